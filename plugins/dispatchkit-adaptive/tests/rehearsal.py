"""A policy run against known costs, without a device: what would it lose?

The real dispatcher serves every step; only the clock is simulated. The policy sees noisy times,
the result is counted in true ones.
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

#: (number of the step, tokens, graph or None for eager) -> microseconds
Cost = Callable[[int, int, GraphKey | None], float]


@attrs.frozen
class Rehearsal:
    """What came of it; all times are true ones, in microseconds.

    Attributes:
        steps: Steps served.
        total_us: What the policy's choices cost.
        oracle_us: What the best choice at every step would have cost.
        base_us: What the base policy's choices would have cost.
        worst_prefix_pct: Most that the policy was behind the base, in per cent of the base,
            after any number of steps from ``grace`` on; None in a shorter run.
        measured: Steps that were measured.
        changes: Steps whose choice differs from the base's.
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
        """Cost over the oracle's, in per cent of it."""
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
    """Serve batches of some sizes with a policy, by known costs.

    Args:
        policy: The policy, without history.
        config: Its configuration; every declared graph counts as captured.
        sizes: Tokens of each step.
        cost: What a step costs.
        base: The policy that the prefix is compared with.
        seed: Of the noise.
        sample_every: One steady step in so many is measured, more seldom where the policy's
            ``pace`` says so; one-shot ones always are.
        delay: Steps until an outcome is told.
        noise: How measured times differ from true ones.
        grace: Steps from which on prefixes are compared.
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
    """Give a policy the timed runs that it asks for after a capture."""
    wants = getattr(policy, "calibration_runs", None)
    while wants is not None and (runs := wants(dispatcher.graphs)):
        for run in runs:
            for _ in range(run.runs):
                us = cost(0, run.batch.num_tokens, run.decision.key)
                seen = noise.measured(us, chance)
                dispatcher.observe(Outcome(run.batch, run.decision, seen))
