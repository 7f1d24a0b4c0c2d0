"""Sessions' state equals that of each session alone, for any other sessions and steps."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from pathlib import Path

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import settings  # noqa: E402
from hypothesis.stateful import run_state_machine_as_test  # noqa: E402
from interrupts import interrupted  # noqa: E402
from slot_sessions import SessionMachine, make_runner, make_state  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    GraphRunner,
    RunnerOptions,
    SlotState,
    StaticInput,
    eager_piece,
    eager_region,
    graph_break,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError, DescriptorError, InputError  # noqa: E402
from dispatchkit.execute import (  # noqa: E402
    CheckWarning,
    EagerStepWarning,
    RawBank,
    SlotMove,
)
from dispatchkit.execute.step.state import Snapshot  # noqa: E402
from dispatchkit.options import with_settings  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::dispatchkit.execute.ChurnWarning"),
    pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "sessions.md"
ROWS = StaticInput((None, 2), "float32")


def total(x, slots):
    """Add to the total of a session."""
    made = slots["total"] + x
    slots["total"] = made
    return made


def state_of(num_slots=4, **settings):
    return SlotState({"total": ROWS}, num_slots, **settings)


def runner_of(state, step=total, *, captured=True, **settings):
    settings = {"sizes": (1, 4), "max_num_tokens": 4, "mode": "FULL", **settings}
    runner = GraphRunner(step, {"x": ROWS, "slots": state}, backend="tape", **settings)
    if captured:
        assert not runner.capture().failed
    return runner


def totals(state):
    return {session: state[session]["total"][0].item() for session in state}


def test_sessions_together_are_what_each_is_alone(is_nightly):
    """Sessions join, leave, move and step in any order, compared with each run alone."""
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=10_000 if is_nightly else 20, stateful_step_count=8, deadline=None
        ),
    )


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    ("slots", "problem"),
    [
        ([0, 1, 1], r"slots\[2\] must be a different slot than slots\[1\], got 1\."),
        ([0, 3], r"slots\[1\] must be the slot of a session, got 3\. This slot is free"),
        ([4], r"slots\[0\] must be a slot from 0 to 3, got 4"),
        ([-1], r"slots\[0\] must be a slot from 0 to 3, got -1"),
        ([-6, 0], r"slots\[0\] must be a slot from 0 to 3, got -6"),
        ([0, 5], r"slots\[1\] must be a slot from 0 to 3, got 5"),  # the sink, for one row
        (
            [0, 1, 2, 0, 1, 2],
            r"slots\[3\] must be a different slot than slots\[0\], got 0",
        ),  # more than exist
    ],
)
@pytest.mark.parametrize("host", [True, False])
def test_a_step_of_wrong_slots_is_refused_before_anything_runs(slots, problem, compact, host):
    """The error names the row and the slot, and no session changes."""
    state = state_of(compact=compact, host=host)
    runner = runner_of(state, max_num_tokens=8, sizes=(1, 8))
    for session in "abc":
        state.join(session)
    given = slots if host else torch.tensor(slots)
    with pytest.raises(DescriptorError, match=f"^{problem}"):
        runner(x=torch.ones(len(slots), 2), slots=given)
    assert totals(state) == {"a": 0, "b": 0, "c": 0}
    assert runner.stats().steps == 0


@pytest.mark.parametrize(("host", "given"), [(True, ["a"]), (True, "a"), (False, [0])])
def test_slots_of_another_kind_are_refused_with_the_next_step(host, given):
    state = state_of(host=host)
    runner = runner_of(state, captured=False)
    state.join("a")
    with pytest.raises(InputError, match=r"got .* Pass the slots of .* slots_of\(sessions\)\.$"):
        runner(x=torch.ones(1, 2), slots=given)


def test_a_step_of_compact_sessions_is_of_the_first_slots_in_order():
    state = state_of(compact=True)
    runner = runner_of(state)
    for session in "abc":
        state.join(session)
    runner(x=torch.ones(2, 2), slots=[0, 1])  # padding overwrites the third
    assert totals(state) == {"a": 1, "b": 1, "c": 0}
    for slots in ([1, 0], [1], [0, 2]):
        with pytest.raises(DescriptorError, match=r"for compact sessions"):
            runner(x=torch.ones(len(slots), 2), slots=slots)


def test_a_step_in_place_names_its_slots_in_the_buffers():
    """They are checked as in a call."""
    state = state_of()
    runner = runner_of(state)
    for session in "ab":
        state.join(session)
    runner.buffers["x"][:2] = 1
    runner.buffers["slots"][:2] = torch.tensor([1, 0])
    assert runner.run_in_place(2).tolist() == [[1, 1], [1, 1]]
    runner.buffers["slots"][:2] = 1
    with pytest.raises(DescriptorError, match="must be a different slot than"):
        runner.run_in_place(2)
    larger = runner_of(state, max_num_tokens=9)
    with (
        pytest.warns(EagerStepWarning),
        pytest.raises(InputError, match="size of the static inputs"),
    ):
        larger.run_in_place(9)
    assert totals(state) == {"a": 1, "b": 1}


def test_a_step_of_dummy_rows_alone_is_of_no_session():
    state = state_of()
    runner = runner_of(state)
    state.join("a")
    fill = state.static_input.fill
    assert runner(x=torch.ones(3, 2), slots=[fill] * 3).tolist() == [[1, 1]] * 3
    assert totals(state) == {"a": 0}


def test_sessions_say_what_is_wrong_with_them():
    state = state_of(2)
    assert [state.join("a"), state.join("b")] == [0, 1]
    with pytest.raises(DescriptorError, match="Session 'a' already has a slot"):
        state.join("a")
    with pytest.raises(DescriptorError, match="No slot is free for session 'c'; num_slots is 2"):
        state.join("c")
    with pytest.raises(
        DescriptorError, match=r"Session 'c' has no slot\. Call join\(session\) first"
    ):
        state.slots_of(["a", "c"])
    with pytest.raises(DescriptorError, match="sessions must be distinct"):
        state.leave("a", "a")
    with pytest.raises(DescriptorError, match="Session 'c' has no slot"):
        state.leave("a", "c")
    with pytest.raises(DescriptorError, match=r"slot must be a free slot from 0 to 1, got 1"):
        state.move("a", 1)
    unhashable = r"session must be a hashable value, got .*1.*\. Identify the session by"
    for wrong in (state.join, state.clear, state.slots_of, state.leave, state.__contains__):
        with pytest.raises(DescriptorError, match=unhashable):
            wrong([[1]])
    with pytest.raises(
        DescriptorError, match=r"sessions must be a list of sessions, got 3\. Pass a single"
    ):
        state.slots_of(3)
    with pytest.raises(DescriptorError, match=r"must be a list of sessions, got 'caller 7'"):
        state.slots_of("caller 7")
    with pytest.raises(DescriptorError, match=r"session must be a hashable value, got \[1\]\."):
        state.slots_of(one for one in ("a", [1]))
    with pytest.raises(DescriptorError, match=r"slot must be a free slot from 0 to 1, got \[1\]"):
        state.move("a", [1])
    with pytest.raises(DescriptorError, match="bank must be one of: total, got 'sum'"):
        state.rows(torch.tensor([0]))["sum"]
    assert str(state) == "<SlotState of total: 2 of 2 slots in use>"


@pytest.mark.parametrize("value", [torch.ones(2, 3), torch.ones(2), torch.ones(3, 2), 0.0])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_another_shape_are_refused(value, compact):
    state = state_of(compact=compact)
    for session in "ab":
        state.join(session)
    with pytest.raises(InputError, match=r"Rows of 'total' must (have shape \(2, 2\)|be a tensor)"):
        state.rows(torch.tensor([0, 1]))["total"] = value
    assert totals(state) == {"a": 0, "b": 0}
    assert state.sessions == ("a", "b")


def test_the_last_sessions_fill_the_gaps_of_those_that_leave():
    """The fewest moves are made, and vacated slots are cleared."""
    state = state_of(6, compact=True)
    for number, session in enumerate("abcdef"):
        state.join(session)
        state[session]["total"].fill_(number)
    moves = state.leave("b", "e", "c")
    assert moves == [SlotMove("d", 3, 1, 8), SlotMove("f", 5, 2, 8)]
    assert totals(state) == {"a": 0, "d": 3, "f": 5}
    assert state.join("g") == 3
    assert state.leave("a", "d", "f", "g") == []
    assert not state.get_bank("total").tensor.any()


RAW = {
    "keys": RawBank((2, None, 5, 1), "float32", fill=-1, positions=2),  # four and one for padding
    "cell": RawBank((None, 3), "float32"),
    "source": RawBank((None, 2), "bool", is_read_only=True),
}


def raw_rows(state, slot):
    """A slot's positions in one layer, its cell and its source."""
    keys, cell, source = state.tensors
    return keys[0, slot, :, 0].tolist(), cell[slot].tolist(), source[slot].tolist()


