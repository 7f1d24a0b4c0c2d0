"""Validate and derive capture sizes, and build the padding table.

Sizes are derived in two ways. ``default_capture_sizes`` follows dispatchkit's own rule, and its
result always includes the given maximum. ``derive_capture_sizes`` follows the rules of one
generation of vLLM: a range of releases with the same rules. ``SIZE_RULES`` lists the generations.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import attrs

from dispatchkit.errors import ConfigError, DescriptorError, UnknownNameError
from dispatchkit.keys.checks import check_count, check_counts
from dispatchkit.keys.modes import CUDAGraphMode

__all__ = [
    "SIZE_RULES",
    "CaptureSizeWarning",
    "CaptureSizes",
    "SizeRules",
    "check_capture_sizes",
    "default_capture_sizes",
    "derive_capture_sizes",
    "padded_size",
    "padding_table",
    "round_sizes_for_query_len",
    "rounds_for_query_len",
]

_COARSE_FROM = 256  # From this size on, the step between sizes doubles.
MAX_CAPTURE_SIZE = 1 << 22
"""Largest capture size allowed; tables have an entry for each number of tokens."""


class CaptureSizeWarning(UserWarning):
    """Capture sizes were changed, or some batches have no graph."""


# -- validation ---------------------------------------------------------------------------


def check_capture_sizes(
    sizes: Iterable[Any] | str,
    *,
    setting: str = "sizes",
    limit: int | None = None,
    over_limit: Literal["refuse", "trim"] = "refuse",
    uniform: bool = False,
) -> tuple[int, ...]:
    """Validate capture sizes, and return them sorted and without duplicates.

    Args:
        sizes: The sizes, or comma-separated text.
        setting: Name of the setting, for messages.
        limit: Value of ``max_num_tokens``; None means no limit.
        over_limit: ``"refuse"`` raises for sizes above the limit, ``"trim"`` drops them with a
            warning.
        uniform: Whether the sizes serve only uniform batches; warnings then say so.

    Returns:
        The sizes; empty if none were given or all were dropped.

    Raises:
        ConfigError: A size is not a whole number of at least 1, is above ``MAX_CAPTURE_SIZE``, or
            is above the limit with ``over_limit="refuse"``.

    Warns:
        CaptureSizeWarning: Only with a limit: sizes were dropped, no size is left, or batches
            between the largest size and the limit have no graph.
    """
    if isinstance(sizes, str):
        sizes = [part for part in sizes.split(",") if part.strip()]
    elif not isinstance(sizes, Iterable):
        raise ConfigError(setting, sizes, "a list of whole numbers, such as [8, 16]")
    checked = sorted(set(check_counts(sizes, setting)))
    if checked and checked[-1] > MAX_CAPTURE_SIZE:
        raise ConfigError(setting, checked[-1], f"at most {MAX_CAPTURE_SIZE:,} tokens")
    if limit is None:
        return tuple(checked)
    kept = checked[: bisect_left(checked, limit + 1)]
    if len(kept) < len(checked):
        beyond = checked[len(kept) :]
        if over_limit == "refuse":
            raise ConfigError(
                setting,
                beyond if len(beyond) > 1 else beyond[0],
                f"at most max_num_tokens ({limit})",
                f"Increase max_num_tokens to at least {checked[-1]}, or omit sizes above {limit}.",
            )
        warnings.warn(
            f"Sizes above max_num_tokens ({limit}) were dropped from `{setting}`: "
            f"{', '.join(map(str, beyond))}. To keep them, increase max_num_tokens.",
            CaptureSizeWarning,
            stacklevel=2,
        )
    if not kept:
        warnings.warn(
            f"`{setting}` is empty, so "
            + (
                "uniform batches have no graphs of their own"
                if uniform
                else "every batch runs eager"
            )
            + ". Add at least one size.",
            CaptureSizeWarning,
            stacklevel=2,
        )
    elif kept[-1] < limit:
        first = kept[-1] + 1
        above = f"{first} to {limit}" if first < limit else str(limit)
        warnings.warn(
            f"`{setting}` ends at {kept[-1]}: "
            + (
                f"uniform batches of {above} tokens have no graphs of their own"
                if uniform
                else f"batches of {above} tokens run eager unless the policy splits them"
            )
            + f". Add {limit} to cover them.",
            CaptureSizeWarning,
            stacklevel=2,
        )
    return tuple(kept)


# -- default sizes ------------------------------------------------------------------------


def default_capture_sizes(
    max_size: int, *, max_num_seqs: int | None = None, query_len: int = 1
) -> tuple[int, ...]:
    """Return capture sizes up to and including a maximum.

    The sizes are 1, 2, 4, then multiples of 8 below 256 and multiples of 16 from there on. With a
    query length above one, the query length times each of these numbers is added, so that uniform
    decode batches with such a number of requests need no padding. The size of a uniform decode
    batch with the maximum number of requests is added, too.

    Args:
        max_size: Largest size, in tokens.
        max_num_seqs: Largest number of requests in a batch, if known.
        query_len: Tokens per request of a uniform decode batch.

    Raises:
        ConfigError: A value is not a whole number of at least 1.
    """
    top = check_count(max_size, "max_size")
    query_len = check_count(query_len, "query_len")
    sizes = {*_ladder(top), top}
    if max_num_seqs is not None:
        max_num_seqs = check_count(max_num_seqs, "max_num_seqs")
        sizes.add(min(top, max_num_seqs * query_len))
    if query_len > 1:
        sizes.update(n * query_len for n in _ladder(min(top // query_len, max_num_seqs or top)))
    return tuple(sorted(sizes))


def _ladder(top: int, small: Iterable[int] = (1, 2, 4)) -> list[int]:
    """Return the small sizes, multiples of 8, and from 256 on multiples of 16, up to ``top``."""
    return [
        *(size for size in small if size <= top),
        *range(8, min(top + 1, _COARSE_FROM), 8),
        *range(_COARSE_FROM, top + 1, 16),
    ]


# -- vLLM's sizes, by generation ----------------------------------------------------------


@attrs.frozen
class SizeRules:
    """The rules by which a generation of vLLM derives and rounds capture sizes.

    Attributes:
        descending: Whether the list is sorted largest first.
        mode_none_empties: Whether mode NONE results in no sizes.
        eager_empties_user_list: Whether ``enforce_eager`` also drops a list given by the user.
        query_len_in_base: Whether the default maximum is derived from ``max_num_seqs`` times the
            query length, instead of ``max_num_seqs`` alone.
        coarse_above: Whether the step between sizes doubles from 256 on.
        small_sizes_always: Whether 1, 2 and 4 are kept even if the maximum is smaller.
        filters_user_list: Whether sizes above ``max_num_batched_tokens``, and sizes that the
            tensor-parallel filter rejects, are removed from the user's list.
        tensor_parallel_filter: Whether sequence parallelism limits sizes to multiples of the
            tensor-parallel size.
        adds_limits: Whether ``max_num_batched_tokens`` and the sizes of decode batches are added to
            the derived sizes.
        rounds: When sizes are rounded to multiples of the query length. ``full_decode``: if decode
            batches run FULL. ``separate_full_decode``: if decode batches run FULL and mixed batches
            run in another mode. None: never.
        rounding_with_tensor_parallel: When sizes are also rounded to multiples of a tensor-parallel
            size above one; ``sequence_parallel`` means only with sequence parallelism.
        empty_rounding: What happens if even the smallest multiple is above the maximum: ``raise``
            an error, or ``keep`` the unrounded sizes.
    """

    descending: bool = False
    mode_none_empties: bool = True
    eager_empties_user_list: bool = True
    query_len_in_base: bool = True
    coarse_above: bool = True
    small_sizes_always: bool = False
    filters_user_list: bool = True
    tensor_parallel_filter: bool = False
    adds_limits: bool = False
    rounds: Literal["full_decode", "separate_full_decode"] | None = "full_decode"
    rounding_with_tensor_parallel: Literal["sequence_parallel", "always", "never"] = "never"
    empty_rounding: Literal["raise", "keep"] = "raise"


_RULES_0_33 = SizeRules(adds_limits=True)
_RULES_0_13 = SizeRules(
    tensor_parallel_filter=True,
    rounds="separate_full_decode",
    rounding_with_tensor_parallel="sequence_parallel",
)
_RULES_0_11 = SizeRules(
    descending=True,
    mode_none_empties=False,
    eager_empties_user_list=False,
    query_len_in_base=False,
    coarse_above=False,
    small_sizes_always=True,
    filters_user_list=False,
    tensor_parallel_filter=True,
    rounds=None,
)

#: The known generations, by name. ``newest`` is 0.33.
SIZE_RULES: Mapping[str, SizeRules] = MappingProxyType(
    {"0.11": _RULES_0_11, "0.13": _RULES_0_13, "0.33": _RULES_0_33, "newest": _RULES_0_33}
)
#: The generations by name, for rounding. 0.11.1 is separate because it introduced rounding.
_ROUNDING_RULES: Mapping[str, SizeRules] = MappingProxyType(
    {
        **SIZE_RULES,
        "0.11.1": attrs.evolve(
            _RULES_0_13, rounding_with_tensor_parallel="always", empty_rounding="keep"
        ),
    }
)


@attrs.frozen
class CaptureSizes:
    """Sizes derived by the rules of one generation of vLLM.

    Attributes:
        sizes: The sizes, in the order of that generation.
        max_size: The largest size; 0 if there are no sizes. If ``round_sizes_for_query_len`` leaves
            the sizes unrounded, this is its argument ``max_size``, if given.
        notes: One sentence for each setting that was changed or could not be applied.
    """

    sizes: tuple[int, ...]
    max_size: int
    notes: tuple[str, ...] = ()


def _rules(generation: str, table: Mapping[str, SizeRules]) -> SizeRules:
    if generation not in table:
        raise UnknownNameError("generation", generation, table)
    return table[generation]


def derive_capture_sizes(
    generation: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    user_sizes: Iterable[int] | None = None,
    user_max_size: int | None = None,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    query_len: int = 1,
    enforce_eager: bool = False,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    ceiling: int = 512,
    small_steps: bool = False,
) -> CaptureSizes:
    """Return the capture sizes that a generation of vLLM derives.

    Args:
        generation: ``"0.11"``, ``"0.13"``, ``"0.33"`` or ``"newest"``.
        max_num_seqs: Largest number of requests in a batch.
        max_num_batched_tokens: Largest number of tokens in a batch.
        user_sizes: The user's list of sizes, if given.
        user_max_size: The user's maximum size, if given.
        mode: The configured mode. Generations after 0.11 have no sizes in mode NONE.
        query_len: Tokens per request of a uniform decode batch (1 + speculative tokens).
        enforce_eager: Whether graphs are switched off.
        tensor_parallel_size: Number of ranks that share each layer.
        sequence_parallel: Whether sequence parallelism is on.
        ceiling: Upper limit of the default maximum; 0.33 uses 1024 on data-center Blackwell GPUs.
        small_steps: Whether every size up to 32 is captured (0.33's "interactivity" mode); other
            generations ignore this.

    Raises:
        ConfigError: The maximum for derived sizes is below 1. In generations after 0.11, also: the
            user's list is empty, or its largest usable size differs from the user's maximum.
        UnknownNameError: The generation is unknown.
    """
    rules = _rules(generation, SIZE_RULES)
    if enforce_eager and (rules.eager_empties_user_list or user_sizes is None):
        return CaptureSizes((), 0)
    if rules.mode_none_empties and mode is CUDAGraphMode.NONE:
        return CaptureSizes((), 0)

    base = max_num_seqs * (query_len if rules.query_len_in_base else 1)
    wanted = min(2 * base, ceiling) if user_max_size is None else user_max_size
    top = min(wanted, max_num_batched_tokens) if rules.filters_user_list else wanted
    filters = user_sizes is None or rules.filters_user_list
    if user_sizes is not None:
        sizes = set(user_sizes)
        if not sizes and rules.filters_user_list:
            raise ConfigError("capture sizes", [], "a list of at least one size")
    else:
        check_count(top, "max_capture_size")
        sizes = set(_grid(top, rules, small_steps=small_steps))
        if rules.adds_limits:
            if max_num_batched_tokens <= top:
                sizes.add(max_num_batched_tokens)
            if user_max_size is None:
                sizes |= _decode_sizes(wanted, max_num_seqs, query_len, ceiling)
    if filters:
        sizes = {size for size in sizes if size <= max_num_batched_tokens}
        if rules.tensor_parallel_filter and sequence_parallel and tensor_parallel_size > 1:
            sizes = {size for size in sizes if size % tensor_parallel_size == 0}
    ordered = sorted(sizes, reverse=rules.descending)
    largest = max(ordered, default=0)
    notes: tuple[str, ...] = ()
    if user_max_size is not None and rules.filters_user_list and user_max_size != largest:
        if user_sizes is not None:
            raise ConfigError(
                "max_capture_size",
                user_max_size,
                f"the largest usable capture size ({largest}) if capture sizes are also given",
                message=f"max_capture_size is {user_max_size}, but the largest usable capture size "
                f"is {largest}. Omit max_capture_size or the capture sizes.",
            )
        notes = (f"max_capture_size was lowered from {user_max_size} to {largest}.",)
    return CaptureSizes(tuple(ordered), largest, notes)


def _grid(top: int, rules: SizeRules, *, small_steps: bool) -> list[int]:
    small = range(1, min(top, 32) + 1) if small_steps and rules.adds_limits else (1, 2, 4)
    if rules.coarse_above:
        return _ladder(top, small)
    return [*(s for s in small if rules.small_sizes_always or s <= top), *range(8, top + 1, 8)]


def _decode_sizes(top: int, max_num_seqs: int, query_len: int, ceiling: int) -> set[int]:
    """Return sizes that fit common numbers of decode requests exactly."""
    if query_len == 1:
        return {max_num_seqs} if max_num_seqs <= top else set()
    most = min(max_num_seqs, ceiling)
    return {n * query_len for n in (*_ladder(most), most) if n * query_len <= top}


def round_sizes_for_query_len(
    sizes: Iterable[int],
    query_len: int,
    *,
    generation: str = "newest",
    max_size: int | None = None,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
) -> CaptureSizes:
    """Round sizes up to multiples of a query length, and drop those above a maximum.

    A uniform batch padded to a rounded size consists of whole requests. If all rounded sizes are
    above the maximum, but the smallest multiple is not, this multiple is the only size. Call
    ``rounds_for_query_len`` to find out whether a mode requires rounding.

    Args:
        sizes: Capture sizes to round, in tokens.
        query_len: Tokens per request of a uniform decode batch.
        generation: The generation of vLLM whose rules apply.
        max_size: Largest size allowed; None means the largest of ``sizes``.
        tensor_parallel_size: Number of ranks that share each layer.
        sequence_parallel: Whether sequence parallelism is on.

    Raises:
        ConfigError: Even the smallest multiple is above the maximum; or sizes must also be rounded
            to multiples of the tensor-parallel size, and the query length is neither a multiple nor
            a divisor of that size.
    """
    rules = _rules(generation, _ROUNDING_RULES)
    given = tuple(sizes)
    top = max(given, default=0) if max_size is None else max_size
    if query_len <= 1 or not given or rules.rounds is None:
        return CaptureSizes(given, top)
    multiple = query_len
    if tensor_parallel_size > 1 and (
        rules.rounding_with_tensor_parallel == "always"
        or (rules.rounding_with_tensor_parallel == "sequence_parallel" and sequence_parallel)
    ):
        multiple = max(query_len, tensor_parallel_size)
        if multiple % query_len or multiple % tensor_parallel_size:
            raise ConfigError(
                "query_len",
                query_len,
                f"a multiple or a divisor of the tensor-parallel size ({tensor_parallel_size})",
                "Change the number of speculative tokens"
                + (
                    " or the tensor-parallel size."
                    if rules.rounding_with_tensor_parallel == "always"
                    else ", or disable sequence parallelism."
                ),
            )
    rounded = sorted({-(-size // multiple) * multiple for size in given})
    rounded = [size for size in rounded if size <= top]
    if not rounded and multiple <= top:
        rounded = [multiple]
    if not rounded:
        if rules.empty_rounding == "keep":
            note = f"No multiple of {multiple} is at most {top}, so sizes are not rounded."
            return CaptureSizes(given, top, (note,))
        raise ConfigError(
            "capture sizes",
            list(given),
            f"at least {multiple}",
            f"Add a size of at least {multiple}."
            if max_size is None
            else f"Increase the maximum to at least {multiple}.",
            message=f"No capture size can be rounded to a multiple of {multiple} tokens, because "
            f"the {'largest given' if max_size is None else 'maximum'} size is {top}.",
        )
    return CaptureSizes(tuple(rounded), rounded[-1])


def rounds_for_query_len(mode: CUDAGraphMode, query_len: int, generation: str = "newest") -> bool:
    """Return whether a generation of vLLM rounds sizes for a mode and query length."""
    rules = _rules(generation, _ROUNDING_RULES)
    if rules.rounds is None or query_len <= 1:
        return False
    if rules.rounds == "separate_full_decode" and not mode.separate_routine():
        return False
    return mode.decode_mode() is CUDAGraphMode.FULL


# -- padding ------------------------------------------------------------------------------


def padding_table(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return a table with the padded size of each number of tokens up to the largest size.

    Entry n is the smallest size of at least n, and entry 0 is 0. Without sizes, the table contains
    only entry 0.
    """
    ordered = sorted(set(sizes))
    table = [0] * (ordered[-1] + 1 if ordered else 1)
    below = 0
    for size in ordered:
        table[below + 1 : size + 1] = [size] * (size - below)
        below = size
    return tuple(table)


def padded_size(table: tuple[int, ...], num_tokens: int) -> int:
    """Return the size that a batch is padded to.

    Raises:
        DescriptorError: ``num_tokens`` is negative or above the largest size.
    """
    if not 0 <= num_tokens < len(table):
        raise DescriptorError("num_tokens", num_tokens, f"from 0 to {len(table) - 1}")
    return table[num_tokens]
