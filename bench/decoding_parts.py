"""Measure the parts of a decoding step: host, kernels, gaps, and the memory-bound minimum.

    python bench/decoding_parts.py [--models NAME ...] [--cases CASE ...] [--batches N ...]
        [--rounds N] [--trace-steps N] [--length N] [--most N] [--trace FILE]

Models, cases and traces are those of ``decoding.py``, whose ``--fill-cache`` also compiles for this
script in advance. For each case:

- ``first pass``: the steps of a trace from a cold start, with host times of each call. A call that
  takes more than ten times the median has captured, compiled or tuned something. The number of
  these calls and their total excess time are printed.
- ``second pass``: the time per step when the same steps are repeated.

For each batch size, with everything captured:

- ``host``: one call on an idle device, without waiting for its result;
- ``wall``: the time per step of 20 consecutive steps;
- ``device``: the time between two events around a call that is queued behind other work, which
  hides the host time;
- ``kernels``: the durations of all kernels of a call (torch.profiler), their number, and the
  longest by name; ``gaps`` is ``device`` minus the time in which any kernel runs;
- ``floor``: the bytes of the weights and of the used part of the cache that a step reads, divided
  by the rate of reading one large tensor on this device.

Without a CUDA device, the script prints a line and exits.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

try:
    import transformers  # noqa: F401 - fails here with a clearer message than in the modules below
except ImportError:
    raise SystemExit(
        "This script requires transformers: pip install 'dispatchkit[transformers]'"
    ) from None

from _common import at_least_one, emit
from _compile_time import compile_time, load_compiler
from _decoding_cases import (
    CASES,
    DEVICE,
    IS_GPU,
    OWN_COMPILED,
    Case,
    free_memory,
    make_model,
    reset_compiler,
    synchronize,
)
from _decoding_sizes import trace_sizes

BENCH = "decoding_parts"
TRACE = Path(__file__).resolve().parent.parent / "tests/data/traces/step_azure_conv_low.csv.gz"
# Number of device cycles that hide the host time of one call.
HIDING_CYCLES = 20_000_000


class Parts:
    """The measurement of the parts of a decoding step, for one case.

    Args:
        name: Name of the model.
        model: Model whose steps the case runs.
        case: Case to measure.
        args: Command-line arguments.
    """

    def __init__(self, name: str, model: Any, case: Case, args: argparse.Namespace) -> None:
        self.name, self.model, self.case, self.args = name, model, case, args
        maker = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(3, 90, (args.most,), generator=maker).to(DEVICE)
        self._positions = torch.full(
            (args.most,), args.length // 2, dtype=torch.int64, device=DEVICE
        )

    def step(self, rows: int) -> None:
        """Run one step."""
        self.case.run(self._tokens[:rows], self._positions[:rows])

    def measure_passes(self, sizes: Sequence[int]) -> None:
        """Measure a trace from a cold start, then three times warm."""
        before, start, calls = compile_time(), perf_counter(), []
        for rows in sizes:
            begin = perf_counter()
            self.step(rows)
            calls.append(perf_counter() - begin)
        synchronize()
        elapsed, spent = perf_counter() - start, compile_time().since(before)
        usual = statistics.median(calls)
        long = [one for one in calls if one > 10 * usual]
        self.emit_part(
            "first pass",
            (elapsed - spent.total) / len(sizes) * 1e3,
            compile_s=round(spent.total, 2),
            long_calls=len(long),
            long_ms=round((sum(long) - usual * len(long) - spent.total) * 1e3, 1),
            host_median_ms=round(usual * 1e3, 3),
            **self.case.stats(),
        )
        for turn in range(3):
            start = perf_counter()
            for rows in sizes:
                self.step(rows)
            synchronize()
            self.emit_part("second pass", (perf_counter() - start) / len(sizes) * 1e3, turn=turn)

    def batch(self, rows: int, rate: float) -> None:
        """Measure steps of one size."""
        for _ in range(5):
            self.step(rows)
        host, wall, device = [], [], []
        for _ in range(self.args.rounds):
            synchronize()
            start = perf_counter()
            self.step(rows)
            host.append((perf_counter() - start) * 1e3)
            synchronize()
            start = perf_counter()
            for _ in range(20):
                self.step(rows)
            synchronize()
            wall.append((perf_counter() - start) / 20 * 1e3)
            device.append(self._device_ms(rows))
        kernels = self._kernels(rows)
        num_bytes = self._bytes_read(rows)
        on_device = statistics.median(device)
        facts = {
            "wall_ms": statistics.median(wall),
            "device_ms": on_device,
            "kernels_ms": kernels["sum"],
            "busy_ms": kernels["busy"],
            "gaps_ms": on_device - kernels["busy"],
            "floor_ms": num_bytes / rate * 1e3,
        }
        self.emit_part(
            "batch",
            statistics.median(host),
            rows=rows,
            **{name: round(value, 4) for name, value in facts.items()},
            num_kernels=kernels["number"],
            bytes_read=num_bytes,
            longest=kernels["longest"],
        )

    def emit_part(self, part: str, ms: float, **more: Any) -> None:
        """Print one line."""
        emit(BENCH, self.case.name, ms, "ms", self.args.rounds, model=self.name, part=part, **more)

    def _device_ms(self, rows: int) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HIDING_CYCLES)  # noqa: SLF001
        first.record()
        self.step(rows)
        last.record()
        synchronize()
        return float(first.elapsed_time(last))

    def _kernels(self, rows: int, steps: int = 5) -> dict[str, Any]:
        """Return the times of a step's kernels in milliseconds, as measured by the profiler."""
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            for _ in range(steps):
                self.step(rows)
                synchronize()
        spans, by_name, number = [], Counter[str](), 0
        for event in profile.events():
            is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
            if not is_kernel or getattr(event, "is_user_annotation", False):
                continue
            start, end = event.time_range.start, event.time_range.end
            spans.append((start, end))
            by_name[event.name] += end - start
            number += 1
        busy, reached = 0.0, 0.0
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return {
            "sum": sum(end - start for start, end in spans) / steps / 1e3,
            "busy": busy / steps / 1e3,
            "number": number / steps,
            "longest": {name[:70]: round(us / steps, 1) for name, us in by_name.most_common(8)},
        }

    def _bytes_read(self, rows: int) -> int:
        """Return the bytes that a step must read: weights and the used part of the cache."""
        config = self.model.config
        weights = {
            one.data_ptr(): one.nbytes
            for name, one in self.model.named_parameters()
            if "embed" not in name and "wpe" not in name and "wte" not in name
        }
        head = self.model.get_output_embeddings().weight
        weights[head.data_ptr()] = head.nbytes
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        width = config.hidden_size // heads * kv_heads * head.element_size()
        cache = 2 * config.num_hidden_layers * rows * (self.args.length // 2) * width
        return sum(weights.values()) + cache


def reading_rate() -> float:
    """Return the rate of reading one large tensor, in bytes per second."""
    large = torch.ones(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    samples = []
    for _ in range(12):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        large.max()
        last.record()
        synchronize()
        samples.append(large.nbytes / first.elapsed_time(last) * 1e3)
    return max(samples)


def main() -> None:
    """Measure all requested models and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama-small", "llama-1b"])
    cases = [OWN_COMPILED, "reduce-overhead"]
    parser.add_argument("--cases", nargs="+", default=cases, choices=list(CASES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16, 24, 32])
    parser.add_argument("--rounds", type=at_least_one, default=15)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--trace-steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--most", type=int, default=128, help="largest batch")
    args = parser.parse_args()
    if not IS_GPU:
        emit(BENCH, "all", 0, "ms", 0, missing="torch finds no CUDA device")
        return
    args.dynamic = "batch"
    args.sizes = [one for one in (1, 2, 4, *range(8, 513, 8)) if one < args.most] + [args.most]
    load_compiler(DEVICE)
    rate = reading_rate()
    emit(BENCH, "reading one large tensor", rate / 1e9, "GB/s", 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings from torch.compile and transformers
        for name in args.models:
            model = make_model(name)
            for one in args.cases:
                free_memory()
                parts = Parts(name, model, CASES[one](model, args), args)
                parts.measure_passes(trace_sizes(args))
                for rows in args.batches:
                    parts.batch(rows, rate)
                del parts
            del model
            reset_compiler()


if __name__ == "__main__":
    main()