def test_moves_of_raw_banks_copy_positions_in_use_and_clear_the_rest():
    """A slot is cleared when a session joins; until then padding may change it."""
    state = SlotState(RAW, 4, compact=True)
    for session in "abcd":
        state.join(session)
    for number, tensor in enumerate(state.tensors):
        tensor.fill_(number + 5)
    for number in (-1, 0.5, None):
        with pytest.raises(
            DescriptorError, match=r"used\['d'\] must be a non-negative integer, got"
        ):
            state.leave("a", used={"d": number})
    moves = state.leave("a", "c", used={"d": 2, "b": 9})
    assert moves == [SlotMove("d", 3, 0, 2 * 2 * 4 + 3 * 4 + 2)]
    assert raw_rows(state, 0) == ([5, 5, -1, -1, -1], [6] * 3, [True] * 2)
    assert raw_rows(state, 3) == ([5] * 5, [6] * 3, [True] * 2)
    assert state.leave("d", used={"b": 9}) == [SlotMove("b", 1, 0, 2 * 4 * 4 + 3 * 4 + 2)]
    assert raw_rows(state, 0) == ([5, 5, 5, 5, -1], [6] * 3, [True] * 2)
    assert state.join("e") == 1
    assert raw_rows(state, 1) == ([-1] * 5, [0] * 3, [False] * 2)
    assert state.num_bytes == 4 * (2 * 5 * 4 + 3 * 4 + 2)  # only the rows of slots


