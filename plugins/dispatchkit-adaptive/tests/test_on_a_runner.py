"""The policy in a real runner on a tape with simulated costs, including that of measuring."""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402

from dispatchkit_adaptive import AdaptivePolicy  # noqa: E402

SIZES = (16, 24, 32, 64)
#: Device time of recording one event, in microseconds.
EVENT_US = 2.0


def graph_us(size):
    return 40.0 + 4.0 * size


def eager_us(num_tokens):
    """Return the time of eager, which is faster than the graph below about 0.9 of a bucket."""
    return 50.0 + 4.2 * num_tokens


class SimulatedEvent:
    def __init__(self, backend):
        self._backend, self.at = backend, 0.0

    def record(self, stream=None):
        self._backend.now += EVENT_US
        self._backend.total_us += EVENT_US
        self._backend.num_records += 1
        self.at = self._backend.now

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_us(self, end):
        return end.at - self.at


class SimulatedGraph:
    def __init__(self, graph, backend, size):
        self._graph, self._backend, self._size = graph, backend, size

    def __getattr__(self, name):
        return getattr(self._graph, name)

    def replay(self):
        self._graph.replay()
        self._backend.spend(graph_us(self._size))


class SimulatedTape(TapeBackend):
    """Tape with a simulated clock that steps advance by their cost.

    ``now`` is noisy, as in measurements; ``total_us`` is the true time of steps and events.
    """

    def __init__(self, seed):
        super().__init__()
        self.now = self.total_us = 0.0
        self.num_records = 0
        self._chance = random.Random(seed)

    def spend(self, us):
        self.total_us += us
        noisy = us * max(0.5, self._chance.gauss(1.0, 0.05))
        self.now += noisy * 10.0 if self._chance.random() < 0.005 else noisy

    def step(self, x):
        self.last_size = x.shape[0]
        self.spend(eager_us(x.shape[0]))
        return x + 1

    def new_event(self, *, timing=False):
        return SimulatedEvent(self) if timing else super().new_event(timing=timing)

    def capture(self, run, *, stream, pool, generators=()):
        graph = super().capture(run, stream=stream, pool=pool, generators=generators)
        return SimulatedGraph(graph, self, self.last_size)


def serve(policy, sizes, sample_every):
    backend = SimulatedTape(seed=1)
    runner = GraphRunner(
        backend.step,
        {"x": StaticInput((None,), "float32")},
        sizes=SIZES,
        mode="FULL",
        policy=policy,
        backend=backend,
        options=RunnerOptions(sample_every=sample_every),
    )
    runner.capture()
    backend.total_us, backend.num_records = 0.0, 0
    for size in sizes:
        assert runner(torch.zeros(size)).tolist() == [1.0] * size
    return backend, runner


def test_learning_pays_for_its_measuring():
    chance = random.Random(3)
    sizes = [chance.randint(1, 64) for _ in range(700)]
    base, _ = serve("vllm", sizes, 8)
    assert base.num_records == 0
    learnt, runner = serve(AdaptivePolicy(seed=2), sizes, 8)
    best = sum(
        min(eager_us(size), graph_us(next(one for one in SIZES if one >= size))) for size in sizes
    )
    # The best choices save 13.4 percent.
    assert learnt.total_us < 0.91 * base.total_us
    assert learnt.total_us < 1.05 * best
    # One regular step in eight is measured, and some probes, with two events each.
    assert learnt.num_records < 2 * len(sizes) * 0.3
    assert runner.stats().steps == len(sizes)


def test_only_what_was_measured_is_told_and_calibrations_are_no_steps():
    policy = AdaptivePolicy(seed=2)
    outcomes = []
    observe = policy.observe
    policy.observe = lambda outcome: (outcomes.append(outcome), observe(outcome))[1]
    _, runner = serve(policy, [20] * 120, 16)
    runner.drain(wait=True)
    calibrations = [one for one in outcomes if one.decision.reason == "calibration"]
    served = [one for one in outcomes if one.decision.reason != "calibration"]
    assert len(calibrations) >= 8 * len(SIZES)
    assert all(one.decision.one_shot and one.completed for one in calibrations)
    steady = [one.step for one in served if not one.decision.one_shot]
    assert steady[0] - len(calibrations) in range(1, 8 * len(SIZES) + 400)
    assert all(later - earlier >= 16 for earlier, later in itertools.pairwise(steady))
    assert len(steady) <= 120 // 16 + 1
