"""Measure ``adaptive`` on a GPU, compared with ``vllm`` and with the best fixed arms.

    python bench/policies_gpu.py                       # both models, about 120 seconds
    python bench/policies_gpu.py --models mlp --traces uniform --steps 1000

The models are a wide MLP (8 layers of width 4096) and a decoder. Traffic has either uniformly
random sizes up to 2048, or the sizes of a recorded trace. All cases serve the same batches in the
same order with the same capture sizes. They take turns in blocks, and a different case is first in
each block, so that clock drift affects all equally. The device is synchronized only between blocks.

``hindsight`` uses the best single arm of each bucket, the graph or eager. The arms are timed in
advance: by the host over consecutive steps, and by the device while steps are queued behind other
work. If the two clocks select different arms, both selections are served and the faster one counts.

The first eager run of a size takes longer, because libraries select kernels by size. Therefore,
each size runs eager once and both policies fill their tables before the totals are measured. The
line ``cold`` contains the first steps without this preparation. Runs that the policy requests at
capture are not part of the totals; ``calibration_s`` is their duration.

Each kind of traffic prints one line as soon as it is measured, and the last lines say which goals
are met. The files in ``--details`` contain all results as one JSON object per line, and the final
estimates of ``adaptive``. In the printed lines:

- ``gain`` is the speed relative to ``vllm``, ``over`` the time relative to the hindsight. Values of
  the first 2000 steps are in parentheses.
- ``device`` and ``host``: for the steps whose arm differs from the hindsight's, the milliseconds
  lost (in the first 2000 steps, plus later) and won, computed from the arm times of that clock.
  Neither is exact if the host limits some steps and the device others.
- ``learn`` is the host time of the policy per step, and its ``max`` for one outcome. ``outcomes``
  is the number of reported outcomes, ``cleared`` the number of cell ranges they cleared, and
  ``decided`` the number of new decisions.
- The line ends with the numbers of eager (``e``) and graph (``g``) steps of each bucket that has at
  least 2% of the steps.

Each model uses its own process, so that a failure does not affect the other model. Without CUDA,
``--device cpu`` runs small models on the tape backend, which tests the script only.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from dispatchkit import (
    Decision,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    load_plugins,
)
from dispatchkit.observe.trace import read_trace

TRACES = Path(__file__).resolve().parents[1] / "tests" / "data" / "traces"
BLOCK = 50
EARLY = 2000
#: Divisor of all sizes without a GPU.
SMALLER = 32
#: Approximate number of sizes at which eager steps are timed, at least two per bucket.
TIMED_SIZES = 48
# Goals: minimum speedup over vllm on the MLP, maximum time relative to the best arms, and maximum
# time relative to vllm on the decoder.
MLP_GAIN, OVER_HINDSIGHT, DECODER_LOSS = 1.15, 1.01, 1.01


class Mlp(nn.Module):
    """Linear layers of equal width with residual connections."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output; shape (N, width), like ``x``."""
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class Decoder(nn.Module):
    """Decode step of a transformer without a cache, with many small kernels per layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "norm2": nn.RMSNorm(width),
                    "up": nn.Linear(width, 4 * width, bias=False),
                    "down": nn.Linear(2 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output; shape (N, width), like ``x``."""
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, dim=-1)
            weight = torch.sigmoid((q * k).sum(-1, keepdim=True) / q.shape[-1] ** 0.5)
            x = x + layer["out"](weight * v)
            gate, up = layer["up"](layer["norm2"](x)).chunk(2, dim=-1)
            x = x + layer["down"](torch.nn.functional.silu(gate) * up)
        return x


@attrs.frozen
class Case:
    """A model, and the number of steps to measure.

    Attributes:
        make: Factory that returns the module for a width and a number of layers.
        width: Number of input features.
        layers: Number of layers.
        sizes: Capture sizes.
        steps: Number of steps of each kind of traffic.
        cold_steps: Number of steps of the first kind of traffic that are measured before most sizes
            have run eager.
    """

    make: Callable[[int, int], nn.Module]
    width: int
    layers: int
    sizes: tuple[int, ...]
    steps: int
    cold_steps: int = 0