@pytest.mark.parametrize("length", [1, 3])
def test_steps_that_address_raw_banks_declare_what_they_change(length):
    """Captures change no live session; padding changes only free slots."""
    state = SlotState(RAW, 4, compact=True)
    keys, cell, _ = state.tensors

    def step(x, positions):
        rows = torch.arange(x.shape[0])
        keys[:, rows, positions] = x
        cell[: len(rows)].add_(x)
        return keys[0, : len(rows), :4, 0].clamp(min=0).sum(1, keepdim=True) + x

    runner = GraphRunner(
        step,
        {
            "x": StaticInput((None, 1), "float32"),
            "positions": StaticInput((None,), "int64", fill=4),
        },
        sizes=(4,),
        max_num_tokens=4,
        state=state.step_state,
        backend="tape",
        options=RunnerOptions(strict=True),
    )
    for session in range(length):
        state.join(session)
        state[session]["cell"].fill_(session)
    assert not runner.capture().failed
    for position in range(2):
        x = torch.ones(length, 1) * (position + 1)
        found = runner(x=x, positions=torch.full((length,), position))
    assert found.tolist() == [[5]] * length
    for session in range(length):
        keys_there, cell_there, _ = raw_rows(state, session)
        assert (keys_there[:4], cell_there) == ([1, 2, -1, -1], [3 + session] * 3)


@pytest.mark.parametrize("settings", [{}, {"compact": True}, {"num_slots": 1}])
def test_a_capture_that_fails_leaves_every_session_as_it_was(settings):
    """Dummy rows write only to the sink."""
    state = state_of(**settings)
    for session in "abc"[: state.num_slots]:
        state.join(session)
        state[session]["total"].fill_(7)
    before = state.get_bank("total").tensor[: state.num_slots + 1].clone()

    def failing(x, slots):
        made = total(x, slots)
        return made * float(made.sum())  # refused in a capture

    runner = runner_of(state, failing, captured=False)
    assert len(runner.capture().failed) == 2
    assert torch.equal(state.get_bank("total").tensor[: state.num_slots + 1], before)


