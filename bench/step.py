"""Measure the host time of a complete step: decide, copy inputs, launch, return the result.

    python bench/step.py [ROUNDS] [--trace steps.csv.gz] [--skip-compile] [--only GROUP]

Steps have the sizes of a real trace, in its order. All rivals run in one process and take turns
every few steps, each after two unmeasured steps. The device is synchronized between turns, outside
the measured time, so that the queue of launches is never full. Rivals that do not support varying
sizes run one size only.

- ``eager``, ``torch.compile`` (mode ``reduce-overhead``), ``make_graphed_callables``;
- ``by hand``: typical code with a dict of graphs, a slice assignment for each input, a fill of the
  stale rows, a replay and a slice;
- ``by hand, best``: cached views, one fused copy and no checks, launched by torch or directly;
- ``bare replay`` and ``bare launch``: only the graph.

Inputs of a size are the same tensors each time, like an engine's own buffers, except in the case
``other addresses each time``.

Groups: ``device`` (the base case: 3 int64 inputs, 50 operations), ``inputs`` (1 input, 8 inputs,
    and 3 inputs of two dtypes), ``nodes`` (steps of 1 and of 500 operations), ``host`` (numpy
    arrays and pinned memory). Without a GPU, the tape backend is measured. ``runner`` is the
    runner's own time, with launches and copy nodes that do nothing; ``tape`` compares replay with
    eager. ``floors.py`` measures the parts of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter_ns
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import at_least_one, emit

from dispatchkit import (
    BatchDescriptor,
    BufferOptions,
    CaptureOptions,
    GraphKey,
    GraphRunner,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
)
from dispatchkit.backends.cuda import CudaBackend
from dispatchkit.backends.cuda.copy import CopyKernel, CopyNode
from dispatchkit.backends.tape import TapeBackend
from dispatchkit.errors import TraceError
from dispatchkit.observe.trace import read_trace
from dispatchkit.testing import OneBucketPolicy

BENCH = "step"
TRACES = Path(__file__).resolve().parent.parent / "tests" / "data" / "traces"
SIZES = (1, 2, 4, *range(8, 257, 8))
FIXED = 200  # number of rows for rivals with one size
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
FULL_KEY = GraphKey(RuntimeMode.FULL, BatchDescriptor(FIXED))

Run = Callable[[int], Any]  # called with the number of rows


class Step(torch.nn.Module):
    """Step of ``num_ops`` operations with any number of inputs and one output."""

    def __init__(self, num_ops: int) -> None:
        super().__init__()
        self.num_ops = num_ops

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Stack the inputs and add 1 repeatedly."""
        dtype = inputs[0].dtype
        out = torch.stack([one if one.dtype is dtype else one.to(dtype) for one in inputs], -1)
        for _ in range(self.num_ops - 1):
            out = out + 1
        return out


def sizes_of(path: Path, count: int) -> list[int]:
    """Return ``count`` batch sizes of a trace that fit the graphs, repeated if necessary."""
    fitting = [size for size in read_trace(path).column("num_tokens") if 1 <= size <= SIZES[-1]]
    return list(islice(cycle(fitting), count))


def bucket_of(rows: int) -> int:
    """Return the smallest capture size for a number of rows."""
    return next(size for size in SIZES if size >= rows)


def names(count: int) -> list[str]:
    """Return the names of ``count`` inputs."""
    return [f"input_{index}" for index in range(count)]


