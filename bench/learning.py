"""Measure the host time of a policy that learns.

Batches of uniformly random sizes go through the real dispatcher, without a device and without
plans. A cost model with noise provides the step times. One in 16 regular steps (those that are not
probes) is measured. The printed times are CPU times of this thread:

- ``observe``: the processing of one outcome, including the update of the table.
- ``fill``: the decision of one cell that is filled again.
- ``step``: both of these together, in one step.
- ``loop_ns``: one addition in a loop, about 15 to 20 ns unless the machine is busy.

    python bench/learning.py
    python bench/learning.py --steps 2000 --models lm --json

With ``--device``, two runners of a small MLP take turns in blocks of 200 steps. One uses ``vllm``,
the other a policy that learns but chooses like ``vllm``. ``more`` is the difference between the
medians of their blocks, in microseconds per step. ``parts`` contains the time of ``events``
(recording and reading the events of measured steps), of ``observe``, and of ``fill`` including the
new plan. ``most`` contains the parts of the most expensive step.

    python bench/learning.py --device cuda            # about 20 seconds
    python bench/learning.py --device cpu --steps 2000
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

from dispatchkit_plan.costs import load_cost_model
from dispatchkit_plan.scenario import Noise

PARTS = ("observe", "fill", "step")
BLOCK = 200


def main() -> None:
    """Measure each model, or a runner, and print the results."""
    options = parse()
    if options.device:
        row = on_device(options)
        print(json.dumps(row) if options.json else device_summary(row), flush=True)
        return
    for model in options.models.split(","):
        row = measure(model, options)
        print(json.dumps(row) if options.json else summary(row), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="mlp,lm", help="names of models in bench/policies.py, comma-separated")
    add("--policy", default="adaptive")
    add("--steps", type=int, default=5000)
    add("--sample-every", type=int, default=16)
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), help="measure a runner; cpu uses the tape backend")
    add("--json", action="store_true", help="print one JSON object per line")
    return parser.parse_args()


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the host times of a policy that learns from the step times of one cost model."""
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
        return noise.measured(us, chance)

    while runs := policy.calibration_runs(table.graphs):
        for run in runs:
            for _ in range(run.runs):
                us = cost(run.batch.num_tokens, run.decision)
                table.observe(Outcome(run.batch, run.decision, us))
    for num_tokens in range(low, high + 1):
        table.dispatch(num_tokens)
    clock = time.thread_time_ns
    filled, num_decided = table.dispatch(low), [0]
    decide = policy.decide

    def counted(*args: Any) -> Any:
        num_decided[0] += 1
        return decide(*args)

    policy.decide = counted
    took: dict[str, list[float]] = {part: [] for part in PARTS}
    pending: list[Outcome] = []
    last = -options.sample_every
    gc.collect()
    gc.disable()
    for step in range(1, options.steps + 1):
        num_tokens = chance.randint(low, high)
        before, start = num_decided[0], clock()
        filled = table.dispatch(num_tokens)
        fill_us = (clock() - start) / 1e3 if num_decided[0] > before else 0.0
        observe_us = 0.0
        spacing = options.sample_every * getattr(policy, "pace", 1)
        if filled.timed and (filled.one_shot or step - last >= spacing):
            last, us = step, cost(num_tokens, filled)
            pending.append(Outcome(table.batch(num_tokens), filled, us, step=step))
            # As in a runner, a step that fills a cell reports no outcome.
            while pending and not fill_us:
                start = clock()
                table.observe(pending.pop(0))
                took["observe"].append((clock() - start) / 1e3)
                observe_us += took["observe"][-1]
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