@pytest.mark.parametrize("compact", [False, True])
def test_captures_copy_no_bank(compact, monkeypatch):
    """Nothing is saved around a capture or around a call's proof."""
    state = state_of(64, compact=compact)
    saved = []
    monkeypatch.setattr(Snapshot, "save", lambda _, storage: saved.append(storage))
    monkeypatch.setattr(Snapshot, "save_as", lambda _, storage, copied: saved.append(storage))
    runner = runner_of(state, lazy=True, captured=False)
    for session in range(3):
        state.join(session)
    runner(x=torch.ones(3, 2), slots=[0, 1, 2])
    assert runner.stats().captures == 1
    assert not saved


def test_rows_that_are_written_in_place_are_refused():
    """The write is refused before it happens, because the rows may belong to sessions."""

    def step(x, slots):
        return slots["total"].add_(x)

    state = state_of(compact=True)
    for session in "ab":
        state.join(session)
    runner = runner_of(state, step, captured=False)
    (problem, *_) = runner.capture().failed.values()
    assert problem.startswith("slot_written: The step writes rows of 'total' in place, with ")
    assert totals(state) == {"a": 0, "b": 0}


def add_to_all(x, slots):
    slots.bank("total").add_(1)
    return x * 1


def clear_a_column(x, slots):
    slots.bank("total")[:, 0].zero_()
    return x * 1


def write_flat(x, slots):
    flat = slots.bank("total").view(-1)
    flat[slots.index] = flat[slots.index.clamp(max=slots.bank("total").shape[0] - 2)] + x[:, 0]
    return x * 1


@pytest.mark.parametrize("step", [add_to_all, clear_a_column])
def test_a_write_to_all_rows_of_a_bank_is_refused(step):
    """It would change the state of sessions outside the step."""
    state = state_of()
    state.join("a")
    problems = runner_of(state, step, captured=False).capture().failed.values()
    assert problems
    for problem in problems:
        assert problem.startswith("slot_written: The step writes rows of 'total' in place, with ")
    assert totals(state) == {"a": 0}


def test_a_write_to_indexed_rows_of_a_flat_bank_is_captured():
    state = state_of()
    state.join("a")
    assert not runner_of(state, write_flat, captured=False).capture().failed


def add_and_forget(x, slots):
    slots["total"].add_(x)
    return x * 1


def write_a_column(x, slots):
    total = slots["total"]
    total[:, 0] = x[:, 0]
    return total * 1


def read_again(x, slots):
    slots["total"].add_(x)
    slots["total"] = slots["total"] * 2
    return x * 1


def add_and_assign(x, slots):
    slots["total"] += x
    return x * 1


def change_a_clone(x, slots):
    before = slots["total"].clone()
    slots["total"] = before + x
    return before.zero_()


def assign_another_copy(x, slots):
    first, second = slots["total"], slots["total"]
    first.add_(x)
    slots["total"] = second
    return x * 1


def assign_a_view_of_another_changed_copy(x, slots):
    first, second = slots["total"], slots["total"]
    first.add_(x)
    slots["total"] = second.add_(1)[:]
    return x * 1


@pytest.mark.parametrize(
    "step",
    [
        add_and_forget,
        write_a_column,
        read_again,
        assign_another_copy,
        assign_a_view_of_another_changed_copy,
    ],
)
def test_a_change_of_copied_rows_that_is_lost_is_refused(step):
    """Gathered rows are copies."""
    state = state_of()
    state.join("a")
    problems = runner_of(state, step, captured=False).capture().failed.values()
    assert problems
    for problem in problems:
        assert problem.startswith("slot_written: The step changes rows of 'total' in place, with ")
        assert "Assign the changed rows with slots['total'] = rows" in problem


def assign_what_is_computed(x, slots):
    first, second = slots["total"], slots["total"]
    first.add_(x)
    slots["total"] = first + second * 0
    return x * 1


def assign_the_changed_of_two(x, slots):
    first, second = slots["total"], slots["total"]
    first.add_(x)
    slots["total"] = first
    return second * 1


