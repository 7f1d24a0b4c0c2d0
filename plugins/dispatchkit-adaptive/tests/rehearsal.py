"""Simulate a policy at known costs, and compare its choices with the best ones.

Every step goes through the real dispatcher; only time is simulated. The policy receives noisy
times, and the result uses true times.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from dispatchkit import (
    Decision,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    GraphRegistry,
    Outcome,
    Policy,
)

from dispatchkit_plan.scenario import Noise

#: Function of (number of the step, tokens, graph or None for eager); returns microseconds.
Cost = Callable[[int, int, GraphKey | None], float]


@attrs.frozen
class Rehearsal:
    """Result of a simulation, in true times.

    Attributes:
        steps: Number of steps.
        total_us: Total time of the policy's choices, in microseconds.
        oracle_us: Total time of the best choice at every step.
        base_us: Total time of the base policy's choices.
        worst_prefix_pct: Largest additional time relative to the base policy, in percent, over all
            prefixes of at least ``grace`` steps; None if the run is shorter.
        measured: Number of measured steps.
        changes: Number of steps whose choice differs from that of the base policy.
    """

    steps: int
    total_us: float
    oracle_us: float
    base_us: float
    worst_prefix_pct: float | None
    measured: int
    changes: int

    @property
    def over_oracle_pct(self) -> float:
        """Additional time relative to the best choices, in percent."""
        return 100.0 * (self.total_us / self.oracle_us - 1.0) if self.oracle_us else 0.0


def rehearse(
    policy: Policy,
    config: DispatchConfig,
    sizes: Sequence[int],
    cost: Cost,
    base: Policy,
    *,
    seed: int = 0,
    sample_every: int = 1,
    delay: int = 0,
    noise: Noise | None = None,
    grace: int = 200,
) -> Rehearsal:
    """Simulate a policy on batches of the given sizes.

    Args:
        policy: Policy without history.
        config: Configuration of the policy; every declared graph counts as captured.
        sizes: Number of tokens of each step.
        cost: Cost function of a step.
        base: Policy to compare with.
        seed: Seed of the noise.
        sample_every: One of this many regular steps is measured, or fewer if the policy's ``pace``
            is larger than 1. One-shot steps are always measured.
        delay: Number of steps until an outcome is reported.
        noise: Difference between measured and true times.
        grace: Length of the shortest compared prefix.
    """
    chance, noise = random.Random(seed), noise or Noise()
    served, reference = _captured(policy, config), _captured(base, config)
    graphs = tuple(served.registry)
    _calibrate(policy, served, cost, noise, chance)
    waiting: deque[tuple[int, Outcome]] = deque()
    total = oracle = base_total = 0.0
    worst: float | None = None
    measured = changes = 0
    last_measured = -sample_every
    for step, num_tokens in enumerate(sizes):
        while waiting and waiting[0][0] <= step:
            served.observe(waiting.popleft()[1])
        decision = served.dispatch(num_tokens)
        us = cost(step, num_tokens, decision.key)
        other = reference.dispatch(num_tokens)
        base_us = cost(step, num_tokens, other.key)
        total += us
        base_total += base_us
        changes += decision.key != other.key
        fitting = [key for key in graphs if key.num_tokens >= num_tokens]
        oracle += min(cost(step, num_tokens, key) for key in (None, *fitting))
        if step + 1 >= grace:
            behind = 100.0 * (total / base_total - 1.0)
            worst = behind if worst is None else max(worst, behind)
        spacing = sample_every * getattr(policy, "pace", 1)
        if decision.timed and (decision.one_shot or step - last_measured >= spacing):
            last_measured = step
            measured += 1
            outcome = _outcome(served, num_tokens, decision, noise.measured(us, chance), step + 1)
            waiting.append((step + 1 + delay, outcome))
    return Rehearsal(len(sizes), total, oracle, base_total, worst, measured, changes)


def _captured(policy: Policy, config: DispatchConfig) -> Dispatcher:
    dispatcher = Dispatcher(policy, config, registry=GraphRegistry(), strict=True)
    for key in dispatcher.registry:
        dispatcher.registry.captured(key, object())
    return dispatcher


def _outcome(
    dispatcher: Dispatcher, num_tokens: int, decision: Decision, us: float, step: int
) -> Outcome:
    return Outcome(dispatcher.batch(num_tokens), decision, us, step=step)


def _calibrate(
    policy: Policy, dispatcher: Dispatcher, cost: Cost, noise: Noise, chance: random.Random
) -> None:
    """Run the calibration that a policy requests after a capture."""
    requests = getattr(policy, "calibration_runs", None)
    while requests is not None and (runs := requests(dispatcher.graphs)):
        for run in runs:
            for _ in range(run.runs):
                us = cost(0, run.batch.num_tokens, run.decision.key)
                measured = noise.measured(us, chance)
                dispatcher.observe(Outcome(run.batch, run.decision, measured))
