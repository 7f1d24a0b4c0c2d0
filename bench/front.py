"""Measure ``graphed`` on common models: results, share of replayed calls, and time.

    python bench/front.py [--workers 8] [--limit-s 240] [--cases REGEX] [--no-tf32]

Workers check all models in parallel. Then one worker at a time measures, alone on the device. The
kind of a line is the first word of its ``case``:

- "results": the largest error relative to eager (norm of the difference divided by norm of the
  result), and the share of warm calls that were replayed.
- "time": the median time of a call in microseconds with ``graphed``, eager and a GraphRunner with
  declared inputs (``runner``).
- "compiled": for ten models at their largest batch, the times with torch.compile in mode
  reduce-overhead, ``graphed`` and eager, and the seconds of compilation.
- "failed": a model that raised an error. "missing": a package that cannot be imported. "skipped": a
  model for which a stage had no time left. "stopped": a worker that exceeded the time of a stage.

The last line counts the workers' lines of each kind. ``--no-tf32`` uses full precision, in which
results for different batch sizes differ least.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from _common import emit
from _front_models import COMPILED, MODELS, MissingPackageError, Model
from torch.utils._pytree import tree_leaves

from dispatchkit import Axis, GraphRunner, StaticInput, graphed

ROUNDS = 3
BUCKETS = (16, 32, 64, 128)
SIZES = (1, 2, 3, 4, 6, 8)
#: Models that take only seconds on a CPU.
ON_CPU = ("LSTM",)
#: Stages in order: the share of the time limit at which each ends, and whether workers take turns.
STAGES = {
    "check": (0.5, False),
    "measure": (0.72, True),
    "compile": (0.92, False),
    "measure_compiled": (1.0, True),
}


@attrs.define
class CheckedModel:
    """A checked model, and the variants to measure.

    Attributes:
        name: Name of the model.
        model: Plain model and its calls.
        fast: Graphed model.
        runner: Runner with declared inputs; None if it could not be created.
        compiled: Model compiled by torch.compile; None if it is not compiled.
        compile_s: Duration of the compilation in seconds.
    """

    name: str
    model: Model
    fast: Any
    runner: GraphRunner | None
    compiled: Any = None
    compile_s: float = 0.0


def _print_line(case: str, **more: Any) -> None:
    print(json.dumps({"bench": "front", "case": case, **more}), flush=True)


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _tensors(result: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]


def _error(got: Any, want: Any) -> float:
    """Return the largest relative error of a result's tensors; inf if their shapes differ."""
    ours, theirs = _tensors(got), _tensors(want)
    if [one.shape for one in ours] != [one.shape for one in theirs]:
        return float("inf")
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        difference = (one.double() - other.double()).norm()
        error = float(difference / other.double().norm().clamp_min(1e-12))
        worst = max(worst, error if error == error else float("inf"))  # treat nan as inf
    return worst


def _runner(model: Model, backend: str) -> GraphRunner:
    names = {size for shape in model.inputs.values() for size in shape if isinstance(size, str)}
    first, module, call = model.calls[0], model.module, model.call
    inputs = {
        name: StaticInput(shape, first[name].dtype, fill=model.fills.get(name, 0))
        for name, shape in model.inputs.items()
    }

    def step(**given: Any) -> Any:
        return call(module, {name: given[name] for name in inputs})

    axes = [Axis(name, BUCKETS) for name in sorted(names)]
    return GraphRunner(step, inputs, sizes=SIZES, axes=axes or None, lazy=True, backend=backend)


def _axes_of(model: Model, call: dict[str, torch.Tensor]) -> dict[str, int]:
    return {
        size: call[name].shape[dim]
        for name, shape in model.inputs.items()
        for dim, size in enumerate(shape)
        if isinstance(size, str)
    }


def _largest(model: Model) -> dict[str, torch.Tensor]:
    name, shape = next(iter(model.inputs.items()))
    return max(model.calls, key=lambda call: call[name].shape[shape.index(None)])