@pytest.mark.parametrize(
    "step", [add_and_assign, change_a_clone, assign_what_is_computed, assign_the_changed_of_two]
)
def test_a_change_of_copied_rows_that_is_assigned_is_kept(step):
    """In-place operations are allowed if their result reaches the bank or is not meant to."""
    state = state_of()
    state.join("a")
    runner = runner_of(state, step, options=RunnerOptions(strict=True))
    for _ in range(2):
        runner(x=torch.ones(1, 2), slots=[0])
    assert totals(state) == {"a": 2}


def test_a_change_that_is_not_in_what_is_computed_is_lost():
    """As in eager, assigning one copy shows that the change of another copy is unintended."""

    def step(x, slots):
        first, second = slots["total"], slots["total"]
        first.add_(x)
        slots["total"] = second + 10
        return x * 1

    state = state_of()
    state.join("a")
    runner_of(state, step, options=RunnerOptions(strict=True))(x=torch.ones(1, 2), slots=[0])
    assert totals(state) == {"a": 10}


@pytest.mark.parametrize("compact", [False, True])
def test_rows_may_be_assigned_to_themselves(compact):
    def step(x, slots):
        slots["total"] = slots["total"]
        slots["total"] = slots["total"] + x
        slots["total"] = slots.bank("total")[: len(x)] if compact else slots["total"][:]
        return slots["total"] * 1

    state = state_of(compact=compact)
    for name in "abc":
        state.join(name)
    runner = runner_of(state, step, options=RunnerOptions(strict=True))
    for rows in (3, 2, 3):
        runner(x=torch.ones(rows, 2), slots=list(range(rows)))
    assert totals(state) == {"a": 3, "b": 3, "c": 2}


def test_a_state_without_banks_is_refused():
    for wrong, missing in (({"host": True}, "banks"), ({"banks": {}}, "num_slots")):
        with pytest.raises(ConfigError, match=f"{missing} must be given to SlotState"):
            SlotState(**wrong)


def test_padding_that_changes_rows_is_found_with_slots_too():
    def mean(x, slots):
        made = slots["total"] + x.mean(0)
        slots["total"] = made
        return made

    state = state_of()
    runner = runner_of(state, mean)
    for session in "abc":
        state.join(session)
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        found = runner(x=torch.tensor([[1.0, 2], [2, 4], [3, 6]]), slots=[2, 0, 1])
    assert found.tolist() == [[2, 4]] * 3


@pytest.mark.parametrize("compact", [False, True])
def test_check_mode_compares_the_rows_of_sessions(compact):
    state = state_of(compact=compact)
    runner = runner_of(state, options=RunnerOptions(check=1))
    for session in "abc":
        state.join(session)
    for _ in range(2):
        runner(x=torch.ones(3, 2), slots=[0, 1, 2])
    assert totals(state) == {"a": 2, "b": 2, "c": 2}
    (graph,) = [one for one in runner.lanes[0].lifecycle.live().values() if one.hits]
    graph.graphs[0].replay = lambda: None
    with pytest.warns(CheckWarning, match="rows of 'total': "):
        runner(x=torch.ones(3, 2), slots=[0, 1, 2])
    assert totals(state) == {"a": 3, "b": 3, "c": 3}


def test_steps_with_an_axis_name_slots_too():
    def step(x, slots, length):
        made = slots["total"] + x.sum(1, keepdim=True)
        slots["total"] = made
        return made

    state = state_of()
    runner = GraphRunner(
        step,
        {"x": StaticInput((None, "length"), "float32"), "slots": state},
        sizes=(4,),
        max_num_tokens=4,
        axes=[Axis("length", (4, 8))],
        backend="tape",
        options=RunnerOptions(strict=True),
    )
    runner.capture()
    for session in "ab":
        state.join(session)
    runner(x=torch.ones(2, 3), slots=[0, 1], length=3)
    runner(x=torch.ones(1, 7), slots=[1], length=7)
    assert totals(state) == {"a": 3, "b": 10}


def test_a_split_batch_names_slots_in_its_parts():
    state = state_of(8)
    runner = GraphRunner(
        total,
        {"x": ROWS, "slots": state},
        sizes=(2, 4),
        max_num_tokens=8,
        policy="threshold",
        backend="tape",
        mode="FULL",
        options=RunnerOptions(rows_independent=True, policy_options={"split": True}, strict=True),
    )
    assert not runner.capture().failed
    for session in range(7):
        state.join(session)
    order = [6, 5, 4, 3, 2, 1, 0]
    found = runner(x=torch.arange(7.0).view(7, 1).expand(7, 2), slots=order)
    assert found[:, 0].tolist() == list(range(7))
    assert totals(state) == {session: 6.0 - session for session in range(7)}
    with pytest.raises(
        ConfigError, match="rows_independent must be False with a compact SlotState"
    ):
        runner_of(state_of(compact=True), options=RunnerOptions(rows_independent=True))


