"""Compare simulations with replays on a device, and memory forecasts with captures.

    python bench/simulate_gpu.py [--steps N] [--repeats N] [--samples N] [--trace FILE]
                                 [--only simulate|memory] [--models NAME,NAME]

``simulate``: decoders (FULL for decode steps, PIECEWISE for mixed steps) and an MLP are calibrated,
    and the trace is simulated with the measured costs. Then the steps of the trace run through the
    runner, with the same sizes and numbers of requests, on prepared inputs. ``queued`` synchronizes
    once, at the end of the trace; ``waited`` synchronizes after each step, like a loop that reads
    its results. ``median`` is the measured total, and ``ratio`` the simulated total divided by the
    measured total: 1 is exact, 0.95 to 1.05 is the target. ``same_modes`` says whether simulation
    and runner ran the same number of steps in each mode.

``memory``: for five models, the forecast from a few captured sizes is compared with the memory of
    graphs of all sizes. ``median`` is the measured memory, and ``ratio`` the upper bound of the
    forecast divided by the measured memory: 1 to 1.1 is the target. ``driver_bytes`` is the memory
    that the driver allocated outside torch; torch's statistics do not include it.

Without a GPU, small models run on the tape backend, which tests the script only.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from _common import emit
from torch import nn

from dispatchkit import (
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.demo.decoder import DecoderShape
from dispatchkit.demo.models import decoder, mlp
from dispatchkit.demo.replay import resolve_device
from dispatchkit.keys import DispatchConfig, default_capture_sizes
from dispatchkit.observe.trace import StepTrace, read_trace

from dispatchkit_plan import CostModel, Scenario, simulate
from dispatchkit_plan.calibration.calibrate import calibrate
from dispatchkit_plan.calibration.graph_memory import MemoryMeter, forecast_graph_memory

BENCH = "simulate_gpu"
IS_GPU = torch.cuda.is_available()
TRACE = Path(__file__).parents[1] / (
    f"tests/data/traces/step_azure_conv_{'high' if IS_GPU else 'low'}.csv.gz"
)
PLACE = resolve_device("auto")


# -- simulate ---------------------------------------------------------------------------------


def largest(trace: StepTrace) -> int:
    return max(trace.column("num_tokens"))


def calibrated_models(trace: StepTrace) -> dict[str, Callable[[], GraphRunner]]:
    limit = largest(trace)
    if not IS_GPU:
        shape = DecoderShape(num_slots=64, cache_len=32)
        return {
            "decoder": lambda: decoder(shape=shape, max_num_tokens=limit, outputs="view"),
            "mlp": lambda: mlp(max_num_tokens=limit, outputs="view"),
        }
    slots = max(256, *trace.column("num_reqs"))

    def shape(num_layers: int, num_heads: int, head_dim: int) -> DecoderShape:
        # Use short caches, because attention reads the whole cache in each step.
        return DecoderShape(
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=head_dim,
            cache_len=128,
            num_slots=slots,
        )

    return {
        "decoder": lambda: decoder(shape=shape(4, 16, 128), max_num_tokens=limit, outputs="view"),
        "mlp": lambda: mlp(max_num_tokens=limit, outputs="view"),
        # The eager steps of this model take longer on the host than on the device.
        "small decoder": lambda: decoder(
            shape=shape(8, 8, 64), max_num_tokens=limit, outputs="view"
        ),
    }


class Steps:
    """The steps of a trace as calls of a runner with prepared inputs."""

    def __init__(
        self, runner: GraphRunner, trace: StepTrace, specs: dict[str, StaticInput]
    ) -> None:
        generator = torch.Generator(PLACE).manual_seed(0)
        made: dict[int, dict[str, torch.Tensor]] = {}
        self.calls = []
        limit = runner.config.max_num_seqs
        for tokens, reqs, uniform in zip(
            *(trace.column(name) for name in ("num_tokens", "num_reqs", "uniform_decode")),
            strict=True,
        ):
            if not tokens:
                continue
            if tokens not in made:
                made[tokens] = {name: spec.full(tokens, PLACE) for name, spec in specs.items()}
                for tensor in made[tokens].values():
                    if tensor.dtype.is_floating_point:
                        tensor.normal_(generator=generator)
            self.calls.append((made[tokens], min(reqs, limit), uniform))
        self.runner = runner

    def each(self) -> list[tuple[str, int, float]]:
        """Run all steps, synchronizing after each; return (mode, tokens, microseconds) of each."""
        runner, synchronize = self.runner, self.runner.backend.synchronize
        found = []
        synchronize()
        for inputs, num_reqs, uniform in self.calls:
            tokens = next(iter(inputs.values())).shape[0]
            mode = runner.explain(tokens, num_reqs, uniform).decision.mode
            start = perf_counter()
            runner(**inputs, num_reqs=num_reqs, uniform=uniform)
            synchronize()
            found.append((str(mode), tokens, (perf_counter() - start) * 1e6))
        return found

    def run(self, *, waited: bool) -> float:
        """Run all steps; return their duration in seconds."""
        runner, synchronize = self.runner, self.runner.backend.synchronize
        synchronize()
        gc.collect()
        start = perf_counter()
        for inputs, num_reqs, uniform in self.calls:
            runner(**inputs, num_reqs=num_reqs, uniform=uniform)
            if waited:
                synchronize()
        synchronize()
        return perf_counter() - start


def eager_sizes(trace: StepTrace) -> list[int]:
    """Return the sizes at which eager steps are measured, up to the largest step."""
    limit, size = largest(trace), 512 if IS_GPU else 16
    sizes = [1, size]
    while size < limit:
        size = min(limit, size + max(1, size // 6))
        sizes.append(size)
    return sizes


def compare(name: str, runner: GraphRunner, trace: StepTrace, args: argparse.Namespace) -> None:
    """Calibrate, simulate and replay one model, and print the comparison."""
    models: dict[str, CostModel] = {}
    start = perf_counter()
    for pace in ("queued", "waited"):
        models[pace] = calibrate(
            runner,
            pace=pace,
            samples=args.samples,
            eager_sizes=eager_sizes(trace),
            name=f"{name}, {pace}",
        )
    calibrated_s = perf_counter() - start
    report = runner.capture()
    specs = runner.spec.inputs
    steps = Steps(runner, trace, specs)
    simulated = {
        pace: simulate(trace, Scenario(cost_model=model, config=runner.config))
        for pace, model in models.items()
    }
    steps.run(waited=False)
    modes = dict(runner.stats().steps_by_mode)
    allocations = device_allocations()
    totals: dict[str, list[float]] = {"queued": [], "waited": []}
    for _ in range(args.repeats):
        for pace, times in totals.items():
            times.append(steps.run(waited=pace == "waited"))
    allocations = device_allocations() - allocations
    for pace, times in totals.items():
        measured = statistics.median(times)
        result = simulated[pace]
        emit(
            BENCH,
            f"{name}, {pace}: simulated over measured",
            measured * 1e3,
            "ms",
            len(times),
            ratio_to="replay",
            ratio=result.time_s / measured,
            simulated_ms=round(result.time_s * 1e3, 2),
            eager_ms=round(result.eager_time_s * 1e3, 2),
            least_ms=round(min(times) * 1e3, 2),
            most_ms=round(max(times) * 1e3, 2),
            steps=len(steps.calls),
            modes={mode: count for mode, count in result.modes.items() if count},
            same_modes={m: c for m, c in result.modes.items() if c}
            == {str(m): c for m, c in modes.items() if c},
            device_allocations=allocations,
            calibrated_s=round(calibrated_s, 1),
            captured_s=round(report.seconds, 1),
            source=models[pace].source,
        )
    if args.dump:
        costs = {pace: one.to_json() for pace, one in models.items()}
        path = Path(args.dump) / f"costs_{name.replace(' ', '_')}.json"
        path.write_text(json.dumps({"costs": costs, "each": steps.each()}))


def device_allocations() -> int:
    """Return how often torch allocated memory from the device.

    Such allocations are slow. After a warmup, they are rare.
    """
    return torch.cuda.memory_stats()["num_device_alloc"] if IS_GPU else 0


# -- memory -----------------------------------------------------------------------------------


def _weights(count: int, rows: int, columns: int) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    return [
        torch.randn(rows, columns, device=PLACE).mul_(columns**-0.5).to(dtype) for _ in range(count)
    ]


def conv_step() -> tuple[Any, dict[str, StaticInput]]:
    """Return a step of three convolutions over embedded texts of 64 characters."""
    channels = 128 if IS_GPU else 8
    embedding = nn.Embedding(256, channels, device=PLACE)
    convs = [nn.Conv1d(channels, channels, 5, padding=2, device=PLACE) for _ in range(3)]

    def step(letters: torch.Tensor) -> torch.Tensor:
        hidden = embedding(letters).transpose(1, 2)
        for conv in convs:
            hidden = torch.relu(conv(hidden))
        return hidden.mean(-1)

    return step, {"letters": StaticInput((None, 64), "int64")}


def wide_step() -> tuple[Any, dict[str, StaticInput]]:
    """Return a step of two layers with a hidden width of 16 times the input width."""
    width = 1024 if IS_GPU else 16
    (up,), (down,) = _weights(1, 16 * width, width), _weights(1, width, 16 * width)

    def step(hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(nn.functional.linear(hidden, up))
        return nn.functional.linear(inner, down)

    return step, {"hidden": StaticInput((None, width), up.dtype)}


def memory_models() -> dict[str, Callable[[], GraphRunner]]:
    sizes = default_capture_sizes(512 if IS_GPU else 16)

    def made(build: Callable[[], tuple[Any, dict[str, StaticInput]]]) -> GraphRunner:
        step, inputs = build()
        config = DispatchConfig(sizes=sizes, mode="FULL")
        return GraphRunner(step, inputs, options=RunnerOptions(config=config))

    shape = DecoderShape(num_layers=8, num_heads=8, head_dim=64, cache_len=128, num_slots=512)
    narrow = DecoderShape(num_layers=32, num_heads=4, head_dim=64, cache_len=128, num_slots=512)
    small = DecoderShape(num_slots=32, cache_len=16)
    return {
        "mlp": lambda: mlp(sizes=sizes),
        "decoder": lambda: decoder(sizes=sizes, shape=shape if IS_GPU else small),
        "deep narrow": lambda: decoder(sizes=sizes, shape=narrow if IS_GPU else small),
        "wide": lambda: made(wide_step),
        "convolutions": lambda: made(conv_step),
    }


def forecast(name: str, runner: GraphRunner, args: argparse.Namespace) -> None:
    """Forecast the memory of a runner's graphs, then capture all graphs and compare."""
    start = perf_counter()
    predicted = forecast_graph_memory(runner)
    forecast_s = perf_counter() - start
    meter = MemoryMeter(runner)
    sizes = sorted({key.num_tokens for key in runner.registry}, reverse=True)
    taken, count = [], 0
    for size in sizes:
        report = runner.capture([key for key in runner.registry if key.num_tokens == size])
        count += report.num_graphs
        taken.append(meter.pool_bytes())
    driver = meter.driver_bytes()
    emit(
        BENCH,
        f"{name}: forecast over memory of graphs",
        taken[-1],
        "bytes",
        1,
        ratio_to="all graphs",
        ratio=predicted.high_bytes / taken[-1],
        expected_ratio=round(predicted.expected_bytes / taken[-1], 3),
        forecast_bytes=predicted.high_bytes,
        expected_bytes=predicted.expected_bytes,
        low_bytes=predicted.low_bytes,
        driver_bytes=driver,
        driver_told=[predicted.driver_bytes, predicted.driver_high_bytes],
        graphs=count,
        sizes=len(sizes),
        forecast_s=round(forecast_s, 1),
    )
    if args.dump:
        path = Path(args.dump) / f"memory_{name.replace(' ', '_')}.json"
        path.write_text(json.dumps({"sizes": sizes, "pool": taken, "driver": driver}))


def main() -> None:
    """Measure the selected models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000 if IS_GPU else 40)
    parser.add_argument("--repeats", type=int, default=5 if IS_GPU else 1)
    parser.add_argument("--samples", type=int, default=7 if IS_GPU else 1)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--only", choices=("simulate", "memory"))
    parser.add_argument("--models", default="")
    parser.add_argument(
        "--dump",
        default="",
        help="folder for cost models, step times and the memory after each capture",
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")  # steps above the largest graph are intended
    if not IS_GPU:
        torch.set_num_threads(1)
    selected = set(filter(None, args.models.split(",")))
    trace = read_trace(args.trace)[: args.steps]
    if args.only != "memory":
        for name, make in calibrated_models(trace).items():
            if not selected or name in selected:
                compare(name, make(), trace, args)
                release()
    if args.only != "simulate":
        for name, make in memory_models().items():
            if not selected or name in selected:
                forecast(name, make(), args)
                release()


def release() -> None:
    """Release the previous model's memory."""
    gc.collect()
    if IS_GPU:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
