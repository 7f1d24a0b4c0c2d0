"""A capture that draws nothing does not disturb other threads' use of the default generator."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.cuda import default_generator  # noqa: E402
from dispatchkit.backends.cuda.default_generator import begin_allowing_draws  # noqa: E402


class State:
    """Torch's state of a generator; a capture that registers it marks it."""

    def __init__(self):
        self.seed, self.offset, self.is_captured = 0, 0, False


class Generator:
    """Imitates how a CUDA generator handles its state (torch's CUDAGeneratorImpl.cpp)."""

    def __init__(self, device="cuda:0", state=None):
        self.device, self.state = device, state or State()

    def graphsafe_get_state(self):
        return Generator(self.device, self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def get_state(self):
        return (self.state.seed, self.state.offset)

    def set_state(self, state):
        self.state.seed, self.state.offset = state

    def get_offset(self):
        return self.state.offset

    def set_offset(self, offset):
        self.state.offset = offset

    def draw(self):
        if self.state.is_captured:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.state.offset += 4
        return (self.state.seed, self.state.offset)


@pytest.fixture
def default(monkeypatch):
    """Return the default generator at some offset, and further states."""
    default = Generator()
    default.set_state((7, 100))
    monkeypatch.setattr(torch.cuda, "default_generators", (default,))
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: None)
    monkeypatch.setattr(default_generator, "UseStream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(default_generator, "_registers", {})
    return default


def registering(default, others_draw=lambda place: None):
    """Return the start of a capture as in torch up to 2.12, interleaved with draws of others."""

    def begin():
        others_draw("before")
        registered = default.state
        torch.empty(1)  # torch's memory of the state, used by no earlier graph
        others_draw("within")
        registered.is_captured = True
        others_draw("after")

    return begin


def test_others_draw_what_they_would_have_drawn(default):
    """Draws before, during and after the start raise no error and repeat no number."""
    drawn = []
    begin = registering(default, lambda place: drawn.append(default.draw()))
    own = default.state
    for _ in range(3):
        begin_allowing_draws(begin, 0)
        drawn.append(default.draw())
        assert default.state is own
        assert not own.is_captured
    assert drawn == [(7, 104 + 4 * index) for index in range(12)]


def test_a_seed_that_others_set_meanwhile_stays(default):
    begin_allowing_draws(registering(default, lambda place: default.set_state((9, 0))), 0)
    assert default.get_state() == (9, 0)


@pytest.mark.parametrize("where", ["before", "within", "after"])
def test_whatever_raises_the_own_state_comes_back(default, where):
    """A capture that fails at any point leaves the generator unchanged."""
    own = default.state

    def fail(place):
        if place == where:
            raise RuntimeError("no capture")

    with pytest.raises(RuntimeError, match="no capture"):
        begin_allowing_draws(registering(default, fail), 0)
    assert default.state is own
    assert default.draw() == (7, 104)


def test_a_torch_that_registers_nothing_is_left_alone_from_then_on(default):
    """From torch 2.13 on, states are registered when a capture draws from them."""
    states = []
    for _ in range(2):
        begin_allowing_draws(lambda: states.append(default.state), 0)
    own = default.state
    assert states[0] is not own
    assert states[1] is own
    assert default.draw() == (7, 104)


def test_a_draw_in_the_very_moment_of_the_exchange_is_not_drawn_again(default, monkeypatch):
    """The other state continues after the numbers that its owner drew while it was set."""
    exchange = Generator.graphsafe_set_state
    drawn = []

    def late(self, other):
        if not drawn:
            drawn.append(self.draw())
        exchange(self, other)

    monkeypatch.setattr(Generator, "graphsafe_set_state", late)
    begin_allowing_draws(registering(default, lambda place: drawn.append(default.draw())), 0)
    assert len(set(drawn)) == len(drawn) == 4
