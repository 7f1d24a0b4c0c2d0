"""Encode the properties of a step as a row of integers, and decode the merged row.

Rows are merged with a maximum per column, which needs a single collective. A minimum is encoded as
the distance from the largest possible value, and a set as one flag per member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dispatchkit.errors import ConfigError, NoGraphError, counted
from dispatchkit.keys import ALLOWED_MODES, DispatchConfig, RuntimeMode

from dispatchkit_ranks.protocol import MAX_COLUMNS

_FULL = int(RuntimeMode.FULL)
_CODES = {modes: code for code, modes in enumerate(ALLOWED_MODES)}
_FORBIDS = tuple(
    tuple(int(mode not in allowed) for mode in RuntimeMode) for allowed in ALLOWED_MODES
)
# The column of the mode distance, the first column of the forbidden modes, and the first column of
# the query classes. Columns 0 to 2 contain the numbers of tokens, requests and adapters.
_MODE_DISTANCE, _FORBIDDEN, _CLASSES = 3, 4, 7
_MAX_CACHED = 4096
#: Value of ``switches`` with all switches on.
ALL_ON = -1


class AgreedBatch(NamedTuple):
    """The properties of a step that all ranks agreed on.

    The first five attributes are the arguments of ``Dispatcher.dispatch``, in order.

    Attributes:
        num_tokens: Largest number of tokens of any rank; 0 if all ranks are idle.
        num_reqs: Largest known number of requests of any rank; 0 if no rank knows its number.
        uniform: The query class of all batches. Batches of different classes get the class with
            variable query lengths if it includes all of them, and 0 (mixed) otherwise.
        loras: Largest number of active adapters of any rank; with axes, the result of
            ``DispatchConfig.variant`` for this number and ``axes``.
        ceiling: Code of the runtime modes that every rank allows, without modes above the lowest
            mode that any rank would choose for its own batch.
        switches: The switches that are on for every rank, as bits in their declared order.
        axes: For each axis, the largest value of any rank, which all ranks pad to. None for an
            exact axis whose values differ between ranks; no graph can then serve the step.
    """

    num_tokens: int
    num_reqs: int
    uniform: int
    loras: int
    ceiling: int
    switches: int = 0
    axes: tuple[int | None, ...] = ()


class Facts:
    """Encoder of one rank's row, and decoder of the merged row of all ranks.

    Args:
        config: The configuration that defines the query classes.
        switches: Names of on/off choices that change the collectives in a step, such as whether to
            use microbatches. A switch takes effect only if it is on for all ranks.
        more: Number of additional columns at the end, for subclasses.

    Attributes:
        num_columns: Length of a row.
        all_on: All switches, as bits.

    Raises:
        ConfigError: The query classes and switches do not fit in one row.
    """

    def __init__(
        self, config: DispatchConfig, switches: Sequence[str] = (), *, more: int = 0
    ) -> None:
        self.switches: tuple[str, ...] = tuple(switches)
        self._num_classes = config.num_query_classes
        self._varlen = self._num_classes - 1 if config.varlen_decode else 0
        # Query classes whose batches also belong to the class with variable query lengths.
        self._fits_varlen: frozenset[int] = frozenset()
        if config.varlen_decode:
            lens = enumerate(config.query_lens, 1)
            short = [index for index, query_len in lens if query_len <= config.query_len]
            self._fits_varlen = frozenset((*short, self._varlen))
        self._first_switch = _CLASSES + self._num_classes
        self._first_more: int = self._first_switch + len(self.switches)
        self.num_columns: int = self._first_more + more
        self.all_on: int = (1 << len(self.switches)) - 1
        # The dispatcher adds one column.
        if self.num_columns >= MAX_COLUMNS:
            raise _too_many(config, self.switches, MAX_COLUMNS - 1 - self._first_switch, more)
        self._idle = [0] * self.num_columns
        self._cache: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def row(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform: int,
        loras: int,
        ceiling: int,
        mode: int,
        switches: int = ALL_ON,
    ) -> list[int]:
        """Return the row of a batch.

        Args:
            num_tokens: Number of unpadded tokens. An idle rank passes 0; its row then restricts
                only the modes and the switches.
            num_reqs: Number of requests; 0 if unknown.
            uniform: Query class, see ``Dispatcher.dispatch``.
            loras: Number of active adapters.
            ceiling: Code of the allowed modes.
            mode: The mode that this rank would run its own batch in.
            switches: Bits of the switches that are on for this rank.
        """
        row = self._idle.copy()
        if ceiling != _FULL:
            row[_FORBIDDEN:_CLASSES] = _FORBIDS[ceiling]
        if num_tokens:
            row[:_FORBIDDEN] = (num_tokens, num_reqs, loras, _FULL - mode)
            row[_CLASSES + uniform] = 1
        for index in range(len(self.switches)):
            row[self._first_switch + index] = not switches >> index & 1
        return row

    def merge(self, merged: Sequence[int]) -> AgreedBatch:
        """Decode the merged row of all ranks.

        Raises:
            NoGraphError: No runtime mode is allowed on all ranks; every rank raises this error.
        """
        # The columns after the counts have few distinct values, so cache their decoded form.
        facts = tuple(merged[_MODE_DISTANCE : self._first_more])
        cached = self._cache.get(facts)
        if cached is None:
            cached = self._derive(merged)
            if len(self._cache) < _MAX_CACHED:
                self._cache[facts] = cached
        uniform, ceiling, switches = cached
        return AgreedBatch(merged[0], merged[1], uniform, merged[2], ceiling, switches)

    def _derive(self, merged: Sequence[int]) -> tuple[int, int, int]:
        """Return the common query class, the code of the common modes and the switches."""
        distance, forbidden = merged[_MODE_DISTANCE], merged[_FORBIDDEN:_CLASSES]
        ceiling = _FULL - distance
        allowed = frozenset(mode for mode in RuntimeMode if mode <= ceiling and not forbidden[mode])
        if not allowed:
            raise _no_common_mode(forbidden, ceiling)
        off = merged[self._first_switch : self._first_more]
        switches = sum(1 << index for index, is_off in enumerate(off) if not is_off)
        return self._common_class(merged), _CODES[allowed], switches

    def _common_class(self, merged: Sequence[int]) -> int:
        present = [
            index for index, flag in enumerate(merged[_CLASSES : self._first_switch]) if flag
        ]
        if len(present) == 1:
            return present[0]
        fits = present and all(each in self._fits_varlen for each in present)
        return self._varlen if fits else 0


def _too_many(
    config: DispatchConfig, switches: tuple[str, ...], left: int, more: int
) -> ConfigError:
    """Return an error that names the setting to shorten.

    Args:
        config: The configuration whose rows are too long.
        switches: Names of the switches, for the message.
        left: Number of columns available for axes and switches.
        more: Number of columns that the axes need.
    """
    if left < 0:
        most = len(config.query_lens) + left
        return ConfigError(
            "query_lens",
            config.query_lens,
            f"a list of at most {counted(most, 'item')} for use with ranks",
        )
    if more > left:
        names = [axis.name for axis in config.axes]
        expected = (
            f"a list of at most {counted(left, 'item')} for use with ranks (an exact axis counts "
            "twice)"
        )
        return ConfigError("axes", names, expected)
    return ConfigError(
        "switches",
        switches,
        f"a list of at most {counted(left - more, 'item')} for use with ranks",
        "Each configured query length or axis lowers this limit by 1, an exact axis by 2.",
    )


def _no_common_mode(forbidden: Sequence[int], ceiling: int) -> NoGraphError:
    out = ", ".join(mode.name for mode in RuntimeMode if forbidden[mode])
    limit = ""
    if ceiling < _FULL:
        limit = (
            f"At least one rank would run its own batch in mode {RuntimeMode(ceiling).name}, so no "
            "rank may use a higher mode. "
        )
    return NoGraphError(
        f"The ranks allow no common runtime mode. Modes excluded by some rank: {out}. {limit}"
        "Allow NONE on all ranks, or exclude the same modes on all ranks.",
        reason="no_common_mode",
    )
