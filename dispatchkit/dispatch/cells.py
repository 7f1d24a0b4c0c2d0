"""Convert between arguments of ``dispatch``, table cells and batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dispatchkit.errors import DescriptorError
from dispatchkit.keys.batch import Batch
from dispatchkit.keys.checks import is_flag, whole_number
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode

#: Code of the allowed modes, query class, variant (adapters and axes), number of tokens.
Cell = tuple[int, int, int, int]

_MORE_TOKENS = (
    "Raise max_num_tokens for larger batches; batches above the largest capture size run eager."
)
_MORE_LORAS = "Raise max_loras for more adapters."
_MORE_REQS = "Raise max_num_seqs for more requests."
_FEWER_REQS = "Each request has at least one token; pass 0 if the number is unknown."
_MORE_LENGTHS = "Pass 0 for a mixed batch, or add a length to query_lens."
#: Hints that apply only to numbers above a limit.
_RAISE_LIMIT = (_MORE_TOKENS, _MORE_LORAS, _MORE_REQS)
_CODES = "Pass a RuntimeMode, or allowed_modes_code(modes)."


def cell_of_call(
    config: DispatchConfig, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
) -> Cell:
    """Return the table cell for the arguments of ``dispatch``.

    Raises:
        DescriptorError: An argument is not a whole number, is out of range, or contradicts another
            argument.
    """
    classes = config.num_query_classes - 1
    most_tokens = num_tokens if _is_whole(num_tokens) else 0
    most = min(config.max_num_seqs, most_tokens)
    reqs = ("the number of tokens", _FEWER_REQS)
    if config.max_num_seqs < most_tokens:
        reqs = ("max_num_seqs", _MORE_REQS)
    kinds = "the number of query lengths" + ", plus 1 for varlen_decode" * config.varlen_decode
    variants = ("max_loras", _MORE_LORAS)
    if config.axes:
        variants = (
            "the variants of the configured axes",
            "Pass the result of DispatchConfig.variant().",
        )
    for field, value, limit, limit_name, hint in (
        ("num_tokens", num_tokens, config.max_num_tokens, "max_num_tokens", _MORE_TOKENS),
        ("loras", loras, config.variants.count - 1, *variants),
        ("uniform", uniform, classes, kinds, _MORE_LENGTHS),
        ("ceiling", ceiling, len(ALLOWED_MODES) - 1, "the codes of allowed modes", _CODES),
        ("num_reqs", num_reqs, most, *reqs),
    ):
        is_whole = type(value) is int or _is_whole(value)
        if not is_whole or not 0 <= value <= limit:
            numbers = f"a whole number from 0 to {limit}" if limit else "0"
            allowed = f"{numbers} ({limit_name})"
            if hint in _RAISE_LIMIT and not (is_whole and value > limit):
                hint = ""
            raise DescriptorError(field, value, allowed, hint)
    return int(ceiling), int(uniform), int(loras), int(num_tokens)


def cell_of_batch(config: DispatchConfig, batch: Batch) -> Cell:
    """Return the cell of a batch.

    Raises:
        DescriptorError: The batch is empty or outside the configured limits.
    """
    uniform = 0
    if batch.uniform:
        if batch.query_len not in config.query_lens:
            known = ", ".join(map(str, config.query_lens))
            allowed = (f"one of {known}" if len(config.query_lens) > 1 else known) + " (query_lens)"
            hint = "Add the length to query_lens of the configuration."
            raise DescriptorError("query_len", batch.query_len, allowed, hint)
        uniform = 1 + config.query_lens.index(batch.query_len)
    elif (
        config.varlen_decode
        and batch.max_query_len is not None
        and batch.max_query_len <= config.query_len
    ):
        uniform = config.num_query_classes - 1
    if batch.num_tokens == 0:
        raise DescriptorError("num_tokens", 0, "at least 1", "Empty batches always run eager.")
    return cell_of_call(
        config,
        batch.num_tokens,
        batch.num_reqs or 0,
        uniform,
        config.variants.of_buckets(batch.num_active_loras, batch.axes),
        batch.allowed,
    )


def batch_of_cell(config: DispatchConfig, cell: Cell, num_reqs: int) -> Batch:
    """Return the batch of a cell, with a number of requests (0 if unknown)."""
    ceiling, uniform, variant, num_tokens = cell
    loras, axes = config.variants.facts(variant)
    is_uniform, query_len, max_query_len = config.query_class(uniform)
    return Batch(
        num_tokens=num_tokens,
        num_reqs=int(num_reqs) or None,
        uniform=is_uniform,
        query_len=query_len,
        max_query_len=max_query_len,
        num_active_loras=loras,
        allowed=ceiling,
        axes=axes,
    )


def format_modes(modes: Iterable[RuntimeMode]) -> str:
    """Return the names of runtime modes as text for messages."""
    return ", ".join(sorted(mode.name for mode in modes))


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number or a flag (0 or 1)."""
    return whole_number(value) is not None or is_flag(value)