def test_a_capture_size_may_be_above_the_number_of_compact_slots():
    state = state_of(3, compact=True)
    for session in "abc":
        state.join(session)
        state[session]["total"].fill_(5)
    runner = runner_of(state, sizes=(8,), max_num_tokens=8, options=RunnerOptions(strict=True))
    runner(x=torch.ones(2, 2), slots=[0, 1])
    assert totals(state) == {"a": 6, "b": 6, "c": 5}


@eager_region
def add_in_a_region(x, slots):
    return total(x, slots)


@eager_region
def rows_of(slots):
    return slots["total"]


def broken_in_between(x, slots):
    made = slots["total"] + x
    graph_break()
    slots["total"] = made
    return made * 2


def read_in_a_region(x, slots):
    made = rows_of(slots) + x
    slots["total"] = made
    return made * 2


def write(made, slots):
    slots["total"] = made
    return made * 2


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        broken_in_between,
        read_in_a_region,
        lambda x, slots: add_in_a_region(x * 1, slots) * 2,
        [graph_piece(lambda x, slots: slots["total"] + x), eager_piece(write)],
        [
            eager_piece(lambda slots: slots["total"]),
            graph_piece(lambda rows, x, slots: write(rows + x, slots)),
        ],
    ],
)
def test_a_step_that_breaks_reads_and_writes_rows_on_either_side(step, compact):
    """Rows after a batch in a view of a bank are not cleared as those of a result are."""
    state = state_of(6, compact=compact)
    options = RunnerOptions(strict=True)
    runner = runner_of(state, step, mode="PIECEWISE", options=options)
    for session in range(6):
        state.join(session)
        state[session]["total"].fill_(5)
    for number in (3, 1, 4, 2):
        found = runner(x=torch.ones(number, 2), slots=list(range(number)))
        assert found[:, 0].tolist() == [2 * state[one]["total"][0].item() for one in range(number)]
    assert list(totals(state).values()) == [9, 8, 7, 6, 5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_step_reads_and_writes_rows(dynamic):
    state = state_of(6)
    compiled = torch.compile(total, backend="aot_eager", dynamic=dynamic)
    runner = runner_of(state, compiled, options=RunnerOptions(strict=True))
    for session in "abc":
        state.join(session)
    for _ in range(3):
        runner(x=torch.ones(3, 2), slots=[2, 0, 1])
    assert totals(state) == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize("check", [0, 1])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_banks_may_be_of_any_type(dtype, compact, check):
    bank = StaticInput((None, 2), dtype)

    def step(x, slots):
        made = slots["total"].to(torch.complex64).real + x
        slots["total"] = made.to(bank.dtype)
        return made

    state = SlotState({"total": bank}, 4, compact=compact)
    runner = runner_of(state, step, options=RunnerOptions(strict=True, check=check))
    for session in "abc":
        state.join(session)
    for _ in range(2):
        found = runner(x=torch.ones(3, 2), slots=[0, 1, 2])
    held, wanted = state["c"]["total"], found[2].to(bank.dtype)
    assert torch.equal(held.to(torch.complex64), wanted.to(torch.complex64))
    assert found.tolist() == [[2, 2]] * 3


def test_rows_of_another_type_are_refused():
    def step(x, slots):
        slots["total"] = x.double()
        return x

    state = state_of()
    (problem, *_) = runner_of(state, step, captured=False).capture().failed.values()
    assert "InputError: Rows of 'total' must be torch.float32, got torch.float64" in problem


def test_several_runners_serve_the_same_sessions():
    state = state_of()
    one, other = runner_of(state), runner_of(state, lambda x, slots: total(2 * x, slots))
    copied = copy.copy(one)
    copied.capture()
    state.join("a")
    for runner in (one, other, copied):
        runner(x=torch.ones(1, 2), slots=state.slots_of(["a"]))
    assert totals(state) == {"a": 4}


def test_a_replay_that_fails_is_not_run_again_eager():
    from dispatchkit.errors import ReplayError

    state = state_of()
    runner = runner_of(state)
    state.join("a")
    runner(x=torch.ones(1, 2), slots=[0])
    (graph,) = [one for one in runner.lanes[0].lifecycle.live().values() if one.hits]
    assert graph.has_effect

    def broken():
        raise RuntimeError("launch broke")

    graph.graphs[0].replay = broken
    with pytest.raises(ReplayError, match="may have changed part of its state"):
        runner(x=torch.ones(1, 2), slots=[0])


def test_bad_declarations_are_refused():
    with pytest.raises(ConfigError, match="banks must be a dictionary of StaticInputs by name"):
        SlotState({}, 4)
    with pytest.raises(ConfigError, match=r"banks\['h'\] must be a device StaticInput"):
        SlotState({"h": StaticInput((3,), "float32")}, 4)
    with pytest.raises(ConfigError, match="banks must be all RawBank or all StaticInput"):
        SlotState({"total": ROWS, **RAW}, 4)
    for positions in (0, 3, "2"):
        with pytest.raises(ConfigError, match=r"positions must be one of the dimensions \[1, 2\]"):
            SlotState({"keys": RawBank((None, 5, 1), "float32", positions=positions)}, 4)
    with pytest.raises(ConfigError, match="positions must be None for a read-only bank"):
        SlotState({"k": RawBank((None, 5), "float32", positions=1, is_read_only=True)}, 4)
    with pytest.raises(ConfigError, match=r"without RawBanks, got .*state=slots\.step_state"):
        runner_of(SlotState(RAW, 4))
    with pytest.raises(ConfigError, match="is_read_only must be True or False"):
        RawBank((None, 5), "float32", is_read_only="no")
    with pytest.raises(ConfigError, match="name of a bank must be a string, got 3"):
        SlotState({3: ROWS}, 4)
    with pytest.raises(DescriptorError, match="bank must be one of: total"):
        state_of().get_bank(["total"])
    with pytest.raises(ConfigError, match="num_slots"):
        state_of(0)
    assert state_of("4").num_slots == 4
    for device in ("cdua", "cuda:99", 0.5):
        with pytest.raises(ConfigError, match="device must be a device that torch can use here"):
            state_of(device=device)
    with pytest.raises(ConfigError, match="at most one SlotState"):
        GraphRunner(
            lambda x, a, b: x, {"x": ROWS, "a": state_of(), "b": state_of()}, backend="tape"
        )
    with pytest.raises(
        ConfigError, match=r"must be a SlotState on cpu .the device of the steps., got 'meta'"
    ):
        runner_of(state_of(device="meta"))


def test_a_runner_without_slots_has_none_of_this():
    runner = GraphRunner(lambda x: x + 1, {"x": ROWS}, sizes=(4,), backend="tape")
    runner.capture()
    plan = runner.lanes[0].decide(3).plan
    assert type(plan).__name__ == "GraphPlan"
    assert type(runner.lanes[0].work.step.pieces[0]).__name__ == "Piece"


def test_lanes_with_disjoint_state_run_sessions_apart():
    state = make_state()
    options = with_settings(RunnerOptions(), {"disjoint_state": True})
    runner = make_runner(state, lanes=2, options=attrs.evolve(options, strict=False))
    for session in "abcd":
        state.join(session)
    handles = [
        runner.submit(x=torch.full((2, 2), 1.0 + at), tags=[at, at], slots=slots)
        for at, slots in enumerate(([0, 1], [2, 3]))
    ]
    results = [one.result()[0][:, 0].tolist() for one in handles]
    assert results == [[3.0, 3.0], [5.0, 5.0]]


def test_the_examples_of_the_page_run_as_printed(capsys):
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(examples) == 5
    names: dict = {}
    for example in examples:
        exec(example, names)  # noqa: S102
    assert capsys.readouterr().out.startswith(
        "slots[1] must be a different slot than slots[0], got 0."
    )
    for name in ("runner", "decoder", "raw_decoder"):
        assert names[name].stats().eager_by_reason == {}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("num_sessions", [0, 3])
def test_padding_that_changes_the_state_alone_is_found(num_sessions, compact):
    """Dummy rows write to free slots, where the proof compares them with eager's."""

    def step(x, slots):
        slots["total"] = slots["total"] + x.mean(0)
        return x + 1

    state = state_of(8, compact=compact)
    for session in range(num_sessions):
        state.join(session)
    runner = runner_of(state, step)
    assert not state.get_bank("total").tensor[:9].any()
    for session in range(num_sessions, 4):
        assert state.join(session) == session
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        runner(x=torch.tensor([[1.0, 1], [2, 2], [6, 6]]), slots=[0, 1, 2])
    assert totals(state) == {0: 3, 1: 3, 2: 3, 3: 0}


def test_who_joins_waits_for_a_slot_that_a_capture_has_borrowed():
    state, joined = state_of(4), []
    state.join("a")
    with state.lent(3, lambda: None) as rows:
        assert rows.index.tolist() == [3, 2, 1]
        waiting = threading.Thread(target=lambda: joined.append(state.join("b")))
        waiting.start()
        with state.lent(1, lambda: None) as nothing:
            assert nothing is None
        state.leave("a")
        waiting.join(10)
        assert joined == [0]
        moving = threading.Thread(target=lambda: joined.append(state.move("b", 2).target))
        moving.start()
        rows.restore()
    moving.join(10)
    assert joined == [0, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in __del__
@pytest.mark.parametrize(
    ("compact", "change"),
    [
        (False, lambda state: state.join("new")),
        (False, lambda state: state.leave("a", "c")),
        (True, lambda state: state.leave("a", "b")),
        (False, lambda state: state.move("b", 5)),
    ],
)
def test_an_interrupted_change_leaves_no_state_of_others_in_a_slot(compact, change):
    """A session that joins later starts from the initial state; those that stay keep theirs."""

    def after(at):
        state = state_of(6, compact=compact)
        for value, session in enumerate("abcd", 1):
            state.join(session)
            state[session]["total"].fill_(value)
        places = interrupted(lambda: change(state), at)
        assert torch.is_grad_enabled()
        state.check_slots(np.arange(0), "slots")  # as a step does
        slots = state.slots_of(state.sessions)
        assert sorted(slots) == slots
        assert not compact or slots == [*range(len(slots))]
        kept = {name: value for name, value in totals(state).items() if name != "new"}
        for number in range(6 - len(state)):
            state.join(number)
        new = {name: 0 for name in state if name not in kept}
        assert totals(state) == {**kept, **new}
        assert kept.items() <= {"a": 1, "b": 2, "c": 3, "d": 4}.items()
        assert {"b", "d"} - ({"b"} if compact else set()) <= kept.keys()
        assert not state.get_bank("total").tensor[6].any()  # the blank row
        return places

    for at in range(after(None)):
        after(at)


@pytest.mark.parametrize("seed", [12, 24, 26, 57])
def test_slots_that_a_capture_has_borrowed_are_clear_on_any_stream(seed):
    """On a deferred tape, work of other streams runs late unless somebody waits for it."""
    backend, state = TapeBackend(scheduler=seed), state_of()
    inputs = {"x": ROWS, "slots": state}
    one, other = (
        GraphRunner(total, inputs, sizes=(2, 4), mode="FULL", backend=backend) for _ in range(2)
    )
    one.capture()
    backend.synchronize()
    streams = [backend.new_stream() for _ in range(2)]
    with backend.use_stream(streams[0]):
        other.capture()
    slots = [state.join(session) for session in "abcd"]
    with backend.use_stream(streams[1]):
        one(x=torch.ones(4, 2), slots=slots)
    backend.synchronize()
    assert state.get_bank("total").tensor[:5].tolist() == [[1, 1]] * 4 + [[0, 0]]


def test_a_copy_has_the_same_banks_and_no_sessions():
    state = state_of(3, compact=True)
    state.join("a")
    state["a"]["total"].fill_(7)
    made = pickle.loads(pickle.dumps(state))  # noqa: S301
    assert (made.num_slots, made.compact, made.sessions) == (3, True, ())
    assert not made.get_bank("total").tensor.any()
    assert made.static_input == state.static_input