def direct_launch() -> Callable[[Any, Any], int]:
    """Return the function cudaGraphLaunch."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    runtime.cudaGraphLaunch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return runtime.cudaGraphLaunch


class Case:
    """A kind of step, its inputs of every size, and all ways to run it."""

    def __init__(
        self, sizes: Iterable[int], dtypes: list[torch.dtype], num_ops: int, host: bool = False
    ) -> None:
        self.dtypes, self.host, self.step = dtypes, host, Step(num_ops)
        self.sizes = set(sizes) | {FIXED}
        self.given = {
            rows: [torch.randint(1, 99, (rows,)).to(dtype) for dtype in dtypes]
            for rows in self.sizes
        }
        if host:
            self.pinned = {r: [t.pin_memory() for t in ts] for r, ts in self.given.items()}
            self.arrays = {r: [t.numpy() for t in ts] for r, ts in self.given.items()}
        self.device = {r: [t.to(DEVICE) for t in ts] for r, ts in self.given.items()}
        self.elsewhere = {r: [t.clone() for t in ts] for r, ts in self.device.items()}
        self.static = [torch.zeros(SIZES[-1], dtype=dtype, device=DEVICE) for dtype in dtypes]
        self.graphs: dict[int, Any] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.execs: dict[int, ctypes.c_void_p] = {}

    def capture(self) -> None:
        """Capture the graphs of the handwritten rivals."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for bucket in sorted({bucket_of(rows) for rows in self.sizes}, reverse=True):
            views = [static[:bucket] for static in self.static]
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(*views)
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.outputs[bucket] = self.step(*views)
            graph.instantiate()
            self.graphs[bucket] = graph
            self.execs[bucket] = ctypes.c_void_p(int(graph.raw_cuda_graph_exec()))

    # -- rivals -------------------------------------------------------------------------

    def eager(self) -> Run:
        """Return a function that runs the step without graphs."""
        step, device = self.step, self.device
        return lambda rows: step(*device[rows])

    def by_hand(self, given: dict[int, list[torch.Tensor]], non_blocking: bool = False) -> Run:
        """Return a typical handwritten implementation."""
        static, graphs, outputs = self.static, self.graphs, self.outputs

        def run(rows: int) -> torch.Tensor:
            bucket = bucket_of(rows)
            for buffer, tensor in zip(static, given[rows], strict=True):
                if non_blocking:
                    buffer[:rows].copy_(tensor, non_blocking=True)
                else:
                    buffer[:rows] = tensor
            static[0][rows:bucket].fill_(0)
            graphs[bucket].replay()
            return outputs[bucket][:rows]

        return run

    def by_hand_best(self, *, direct: bool) -> Run:
        """Return a handwritten implementation with cached views, one fused copy and no checks.

        It supports only one dtype and does not fill stale rows.
        """
        kept = {
            rows: (
                [static[:rows] for static in self.static],
                self.graphs[bucket_of(rows)],
                self.execs[bucket_of(rows)],
                self.outputs[bucket_of(rows)][:rows],
            )
            for rows in self.sizes
        }
        device, copy, launch, stream = self.device, torch._foreach_copy_, direct_launch(), None

        def replay(rows: int) -> torch.Tensor:
            views, graph, _, out = kept[rows]
            copy(views, device[rows])
            graph.replay()
            return out

        def launched(rows: int) -> torch.Tensor:
            views, _, handle, out = kept[rows]
            copy(views, device[rows])
            launch(handle, stream)
            return out

        return launched if direct else replay

    def bare_replay(self) -> Run:
        """Return a function that replays the graph through torch."""
        graphs = {rows: self.graphs[bucket_of(rows)] for rows in self.sizes}
        return lambda rows: graphs[rows].replay()

    def bare_launch(self) -> Run:
        """Return a function that launches the graph through the CUDA runtime."""
        execs = {rows: self.execs[bucket_of(rows)] for rows in self.sizes}
        launch = direct_launch()
        return lambda rows: launch(execs[rows], None)

    def graphed(self) -> Run:
        """Return the step graphed by torch.cuda.make_graphed_callables, for one size."""
        sample = tuple(self.device[FIXED])
        step = torch.cuda.make_graphed_callables(Step(self.step.num_ops), sample)
        return lambda rows: step(*sample)

    def compiled(self) -> Run:
        """Return the step compiled in mode reduce-overhead, for one size."""
        sample = tuple(self.device[FIXED])
        step = torch.compile(Step(self.step.num_ops), mode="reduce-overhead", dynamic=False)
        for _ in range(5):
            step(*sample)
        return lambda rows: step(*sample)

    # -- this package -------------------------------------------------------------------

    def runner(self, outputs: str, backend: Any = "auto") -> GraphRunner:
        """Return a runner that has captured all sizes."""
        inputs = {
            name: StaticInput((None,), dtype, host=self.host)
            for name, dtype in zip(names(len(self.dtypes)), self.dtypes, strict=True)
        }
        runner = GraphRunner(
            _named(self.step, len(self.dtypes)),
            inputs,
            sizes=SIZES,
            mode="FULL",
            policy=OneBucketPolicy(),
            backend=backend,
            outputs=outputs,
            options=RunnerOptions(
                buffers=BufferOptions(output_batch_dims=0),
                # The proof would reject a graph that does nothing.
                capture=CaptureOptions(prove_rows=not isinstance(backend, Idle)),
            ),
        )
        report = runner.capture()
        if report.failed:
            raise SystemExit(f"captures failed: {report.failed}")
        return runner

    def call(
        self, runner: GraphRunner, given: dict[int, list[Any]], *, by_name: bool = True
    ) -> Run:
        """Return a call of the runner, with inputs by name as in engines, or by position."""
        if not by_name:
            return lambda rows: runner(*given[rows])
        kept = {
            rows: dict(zip(names(len(values)), values, strict=True))
            for rows, values in given.items()
        }
        return lambda rows: runner(**kept[rows])

    def call_elsewhere(self, runner: GraphRunner) -> Run:
        """Return a call whose inputs have different addresses than in the previous call."""
        kept = {
            rows: [
                dict(zip(names(len(self.dtypes)), values[rows], strict=True))
                for values in (self.device, self.elsewhere)
            ]
            for rows in self.sizes
        }

        def run(rows: int) -> Any:
            turns = kept[rows]
            turns.reverse()
            return runner(**turns[0])

        return run


