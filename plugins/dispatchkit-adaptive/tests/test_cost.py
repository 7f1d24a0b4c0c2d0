"""The cost of learning per step, in executed lines of Python (about 0.05 µs each)."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from dispatchkit import DispatchConfig, Dispatcher, Outcome

from dispatchkit_adaptive import AdaptivePolicy
from dispatchkit_plan.costs import load_cost_model
from dispatchkit_plan.scenario import Noise

STEPS, SAMPLE_EVERY, LOW = 800, 16, 385


def lines_of(call: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Return the result of a call and the number of executed lines of Python."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call(*args), count
    finally:
        sys.settrace(before)


def test_outcomes_and_cells_filled_again_cost_little_and_never_much_at_once() -> None:
    """An outcome takes at most 45 µs, and all outcomes take below 2.5 µs per step on average.

    A step that fills a cell reports no outcome; a later step reports it.
    """
    costs = load_cost_model("mlp-h100")
    config = DispatchConfig(mode="FULL", max_num_tokens=2048, sizes="512,768,1024,2048")
    policy = AdaptivePolicy()
    table = Dispatcher(policy, config, strict=True)
    for key in table.registry:
        table.registry.captured(key, object())
    chance, noise = random.Random(0), Noise()

    def us(num_tokens: int, decision: Any) -> float:
        key = decision.key
        time = costs.graph_us(key.num_tokens) if key else costs.eager_us(num_tokens)
        return noise.measured(time, chance)

    while runs := policy.calibration_runs(table.graphs):
        for run in runs:
            for _ in range(run.runs):
                time = us(run.batch.num_tokens, run.decision)
                table.observe(
                    Outcome(
                        run.batch,
                        run.decision,
                        time,
                        queued=True,
                        host_us=time,
                        device_us=time,
                    )
                )
    for num_tokens in range(LOW, 2049):
        table.dispatch(num_tokens)
    _, found = lines_of(table.dispatch, LOW)
    last, told, fills = 0, [], []
    for step in range(1, STEPS + 1):
        num_tokens = chance.randint(LOW, 2048)
        decision, count = lines_of(table.dispatch, num_tokens)
        fills.append(count - min(count, found))
        is_due = step - last >= SAMPLE_EVERY * policy.pace
        if decision.one_shot or is_due:
            last, batch = step, table.batch(num_tokens)
            time = us(num_tokens, decision)
            outcome = Outcome(
                batch, decision, time, queued=True, step=step, host_us=time, device_us=time
            )
            told.append(lines_of(table.observe, outcome)[1])
    assert len(told) > STEPS / SAMPLE_EVERY / 2
    assert max(fills) <= 360
    assert max(told) <= 900
    assert sum(told) <= 45 * STEPS
