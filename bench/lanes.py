"""Measure steps on lanes, compared with handwritten graphs on streams and with serial steps.

    python bench/lanes.py [ROUNDS] [--lanes 2 4 8] [--steps N] [--kinds small filling] [--brief]

On a GPU, two times are measured and divided by the number of steps of a round: the time from the
round's first launch to the end of its device work, and the host time until the last launch returns.
Results are released after the round. All cases take turns in one process:

- ``serial``: one handwritten graph on one stream.
- ``raw streams``: one handwritten graph per stream.
- ``raw streams, copies``: the same, with a copy of the input and a clone of the result.
- ``raw streams, copied in``: the same, with a copy of the input, but without a clone.
- ``runner, serial``: calls of a runner with one lane.
- ``runner, lanes``: ``submit`` of a runner with several lanes, which are used in turn.
- ``runner, lanes, views``: the same with results that are not cloned.

``small`` graphs leave most of the device idle; ``filling`` graphs occupy all of it. Steps are
launched one after another, so the last lane begins late in each round, with the runner and by hand.
With more steps per round, this delay matters less. Without a GPU, the tape backend is measured: the
host time of ``submit``, compared with a call of the same graph.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import emit, emit_all, interleaved

from dispatchkit import (
    GraphRunner,
    RunnerOptions,
    StaticInput,
)

BENCH = "lanes"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
#: Kinds of graphs: rows, width and layers of the network, and the step time relative to the small
#: kind.
KINDS = {"small": (16, 512, 100, 1), "filling": (8192, 8192, 4, 4)}


class Network:
    """A stack of square linear layers."""

    def __init__(self, width: int, layers: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        kind = torch.bfloat16 if HAS_GPU else torch.float32
        self.weights = [
            (torch.randn(width, width, generator=generator, device=DEVICE) / width**0.5).to(kind)
            for _ in range(layers)
        ]
        self.dtype = kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x


def runner_of(
    network: Network, rows: int, width: int, lanes: int, outputs: str = "owned"
) -> GraphRunner:
    runner = GraphRunner(
        network,
        {"x": StaticInput((None, width), network.dtype)},
        sizes=(rows,),
        max_num_tokens=rows,
        mode="FULL",
        backend="cuda" if HAS_GPU else "tape",
        lanes=lanes,
        outputs=outputs,
        options=RunnerOptions(strict=True),
    )
    failed = runner.capture().failed
    if failed:
        raise SystemExit(f"captures failed: {failed}")
    return runner


class ByHand:
    """A handwritten graph with its own input, output and stream."""

    def __init__(self, network: Network, rows: int, width: int) -> None:
        self.stream: Any = torch.cuda.Stream()
        self.x = torch.zeros(rows, width, dtype=network.dtype, device=DEVICE)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            network(self.x)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph, stream=self.stream):
            self.out = network(self.x)


def by_turns(
    cases: dict[str, Callable[[int], Any]], steps: int, rounds: int, warmup: int = 3
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the total and the host time of each case, in microseconds per step.

    Args:
        cases: Functions by name. Each launches the step with the given number and returns the
            result, which is kept alive.
        steps: Number of steps per round.
        rounds: Number of samples of each case.
        warmup: Number of unmeasured rounds.
    """
    whole: dict[str, list[float]] = {name: [] for name in cases}
    host: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    gc.disable()
    try:
        for turn in range(-warmup, rounds):
            for name, launch in cases.items():
                start = perf_counter_ns()
                kept = [launch(number) for number in range(steps)]
                given_out = perf_counter_ns()
                torch.cuda.synchronize()
                end = perf_counter_ns()
                del kept
                if turn >= 0:
                    whole[name].append((end - start) / steps / 1000)
                    host[name].append((given_out - start) / steps / 1000)
    finally:
        gc.enable()
    return whole, host