def check(name: str, device: torch.device) -> CheckedModel:
    """Compare all calls of a model with eager, and create the variants to measure."""
    torch.manual_seed(0)
    model = MODELS[name](device)
    backend = "tape" if device.type == "cpu" else "auto"
    fast = graphed(model.module, backend=backend)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for call in model.calls:
                model.call(fast, call)
        captured_s = time.perf_counter() - start
        before = _replayed(fast)
        worst = 0.0
        for call in model.calls:
            want = model.call(model.module, call)
            worst = max(worst, _error(model.call(fast, call), want))
        stats = fast.graphed.stats()
        replayed = _replayed(fast) - before
    reasons: dict[str, int] = dict(stats.plain)
    for one in stats.runners.values():
        for reason, count in one.eager_by_reason.items():
            reasons[reason] = reasons.get(reason, 0) + count
    emit(
        "front",
        f"results {name}",
        worst,
        "relative error",
        len(model.calls),
        share_replayed=round(replayed / len(model.calls), 3),
        error=f"{worst:.2e}",
        eager_by_reason=reasons,
        graphs=sum(one.captures for one in stats.runners.values()),
        captured_s=round(captured_s, 2),
        why=sorted(_reasons(fast))[:4],
        warned=sorted({str(one.message)[:300] for one in caught}),
    )
    runner = None
    try:
        runner = _runner(model, backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                for call in model.calls:
                    runner(**call, **_axes_of(model, call))
    except Exception as error:  # noqa: BLE001 - only the comparison with the runner is missing
        _print_line(f"failed runner of {name}", error=_error_text(error))
        runner = None
    return CheckedModel(name, model, fast, runner)


def _reasons(fast: Any) -> set[str]:
    """Return the reasons recorded for keys of all runners, such as capture failures."""
    return {
        entry.reason[:600]
        for runner in fast.graphed.runners
        for entry in runner.registry.entries.values()
        if entry.reason
    }


def _replayed(fast: Any) -> int:
    modes: dict[str, int] = fast.graphed.stats().steps_by_mode
    return sum(count for mode, count in modes.items() if mode != "NONE")


def _median_us(run: Any, calls: list[Any], device: torch.device) -> float:
    rounds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for call in calls:
            run(call)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / len(calls) * 1e6)
    return statistics.median(rounds[1:])


def measure(ready: CheckedModel, device: torch.device) -> None:
    """Measure the warm calls of a model: eager, graphed, and with a runner."""
    model, runner = ready.model, ready.runner
    eager = _median_us(lambda call: model.call(model.module, call), model.calls, device)
    fast = _median_us(lambda call: model.call(ready.fast, call), model.calls, device)
    more: dict[str, Any] = {"eager": round(eager, 1), "runner": None}
    if runner is not None:
        calls = [{**call, **_axes_of(model, call)} for call in model.calls]
        more["runner"] = round(_median_us(lambda call: runner(**call), calls, device), 1)
    emit(
        "front",
        f"time {ready.name}",
        fast,
        "us",
        ROUNDS,
        ratio_to="eager",
        ratio=fast / eager,
        speed_up=round(eager / fast, 2),
        **more,
    )


def compile_one(ready: CheckedModel, device: torch.device) -> None:
    """Compile a model in mode reduce-overhead for its largest batch."""
    if ready.name not in COMPILED or device.type != "cuda":
        return
    compiled = torch.compile(ready.model.module, mode="reduce-overhead", dynamic=False)
    start = time.perf_counter()
    for _ in range(4):  # compile, warm up, record, replay
        ready.model.call(compiled, _largest(ready.model))
    torch.cuda.synchronize()
    ready.compiled, ready.compile_s = compiled, time.perf_counter() - start


def measure_compiled(ready: CheckedModel, device: torch.device) -> None:
    """Measure a compiled model, graphed and eager, at its largest batch."""
    if ready.compiled is None:
        return
    model = ready.model
    calls = [_largest(model)] * len(model.calls)
    compiled = _median_us(lambda call: model.call(ready.compiled, call), calls, device)
    fast = _median_us(lambda call: model.call(ready.fast, call), calls, device)
    eager = _median_us(lambda call: model.call(model.module, call), calls, device)
    emit(
        "front",
        f"compiled {ready.name}",
        compiled,
        "us",
        ROUNDS,
        ratio_to="graphed",
        ratio=compiled / fast,
        graphed=round(fast, 1),
        eager=round(eager, 1),
        compile_s=round(ready.compile_s, 1),
    )


