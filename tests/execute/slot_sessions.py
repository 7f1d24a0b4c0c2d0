"""Compare sessions that join, leave and step in random order with each session run alone."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dispatchkit import GraphRunner, LaneOptions, RunnerOptions, SlotState, StaticInput
from dispatchkit.errors import DescriptorError

SIZES = (1, 2, 4, 8)
NUM_SLOTS = 6  # fewer than the largest size
POSITIONS = 4
NAMES = "abcdefgh"  # more sessions than slots
START = 0.5
# One integer encodes the names, because a draw of hypothesis takes longer than a step.
SOME_NAMES = st.integers(0, 2 ** len(NAMES) - 1).map(
    lambda bits: [name for number, name in enumerate(NAMES) if bits >> number & 1]
)
BANKS = {
    "total": StaticInput((None, 2), "float32", fill=START),
    "recent": StaticInput((2, None), "int64"),  # slots in the second dimension
    "notes": StaticInput((None, POSITIONS), "float32", fill=START),
}
#: Settings of the state and of the runner for each kind.
KINDS = {
    "gathered": ({}, {}),
    "compact": ({"compact": True}, {}),
    "slots on the device": ({"host": False}, {}),
    "checked": ({}, {"options": RunnerOptions(check=1)}),
    "compact, checked": ({"compact": True}, {"options": RunnerOptions(check=1)}),
    "lanes": ({}, {"lanes": 2}),
    "disjoint lanes": (
        {},
        {"lanes": 2, "options": RunnerOptions(lanes=LaneOptions(disjoint_state=True))},
    ),
    "views": ({}, {"outputs": "view"}),
}


def step(x, tags, slots):
    """Sum a session's inputs, keep its last two tags, and write each input at a position."""
    total = slots["total"] + x
    before = slots["recent"].sum(0)
    slots["total"] = total
    slots["recent"] = torch.stack((slots["recent"][1], tags))
    slots.bank("notes")[slots.index, tags % POSITIONS] = x[:, 0]
    return total * 2, before, slots["notes"].sum(1)


class Session:
    """Reference state of one session."""

    def __init__(self):
        self.total, self.recent = [START, START], [0, 0]
        self.notes = [START] * POSITIONS

    def step(self, x, tag):
        """Return the outputs of this session's step as one list."""
        self.total = [one + more for one, more in zip(self.total, x, strict=True)]
        before, self.recent = sum(self.recent), [self.recent[1], tag]
        self.notes[tag % POSITIONS] = x[0]
        return [*(2 * one for one in self.total), before, sum(self.notes)]

    @property
    def row(self):
        return [*self.total, *self.recent, *self.notes]


def in_one(tensors):
    """Return the rows of several tensors side by side, waiting for the device only once."""
    return torch.cat([one.reshape(len(one), -1).double() for one in tensors], 1).tolist()


def make_state(device="cpu", **settings):
    return SlotState(BANKS, NUM_SLOTS, device=device, **settings)


def make_runner(state, backend="tape", **settings):
    inputs = {
        "x": StaticInput((None, 2), "float32"),
        "tags": StaticInput((None,), "int64", host=state.static_input.host),
        "slots": state,
    }
    settings = {"sizes": SIZES, "max_num_tokens": 8, "mode": "FULL", "lazy": True, **settings}
    return GraphRunner(step, inputs, backend=backend, **settings)


@functools.cache
def runner_of(kind, device, backend):
    of_state, of_runner = KINDS[kind]
    state = make_state(device, **of_state)
    return state, make_runner(state, backend, **of_runner)


