"""The dispatcher's table: one ready decision per cell.

A cell is (code of allowed modes, query class, variant, tokens). A variant is the number of
adapters or, with axes, a number that stands for adapters and buckets together. Cells are filled on
first use, and rows are created with their first cell. Rows are lists indexed by the number of
tokens, or, in tables above a million cells, bounded dicts.

Writers hold the dispatcher's lock; readers of a row need none, since every change is a
single item or slice assignment.
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

#: Fills every cell that was not decided yet. No number of requests meets its bound.
EMPTY = Decision(RuntimeMode.NONE, None, "", max_num_reqs=-1)


class Row(Protocol):
    """The decisions of one kind of batch, by number of tokens; see ``Dispatcher.row``."""

    def __getitem__(self, num_tokens: int, /) -> Decision:
        """Return the decision; its ``max_num_reqs`` is -1 if ``dispatch`` must be called."""
        ...


class DictRow(dict[int, Decision]):
    """A row of a very large table: bounded, with ``EMPTY`` for cells without a decision."""

    def __missing__(self, num_tokens: int) -> Decision:
        return EMPTY


class Table:
    """One epoch: decisions by allowed modes, query class, variant and tokens.

    Attributes:
        epoch: Number of the table.
        rows: What the hot path indexes, first by the code of allowed modes. A row that was never
            used is an empty tuple, so that indexing it raises IndexError.
        waiting: One-shot decisions by cell, in the order they are served. Such a cell is empty in
            its row, so that the step takes one on the cold path.
        steady: The decision restored to such a cell with the last of them.
        by_reqs: Decisions for more requests than the cell's own decision holds for.
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
        """Number of cells with a decision, counted on each access."""
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
        """Return the decision that the next step would get, or None to ask the policy."""
        waiting = self.waiting.get(cell)
        if waiting and num_reqs <= waiting[0].max_num_reqs:
            return waiting[0]
        steady = self.get(cell)
        if num_reqs <= steady.max_num_reqs:
            return steady
        return None if steady is EMPTY else self.get_by_reqs(cell, num_reqs)

    def put(self, cell: Cell, decision: Decision) -> None:
        """Set the steady decision of a cell, which is served after waiting one-shot decisions."""
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
        """Serve a decision once, after those already waiting."""
        if cell not in self.waiting:
            steady = self.get(cell)
            if steady is not EMPTY:
                self._empty_row_cell(cell)
                self.steady[cell] = steady
            self.waiting[cell] = []
        self.waiting[cell].append(decision)

    def take_one_shot(self, cell: Cell, num_reqs: int) -> Decision | None:
        """Return the next one-shot decision, if it holds for this many requests.

        With the last one the steady decision is back in place, before the step runs.
        """
        waiting = self.waiting.get(cell)
        if not waiting or num_reqs > waiting[0].max_num_reqs:
            return None
        decision = waiting.pop(0)
        if not waiting:
            self.drop_one_shots(cell)
        return decision

    def drop_one_shots(self, cell: Cell) -> None:
        """Serve the steady decision again, dropping one-shot decisions that wait."""
        self.waiting.pop(cell, None)
        steady = self.steady.pop(cell, None)
        if steady is not None:
            self.put(cell, steady)

    def get_by_reqs(self, cell: Cell, num_reqs: int) -> Decision | None:
        """Return the decision stored for a number of requests beyond the cell's bound."""
        return self.by_reqs.get(cell, {}).get(num_reqs)

    def put_by_reqs(self, cell: Cell, num_reqs: int, decision: Decision) -> None:
        """Store a decision for a number of requests, up to a bound on all of them."""
        if self._num_by_reqs >= MAX_COLD_CELLS:
            self._clear_by_reqs()
        self.by_reqs.setdefault(cell, {})[num_reqs] = decision
        self._num_by_reqs += 1

    def forget_steady(self, cell: Cell, up_to: int = 0) -> None:
        """Empty cells of a row and decisions stored by requests; one-shot decisions stay.

        Args:
            cell: The cell of the fewest tokens.
            up_to: The most tokens; if that is fewer, only the one cell.
        """
        if up_to <= cell[3]:
            self._num_by_reqs -= len(self.by_reqs.pop(cell, ()))
            self.steady.pop(cell, None)
            self._empty_row_cell(cell)  # already empty for a cell with waiting decisions
            return
        first, named = cell[3], _names(cell, up_to)
        for one in filter(named, list(self.steady)):
            del self.steady[one]
        for one in filter(named, list(self.by_reqs)):
            self._num_by_reqs -= len(self.by_reqs.pop(one))
        row = self._row(cell)
        if self._as_dict:
            for size in [size for size in row if first <= size <= up_to]:
                del row[size]
        elif row != ():
            stop = min(up_to + 1, self._row_size)
            row[first:stop] = [EMPTY] * (stop - first)

    def invalidate(self, mode: RuntimeMode, num_tokens: int) -> None:
        """Empty all cells that a key of this mode and size could serve."""
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


def _names(cell: Cell, up_to: int) -> Callable[[Cell], bool]:
    """Return whether a cell is in a row, within a range of tokens."""
    return lambda one: one[:3] == cell[:3] and cell[3] <= one[3] <= up_to


def _may_choose(cell: Cell, mode: RuntimeMode, num_tokens: int) -> bool:
    return cell[3] <= num_tokens and mode in ALLOWED_MODES[cell[0]]