class PartTimer:
    """Timer of the parts of learning in a runner.

    Args:
        runner: Runner whose methods are wrapped to be timed.
    """

    def __init__(self, runner: Any) -> None:
        self.us = dict.fromkeys(("events", "observe", "fill"), 0.0)
        self.calls = dict.fromkeys(self.us, 0)
        self.most: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._step, self._inner = -1, 0.0
        lane = runner.lanes[0]
        self._lane = lane.lane
        self._wrap(lane.timings, "begin", "events")
        self._wrap(lane.timings, "finish", "events")
        self._wrap(runner.dispatcher, "observe", "observe")
        self._wrap(runner.dispatcher, "_fill", "fill")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter_ns()
            result = call(*args, **options)
            took = (time.perf_counter_ns() - start) / 1e3
            alone, self._inner = took - self._inner, outer + took
            self.us[part] += alone
            self.calls[part] += 1
            if self._lane.tick != self._step:
                self._step, self._now = self._lane.tick, {}
            self._now[part] = self._now.get(part, 0.0) + alone
            self.most = max(self.most, self._now, key=lambda parts: sum(parts.values()))
            return result

        setattr(owner, name, timed)


def on_device(options: argparse.Namespace) -> dict[str, Any]:
    """Return the time that learning adds to the steps of a runner."""
    import torch

    from dispatchkit import GraphRunner, RunnerOptions, StaticInput

    from dispatchkit_adaptive import AdaptivePolicy

    device, sizes = options.device, (64, 128, 256, 512)
    width = 256 if device == "cuda" else 4
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    module = torch.nn.Sequential(*layers).to(device).eval()
    rows = torch.randn(sizes[-1], width, device=device)

    def runner_of(policy: Any) -> Any:
        runner = GraphRunner(
            module.forward,
            {"input": StaticInput((None, width), "float32")},
            sizes=sizes,
            mode="FULL",
            policy=policy,
            outputs="view",
            backend="auto" if device == "cuda" else "tape",
            options=RunnerOptions(sample_every=options.sample_every, device=device),
        )
        runner.capture()
        return runner

    # This policy requires a gain of 90% for a change and never probes, so it chooses like `vllm`.
    policy = AdaptivePolicy(margin=0.9, explore=0.0, seed=options.seed)
    runners = {"without": runner_of("vllm"), "with": runner_of(policy)}
    chance = random.Random(options.seed)
    traffic = [chance.randint(1, sizes[-1]) for _ in range(options.steps)]
    took: dict[str, list[float]] = {name: [] for name in runners}

    def serve(name: str, block: list[int]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for size in block:
            runners[name](rows[:size])
        return (time.perf_counter_ns() - start) / 1e3 / len(block)

    blocks = [traffic[at : at + BLOCK] for at in range(0, len(traffic), BLOCK)]
    for block in blocks:
        for name in runners:
            serve(name, block)
    for block in blocks:
        for name, times in took.items():
            times.append(serve(name, block))
    parts = PartTimer(runners["with"])
    for block in blocks:
        serve("with", block)
    step = {name: statistics.median(times) for name, times in took.items()}
    return {
        "bench": "learning",
        "device": torch.cuda.get_device_name() if device == "cuda" else "tape",
        "steps": options.steps,
        "sample_every": options.sample_every,
        "unit": "us",
        "step": step,
        "more": step["with"] - step["without"],
        "parts": {name: us / options.steps for name, us in parts.us.items()},
        "calls": parts.calls,
        "most": parts.most,
        "pace": policy.pace,
    }


def device_summary(row: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{name} {us:.2f} ({row['calls'][name]})" for name, us in row["parts"].items()
    )
    most = " + ".join(f"{name} {us:.0f}" for name, us in row["most"].items())
    return (
        f"{row['device']} {row['steps']} steps, us per step: with {row['step']['with']:.2f}, "
        f"without {row['step']['without']:.2f}, more {row['more']:.2f}; {parts}; most in one step "
        f"{sum(row['most'].values()):.0f} ({most}); pace {row['pace']}"
    )


def summary(row: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{part} {one['n']}: {one['per_step']:.2f} per step, median {one['median']:.1f}, "
        f"P99 {one['p99']:.1f}, max {one['max']:.1f}"
        for part, one in ((part, row[part]) for part in PARTS)
    )
    head = f"{row['policy']} {row['model']} {row['steps']} steps, us (loop {row['loop_ns']:.0f} ns)"
    return f"{head}: {parts}"


if __name__ == "__main__":
    main()
