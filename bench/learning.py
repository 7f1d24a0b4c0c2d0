"""What learning costs the host: the outcomes of measured steps, and the cells that change.

A policy serves uniform traffic by the real dispatcher at known costs with noise, one steady step
in 16 measured, without a device or a plan. Each outcome that is told (``observe``), with the cells
that it changes, and each cell that is filled again are timed in this thread's own processor time.
``step`` is what one step does of both: the most that any one had to wait. A machine that is busy
shows in ``loop_ns``, what one addition in a loop takes (some 15 to 20 on a quiet one).

    python bench/learning.py
    python bench/learning.py --steps 2000 --models lm --json
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import statistics
import time
import timeit
from typing import Any

from policies import MODELS

from dispatchkit import DispatchConfig, Dispatcher, Outcome, load_plugins

from dispatchkit_adaptive import Noise
from dispatchkit_plan.costs import load_cost_model

PARTS = ("observe", "fill", "step")


def main() -> None:
    """Print one row for each model: microseconds per step, per call, and at most."""
    options = parse()
    for model in options.models.split(","):
        row = measure(model, options)
        print(json.dumps(row) if options.json else summary(row), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="mlp,lm", help="names of bench/policies.py, with commas")
    add("--policy", default="adaptive")
    add("--steps", type=int, default=5000)
    add("--sample-every", type=int, default=16)
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object a line")
    return parser.parse_args()


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Serve with one model's costs, and return what learning took."""
    model_name, sizes, low, high = MODELS[name]
    model = load_cost_model(model_name)
    graph, eager = (
        functools.cache(model.graph_us.__call__),
        functools.cache(model.eager_us.__call__),
    )
    config = DispatchConfig(mode="FULL", max_num_tokens=high, **({"sizes": sizes} if sizes else {}))
    policy = load_plugins().create_policy(options.policy)
    table = Dispatcher(policy, config, strict=True)
    for key in table.registry:
        table.registry.captured(key, object())
    chance, noise = random.Random(options.seed), Noise()

    def cost(num_tokens: int, decision: Any) -> float:
        us = graph(decision.key.num_tokens) if decision.key else eager(num_tokens)
        return noise(us, chance)

    while runs := policy.calibration_runs(table.graphs):
        for run in runs:
            for _ in range(run.runs):
                us = cost(run.batch.num_tokens, run.decision)
                table.observe(Outcome(run.batch, run.decision, us))
    for num_tokens in range(low, high + 1):
        table.dispatch(num_tokens)
    clock = time.thread_time_ns
    filled, asked = table.dispatch(low), [0]
    decide = policy.decide

    def counted(*args: Any) -> Any:
        asked[0] += 1
        return decide(*args)

    policy.decide = counted
    took: dict[str, list[float]] = {part: [] for part in PARTS}
    last = -options.sample_every
    gc.collect()
    gc.disable()
    for step in range(1, options.steps + 1):
        num_tokens = chance.randint(low, high)
        before, start = asked[0], clock()
        filled = table.dispatch(num_tokens)
        fill_us = (clock() - start) / 1e3 if asked[0] > before else 0.0
        observe_us = 0.0
        if filled.timed and (
            filled.one_shot or step - last >= options.sample_every * getattr(policy, "pace", 1)
        ):
            last = step
            outcome = Outcome(table.batch(num_tokens), filled, cost(num_tokens, filled), step=step)
            start = clock()
            table.observe(outcome)
            observe_us = (clock() - start) / 1e3
            took["observe"].append(observe_us)
        if fill_us:
            took["fill"].append(fill_us)
        took["step"].append(fill_us + observe_us)
    gc.enable()
    row: dict[str, Any] = {"bench": "learning", "model": name, "policy": options.policy}
    row |= {"steps": options.steps, "sample_every": options.sample_every, "unit": "us"}
    row["loop_ns"] = timeit.timeit("x + 1", "x = 1", number=1_000_000) * 1e3
    for part, times in took.items():
        row[part] = {
            "n": len(times),
            "per_step": sum(times) / options.steps,
            "median": statistics.median(times) if times else 0.0,
            "p99": sorted(times)[int(0.99 * len(times))] if times else 0.0,
            "max": max(times, default=0.0),
        }
    return row


def summary(row: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{part} {one['n']}: {one['per_step']:.2f} a step, median {one['median']:.1f}, "
        f"99% {one['p99']:.1f}, most {one['max']:.1f}"
        for part, one in ((part, row[part]) for part in PARTS)
    )
    head = f"{row['policy']} {row['model']} {row['steps']} steps, us (loop {row['loop_ns']:.0f} ns)"
    return f"{head}: {parts}"


if __name__ == "__main__":
    main()