def _named(step: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a step with named inputs, which a runner reads from its signature."""
    listing = ", ".join(names(count))
    scope: dict[str, Any] = {"step": step}
    exec(f"def named({listing}):\n    return step({listing})", scope)  # noqa: S102
    return scope["named"]


def in_turns(
    cases: dict[str, Run], sizes: list[int], *, rounds: int, together: int
) -> dict[str, list[float]]:
    """Return microseconds per step of each case, one sample per turn.

    At the start of a turn, caches contain the data of the previous case. Each turn therefore begins
    with two unmeasured steps of the trace, and the order of cases rotates by one every round.

    Args:
        cases: Functions to run, by name.
        sizes: Number of rows of each step, in order.
        rounds: Number of turns of each case.
        together: Number of steps per turn, between two synchronizations.
    """
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        for rows in sorted(set(sizes)):
            for _ in range(2):
                run(rows)
        wait()
    order, before = cycle(sizes), sizes[-2:]
    names_in_turn = deque(cases)
    for _ in range(rounds):
        turn = list(islice(order, together))
        names_in_turn.rotate(-1)
        for name in names_in_turn:
            run = cases[name]
            for rows in before:
                run(rows)
            wait()
            start = perf_counter_ns()
            for rows in turn:
                run(rows)
            samples[name].append((perf_counter_ns() - start) / together / 1000)
        before = turn[-2:]
    wait()
    return samples


def wait() -> None:
    """Synchronize the device."""
    if HAS_GPU:
        torch.cuda.synchronize()


def emit_samples(
    group: str, samples: dict[str, list[float]], ratio_to: str, **more: Any
) -> dict[str, float]:
    """Print the median of each case, and of its ratios to one case within a turn."""
    medians = {}
    for name, values in samples.items():
        pairs = zip(values, samples[ratio_to], strict=True)
        medians[name] = statistics.median(values)
        emit(
            BENCH,
            name,
            medians[name],
            "us",
            len(values),
            ratio_to=ratio_to,
            ratio=statistics.median(mine / base for mine, base in pairs),
            best=round(min(values), 2),
            group=group,
            **more,
        )
    return medians


def emit_ratios(group: str, samples: dict[str, list[float]], wanted: list[tuple[str, str, float]]):
    """Print ratios that have a limit, and whether they stay within it."""
    for mine, other, limit in wanted:
        if mine in samples and other in samples:
            pairs = zip(samples[mine], samples[other], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            emit(
                BENCH,
                f"{mine} / {other}",
                ratio,
                "ratio",
                len(samples[mine]),
                ratio_to=other,
                ratio=ratio,
                limit=round(limit, 4),
                reached=ratio <= limit,
                group=group,
            )


# -- on a device ------------------------------------------------------------------------------

INT64 = torch.int64


def device_group(sizes: list[int], rounds: int, *, compile_too: bool) -> None:
    """Compare the base case with all rivals."""
    case = Case(sizes, [INT64] * 3, 50)
    case.capture()
    view, owned = case.runner("view"), case.runner("owned")
    by_torch = case.runner("view", CudaBackend(copy_node=False))
    paths = {
        what: one.controls.input_path(FULL_KEY) for what, one in (("with", view), ("out", by_torch))
    }
    cases: dict[str, Run] = {
        "eager": case.eager(),
        "by hand": case.by_hand(case.device),
        "by hand, best": case.by_hand_best(direct=False),
        "by hand, best, launched directly": case.by_hand_best(direct=True),
        "bare replay": case.bare_replay(),
        "bare launch": case.bare_launch(),
        "runner, view": case.call(view, case.device),
        "runner, view, other addresses each time": case.call_elsewhere(view),
        "runner, view, by position": case.call(view, case.device, by_name=False),
        "runner, view, without the copy node": case.call(by_torch, case.device),
        "runner, owned": case.call(owned, case.device),
        "runner, in place": view.run_in_place,
    }
    others = {"make_graphed_callables": case.graphed}
    if compile_too:
        others["reduce-overhead"] = case.compiled
    for name, make in others.items():
        try:
            cases[name] = make()
        except Exception as error:  # noqa: BLE001 - the failure of a rival must not stop the others
            what = f"{type(error).__name__}: {error}"
            emit(BENCH, name, 0, "us", 0, group="device", failed=what[:200])
    samples = in_turns(cases, sizes, rounds=rounds, together=10)
    emit_samples("device", samples, "by hand", inputs_by=paths)
    wanted = [
        ("runner, view", "by hand", 1 / 3),
        ("runner, view", "make_graphed_callables", 0.35),
        ("runner, view, other addresses each time", "make_graphed_callables", 0.35),
        ("runner, view", "reduce-overhead", 1 / 12),
        ("runner, owned", "by hand", 0.6),
    ]
    emit_ratios("device", samples, wanted)
    # With one size, there are no stale rows.
    ours = ("runner, view", "runner, view, without the copy node", "runner, in place")
    steady = {name: cases[name] for name in ("by hand", *ours)}
    steady |= {name: cases[name] for name in ("by hand, best", "bare launch", "bare replay")}
    samples = in_turns(steady, [FIXED], rounds=rounds, together=10)
    emit_samples("one size", samples, "bare launch")
    pairs = zip(samples["runner, in place"], samples["bare launch"], strict=True)
    over = statistics.median(mine - base for mine, base in pairs)
    emit(
        BENCH,
        "in place, time beyond a bare launch",
        over,
        "us",
        rounds,
        limit=1.0,
        reached=over <= 1.0,
        group="one size",
    )


def inputs_group(sizes: list[int], rounds: int) -> None:
    """Compare steps with 1 input, with 8 inputs, and with inputs of two dtypes."""
    shapes = {
        "1 input": [INT64],
        "8 inputs": [INT64] * 8,
        "3 inputs of two dtypes": [INT64, torch.int32, INT64],
    }
    for name, dtypes in shapes.items():
        case = Case(sizes, dtypes, 50)
        case.capture()
        cases = {
            "by hand": case.by_hand(case.device),
            "runner, view": case.call(case.runner("view"), case.device),
            "runner, owned": case.call(case.runner("owned"), case.device),
        }
        samples = in_turns(cases, sizes, rounds=rounds, together=10)
        emit_samples("inputs", samples, "by hand", inputs=name)


def nodes_group(sizes: list[int], rounds: int) -> None:
    """Compare steps of 1 and of 500 operations."""
    for num_ops in (1, 500):
        case = Case(sizes, [INT64] * 3, num_ops)
        case.capture()
        view = case.runner("view")
        cases = {
            "eager": case.eager(),
            "by hand": case.by_hand(case.device),
            "bare replay": case.bare_replay(),
            "bare launch": case.bare_launch(),
            "runner, view": case.call(view, case.device),
            "runner, in place": view.run_in_place,
        }
        samples = in_turns(cases, sizes, rounds=rounds, together=10 if num_ops < 100 else 2)
        emit_samples("nodes", samples, "by hand", operations=num_ops)


def host_group(sizes: list[int], rounds: int) -> None:
    """Compare inputs in host memory, synchronizing after each step or after ten steps."""
    case = Case(sizes, [INT64] * 3, 50, host=True)
    case.capture()
    view, staged = case.runner("view"), case.runner("view", CudaBackend(copy_node=False))
    paths = {
        what: one.controls.input_path(FULL_KEY) for what, one in (("with", view), ("out", staged))
    }

    def in_place(runner: GraphRunner) -> Run:
        buffers = runner.buffers
        targets = [buffers[name].numpy() for name in buffers]

        def step(rows: int) -> Any:
            buffers.wait()
            for target, array in zip(targets, case.arrays[rows], strict=True):
                target[:rows] = array
            return runner.run_in_place(rows)

        return step

    cases = {
        "by hand, pinned": case.by_hand(case.pinned, non_blocking=True),
        "by hand, not pinned": case.by_hand(case.given),
        "runner, arrays": case.call(view, case.arrays),
        "runner, CPU tensors": case.call(view, case.given),
        "runner, owned, arrays": case.call(case.runner("owned"), case.arrays),
        "runner, arrays, by position": case.call(view, case.arrays, by_name=False),
        "runner, written in place": in_place(view),
        "runner, arrays, without the copy node": case.call(staged, case.arrays),
        "runner, written in place, without the copy node": in_place(staged),
        "bare launch": case.bare_launch(),
    }
    for together in (1, 10):
        samples = in_turns(cases, sizes, rounds=rounds, together=together)
        emit_samples(
            "host", samples, "by hand, pinned", steps_between_waits=together, inputs_by=paths
        )
        if together == 1:
            emit_ratios("host", samples, [("runner, arrays", "by hand, pinned", 1 / 3)])


# -- without a device -------------------------------------------------------------------------


class Idle(TapeBackend):
    """Tape whose graphs, launches and copy nodes do nothing, to measure the runner itself.

    Launches and updates of copy nodes call C functions through ctypes, as on a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_stream_handle = partial(int, 0)

    def capture(self, run: Any, **options: Any) -> Any:
        """Capture a graph whose replay does nothing."""
        graph = super().capture(run, **options)
        graph.replay = lambda: None
        graph.raw_graph_handle = graph.raw_exec_handle = 0
        return graph

    def copy_node(self, num_regions: int, num_bytes: int, data_bytes: int = 0) -> CopyNode:
        """Return a CUDA copy node that never runs."""
        nothing = ctypes.c_void_p()
        find, enter = (lambda graph: 0), (lambda: None)
        kernel = CopyKernel(nothing, lambda *_: 0, idle_call, find, enter, max(data_bytes, 16))
        return CopyNode(kernel, num_regions, num_bytes)

    def direct_launch(self, graph: Any) -> tuple[Any, Any]:
        """Return a launch function that does nothing, and a null handle."""
        return idle_call, ctypes.c_void_p()


#: C function that returns 0 for a null pointer and ignores all other arguments.
idle_call: Any = ctypes.CDLL(None).abs


def runner_group(sizes: list[int], rounds: int) -> None:
    """Measure the runner's own time on a CPU."""
    case = Case(sizes, [INT64] * 3, 1)
    runner = case.runner("view", Idle())
    argument = ctypes.c_void_p()
    cases = {
        "launch that does nothing": lambda rows: idle_call(argument, argument),
        "runner, view": case.call(runner, case.device),
        "runner, view, other addresses each time": case.call_elsewhere(runner),
        "runner, view, by position": case.call(runner, case.device, by_name=False),
        "runner, in place": case.runner("view", Idle()).run_in_place,
    }
    for group, walked in (("runner", sizes), ("runner, one size", [FIXED])):
        samples = in_turns(cases, walked, rounds=rounds, together=50)
        emit_samples(group, samples, "launch that does nothing")


def tape_group(rounds: int) -> None:
    """Compare replay on the tape with eager."""
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    mlp = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())])
    block = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0).eval()
    for name, model, shape in (("mlp", mlp, (8, 64)), ("block", block, (2, 16, 64))):
        x = torch.randn(shape)
        backend = TapeBackend()
        with torch.no_grad():
            stream, pool = backend.new_stream(), backend.new_pool()
            graph = backend.capture(lambda model=model, x=x: model(x), stream=stream, pool=pool)
            cases = {
                "eager": lambda _, model=model, x=x: model(x),
                "replay": lambda _, graph=graph: graph.replay(),
            }
            samples = in_turns(cases, [1], rounds=rounds, together=5)
        emit_samples("tape", samples, "eager", model=name)


