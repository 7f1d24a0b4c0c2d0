"""Measure the duration of planning: reading, curves, hedge validation, simulation.

Each case prints one JSON line with times in milliseconds: the median, the best sample, the least
CPU time of a sample (which other processes affect less), and the target, if any.

    python bench/plan.py [SAMPLES]
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, process_time_ns

import numpy as np
from _common import emit

from dispatchkit.observe.trace import TRACE_COLUMNS, read_trace

from dispatchkit_plan import Scenario, free_tokens, plan_sizes, simulate
from dispatchkit_plan.optimal import padding_costs, size_curve
from dispatchkit_plan.workload import as_workload

TRACE = Path(__file__).parents[1] / "tests/data/traces/step_azure_conv_high.csv.gz"


def million_steps(folder: Path) -> Path:
    """Write a trace of a million steps and return its path."""
    path = folder / "million.csv"
    with path.open("w") as out:
        out.write(",".join(TRACE_COLUMNS) + "\n")
        for start in range(0, 1_000_000, 10_000):
            steps = range(start, start + 10_000)
            out.write(
                "".join(f"{i},{i * 0.01:.4f},{i % 999 + 1},1,{i % 999 + 1},0,0\n" for i in steps)
            )
    return path


def measure(case: str, run: Callable[[], object], samples: int, target_ms: float | None) -> None:
    """Measure one case and print its line."""
    times, busy = [], []
    for _ in range(samples):
        start, start_cpu = perf_counter_ns(), process_time_ns()
        run()
        times.append((perf_counter_ns() - start) / 1e6)
        busy.append((process_time_ns() - start_cpu) / 1e6)
    emit(
        "plan",
        case,
        statistics.median(times),
        "ms",
        samples,
        best=round(min(times), 3),
        cpu=round(min(busy), 3),
        target=target_ms,
    )


def main(samples: int = 5) -> None:
    """Measure all cases."""
    trace = read_trace(TRACE)
    demand = as_workload(trace).demand(512)
    sizes = np.arange(1, 513)
    table = list(range(513))
    measure(
        "curve k=1..64 over 512 sizes",
        lambda: size_curve(sizes, padding_costs(sizes, demand), 64),
        samples,
        100.0,
    )
    measure("plan, no hedge", lambda: plan_sizes(trace, graphs=16, hedge="none"), samples, None)
    measure(
        "plan on the first half, hedge validated",
        lambda: plan_sizes(trace, graphs=16, fit_on="first-half"),
        samples,
        None,
    )
    measure(
        "plan by kind of step",
        lambda: plan_sizes(trace, graphs=25, keyed=True, hedge="none"),
        samples,
        None,
    )
    measure(
        "100,000 hints",
        lambda: [free_tokens(table, n % 512) for n in range(100_000)],
        samples,
        None,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = million_steps(Path(folder))
        measure("read a million steps", lambda: read_trace(path), samples, 5000.0)
        million = read_trace(path)
    for case, target_ms, scenario in [
        ("simulate a million steps, vllm", 1000.0, Scenario()),
        ("simulate a million steps, vllm, 12 live graphs", 10_000.0, Scenario(max_graphs=12)),
        ("simulate a million steps, adaptive", 10_000.0, Scenario(policy="adaptive")),
    ]:
        measure(case, functools.partial(simulate, million, scenario), samples, target_ms)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
