"""DispatchConfig: everything a policy needs to know to declare and choose keys."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import attrs

from dispatchkit.errors import ConfigError
from dispatchkit.keys.axes import Axis, Variants
from dispatchkit.keys.capture_sizes import check_capture_sizes, default_capture_sizes
from dispatchkit.keys.checks import check_count, check_flag
from dispatchkit.keys.modes import CUDAGraphMode
from dispatchkit.keys.reading import read_axes, read_flag, read_number_or_numbers, read_numbers
from dispatchkit.keys.records import About, described, or_none, repr_of_given, setting

_DEFAULT_CEILING = 512
_MAX_LORAS = 1 << 12  # each number of adapters is a column of the table


def _query_lens(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    items = tuple(value) if isinstance(value, Iterable) else (value,)
    lens = tuple(check_count(item, "query_lens") for item in items)
    if not lens or len(set(lens)) != len(lens):
        raise ConfigError("query_lens", value, "one or more distinct query lengths")
    return lens


def _axes(value: Any) -> tuple[Axis, ...]:
    axes = (value,) if isinstance(value, Axis) else value
    allowed = "Axis objects with different names"
    if not isinstance(axes, (tuple, list)):
        raise ConfigError("axes", value, allowed)
    names = [axis.name for axis in axes if isinstance(axis, Axis)]
    if len(names) < len(axes) or len(set(names)) < len(names):
        raise ConfigError("axes", value, allowed)
    return tuple(axes)


def _mode(value: Any) -> CUDAGraphMode | None:
    return None if value is None else CUDAGraphMode.parse(value)


def _list_of_sizes(value: Any, name: str) -> tuple[int, ...]:
    return check_capture_sizes(value, setting=name)


@attrs.frozen(kw_only=True, repr=False)
class DispatchConfig:
    """Sizes, limits and modes of one dispatcher.

    Two configurations are equal if they have the same effect: equal sizes, given or derived, and
    equal limits, stated or not. ``attrs.evolve`` keeps the settings that were given and derives the
    others again from the changed settings.

    Attributes:
        mode: Which runtime modes decode and mixed batches use (vLLM's cudagraph mode). If not
            given, it is FULL_AND_PIECEWISE as in vLLM, or FULL in a runner whose step is not split.
        sizes: Ascending numbers of tokens to capture. If not given, derived from
            ``max_num_tokens``, ``max_num_seqs`` and ``query_lens``, up to 512.
        max_num_tokens: Largest batch in tokens; a larger one raises. If not given, it is the
            largest capture size, and larger batches run eager instead of raising.
        max_num_seqs: Most requests in a batch. Defaults to ``max_num_tokens``.
        query_lens: Tokens per request of uniform decode batches, in which every request is past its
            prompt and has exactly this many; one number, or several if a drafter runs with other
            lengths. ``uniform`` indexes it from 1.
        varlen_decode: Decode graphs accept requests of varying length up to the first
            query length; adds one more class of batches after the uniform ones.
        uniform_sizes: Sizes for uniform batches of more than one token per
            request, if they differ from ``sizes``; None means the same sizes.
        max_loras: Most adapters active at once; 0 means no adapters.
        specialize_lora: Also capture graphs without adapters.
        specialize_active_loras: Capture a graph for each of several numbers of adapters (powers of
            two), rather than one for all.
        axes: User-defined axes to capture graphs for, such as a sequence length.

    Numbers may be given as strings, as they come from a command line or the environment.

    Raises:
        ConfigError: A setting has an invalid value.
    """

    # As given; None if derived.
    _mode: CUDAGraphMode | None = attrs.field(
        default=None,
        converter=_mode,
        alias="mode",
        repr=lambda mode: repr(str(mode)),
        metadata=described(
            About(
                "Which runtime modes decode and mixed batches use.",
                "FULL in a runner whose step is not split, else FULL_AND_PIECEWISE",
            )
        ),
    )
    _sizes: Iterable[int] | None = setting(
        None,
        or_none(_list_of_sizes),
        About("Numbers of tokens to capture.", "by max_num_tokens", read_numbers),
        alias="sizes",
        eq=False,
    )
    _max_num_tokens: int | None = setting(
        None,
        or_none(check_count),
        About("Largest batch in tokens.", "largest capture size"),
        alias="max_num_tokens",
    )
    _max_num_seqs: int | None = setting(
        None,
        or_none(check_count),
        About("Most requests of a batch.", "max_num_tokens"),
        alias="max_num_seqs",
    )
    query_lens: tuple[int, ...] = attrs.field(
        default=(1,),
        converter=_query_lens,
        metadata=described(
            About("Tokens per request of uniform decode batches.", read=read_number_or_numbers)
        ),
    )
    varlen_decode: bool = setting(
        False, check_flag, About("Decode graphs accept requests of varying length.", read=read_flag)
    )
    uniform_sizes: tuple[int, ...] | None = setting(
        None,
        or_none(_list_of_sizes),
        About("Sizes for uniform batches, where they differ.", "sizes", read_numbers),
    )
    max_loras: int = setting(
        0,
        lambda value, name: check_count(value, name, minimum=0, maximum=_MAX_LORAS),
        About("Most adapters active at once."),
    )
    specialize_lora: bool = setting(
        True, check_flag, About("Capture graphs without adapters too.", read=read_flag)
    )
    specialize_active_loras: bool = setting(
        False, check_flag, About("Capture graphs for several counts of adapters.", read=read_flag)
    )
    axes: tuple[Axis, ...] = attrs.field(
        default=(),
        converter=_axes,
        metadata=described(
            About(
                "Further axes of a batch to capture graphs for, with their buckets.", read=read_axes
            )
        ),
    )
    mode: CUDAGraphMode = attrs.field(init=False)
    sizes: tuple[int, ...] = attrs.field(init=False)
    max_num_tokens: int = attrs.field(init=False)
    max_num_seqs: int = attrs.field(init=False)
    # Lists of sizes that were already compared with a limit, with a warning if they end below it.
    # attrs.evolve passes them on, so that the copy does not warn again.
    _checked: frozenset[tuple[str, Any, Any]] = attrs.field(
        default=frozenset(), alias="_checked", eq=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__  # the class is frozen; set the derived values
        default = CUDAGraphMode.FULL_AND_PIECEWISE
        set_(self, "mode", default if self._mode is None else self._mode)
        asked: Any = self._sizes  # a tuple, once converted
        sizes, limit = asked, self._max_num_tokens
        if limit is None and sizes is not None:
            if not sizes:
                raise ConfigError(
                    "max_num_tokens",
                    None,
                    "given when sizes are empty",
                    "Without capture sizes the largest batch is unknown.",
                )
            limit = sizes[-1]
        if sizes is None:
            # vLLM's own ceiling; only a list that the user gave is warned about ending below the
            # limit.
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
            check_capture_sizes(given, setting=name, limit=most)
        set_(self, "_checked", checked)
        set_(self, "sizes", sizes)
        set_(self, "max_num_tokens", limit)
        set_(self, "max_num_seqs", limit if self._max_num_seqs is None else self._max_num_seqs)

    __repr__ = repr_of_given

    @property
    def query_len(self) -> int:
        """Tokens per request of a uniform batch (the first, and usually the only, length)."""
        return self.query_lens[0]

    @property
    def is_mode_given(self) -> bool:
        """Whether a mode was given; if not, a runner derives it from its step."""
        return self._mode is not None

    @property
    def has_token_limit(self) -> bool:
        """Whether a batch of more than ``max_num_tokens`` is an error."""
        return self._max_num_tokens is not None

    @property
    def has_request_limit(self) -> bool:
        """Whether a batch of more than ``max_num_seqs`` requests is an error in itself."""
        return self._max_num_seqs is not None

    @property
    def num_query_classes(self) -> int:
        """How many values the ``uniform`` argument of ``dispatch`` takes: 0 is mixed."""
        return 1 + len(self.query_lens) + self.varlen_decode

    @property
    def max_capture_size(self) -> int:
        """Largest capture size, or 0 if there are no sizes."""
        return self.sizes[-1] if self.sizes else 0

    @functools.cached_property
    def variants(self) -> Variants:
        """The variants: numbers that stand for adapters and axes together."""
        return Variants(self.axes, self.max_loras)

    def variant(self, loras: int = 0, **values: int) -> int:
        """Return the ``loras`` argument of ``dispatch`` for a configuration with axes.

        Args:
            loras: Active adapters.
            values: The value of each axis, by name.

        Raises:
            DescriptorError: An axis is missing or unknown, or a value is invalid.
        """
        return self.variants.of_values(loras, values)

    def query_class(self, uniform: int) -> tuple[bool, int, int | None]:
        """Return (uniform, query_len, max_query_len) for a ``uniform`` argument.

        0 is a mixed batch, 1 and up are the uniform query lengths in order, and the number after
        them (with ``varlen_decode``) is a batch whose requests each have at most the first query
        length.
        """
        if 1 <= uniform <= len(self.query_lens):
            query_len = self.query_lens[uniform - 1]
            return True, query_len, query_len
        if uniform and self.varlen_decode:
            return False, 0, self.query_lens[0]
        return False, 0, None
