"""The dispatcher's table, with a decision for each cell.

A cell is identified by the code of the allowed modes, the query class, the variant and the number
of tokens. The variant is the number of adapters or, with axes, a number computed from adapters and
buckets. Rows are created, and cells are filled, on first use. Rows are lists indexed by the number
of tokens; in tables of more than a million cells, they are bounded dicts.

Writers hold the dispatcher's lock. Readers of a row need no lock, because rows are changed only by
single list or dict operations, which are atomic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dispatchkit.dispatch.cells import Cell
from dispatchkit.dispatch.decision import Decision
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import ALLOWED_MODES, RuntimeMode

MAX_LIST_CELLS = 1_000_000
MAX_COLD_CELLS = 65_536

#: The value of cells without a decision. Every number of requests exceeds its limit.
EMPTY = Decision(RuntimeMode.NONE, None, "", max_num_reqs=-1)


class Row(Protocol):
    """The decisions for one kind of batch, indexed by number of tokens.

    See ``Dispatcher.row``.
    """

    def __getitem__(self, num_tokens: int, /) -> Decision:
        """Return the decision for a number of tokens.

        If ``max_num_reqs`` of the decision is -1, the cell is empty, so call ``dispatch``.
        """
        ...


class DictRow(dict[int, Decision]):
    """A row of a very large table; cells without a decision are ``EMPTY``."""

    def __missing__(self, num_tokens: int) -> Decision:
        return EMPTY


class Table:
    """The decisions of one epoch, by allowed modes, query class, variant and tokens.

    Attributes:
        epoch: Number of the epoch to which the decisions belong.
        rows: The rows that the hot path reads, indexed first by the code of the allowed modes, then
            by query class and then by variant. An unused row is an empty tuple, so indexing it
            raises IndexError.
        waiting: One-shot decisions by cell, in the order of use. While a cell has such decisions,
            its row entry is ``EMPTY``, so that the next step uses the cold path.
        steady: Steady (not one-shot) decisions of cells with waiting one-shot decisions, restored
            after the last one-shot decision.
        by_reqs: Decisions for more requests than the cell's decision allows, by cell and number of
            requests.
    """

    def __init__(self, config: DispatchConfig, epoch: int) -> None:
        self.epoch = epoch
        self._row_size = config.max_num_tokens + 1
        num_classes, num_variants = config.num_query_classes, config.variants.count
        num_rows = len(ALLOWED_MODES) * num_classes * num_variants
        self._as_dict = num_rows * self._row_size > MAX_LIST_CELLS
        self.rows: list[list[list[Any]]] = [
            [[() for _ in range(num_variants)] for _ in range(num_classes)] for _ in ALLOWED_MODES
        ]
        self.waiting: dict[Cell, list[Decision]] = {}
        self.steady: dict[Cell, Decision] = {}
        self.by_reqs: dict[Cell, dict[int, Decision]] = {}
        self._num_by_reqs = 0

    @property
    def num_filled(self) -> int:
        """Number of cells with a steady decision, counted on each access."""
        rows = (row for block in self.rows for line in block for row in line)
        return len(self.steady) + sum(
            decision is not EMPTY
            for row in rows
            for decision in (row.values() if isinstance(row, dict) else row)
        )

    def get(self, cell: Cell) -> Decision:
        """Return the steady decision of a cell, or ``EMPTY``."""
        if cell in self.waiting:
            return self.steady.get(cell, EMPTY)
        row = self._row(cell)
        decision: Decision = row[cell[3]] if row != () else EMPTY
        return decision

    def peek(self, cell: Cell, num_reqs: int) -> Decision | None:
        """Return the decision for the next step, or None if the policy must decide."""
        waiting = self.waiting.get(cell)
        if waiting and num_reqs <= waiting[0].max_num_reqs:
            return waiting[0]
        steady = self.get(cell)
        if num_reqs <= steady.max_num_reqs:
            return steady
        return None if steady is EMPTY else self.get_by_reqs(cell, num_reqs)

    def put(self, cell: Cell, decision: Decision) -> None:
        """Set the steady decision of a cell; waiting one-shot decisions are used first."""
        if cell in self.waiting:
            self.steady[cell] = decision
            return
        row = self.row(*cell[:3])
        if self._as_dict and len(row) >= MAX_COLD_CELLS:
            row.clear()
        row[cell[3]] = decision

    def row(self, allowed: int, uniform: int, variant: int) -> Any:
        """Return a row, creating it on first use."""
        line = self.rows[allowed][uniform]
        if line[variant] == ():
            line[variant] = DictRow() if self._as_dict else [EMPTY] * self._row_size
        return line[variant]

    def put_one_shot(self, cell: Cell, decision: Decision) -> None:
        """Append a one-shot decision to the waiting one-shot decisions of a cell."""
        if cell not in self.waiting:
            steady = self.get(cell)
            if steady is not EMPTY:
                self._empty_row_cell(cell)
                self.steady[cell] = steady
            self.waiting[cell] = []
        self.waiting[cell].append(decision)

    def take_one_shot(self, cell: Cell, num_reqs: int) -> Decision | None:
        """Remove and return the next one-shot decision of a cell.

        Return None if no decision is waiting, or if the next decision does not hold for this number
        of requests. Removing the last waiting decision restores the steady decision before the step
        runs.
        """
        waiting = self.waiting.get(cell)
        if not waiting or num_reqs > waiting[0].max_num_reqs:
            return None
        decision = waiting.pop(0)
        if not waiting:
            self.drop_one_shots(cell)
        return decision

    def drop_one_shots(self, cell: Cell) -> None:
        """Drop waiting one-shot decisions and restore the steady decision."""
        self.waiting.pop(cell, None)
        steady = self.steady.pop(cell, None)
        if steady is not None:
            self.put(cell, steady)

    def get_by_reqs(self, cell: Cell, num_reqs: int) -> Decision | None:
        """Return the stored decision for a number of requests above the cell's limit, or None."""
        return self.by_reqs.get(cell, {}).get(num_reqs)

    def put_by_reqs(self, cell: Cell, num_reqs: int, decision: Decision) -> None:
        """Store a decision for a number of requests.

        If too many decisions are stored, all of them are dropped first.
        """
        if self._num_by_reqs >= MAX_COLD_CELLS:
            self._clear_by_reqs()
        self.by_reqs.setdefault(cell, {})[num_reqs] = decision
        self._num_by_reqs += 1

    def forget_steady(self, cell: Cell, up_to: int = 0) -> None:
        """Drop steady decisions of a range of cells; keep one-shot decisions.

        Args:
            cell: The first cell, with the fewest tokens.
            up_to: Number of tokens of the last cell; 0 empties only ``cell``.
        """
        if up_to <= cell[3]:
            self._num_by_reqs -= len(self.by_reqs.pop(cell, ()))
            self.steady.pop(cell, None)
            self._empty_row_cell(cell)  # no effect if one-shot decisions are waiting
            return
        first, in_range = cell[3], _in_range(cell, up_to)
        for one in filter(in_range, list(self.steady)):
            del self.steady[one]
        for one in filter(in_range, list(self.by_reqs)):
            self._num_by_reqs -= len(self.by_reqs.pop(one))
        row = self._row(cell)
        if self._as_dict:
            for size in [size for size in row if first <= size <= up_to]:
                del row[size]
        elif row != ():
            stop = min(up_to + 1, self._row_size)
            row[first:stop] = [EMPTY] * (stop - first)

    def invalidate(self, mode: RuntimeMode, num_tokens: int) -> None:
        """Empty all cells whose batches a key of this mode and size could serve."""
        self._clear_by_reqs()
        for cell in [each for each in self.waiting if _may_choose(each, mode, num_tokens)]:
            del self.waiting[cell]
            self.steady.pop(cell, None)
        stop = min(num_tokens + 1, self._row_size)
        blank = [EMPTY] * stop
        for allowed, block in zip(ALLOWED_MODES, self.rows, strict=True):
            if mode not in allowed:
                continue
            for row in (row for line in block for row in line if row != ()):
                if self._as_dict:
                    for size in [size for size in row if size <= num_tokens]:
                        del row[size]
                else:
                    row[:stop] = blank

    def _row(self, cell: Cell) -> Any:
        return self.rows[cell[0]][cell[1]][cell[2]]

    def _empty_row_cell(self, cell: Cell) -> None:
        row = self._row(cell)
        if self._as_dict:
            if row != ():
                row.pop(cell[3], None)
        elif row != ():
            row[cell[3]] = EMPTY

    def _clear_by_reqs(self) -> None:
        self.by_reqs.clear()
        self._num_by_reqs = 0


def _in_range(cell: Cell, up_to: int) -> Callable[[Cell], bool]:
    """Return a predicate for cells of one row, from ``cell`` up to a number of tokens."""
    return lambda one: one[:3] == cell[:3] and cell[3] <= one[3] <= up_to


def _may_choose(cell: Cell, mode: RuntimeMode, num_tokens: int) -> bool:
    return cell[3] <= num_tokens and mode in ALLOWED_MODES[cell[0]]