def measure_kind(kind: str, lanes: int, rounds: int, per_lane: int, *, brief: bool) -> None:
    rows, width, layers, weight = KINDS[kind]
    network = Network(width, layers)
    each = max(1, per_lane // weight)
    given = torch.randn(rows, width, device=DEVICE).to(network.dtype)
    hands = [ByHand(network, rows, width) for _ in range(lanes)]
    many, one = runner_of(network, rows, width, lanes), runner_of(network, rows, width, 1)
    views = runner_of(network, rows, width, lanes, "view")
    for runner in (many, views):
        if not torch.equal(runner.submit(given).result(), one(given)):
            raise SystemExit("a lane and a call returned different results")
    torch.cuda.synchronize()

    def serial(number: int) -> None:
        with torch.cuda.stream(hands[0].stream):
            hands[0].graph.replay()

    def raw(number: int) -> None:
        hand = hands[number % lanes]
        with torch.cuda.stream(hand.stream):
            hand.graph.replay()

    def raw_copies(number: int) -> Any:
        hand = hands[number % lanes]
        with torch.cuda.stream(hand.stream):
            hand.x.copy_(given)
            hand.graph.replay()
            return hand.out.clone()

    def raw_copied_in(number: int) -> Any:
        hand = hands[number % lanes]
        with torch.cuda.stream(hand.stream):
            hand.x.copy_(given)
            hand.graph.replay()
            return hand.out

    cases = {
        "serial": serial,
        "raw streams": raw,
        "raw streams, copies": raw_copies,
        "raw streams, copied in": raw_copied_in,
        "runner, serial": lambda number: one(given),
        "runner, lanes": lambda number: many.submit(given),
        "runner, lanes, views": lambda number: views.submit(given),
    }
    whole, host = by_turns(cases, each * lanes, rounds)
    bases = {
        "raw streams": ["serial"],
        "raw streams, copies": ["serial"],
        "runner, serial": ["serial"],
        "runner, lanes": ["serial", "raw streams", "raw streams, copies"],
        "runner, lanes, views": ["serial", "raw streams", "raw streams, copied in"],
    }
    what = f"{kind}, {lanes} lanes, {each} steps each"
    line = []
    for name, samples in whole.items():
        ratios = {
            base: statistics.median(map(lambda a, b: a / b, whole[base], samples))
            for base in bases.get(name, [])
        }  # ratios of speeds: above 1 is faster than the base
        median, on_host = statistics.median(samples), statistics.median(host[name])
        if brief:
            beaten = ", ".join(
                f"{ratio:.3f} times the speed of {base}" for base, ratio in ratios.items()
            )
            line.append(f"{name} {median:.1f} us ({on_host:.1f} us host) {beaten}".rstrip())
            continue
        for base, ratio in (ratios or {None: None}).items():
            facts = {"ratio_to": base, "ratio": ratio, "host": round(on_host, 2)}
            emit(BENCH, f"{what}: {name}", median, "us", rounds, **facts)
    if brief:
        print(f"{what}: " + "; ".join(line), flush=True)


def measure_host(rounds: int) -> None:
    """Measure the host time on the tape, where a small replay costs almost nothing."""
    network, given = Network(4, 1), torch.ones(1, 4)
    one = runner_of(network, 1, 4, 1)
    many = runner_of(network, 1, 4, 4)

    def calls() -> None:
        for _ in range(20):
            one(given)

    def calls_with_lanes() -> None:
        for _ in range(20):
            many(given)

    def submits() -> None:
        for _ in range(20):
            many.submit(given)

    cases = {"call": calls, "call, 4 lanes": calls_with_lanes, "submit, 4 lanes": submits}
    times = interleaved(cases, rounds=rounds)
    emit_all(BENCH, times, per=20, ratio_to="call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=50)
    parser.add_argument("--lanes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--steps", type=int, default=16, help="number of small steps per lane and round"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument(
        "--brief", action="store_true", help="print one line per kind and number of lanes"
    )
    args = parser.parse_args()
    if not HAS_GPU:
        measure_host(args.rounds)
        return
    for kind in args.kinds:
        for lanes in args.lanes:
            rounds = args.rounds if kind == "small" else max(5, args.rounds // 5)
            measure_kind(kind, lanes, rounds, args.steps, brief=args.brief)


if __name__ == "__main__":
    main()