# The decoder has fewer steps and no cold steps, because its steps take several milliseconds.
CASES = {
    "mlp": Case(Mlp, 4096, 8, (512, 768, 1024, 2048), 12_000, 1000),
    "decoder": Case(
        Decoder, 2048, 16, (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 768, 1024, 2048), 2000
    ),
}


def main() -> None:
    """Measure each model in its own process."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"bench": "policies_gpu", "skipped": "torch finds no CUDA device"}))
        sys.exit(0)
    models = options.models.split(",")
    if len(models) == 1:
        lines = ModelBenchmark(models[0], options).run()
        print_goals(lines)
        sys.exit(any("failed" in line for line in lines))
    codes = [
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--models", model], check=False
        ).returncode
        for model in models
    ]
    sys.exit(any(codes))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default="mlp,decoder", help="names of models, comma-separated")
    add(
        "--traces",
        default="uniform,azure_conv_high",
        help="`uniform` or names in tests/data/traces, comma-separated",
    )
    add(
        "--steps",
        type=int,
        help="number of steps (default: 12000 for mlp, 2000 for decoder); short traces repeat",
    )
    add("--sample-every", type=int, default=16, help="measure one in N steps that are not probes")
    add("--details", default="build/policies_gpu", help="folder for the complete results")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


@attrs.frozen
class Times:
    """Milliseconds of each arm, measured by one clock.

    Attributes:
        graphs: Time of each graph, by its size.
        eager: Time of eager steps by size, in ascending order of the sizes.
    """

    graphs: dict[int, float]
    eager: dict[int, float]

    def of(self, size: int, graph: int) -> float:
        """Return the milliseconds of a batch in the graph of size ``graph``; 0 means eager."""
        return self.graphs[graph] if graph else self.eager_ms(size)

    def eager_ms(self, size: int) -> float:
        """Return the milliseconds of an eager step, interpolated linearly between timed sizes."""
        timed = list(self.eager)
        index = min(max(bisect_left(timed, size), 1), max(len(timed) - 1, 1))
        low, high = timed[index - 1], timed[min(index, len(timed) - 1)]
        share = (size - low) / (high - low) if high > low else 0.0
        return self.eager[low] + share * (self.eager[high] - self.eager[low])

    def best_arms(self, steps: Iterable[int], sizes: Sequence[int]) -> dict[int, int]:
        """Return the best single arm of each bucket: the size of its graph, or 0 for eager."""
        eager: Counter[int] = Counter()
        graph: Counter[int] = Counter()
        for size in steps:
            top = bucket_of(size, sizes)
            eager[top] += self.eager_ms(size)  # type: ignore[assignment]
            graph[top] += self.graphs[top]  # type: ignore[assignment]
        return {top: 0 if eager[top] < graph[top] else top for top in sorted(graph)}


class ModelBenchmark:
    """The measurement of one model.

    Args:
        name: Name in ``CASES``.
        options: Command-line arguments.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, case = name, options, CASES[name]
        if options.steps:
            case = attrs.evolve(case, steps=options.steps)
        on_gpu = options.device == "cuda"
        if not on_gpu:
            small = tuple(sorted({max(1, size // SMALLER) for size in case.sizes}))
            case = attrs.evolve(case, width=64, layers=2, sizes=small, cold_steps=50)
        torch.manual_seed(0)
        self.case = case
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.module = case.make(case.width, case.layers).to(options.device, self.dtype).eval()
        self.rows = torch.randn(
            max(case.sizes), case.width, device=options.device, dtype=self.dtype
        )
        self.served_cold: set[int] = set()
        self.lines: list[dict[str, Any]] = []
        folder = Path(options.details)
        folder.mkdir(parents=True, exist_ok=True)
        self.details = folder / f"{name}.jsonl"
        self.details.write_text("")
        self.facts = {
            "bench": "policies_gpu",
            "model": name,
            "sample_every": options.sample_every,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            "unit": "ms",
        }
        self.vllm, _ = self.runner("vllm")
        self.backend = self.vllm.backend

    def run(self) -> list[dict[str, Any]]:
        """Measure all traffic and return the lines, including failures."""
        traces: dict[str, list[int]] = {}
        with self.part("traffic"):
            for trace in self.options.traces.split(","):
                traces[trace] = self.traffic(trace)
        with self.part("cold"):
            if self.case.cold_steps and traces:
                self.cold(*next(iter(traces.items())))
        times: dict[str, Times] = {}
        with self.part("times"):
            sizes = sorted({size for steps in traces.values() for size in steps})
            self.warm(sizes)
            times = self.time_arms(sizes)
        for trace, steps in traces.items() if times else ():
            with self.part(trace):
                self.serve(trace, steps, times)
            gc.collect()
        return self.lines

    def part(self, name: str) -> PartGuard:
        """Return a context manager that records the duration or the failure of a part."""
        return PartGuard(self, name)

    def record(self, **line: Any) -> None:
        """Record a line and write it to the file immediately."""
        self.lines.append({**self.facts, **line})
        with self.details.open("a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")

    def traffic(self, trace: str) -> list[int]:
        """Return the sizes of the steps, at most 2048."""
        count = self.case.steps
        if trace == "uniform":
            chance = random.Random(1)
            steps = [chance.randint(1, 2048) for _ in range(count)]
        else:
            read = [step.num_tokens for step in read_trace(TRACES / f"step_{trace}.csv.gz")]
            fitting = [size for size in read if 1 <= size <= 2048]
            steps = [fitting[index % len(fitting)] for index in range(count)]
        small = SMALLER if self.options.device == "cpu" else 1
        return [max(1, size // small) for size in steps]

    def runner(self, policy: Any) -> tuple[GraphRunner, float]:
        """Return a captured runner, and the duration of its calibration in seconds."""
        on_gpu = self.options.device == "cuda"
        runner = GraphRunner(
            self.module,
            {"x": StaticInput((None, self.case.width), self.dtype)},
            sizes=self.case.sizes,
            mode="FULL",
            policy=policy,
            outputs="view",
            backend="auto" if on_gpu else "tape",
            options=RunnerOptions(
                sample_every=self.options.sample_every, device=self.options.device
            ),
        )
        seconds = 0.0
        calibration = runner.lanes[0].calibration
        plain = calibration.run

        def timed() -> int:
            nonlocal seconds
            start = time.perf_counter()
            count = plain()
            seconds = time.perf_counter() - start
            return count

        calibration.run = timed  # type: ignore[method-assign]
        runner.capture()
        return runner, seconds

    def cold(self, trace: str, steps: Sequence[int]) -> None:
        """Measure the first steps, before most sizes have run eager in this process."""
        steps = steps[: self.case.cold_steps]
        self.served_cold.update(steps)
        adaptive, calibration_s = self.runner("adaptive")
        totals, _ = self.take_turns(
            {
                "vllm": lambda size: self.vllm(self.rows[:size]),
                "adaptive": lambda size: adaptive(self.rows[:size]),
            },
            steps,
        )
        gain = totals["vllm"] / totals["adaptive"]
        self.record(
            trace=trace, case="cold", n=len(steps), calibration_s=calibration_s, gain=gain, **totals
        )

    def warm(self, sizes: Sequence[int]) -> None:
        """Run each size eager once, and record how much longer first runs take."""
        start = time.perf_counter()
        firsts = []
        for size in sizes:
            first = self.waited(size)
            if self.case.cold_steps and size not in self.served_cold:
                firsts.append(first - self.waited(size))
        cuts = statistics.quantiles(firsts, n=10) if len(firsts) > 1 else [0.0] * 9
        self.record(
            case="first_use",
            sizes=len(sizes),
            seconds=time.perf_counter() - start,
            n=len(firsts),
            extra_mean=statistics.fmean(firsts) if firsts else None,
            extra_deciles=cuts if firsts else None,
        )

    def waited(self, size: int) -> float:
        """Run one eager step; return its milliseconds, including synchronization."""
        self.backend.synchronize()
        start = time.perf_counter()
        self.vllm(self.rows[:size], ceiling=0)
        self.backend.synchronize()
        return (time.perf_counter() - start) * 1e3

    def time_arms(self, steps: Sequence[int]) -> dict[str, Times]:
        """Return, for each clock, the times of all graphs and of eager at some sizes per bucket."""
        start = time.perf_counter()
        sizes = self.case.sizes
        by_bucket: dict[int, list[int]] = {}
        for size in sorted(set(steps)):
            by_bucket.setdefault(bucket_of(size, sizes), []).append(size)
        found: dict[str, Times] = {"host": Times({}, {}), "device": Times({}, {})}
        points = max(2, TIMED_SIZES // len(sizes))
        for top in sizes:
            graph = self.both_clocks(top, 2)
            for clock, ms in graph.items():
                found[clock].graphs[top] = ms
            for size in spread(by_bucket.get(top, []), points):
                for clock, ms in self.both_clocks(size, 0).items():
                    found[clock].eager[size] = ms
        seconds = time.perf_counter() - start
        self.record(
            case="arms",
            seconds=seconds,
            **{
                f"{arm}_{clock}": {size: round(ms, 4) for size, ms in getattr(one, arm).items()}
                for clock, one in found.items()
                for arm in ("graphs", "eager")
            },
        )
        return found

    def both_clocks(self, size: int, ceiling: int) -> dict[str, float]:
        """Return the milliseconds of a step: by the host, and by the device behind other work."""
        backend, runner, rows = self.backend, self.vllm, self.rows
        start_event, end_event = backend.new_event(timing=True), backend.new_event(timing=True)
        batch, stream = rows[:size], backend.current_stream()
        runs, few = (10, 4) if self.name == "mlp" else (5, 3)
        runner(batch, ceiling=ceiling)
        host, device = [], []
        for _ in range(3):
            backend.synchronize()
            start = time.perf_counter()
            for _ in range(runs):
                runner(batch, ceiling=ceiling)
            backend.synchronize()
            host.append((time.perf_counter() - start) * 1e3 / runs)
        for _ in range(3):
            for _ in range(2):
                runner(rows)
            start_event.record(stream)
            for _ in range(few):
                runner(batch, ceiling=ceiling)
            end_event.record(stream)
            backend.synchronize()
            device.append(start_event.elapsed_us(end_event) / 1e3 / few)
        return {"host": statistics.median(host), "device": statistics.median(device)}

    def take_turns(
        self, cases: dict[str, Callable[[int], Any]], steps: Sequence[int]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Run the cases in turns; return their milliseconds for all and for the first steps.

        Times are host times, which include the cost of measuring and learning.
        """
        totals, early = dict.fromkeys(cases, 0.0), dict.fromkeys(cases, 0.0)
        names, backend = list(cases), self.backend
        gc.collect()
        for index, at in enumerate(range(0, len(steps), BLOCK)):
            block = steps[at : at + BLOCK]
            first = index % len(names)
            for name in (*names[first:], *names[:first]):
                run = cases[name]
                backend.synchronize()
                start = time.perf_counter()
                for size in block:
                    run(size)
                backend.synchronize()
                took = (time.perf_counter() - start) * 1e3
                totals[name] += took
                early[name] += took if at < EARLY else 0.0
        return totals, early

    def serve(self, trace: str, steps: Sequence[int], times: dict[str, Times]) -> None:
        """Measure one kind of traffic with both policies and with the hindsight."""
        sizes, rows, vllm = self.case.sizes, self.rows, self.vllm
        policy = load_plugins().create_policy("adaptive")
        learning = LearningCosts(policy)  # wraps the methods before a runner binds them
        adaptive, calibration_s = self.runner(policy)
        start = time.perf_counter()
        for runner in (vllm, adaptive):
            for size in set(steps):
                runner.dispatcher.dispatch(size)
        fill_s = time.perf_counter() - start
        decisions: list[Decision] = []
        adaptive.taps.on_decision(decisions.append)
        learning.start()
        cases: dict[str, Callable[[int], Any]] = {
            "vllm": lambda size: vllm(rows[:size]),
            "adaptive": lambda size: adaptive(rows[:size]),
        }
        arms = {clock: one.best_arms(steps, sizes) for clock, one in times.items()}
        best = {"hindsight_host": arms["host"]}
        if arms["device"] != arms["host"]:
            best["hindsight_device"] = arms["device"]
        for name, chosen in best.items():
            ceilings = {size: 2 if chosen[bucket_of(size, sizes)] else 0 for size in set(steps)}
            cases[name] = lambda size, by=ceilings: vllm(rows[:size], ceiling=by[size])
        totals, early = self.take_turns(cases, steps)
        adaptive.taps.on_decision(None)
        learning.stop()
        name = min(best, key=totals.__getitem__)
        for case, total in totals.items():
            ratio = totals["vllm"] / total
            self.record(
                trace=trace, case=case, n=len(steps), total=total, early=early[case], gain=ratio
            )
        self.account(
            trace,
            steps,
            decisions,
            times,
            best[name],
            {
                "vllm": totals["vllm"],
                "adaptive": totals["adaptive"],
                "hindsight": totals[name],
                "gain": totals["vllm"] / totals["adaptive"],
                "over": totals["adaptive"] / totals[name],
                "early_gain": early["vllm"] / early["adaptive"],
                "early_over": early["adaptive"] / early[name],
                "hindsight_by": name.removeprefix("hindsight_"),
                "calibration_s": calibration_s,
                "fill_s": fill_s,
                **learning.facts(len(steps)),
            },
        )
        print_summary(self.lines[-1])
        buckets = adaptive.dispatcher.policy.explain()  # type: ignore[attr-defined]
        self.record(trace=trace, case="estimates", buckets=[attrs.asdict(one) for one in buckets])

    def account(
        self,
        trace: str,
        steps: Sequence[int],
        decisions: Sequence[Decision],
        times: dict[str, Times],
        best: dict[int, int],
        facts: dict[str, Any],
    ) -> None:
        """Record the time lost and won in steps whose arm differs from the best arm."""
        changed = {clock: Counter[str]() for clock in times}
        by_bucket: dict[int, Counter[str]] = {}
        for index, (size, decision) in enumerate(zip(steps, decisions, strict=False)):
            arm = 0 if decision.key is None else decision.key.num_tokens
            top = bucket_of(size, self.case.sizes)
            is_probe = decision.reason == "probe"
            for clock, one in times.items():
                more = one.of(size, arm) - one.of(size, best[top])
                kind = "won" if more < 0 else "early" if index < EARLY else "late"
                changed[clock][kind] += abs(more)  # type: ignore[assignment]
                if is_probe:
                    changed[clock]["probes"] += more  # type: ignore[assignment]
            counts = by_bucket.setdefault(top, Counter())
            counts["probe" if is_probe else "graph" if arm else "eager"] += 1
        self.record(
            trace=trace,
            case="summary",
            n=len(steps),
            num_decisions=len(decisions),
            **facts,
            probes=sum(counts["probe"] for counts in by_bucket.values()),
            changed={
                clock: {kind: one[kind] for kind in ("early", "late", "won", "probes")}
                for clock, one in changed.items()
            },
            best_arm={top: "graph" if arm else "eager" for top, arm in best.items()},
            steps_by_bucket={top: dict(counts) for top, counts in sorted(by_bucket.items())},
        )


class LearningCosts:
    """Counters of the calls that a runner makes to a policy, with their host time.

    Args:
        policy: Policy that learns.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.start()
        observe, decide = policy.observe, policy.decide

        def observed(outcome: Any) -> Any:
            start = time.perf_counter_ns()
            updates = observe(outcome)
            took = time.perf_counter_ns() - start
            self.ns, self.most_ns = self.ns + took, max(self.most_ns, took)
            self.outcomes += 1
            self.cleared += sum(one.decision is None and not one.one_shot for one in updates)
            return updates

        def decided(batch: Any, graphs: Any) -> Any:
            start = time.perf_counter_ns()
            answer = decide(batch, graphs)
            self.ns += time.perf_counter_ns() - start
            self.decided += 1
            return answer

        policy.observe, policy.decide = observed, decided

    def start(self) -> None:
        """Reset the counters."""
        self.outcomes = self.decided = self.cleared = self.ns = self.most_ns = 0

    def stop(self) -> None:
        """Unwrap the methods of the policy."""
        del self._policy.observe, self._policy.decide

    def facts(self, steps: int) -> dict[str, Any]:
        """Return the counts and host times as fields of a line."""
        return {
            "outcomes": self.outcomes,
            "decided": self.decided,
            "cleared": self.cleared,
            "learn_us": self.ns / 1e3 / steps,
            "learn_most_us": self.most_ns / 1e3,
        }


class PartGuard:
    """Context manager that records the failure of a part, so that the other parts run."""

    def __init__(self, model: ModelBenchmark, part: str) -> None:
        self._model, self._part, self._start = model, part, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        seconds = time.perf_counter() - self._start
        if error is None:
            self._model.record(part=self._part, seconds=seconds)
            return False
        text = "".join(traceback.format_exception(error))
        self._model.record(part=self._part, seconds=seconds, failed=text)
        return isinstance(error, Exception)


def print_summary(line: dict[str, Any]) -> None:
    """Print the results of one kind of traffic."""
    clocks = "; ".join(
        f"{clock} lost {one['early']:.0f}+{one['late']:.0f} won {one['won']:.0f}"
        for clock, one in line["changed"].items()
    )
    arms = " ".join(
        f"{top}:{counts.get('eager', 0)}e/{counts.get('graph', 0)}g"
        for top, counts in line["steps_by_bucket"].items()
        if sum(counts.values()) >= line["n"] // 50
    )
    print(
        f"{line['model']} {line['trace']} {line['n']}: vllm {line['vllm']:.0f} adaptive "
        f"{line['adaptive']:.0f} hindsight {line['hindsight']:.0f} ms ({line['hindsight_by']}); "
        f"gain {line['gain']:.4f} ({line['early_gain']:.4f}) over {line['over']:.4f} "
        f"({line['early_over']:.4f}); {clocks}; probes {line['probes']}; "
        f"learn {line['learn_us']:.1f} us/step, max {line['learn_most_us']:.0f}: outcomes "
        f"{line['outcomes']} cleared {line['cleared']} decided {line['decided']}; "
        f"calibration {line['calibration_s']:.1f} s; {arms[:120]}",
        flush=True,
    )


def print_goals(lines: Sequence[dict[str, Any]]) -> None:
    """Print whether each kind of traffic meets the goals, and the failures."""
    found = [line for line in lines if line.get("case") == "summary"]
    for line in found:
        goals = [("over_hindsight", line["over"], OVER_HINDSIGHT, 1)]
        if line["model"] == "mlp":
            goals.append(("gain_over_vllm", line["gain"], MLP_GAIN, -1))
        else:
            goals.append(("over_vllm", 1.0 / line["gain"], DECODER_LOSS, 1))
        texts = [
            f"{goal} {value:.4f} "
            f"(goal {limit}: {'met' if sign * value <= sign * limit else 'NOT met'})"
            for goal, value, limit, sign in goals
        ]
        print(f"{line['model']} {line['trace']}: {', '.join(texts)}", flush=True)
    for line in lines:
        if "failed" in line:
            why = line["failed"].strip().splitlines()[-1]
            print(f"FAILED {line['model']} {line.get('part', '')}: {why}", flush=True)


def spread(sizes: Sequence[int], count: int) -> list[int]:
    """Return up to ``count`` evenly spaced sizes, including the first and last."""
    last = len(sizes) - 1
    if last < count:
        return list(sizes)
    return sorted({sizes[round(index * last / (count - 1))] for index in range(count)})


def bucket_of(size: int, sizes: Sequence[int]) -> int:
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]


if __name__ == "__main__":
    main()
