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
        raise ConfigError("query_lens", value, "one or more different query lengths")
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

    Two are equal if the same holds under both: equal sizes, given or derived, and equal limits,
    stated or not. ``attrs.evolve``
    keeps what was asked for: what was derived is derived again from the changed settings.

    Attributes:
        mode: Which runtime modes decode and mixed batches use (vLLM's cudagraph mode). Where it
            is not given it is FULL_AND_PIECEWISE as vLLM's, and in a runner whose step is not
            split FULL.
        sizes: Ascending numbers of tokens to capture. Derived from
            ``max_num_tokens``, ``max_num_seqs`` and ``query_lens`` when not given, and then
            at most 512.
        max_num_tokens: Largest batch in tokens; a larger one is a caller's error. Where it is not
            given nothing is: batches above the largest capture size run eager, and this is that
            size.
        max_num_seqs: Most requests of a batch. Defaults to ``max_num_tokens``.
        query_lens: Tokens per request of uniform decode batches, all of whose requests are past
            their prompts and bring exactly so many; one number, or several where a drafter
            runs with other lengths. ``uniform`` indexes it from 1.
        varlen_decode: Decode graphs accept requests of varying length up to the first
            query length; adds one more class of batches after the uniform ones.
        uniform_sizes: Sizes for uniform batches of more than one token per
            request, where they differ from ``sizes``; None: the same.
        max_loras: Most adapters active at once; 0 where there are none.
        specialize_lora: Capture graphs without adapters too, beside those with.
        specialize_active_loras: Capture a graph for several counts of adapters (powers of
            two), rather than one for all counts.
        axes: Further facts that graphs are made for, such as a sequence length.

    Numbers may be given as text, as a command line or the environment has them.

    Raises:
        ConfigError: A setting has a value that cannot be used.
    """

    # As they were asked for; None where they are derived.
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
    # Lists of sizes that were held against a limit, and warned of where they end below it:
    # attrs.evolve hands them on, and the copy does not warn again.
    _checked: frozenset[tuple[str, Any, Any]] = attrs.field(
        default=frozenset(), alias="_checked", eq=False, repr=False
    )

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__  # the class is frozen; these fill what is derived
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
            # vLLM's own ceiling; only a list that the user wrote is warned about its end.
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
        """Tokens per request of a uniform batch (the first, usually only, length)."""
        return self.query_lens[0]

    @property
    def is_mode_given(self) -> bool:
        """Whether a mode was asked for; a runner derives it from its step where none was."""
        return self._mode is not None

    @property
    def has_token_limit(self) -> bool:
        """Whether a batch of more than ``max_num_tokens`` is an error."""
        return self._max_num_tokens is not None

    @property
    def has_request_limit(self) -> bool:
        """Whether a batch of more than ``max_num_seqs`` requests is an error by itself."""
        return self._max_num_seqs is not None

    @property
    def num_query_classes(self) -> int:
        """How many values the ``uniform`` argument of a dispatch takes: 0 is mixed."""
        return 1 + len(self.query_lens) + self.varlen_decode

    @property
    def max_capture_size(self) -> int:
        """Largest capture size, 0 where there is none."""
        return self.sizes[-1] if self.sizes else 0

    @functools.cached_property
    def variants(self) -> Variants:
        """The numbers that stand for adapters and axes together."""
        return Variants(self.axes, self.max_loras)

    def variant(self, loras: int = 0, **values: int) -> int:
        """Return what takes the place of ``loras`` in a dispatch where there are axes.

        Args:
            loras: Active adapters.
            values: The value of each axis, by its name.

        Raises:
            DescriptorError: An axis is missing or unknown, or a value is none.
        """
        return self.variants.of_values(loras, values)

    def query_class(self, uniform: int) -> tuple[bool, int, int | None]:
        """Return (uniform, query_len, max_query_len) for a ``uniform`` argument.

        0 is any mixture, 1.. the uniform query lengths in order, and the one after them
        (with ``varlen_decode``) requests of at most the first query length each.
        """
        if 1 <= uniform <= len(self.query_lens):
            query_len = self.query_lens[uniform - 1]
            return True, query_len, query_len
        if uniform and self.varlen_decode:
            return False, 0, self.query_lens[0]
        return False, 0, None
