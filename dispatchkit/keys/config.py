"""DispatchConfig: the sizes, limits and modes on which policies base decisions."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import attrs

from dispatchkit.errors import ConfigError
from dispatchkit.keys.axes import Axis, Variants
from dispatchkit.keys.capture_sizes import check_capture_sizes, default_capture_sizes
from dispatchkit.keys.checks import check_count, check_counts, check_flag, refuses_unknown_names
from dispatchkit.keys.modes import CUDAGraphMode
from dispatchkit.keys.reading import read_axes, read_flag, read_number_or_numbers, read_numbers
from dispatchkit.keys.records import SettingInfo, or_none, setting, setting_metadata, settings_repr

_DEFAULT_CEILING = 512
#: Largest value allowed for ``max_loras``: tables have an index for each number of adapters.
MAX_LORAS = 1 << 12


def _query_lens(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    lens = check_counts(value, "query_lens")
    if not lens or len(set(lens)) != len(lens):
        raise ConfigError("query_lens", value, "one or more distinct query lengths")
    return lens


def _axes(value: Any) -> tuple[Axis, ...]:
    axes = (value,) if isinstance(value, Axis) else value
    allowed = "a list of Axis objects with different names"
    if not isinstance(axes, (tuple, list)):
        raise ConfigError("axes", value, allowed)
    for at, axis in enumerate(axes):
        if not isinstance(axis, Axis):
            raise ConfigError(f"axes[{at}]", axis, "an Axis")
    if len({axis.name for axis in axes}) < len(axes):
        raise ConfigError("axes", value, allowed)
    return tuple(axes)


def _mode(value: Any) -> CUDAGraphMode | None:
    return None if value is None else CUDAGraphMode.parse(value)


def _list_of_sizes(value: Any, name: str) -> tuple[int, ...]:
    return check_capture_sizes(value, setting=name)


@refuses_unknown_names
@attrs.frozen(kw_only=True, repr=False)
class DispatchConfig:
    """Sizes, limits and modes of one dispatcher.

    A configuration with derived sizes equals one that was created with these sizes and is otherwise
    the same. ``attrs.evolve`` keeps the given settings and derives the others again.

    Attributes:
        mode: The runtime modes that decode and mixed batches use (vLLM's ``cudagraph_mode``). The
            default is FULL in a runner whose step is not split into pieces, otherwise
            FULL_AND_PIECEWISE as in vLLM.
        sizes: Capture sizes in tokens, ascending. By default they are derived from
            ``max_num_tokens``, ``max_num_seqs`` and ``query_lens``, up to 512.
        max_num_tokens: Largest batch in tokens; a larger batch raises DescriptorError. If omitted,
            the value is the largest capture size, and larger batches run eager.
        max_num_seqs: Maximum number of requests in a batch. The default is ``max_num_tokens``.
        query_lens: Tokens per request of uniform decode batches, in which every request is past its
            prompt and has exactly this many tokens. Several lengths are possible, for example if
            the number of draft tokens varies. For a uniform batch, the ``uniform`` argument of
            ``dispatch`` is the 1-based index of the batch's query length in this tuple.
        varlen_decode: Whether decode graphs accept requests of varying length, up to the first
            query length. For a batch of such requests, the ``uniform`` argument of ``dispatch`` is
            ``len(query_lens) + 1``.
        uniform_sizes: Sizes for uniform batches of more than one token per request; None means
            ``sizes``.
        max_loras: Largest number of adapters active in a batch, at most 4,096; 0 means no adapters.
        specialize_lora: Whether to also capture graphs without adapters.
        specialize_active_loras: Whether to capture graphs for several numbers of adapters (powers
            of two and ``max_loras``), instead of only for ``max_loras``.
        axes: User-defined axes to capture graphs for, such as a sequence length.

    Numbers may be given as strings, for example from a command line or the environment.

    Raises:
        ConfigError: A setting has an invalid value.
    """

    # The values as given; None if omitted.
    _mode: CUDAGraphMode | None = attrs.field(
        default=None,
        converter=_mode,
        alias="mode",
        repr=lambda mode: repr(str(mode)),
        metadata=setting_metadata(
            SettingInfo(
                "Runtime modes of decode and mixed batches.",
                "FULL in a runner whose step is not split into pieces, else FULL_AND_PIECEWISE",
            )
        ),
    )
    _sizes: Iterable[int] | None = setting(
        None,
        or_none(_list_of_sizes),
        SettingInfo("Capture sizes, in tokens.", "derived from max_num_tokens", read_numbers),
        alias="sizes",
        eq=False,
    )
    _max_num_tokens: int | None = setting(
        None,
        or_none(check_count),
        SettingInfo("Maximum number of tokens in a batch.", "largest capture size"),
        alias="max_num_tokens",
    )
    _max_num_seqs: int | None = setting(
        None,
        or_none(check_count),
        SettingInfo("Maximum number of requests in a batch.", "max_num_tokens"),
        alias="max_num_seqs",
    )
    query_lens: tuple[int, ...] = attrs.field(
        default=(1,),
        converter=_query_lens,
        metadata=setting_metadata(
            SettingInfo(
                "Tokens per request of uniform decode batches.", read=read_number_or_numbers
            )
        ),
    )
    varlen_decode: bool = setting(
        False,
        check_flag,
        SettingInfo("Allow requests of varying length in decode graphs.", read=read_flag),
    )
    uniform_sizes: tuple[int, ...] | None = setting(
        None,
        or_none(_list_of_sizes),
        SettingInfo(
            "Capture sizes of uniform batches, if different from sizes.", "sizes", read_numbers
        ),
    )
    max_loras: int = setting(
        0,
        lambda value, name: check_count(value, name, minimum=0, maximum=MAX_LORAS),
        SettingInfo("Maximum number of active adapters in a batch."),
    )
    specialize_lora: bool = setting(
        True, check_flag, SettingInfo("Also capture graphs without adapters.", read=read_flag)
    )
    specialize_active_loras: bool = setting(
        False,
        check_flag,
        SettingInfo("Capture separate graphs for different numbers of adapters.", read=read_flag),
    )
    axes: tuple[Axis, ...] = attrs.field(
        default=(),
        converter=_axes,
        metadata=setting_metadata(
            SettingInfo(
                "User-defined axes to capture graphs for, with their buckets.", read=read_axes
            )
        ),
    )
    mode: CUDAGraphMode = attrs.field(init=False)
    sizes: tuple[int, ...] = attrs.field(init=False)
    max_num_tokens: int = attrs.field(init=False)
    max_num_seqs: int = attrs.field(init=False)
    # Lists of sizes that were already checked against a limit. attrs.evolve copies this field, so
    # copies do not repeat the warnings of the check.
    _checked: frozenset[tuple[str, Any, Any]] = attrs.field(
        default=frozenset(), alias="_checked", eq=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__  # sets derived values of the frozen record
        default = CUDAGraphMode.FULL_AND_PIECEWISE
        set_(self, "mode", default if self._mode is None else self._mode)
        asked: Any = self._sizes  # a tuple, after conversion
        sizes, limit = asked, self._max_num_tokens
        if limit is None and sizes is not None:
            if not sizes:
                raise ConfigError(
                    "max_num_tokens",
                    None,
                    "given when sizes are empty",
                    "It cannot be derived without capture sizes.",
                )
            limit = sizes[-1]
        if sizes is None:
            # As in vLLM, default sizes end at 512. If the limit is higher, there is no warning.
            top = _DEFAULT_CEILING if limit is None else min(limit, _DEFAULT_CEILING)
            ladders = (
                default_capture_sizes(top, max_num_seqs=self._max_num_seqs, query_len=query_len)
                for query_len in self.query_lens
            )
            sizes = tuple(sorted({size for ladder in ladders for size in ladder}))
            limit = sizes[-1] if limit is None else limit
        lists = {
            "sizes": asked,
            "uniform_sizes": self.uniform_sizes,
        }
        checked = frozenset(
            (name, given, limit) for name, given in lists.items() if given is not None
        )
        for name, given, most in sorted(checked - self._checked):
            check_capture_sizes(given, setting=name, limit=most, uniform=name == "uniform_sizes")
        set_(self, "_checked", checked)
        set_(self, "sizes", sizes)
        set_(self, "max_num_tokens", limit)
        set_(self, "max_num_seqs", limit if self._max_num_seqs is None else self._max_num_seqs)

    __repr__ = settings_repr

    @property
    def query_len(self) -> int:
        """Tokens per request of a uniform batch: the first of ``query_lens``."""
        return self.query_lens[0]

    @property
    def is_mode_given(self) -> bool:
        """Whether a mode was given; otherwise a runner derives the mode from its step."""
        return self._mode is not None

    @property
    def has_token_limit(self) -> bool:
        """Whether a batch of more than ``max_num_tokens`` raises an error."""
        return self._max_num_tokens is not None

    @property
    def has_request_limit(self) -> bool:
        """Whether ``max_num_seqs`` was given; if so, a batch of more requests raises an error."""
        return self._max_num_seqs is not None

    @property
    def num_query_classes(self) -> int:
        """Number of values of the ``uniform`` argument of ``dispatch``, including 0 (mixed)."""
        return 1 + len(self.query_lens) + self.varlen_decode

    @property
    def max_capture_size(self) -> int:
        """Largest capture size, or 0 if there are no sizes."""
        return self.sizes[-1] if self.sizes else 0

    @functools.cached_property
    def variants(self) -> Variants:
        """The map from adapters and axis values to table indices."""
        return Variants(self.axes, self.max_loras)

    def variant(self, loras: int = 0, **values: int) -> int:
        """Return the ``loras`` argument of ``dispatch`` for adapters and axis values.

        Args:
            loras: Number of active adapters.
            values: The value of each axis, by name.

        Raises:
            DescriptorError: An axis is missing or unknown, or a value is invalid.
        """
        return self.variants.of_values(loras, values)

    def query_class(self, uniform: int) -> tuple[bool, int, int | None]:
        """Return ``(uniform, query_len, max_query_len)`` for a query class.

        The query class is the ``uniform`` argument of ``dispatch``. 0 means a mixed batch, and
        numbers from 1 on mean uniform batches of the query lengths, in order. With
        ``varlen_decode``, the next number means a batch of requests that are no longer than the
        first query length.
        """
        if 1 <= uniform <= len(self.query_lens):
            query_len = self.query_lens[uniform - 1]
            return True, query_len, query_len
        if uniform and self.varlen_decode:
            return False, 0, self.query_lens[0]
        return False, 0, None
