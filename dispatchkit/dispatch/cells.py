"""Convert between arguments of ``dispatch``, table cells and batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dispatchkit.errors import DescriptorError
from dispatchkit.keys.batch import Batch
from dispatchkit.keys.checks import is_flag, whole_number
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode

#: A table cell: the code of the allowed modes, the query class (0 for mixed batches), the variant
#: (adapters and axes), and the number of tokens.
Cell = tuple[int, int, int, int]


def cell_of_call(
    config: DispatchConfig, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int
) -> Cell:
    """Return the table cell for the arguments of ``dispatch``.

    Raises:
        DescriptorError: An argument is not a whole number, is out of range, or contradicts another
            argument.
    """
    most_reqs = min(config.max_num_seqs, num_tokens) if _is_whole(num_tokens) else 0
    for field, value, limit in (
        ("num_tokens", num_tokens, config.max_num_tokens),
        ("loras", loras, config.variants.count - 1),
        ("uniform", uniform, config.num_query_classes - 1),
        ("ceiling", ceiling, len(ALLOWED_MODES) - 1),
        ("num_reqs", num_reqs, most_reqs),
    ):
        is_whole = type(value) is int or _is_whole(value)
        if not is_whole or not 0 <= value <= limit:
            is_above = is_whole and value > limit
            name, hint = _limit_of(field, config, num_tokens, is_above=is_above)
            numbers = f"a whole number from 0 to {limit}" if limit else "0"
            raise DescriptorError(field, value, f"{numbers} ({name})", hint)
    return int(ceiling), int(uniform), int(loras), int(num_tokens)


def _limit_of(
    field: str, config: DispatchConfig, num_tokens: Any, *, is_above: bool
) -> tuple[str, str]:
    """Return the name of a field's limit, and a hint for the error message.

    A hint to raise ``max_num_tokens``, ``max_loras`` or ``max_num_seqs`` is returned only for a
    value above the limit.
    """
    if field == "num_tokens":
        hint = (
            "Raise max_num_tokens for larger batches; batches above the largest capture size run "
            "eager."
        )
        return "max_num_tokens", hint if is_above else ""
    if field == "loras" and config.axes:
        return "the variants of the configured axes", "Pass the result of DispatchConfig.variant()."
    if field == "loras":
        return "max_loras", "Raise max_loras for more adapters." if is_above else ""
    if field == "uniform":
        more = ", plus 1 for varlen_decode" * config.varlen_decode
        hint = "Pass 0 for a mixed batch, or add a length to query_lens."
        return f"the number of query lengths{more}", hint
    if field == "ceiling":
        hint = "Pass a RuntimeMode, or allowed_modes_code(modes)."
        return "the codes of allowed modes", hint
    if _is_whole(num_tokens) and config.max_num_seqs < num_tokens:
        return "max_num_seqs", "Raise max_num_seqs for more requests." if is_above else ""
    hint = "Each request has at least one token; pass 0 if the number of requests is unknown."
    return "the number of tokens", hint


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
    """Return the batch of a cell, with the given number of requests (0 if unknown)."""
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
    """Return whether a value is a whole number or a boolean."""
    return whole_number(value) is not None or is_flag(value)