class _WorkerStages:
    """The models of one worker, processed in stages."""

    def __init__(self, names: list[str], device: torch.device, ends: dict[str, float]) -> None:
        self._device, self._ends = device, ends
        self._names, self._ready = names, list[CheckedModel]()
        self._missing: set[str] = set()

    def run(self, stage: str) -> None:
        """Run a stage for each model; skip the models left when the time of the stage is over."""
        if stage == "check":
            self._each(stage, self._names, self._check)
        else:
            do = {"measure": measure, "compile": compile_one, "measure_compiled": measure_compiled}
            by_name = {one.name: one for one in self._ready}
            self._each(stage, by_name, lambda name: do[stage](by_name[name], self._device))

    def _each(self, stage: str, names: Iterable[str], do: Callable[[str], None]) -> None:
        for name in names:
            if time.time() > self._ends[stage]:
                _print_line(f"skipped {stage} of {name}: time limit exceeded")
                continue
            try:
                do(name)
            except Exception as error:  # noqa: BLE001 - a failing model is a result
                _print_line(f"failed {stage} of {name}", error=_error_text(error))

    def _check(self, name: str) -> None:
        try:
            self._ready.append(check(name, self._device))
        except MissingPackageError as error:
            if error.package not in self._missing:  # print one line per package
                self._missing.add(error.package)
                _print_line(f"missing {error.package}", error=str(error)[:400])


def work(names: list[str], ends: dict[str, float]) -> None:
    """Run the stages that are read from stdin, and print a line after each."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    own = _WorkerStages(names, device, ends)
    with torch.no_grad():
        for line in sys.stdin:
            own.run(line.strip())
            print(f"done {line.strip()}", flush=True)


class _Worker:
    """A worker process and its output lines."""

    def __init__(self, number: int, names: list[str], ends: dict[str, float], tf32: bool) -> None:
        self.number, self._lines = number, queue.SimpleQueue[str | None]()
        given = json.dumps({"names": names, "ends": ends, "tf32": tf32})
        self.process: Any = subprocess.Popen(
            [sys.executable, __file__, "--work", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def begin(self, stage: str) -> bool:
        """Request a stage; return whether the worker process still runs."""
        try:
            self.process.stdin.write(f"{stage}\n")
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def finish(self, stage: str, end: float, counts: dict[str, int]) -> bool:
        """Print the worker's lines of a stage; return whether it completed the stage in time."""
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.time()))
            except queue.Empty:
                return False
            if line is None:
                return False
            if line.strip() == f"done {stage}":
                return True
            print(line, end="", flush=True)
            kind = re.match(r'\{"bench": "front", "case": "(\w+)', line)
            if kind is not None:
                counts[kind[1]] = counts.get(kind[1], 0) + 1

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def _run_stage(
    stage: str, workers: list[_Worker], end: float, grace_s: float, counts: dict[str, int]
) -> list[_Worker]:
    """Run a stage on all workers; return those that completed it."""
    is_serial = STAGES[stage][1]
    if not is_serial:
        for one in workers:
            one.begin(stage)
    left = []
    for one in workers:
        # A worker gets a short grace period to finish its current model.
        if (not is_serial or one.begin(stage)) and one.finish(stage, end + grace_s, counts):
            left.append(one)
        else:
            code = one.process.poll()
            why = "time limit exceeded" if code is None else f"exit status {code}"
            _print_line(f"stopped worker {one.number} in {stage}: {why}")
            one.stop()
    return left


def main() -> None:
    """Divide the models among workers, and run all stages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=240)
    parser.add_argument(
        "--cases", default=".", help="regular expression that selects models by name"
    )
    parser.add_argument("--no-tf32", action="store_true", help="use full precision in convolutions")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        request = json.loads(given.work)
        torch.backends.cudnn.allow_tf32 = request["tf32"]
        work(request["names"], request["ends"])
        return
    start, on_cuda = time.time(), torch.cuda.is_available()
    names = [name for name in MODELS if re.search(given.cases, name)]
    if not on_cuda and given.cases == ".":
        names = list(ON_CPU)
    ends = {stage: start + share * given.limit_s for stage, (share, _) in STAGES.items()}
    count = max(1, min(given.workers if on_cuda else 1, len(names)))
    workers = [
        _Worker(index, names[index::count], ends, not given.no_tf32) for index in range(count)
    ]
    everyone, counts, grace_s = list(workers), dict[str, int](), 0.05 * given.limit_s
    try:
        for stage in STAGES:
            workers = _run_stage(stage, workers, ends[stage], grace_s, counts)
    finally:
        for one in everyone:
            one.stop()
    _print_line(
        "count of lines", models=len(names), seconds=round(time.time() - start, 1), **counts
    )


if __name__ == "__main__":
    main()