def main() -> None:
    """Measure the selected groups and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about = "number of rounds, 300 by default"
    parser.add_argument("rounds", nargs="?", type=at_least_one, default=300, help=about)
    trace = TRACES / "step_azure_conv_low.csv.gz"
    parser.add_argument("--trace", type=Path, default=trace, help="trace with the batch sizes")
    parser.add_argument("--skip-compile", action="store_true", help="do not measure torch.compile")
    parser.add_argument("--only", metavar="GROUP", help="group to measure")
    options = parser.parse_args()
    try:
        sizes = sizes_of(options.trace, 400)
    except TraceError as error:
        parser.error(str(error))
    if not sizes:
        parser.error(f"{options.trace} has no step of 1 to {SIZES[-1]} tokens")
    torch.set_num_threads(1)
    rounds = options.rounds
    if HAS_GPU:
        groups: dict[str, Callable[[], None]] = {
            "device": lambda: device_group(sizes, rounds, compile_too=not options.skip_compile),
            "inputs": lambda: inputs_group(sizes, rounds),
            "nodes": lambda: nodes_group(sizes, rounds),
            "host": lambda: host_group(sizes, rounds),
        }
    else:
        groups = {
            "runner": lambda: runner_group(sizes, rounds),
            "tape": lambda: tape_group(rounds),
        }
    if options.only not in (None, *groups):
        here = ", ".join(groups)
        parser.error(f"unknown group {options.only!r}; the groups on this machine are {here}")
    with torch.no_grad():
        for name, group in groups.items():
            if options.only in (None, name):
                group()


if __name__ == "__main__":
    main()