class SessionMachine(RuleBasedStateMachine):
    """State machine of a runner and its sessions; subclasses set the device."""

    device, backend = "cpu", "tape"

    @initialize(kind=st.sampled_from(sorted(KINDS)), names=SOME_NAMES)
    def start(self, kind, names):
        self.state, self.runner = runner_of(kind, self.device, self.backend)
        self.state.leave(*self.state.sessions)
        for name in BANKS:  # a failed example must not affect later ones
            bank = self.state.get_bank(name)
            bank.tensor.fill_(bank.spec.fill_value)
        self.alone = {}
        self.join(names)

    @rule(names=SOME_NAMES)
    def join(self, names):
        for name in names:
            if name in self.alone or len(self.alone) == NUM_SLOTS:
                with pytest.raises(
                    DescriptorError, match=r"^(No slot is free for|Session .* already has)"
                ):
                    self.state.join(name)
            else:
                self.state.join(name)
                self.alone[name] = Session()

    @precondition(lambda self: self.alone)
    @rule(gone=SOME_NAMES)
    def leave(self, gone):
        gone = [name for name in gone if name in self.alone]
        before = {name: self.state.slots_of([name])[0] for name in self.alone}
        moves = self.state.leave(*gone)
        for name in gone:
            del self.alone[name]
        moved = {one.session: (one.source, one.target) for one in moves}
        for name in self.alone:
            (now,) = self.state.slots_of([name])
            assert moved.get(name, (before[name], before[name])) == (before[name], now)
        assert not moves or self.state.compact

    @precondition(lambda self: self.alone)
    @rule(number=st.integers(0, NUM_SLOTS - 1), slot=st.integers(0, NUM_SLOTS - 1))
    def move(self, number, slot):
        name = self.one_of(number)
        if self.state.compact or slot in self.state.slots_of(self.alone):
            with pytest.raises(
                DescriptorError, match=r"^(slot must be|Session .* cannot be moved)"
            ):
                self.state.move(name, slot)
        else:
            self.state.move(name, slot)

    @precondition(lambda self: self.alone)
    @rule(number=st.integers(0, NUM_SLOTS - 1))
    def clear(self, number):
        name = self.one_of(number)
        self.state.clear(name)
        self.alone[name] = Session()

    @precondition(lambda self: self.alone)
    @rule(seed=st.integers(0, 999), number=st.integers(1, 3))
    def step(self, seed, number):
        names, chance = list(self.state.sessions), random.Random(seed)
        if not self.state.compact:
            chance.shuffle(names)
        names = names[: chance.randint(1, len(names))]
        for _ in range(number):
            x = [[float((seed + 3 * row) % 7), float(row - seed)] for row in range(len(names))]
            tags = [(seed + row * row) % 11 for row in range(len(names))]
            found = in_one(self.run(x, tags, self.state.slots_of(names)))
            rows = zip(names, x, tags, strict=True)
            assert found == [self.alone[name].step(*own) for name, *own in rows]
            seed += 5

    @precondition(lambda self: self.alone)
    @rule(what=st.sampled_from(["a slot named twice", "a swap", 4, 8]))
    def disturb(self, what):
        if what == "a slot named twice":
            slots = self.state.slots_of(self.state.sessions)
            steps, twice = self.runner.stats().steps, [*slots, slots[0]]
            with pytest.raises(
                DescriptorError, match=r"^slots\[\d\] must be a different slot than"
            ):
                self.run([[1.0, 1.0]] * len(twice), [1] * len(twice), twice)
            assert self.runner.stats().steps == steps
        elif what == "a swap":
            if len(self.runner.lanes) == 1:
                self.runner.swap(sizes=(2, 8) if self.runner.config.sizes == SIZES else SIZES)
        else:  # the next step of this size captures while sessions have state
            for key in [one for one in self.runner.registry if one.num_tokens == what]:
                if self.runner.controls.has(key):
                    self.runner.evict(key)

    def teardown(self):
        """Run a last step, so that each sequence shows its result."""
        if getattr(self, "alone", None):
            self.step(len(self.alone), 1)

    @invariant()
    def each_session_has_its_own_and_other_rows_are_as_sessions_start(self):
        if not hasattr(self, "alone"):
            return
        assert set(self.state.sessions) == set(self.alone)
        rows = [Session()] * (NUM_SLOTS + 1)  # including the blank row
        for name in self.alone:
            rows[self.state.slots_of([name])[0]] = self.alone[name]
        banks = (self.state.get_bank(name) for name in BANKS)
        found = in_one(bank.tensor.movedim(bank.dim, 0) for bank in banks)
        assert found[: NUM_SLOTS + 1] == [session.row for session in rows]

    def one_of(self, number):
        """Return one of the current sessions."""
        return sorted(self.alone)[number % len(self.alone)]

    def run(self, x, tags, slots):
        x = torch.tensor(x, device=self.device)
        if not self.state.static_input.host:
            tags, slots = (torch.tensor(one, device=self.device) for one in (tags, slots))
        if len(self.runner.lanes) == 1:
            return self.runner(x=x, tags=tags, slots=slots)
        handle = self.runner.submit(x=x, tags=tags, slots=slots)
        return handle.result()
