"""The table alone: its bounds, and the changes that empty its cells."""

from __future__ import annotations

import attrs
import pytest

from dispatchkit.dispatch import Decision
from dispatchkit.dispatch import table as table_module
from dispatchkit.dispatch.table import EMPTY, DictRow, Table
from dispatchkit.keys import BatchDescriptor, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.keys.modes import ALLOWED_MODES

PIECEWISE = RuntimeMode.PIECEWISE
CONFIG = DispatchConfig(sizes=(8, 16), max_num_tokens=16)
REPLAY = Decision.replay(GraphKey(PIECEWISE, BatchDescriptor(16)))
PROBE = Decision.eager("probe")


def cell(num_tokens, ceiling=PIECEWISE):
    return (int(ceiling), 0, 0, num_tokens)


def test_row_of_a_huge_table_holds_exactly_as_many_cells_as_its_bound(monkeypatch):
    monkeypatch.setattr(table_module, "MAX_LIST_CELLS", 0)
    monkeypatch.setattr(table_module, "MAX_COLD_CELLS", 3)
    table = Table(CONFIG, 0)
    held = []
    for size in (1, 2, 3, 4):
        table.put(cell(size), REPLAY)
        held.append(table.num_filled)
    assert held == [1, 2, 3, 1]
    assert table.get(cell(4)) is REPLAY


def test_answers_by_requests_are_exactly_as_many_as_their_bound(monkeypatch):
    monkeypatch.setattr(table_module, "MAX_COLD_CELLS", 3)
    table = Table(CONFIG, 0)
    for size, num_reqs in ((5, 4), (5, 5), (6, 4)):
        table.put_by_reqs(cell(size), num_reqs, REPLAY)
    assert sum(map(len, table.by_reqs.values())) == 3
    table.forget_steady(cell(5))  # leaves room for two
    for num_reqs in (5, 6):
        table.put_by_reqs(cell(6), num_reqs, REPLAY)
    assert table.get_by_reqs(cell(6), 4) is REPLAY
    table.put_by_reqs(cell(7), 4, REPLAY)
    assert table.by_reqs == {cell(7): {4: REPLAY}}


@pytest.mark.parametrize("max_list_cells", [0, 1_000_000], ids=["dicts", "lists"])
def test_change_of_a_key_empties_what_it_could_serve_and_no_more(monkeypatch, max_list_cells):
    """Cells up to its size that allow its mode, with steady and with one-shot decisions."""
    monkeypatch.setattr(table_module, "MAX_LIST_CELLS", max_list_cells)
    emptied = [cell(7), cell(8)]
    kept = [cell(9), cell(8, RuntimeMode.NONE)]
    for is_probed in (False, True):
        table = Table(CONFIG, 0)
        for each in (*emptied, *kept):
            table.put(each, REPLAY)
            if is_probed:
                table.put_one_shot(each, PROBE)
        table.invalidate(PIECEWISE, 8)
        assert [table.get(each) for each in emptied] == [EMPTY, EMPTY]
        assert [table.get(each) for each in kept] == [REPLAY, REPLAY]
        assert [*table.waiting] == (kept if is_probed else [])
        assert [table.take_one_shot(each, 1) for each in emptied] == [None, None]


def test_what_waits_is_served_up_to_its_bound_of_requests():
    table = Table(CONFIG, 0)
    bounded = attrs.evolve(REPLAY, max_num_reqs=4)
    table.put(cell(8), bounded)
    assert table.peek(cell(8), 4) is bounded
    assert table.peek(cell(8), 5) is None
    table.put_by_reqs(cell(8), 5, PROBE)
    assert table.peek(cell(8), 5) is PROBE
    assert table.peek(cell(7), 5) is None
    table.forget_steady(cell(8))
    table.put(cell(8), bounded)
    table.put_one_shot(cell(8), bounded)
    assert table.peek(cell(8), 5) is None
    assert table.take_one_shot(cell(8), 5) is None
    assert table.take_one_shot(cell(8), 4) is bounded
    assert table.get(cell(8)) is bounded


def test_table_is_of_lists_up_to_exactly_so_many_cells(monkeypatch):
    rows = len(ALLOWED_MODES) * CONFIG.num_query_classes * CONFIG.variants.count
    num_cells = rows * (CONFIG.max_num_tokens + 1)
    for max_list_cells, kind in ((num_cells, list), (num_cells - 1, DictRow)):
        monkeypatch.setattr(table_module, "MAX_LIST_CELLS", max_list_cells)
        table = Table(CONFIG, 0)
        table.put(cell(8), REPLAY)
        assert type(table.rows[int(PIECEWISE)][0][0]) is kind


def test_room_for_answers_by_requests_is_whole_again_after_it_was_cleared(monkeypatch):
    monkeypatch.setattr(table_module, "MAX_COLD_CELLS", 3)
    table = Table(CONFIG, 0)
    held = []
    for num_reqs in range(1, 8):
        table.put_by_reqs(cell(8), num_reqs, REPLAY)
        held.append(len(table.by_reqs[cell(8)]))
    assert held == [1, 2, 3, 1, 2, 3, 1]


def test_forgotten_steady_decision_does_not_come_back_after_a_waiting_one():
    table = Table(CONFIG, 0)
    table.put(cell(8), REPLAY)
    table.put_one_shot(cell(8), PROBE)
    table.forget_steady(cell(8))
    assert table.get(cell(8)) is EMPTY
    assert table.take_one_shot(cell(8), 1) is PROBE
    assert table.get(cell(8)) is EMPTY


def test_emptied_cells_are_not_counted_as_filled():
    table = Table(CONFIG, 0)
    for size in (8, 9):
        table.put(cell(size), REPLAY)
        table.put_one_shot(cell(size), PROBE)
    assert table.num_filled == 2
    table.invalidate(PIECEWISE, 8)
    assert table.num_filled == 1


def test_what_waits_is_foreseen_up_to_and_at_its_bound():
    table = Table(CONFIG, 0)
    bounded = attrs.evolve(PROBE, max_num_reqs=4)
    table.put(cell(8), REPLAY)
    table.put_one_shot(cell(8), bounded)
    assert table.peek(cell(8), 4) is bounded
    assert table.peek(cell(8), 5) is REPLAY
