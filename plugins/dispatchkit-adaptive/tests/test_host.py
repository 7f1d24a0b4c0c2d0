"""Host time counts unless the host is far enough ahead of the device."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from dispatchkit import Batch, Decision, DispatchConfig, Dispatcher, Outcome

from dispatchkit_adaptive import AdaptivePolicy
from dispatchkit_adaptive.host import HostLoad

# Device time of the graph, and of eager steps per token; host time of eager steps and replays.
GRAPH_US, TOKEN_US, EAGER_HOST_US, REPLAY_US = 900.0, 1.5, 600.0, 20.0
# On the device, eager takes half the time of the graph for small batches, and more for large ones.
SMALL, LARGE = 300, [1000] * 5


class Server:
    """Simulated server of batches of up to 1,024 tokens, with one graph and every step measured.

    Args:
        queue: Whether the host is ahead of the device; otherwise it waits after each step.
    """

    def __init__(self, *, queue: bool) -> None:
        self.queue, self.chance = queue, random.Random(1)
        config = DispatchConfig(mode="FULL", max_num_tokens=1024, sizes=(1024,))
        self.table = Dispatcher(AdaptivePolicy(), config, strict=True)
        for key in self.table.registry:
            self.table.registry.captured(key, object())
        self.steps = self.num_probes = 0
        self.ahead_us = 0.0
        while runs := self.table.policy.calibration_runs(self.table.graphs):  # type: ignore[attr-defined]
            for run in runs:
                for _ in range(run.runs):
                    self.observe(run.batch, run.decision, 0.0)
                    self.observe(run.batch, run.decision, 5000.0)

    def observe(self, batch: Batch, decision: Decision, ahead_us: float) -> float:
        """Report a step; return the lead of the host afterwards, in microseconds."""
        is_eager = decision.key is None
        host_us = EAGER_HOST_US if is_eager else REPLAY_US
        device_us = TOKEN_US * batch.num_tokens if is_eager else GRAPH_US
        device_us *= self.chance.gauss(1.0, 0.02)
        outcome = Outcome(
            batch,
            decision,
            max(device_us, 0.9 * host_us),
            queued=ahead_us > 0.0,
            step=self.steps,
            host_us=host_us,
            device_us=device_us if ahead_us > host_us else None,
        )
        self.table.observe(outcome)
        return min(max(0.0, ahead_us - host_us) + device_us, 20_000.0)

    def serve(self, sizes: Sequence[int], num_steps: int = 400) -> float:
        """Serve batches of random sizes; return the share of eager in the last small ones."""
        were_eager = []
        for _ in range(num_steps):
            self.steps += 1
            num_tokens = self.chance.choice(sizes)
            decision = self.table.dispatch(num_tokens)
            self.num_probes += decision.one_shot
            if num_tokens == SMALL:
                were_eager.append(decision.key is None)
            ahead_us = self.observe(self.table.batch(num_tokens), decision, self.ahead_us)
            self.ahead_us = ahead_us if self.queue else 0.0
        return fmean(were_eager[-20:])


@pytest.mark.parametrize("queue", [False, True])
def test_eager_is_chosen_if_even_the_host_takes_less_than_the_graph(queue: bool) -> None:
    assert Server(queue=queue).serve([SMALL, *LARGE]) > 0.9


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the host time of an eager step to 1,200 us, above the device time of the graph."""
    monkeypatch.setattr(__name__ + ".EAGER_HOST_US", 1200.0)


@pytest.mark.usefixtures("slow_host")
@pytest.mark.parametrize(
    ("queue", "sizes", "is_eager"),
    [
        pytest.param(True, [SMALL, *LARGE], True, id="hidden behind large batches"),
        pytest.param(True, [SMALL], False, id="too slow for small batches alone"),
        pytest.param(False, [SMALL, *LARGE], False, id="the host waits after each step"),
    ],
)
def test_device_time_alone_counts_only_while_the_host_is_ahead(
    queue: bool, sizes: Sequence[int], is_eager: bool
) -> None:
    share = Server(queue=queue).serve(sizes)
    assert share > 0.9 if is_eager else share < 0.1


def test_host_time_counts_if_an_arm_was_never_submitted_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager takes the host longer than all queued work takes the device."""
    monkeypatch.setattr(__name__ + ".EAGER_HOST_US", 30_000.0)
    server = Server(queue=True)
    assert server.serve([SMALL, *LARGE], 1000) == 0.0
    assert server.num_probes <= 5


@pytest.mark.usefixtures("slow_host")
def test_host_time_counts_again_when_traffic_no_longer_hides_it() -> None:
    server = Server(queue=True)
    assert server.serve([SMALL, *LARGE]) > 0.9
    assert server.serve([SMALL]) < 0.1


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan, math.inf])
def test_times_that_no_step_can_take_are_ignored(us: float) -> None:
    server = Server(queue=True)
    for num_tokens in (SMALL, 1000) * 20:
        decision = server.table.dispatch(num_tokens)
        batch = server.table.batch(num_tokens)
        outcome = Outcome(batch, decision, GRAPH_US, queued=True, host_us=us, device_us=us)
        server.table.observe(outcome)
    assert server.serve([SMALL, *LARGE]) > 0.9


def test_a_host_that_falls_behind_after_it_was_hidden_needs_twice_as_many_steps() -> None:
    load = HostLoad()
    load.add_submission(100.0, is_eager=True)

    def steps_until_change(*, was_ahead: bool) -> int:
        for count in range(1, 1000):
            if load.add_step(200.0, is_eager=True, was_ahead=was_ahead):
                return count
        raise AssertionError("no change")

    first = steps_until_change(was_ahead=True)
    assert load.is_hidden
    steps_until_change(was_ahead=False)
    assert not load.is_hidden
    assert steps_until_change(was_ahead=True) >= 2 * first
