"""A step's facts as a row of integers, and how the rows of all ranks are merged.

Rows are merged column by column with a maximum, so one collective is enough: a minimum is
sent as the distance from the largest possible value, and a set as one flag for each member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dispatchkit.errors import ConfigError, NoGraphError
from dispatchkit.keys import ALLOWED_MODES, DispatchConfig, RuntimeMode

from dispatchkit_ranks.protocol import MAX_COLUMNS

_FULL = int(RuntimeMode.FULL)
_CODES = {modes: code for code, modes in enumerate(ALLOWED_MODES)}
_FORBIDS = tuple(
    tuple(int(mode not in allowed) for mode in RuntimeMode) for allowed in ALLOWED_MODES
)
# Columns of a row: tokens, requests, adapters, then these.
_CARE, _FORBIDDEN, _CLASSES = 3, 4, 7
_MAX_KEPT = 4096
#: All switches on for this rank.
ALL_ON = -1


class AgreedBatch(NamedTuple):
    """The facts that every rank runs this step under, equal on all of them.

    The first five are the arguments of ``Dispatcher.dispatch``, in its order.

    Attributes:
        num_tokens: The most tokens of any rank; 0 when all are idle.
        num_reqs: The most requests of any rank that knows its number; 0 if no rank does.
        uniform: The query class that all batches belong to; 0 (mixed) if there is none.
        loras: The most active adapters of any rank; with axes, the variant of these.
        ceiling: Code of the runtime modes that are allowed on every rank and no higher than
            what each would have chosen alone.
        switches: The switches that are on for every rank, as bits in their declared order.
        axes: The value of each axis that all ranks pad to: the largest of any rank. None for an
            exact axis on which ranks have different values: no graph serves the step.
    """

    num_tokens: int
    num_reqs: int
    uniform: int
    loras: int
    ceiling: int
    switches: int = 0
    axes: tuple[int | None, ...] = ()


class Facts:
    """Encode one rank's row, and decode the merged row of all ranks.

    Args:
        config: The configuration with the query classes.
        switches: Names of further yes-or-no choices that change the collectives inside a
            step (microbatches, another all-to-all); a switch is on if it is on for all ranks.
        more: Number of further columns at the end, for a subclass.

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
        # Query classes whose batches also have requests of at most the first length.
        self._fits_varlen: frozenset[int] = frozenset()
        if config.varlen_decode:
            lens = enumerate(config.query_lens, 1)
            short = [index for index, query_len in lens if query_len <= config.query_len]
            self._fits_varlen = frozenset((*short, self._varlen))
        self._first_switch = _CLASSES + self._num_classes
        self._first_more: int = self._first_switch + len(self.switches)
        self.num_columns: int = self._first_more + more
        self.all_on: int = (1 << len(self.switches)) - 1
        # The dispatcher needs one column.
        if self.num_columns >= MAX_COLUMNS:
            raise _too_many(config, self.switches, MAX_COLUMNS - 1 - self._first_switch, more)
        self._idle = [0] * self.num_columns
        self._kept: dict[tuple[int, ...], tuple[int, int, int]] = {}

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
            num_tokens: Unpadded tokens; 0 for an idle rank, which restricts only modes.
            num_reqs: Requests; 0 if unknown.
            uniform: Query class, as for ``dispatch``.
            loras: Active adapters.
            ceiling: Code of the allowed modes.
            mode: The highest mode that this rank would run in.
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
            NoGraphError: No runtime mode is allowed on all ranks; each rank raises it.
        """
        # All columns but the counts take few values, so what is derived from them is cached.
        facts = tuple(merged[_CARE : self._first_more])
        kept = self._kept.get(facts)
        if kept is None:
            kept = self._follow(merged)
            if len(self._kept) < _MAX_KEPT:
                self._kept[facts] = kept
        uniform, ceiling, switches = kept
        return AgreedBatch(merged[0], merged[1], uniform, merged[2], ceiling, switches)

    def _follow(self, merged: Sequence[int]) -> tuple[int, int, int]:
        """Return the common query class, the code of the common modes and the switches."""
        care, forbidden = merged[_CARE], merged[_FORBIDDEN:_CLASSES]
        ceiling = _FULL - care
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
    """Return the error for a row that is too long, naming what to reduce.

    Args:
        config: The configuration of the facts.
        switches: Their names.
        left: Columns that query classes leave for axes and switches.
        more: Columns that axes need.
    """
    if left < 0:
        most = len(config.query_lens) + left
        return ConfigError("query_lens", config.query_lens, f"at most {most} with several ranks")
    if more > left:
        names = [axis.name for axis in config.axes]
        expected = f"at most {left} with several ranks, where one that is exact counts as two"
        return ConfigError("axes", names, expected)
    return ConfigError("switches", switches, f"at most {left - more} with this configuration")


def _no_common_mode(forbidden: Sequence[int], ceiling: int) -> NoGraphError:
    out = ", ".join(mode.name for mode in RuntimeMode if forbidden[mode])
    return NoGraphError(
        f"The ranks allow no common runtime mode: {out or 'nothing'} is excluded by at least "
        f"one rank, and one rank allows at most {RuntimeMode(ceiling).name}. Allow NONE, or "
        "exclude the same modes on all ranks.",
        reason="no_common_mode",
    )
