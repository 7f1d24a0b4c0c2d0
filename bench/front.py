"""One line for the models that people have: results, share replayed, and time by ``graphed``.

    python bench/front.py [--workers 8] [--limit-s 240] [--cases REGEX]

Workers check all models side by side, then measure one after the other, alone on the device. Lines
with ``case`` "results ..." have the largest relative error to eager (norm of the difference by that
of the result) and the share of warm calls that were replayed; "time ..." the median of a call by
``graphed`` in microseconds and beside it by eager, by GraphRunner with declared inputs
(``runner``), and by torch.compile with reduce-overhead at a batch of 8 (``compiled``, with
``graphed_at_8`` and the seconds of compiling). A package that is not installed is named in a line
"missing ...".
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import attrs
import torch
from _common import emit
from _front_models import COMPILED, MODELS, Model
from torch.utils._pytree import tree_leaves

from dispatchkit import Axis, GraphRunner, StaticInput, graphed

ROUNDS = 3
BUCKETS = (16, 32, 64, 128)
SIZES = (1, 2, 3, 4, 6, 8)
#: What takes seconds on a CPU.
ON_CPU = ("LSTM",)


@attrs.frozen
class Ready:
    """A model that has been checked, and what is to be measured of it."""

    name: str
    model: Model
    fast: Any
    runner: Any
    compiled: Any
    compile_s: float


def _tensors(result: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]


def _error(got: Any, want: Any) -> float:
    """Return the largest relative error of a result's tensors; infinite where they do not pair."""
    ours, theirs = _tensors(got), _tensors(want)
    if [one.shape for one in ours] != [one.shape for one in theirs]:
        return float("inf")
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        difference = (one.double() - other.double()).norm()
        worst = max(worst, float(difference / other.double().norm().clamp_min(1e-12)))
    return worst


def _runner(model: Model, backend: str) -> GraphRunner:
    names = {size for shape in model.inputs.values() for size in shape if isinstance(size, str)}
    first = model.calls[0]
    inputs = {name: StaticInput(shape, first[name].dtype) for name, shape in model.inputs.items()}

    def step(**given: Any) -> Any:
        return model.call(model.module, {name: given[name] for name in inputs})

    axes = [Axis(name, BUCKETS) for name in sorted(names)]
    runner = GraphRunner(
        step, inputs, sizes=SIZES, axes=axes or None, mode="FULL", lazy=True, backend=backend
    )
    return runner


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


def check(name: str, device: torch.device, deadline: float) -> Ready:
    """Compare all calls of a model with eager, and make what is measured later."""
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
        before = fast.graphed.stats().steps_by_mode
        worst = 0.0
        for call in model.calls:
            want = model.call(model.module, call)
            worst = max(worst, _error(model.call(fast, call), want))
        stats = fast.graphed.stats()
        runner = _runner(model, backend)
        for _ in range(2):
            for call in model.calls:
                runner(**call, **_axes_of(model, call))
    after = stats.steps_by_mode
    reasons: dict[str, int] = dict(stats.plain)
    for one in stats.runners.values():
        for reason, count in one.eager_by_reason.items():
            reasons[reason] = reasons.get(reason, 0) + count
    replayed = after.get("FULL", 0) - before.get("FULL", 0)
    emit(
        "front",
        f"results {name}",
        worst,
        "relative error",
        len(model.calls),
        share_replayed=replayed / len(model.calls),
        error=f"{worst:.2e}",
        eager_by_reason=reasons,
        graphs=sum(one.captures for one in stats.runners.values()),
        captured_s=round(captured_s, 2),
        warned=sorted({str(one.message)[:300] for one in caught}),
    )
    compiled, compile_s = None, 0.0
    if device.type == "cuda" and name in COMPILED and time.time() < deadline:
        compiled = torch.compile(model.module, mode="reduce-overhead", dynamic=False)
        start = time.perf_counter()
        for _ in range(3):
            model.call(compiled, _largest(model))
        torch.cuda.synchronize()
        compile_s = time.perf_counter() - start
    return Ready(name, model, fast, runner, compiled, compile_s)


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


def measure(ready: Ready, device: torch.device) -> None:
    """Time the warm calls of a model by all that run them."""
    model = ready.model
    eager = _median_us(lambda call: model.call(model.module, call), model.calls, device)
    fast = _median_us(lambda call: model.call(ready.fast, call), model.calls, device)
    more: dict[str, Any] = {"eager": round(eager, 1)}
    calls = [{**call, **_axes_of(model, call)} for call in model.calls]
    more["runner"] = round(_median_us(lambda call: ready.runner(**call), calls, device), 1)
    if ready.compiled is not None:
        at_8 = [_largest(model)] * len(model.calls)
        compiled = _median_us(lambda call: model.call(ready.compiled, call), at_8, device)
        graphed_at_8 = _median_us(lambda call: model.call(ready.fast, call), at_8, device)
        more |= {"compiled": round(compiled, 1), "graphed_at_8": round(graphed_at_8, 1)}
        more["compile_s"] = round(ready.compile_s, 1)
    emit(
        "front",
        f"time {ready.name}",
        fast,
        "us",
        ROUNDS,
        ratio_to="eager",
        ratio=fast / eager,
        **more,
    )


def work(names: list[str], device: torch.device, deadline: float) -> None:
    """Check models, wait for one's turn, and measure them."""
    ready = []
    with torch.no_grad():
        for name in names:
            if time.time() > deadline:
                print(json.dumps({"bench": "front", "case": f"left out {name}: no time"}))
                continue
            try:
                ready.append(check(name, device, deadline))
            except ModuleNotFoundError as error:
                print(json.dumps({"bench": "front", "case": f"missing {error.name}: {name}"}))
            except Exception as error:  # noqa: BLE001 - a model that fails is a result
                text = f"{type(error).__name__}: {error}"[:400]
                print(json.dumps({"bench": "front", "case": f"failed {name}", "error": text}))
        print("ready", flush=True)
        sys.stdin.readline()
        for one in ready:
            try:
                measure(one, device)
            except Exception as error:  # noqa: BLE001 - so is this
                text = f"{type(error).__name__}: {error}"[:400]
                print(json.dumps({"bench": "front", "case": f"failed {one.name}", "error": text}))
    print("done", flush=True)


def main() -> None:
    """Share the models among workers, and let one measure at a time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=240)
    parser.add_argument("--cases", default=".", help="a regular expression")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if given.work is not None:
        deadline = time.time() + given.limit_s * 0.55
        work(json.loads(given.work), device, deadline)
        return
    names = [name for name in MODELS if re.search(given.cases, name)]
    if device.type == "cpu":
        names = [name for name in names if name in ON_CPU or given.cases != "."]
    workers = max(1, min(given.workers if device.type == "cuda" else 1, len(names)))
    command = [sys.executable, __file__, "--limit-s", str(given.limit_s), "--work"]
    running: list[Any] = [
        subprocess.Popen(
            [*command, json.dumps(names[index::workers])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(workers)
    ]
    end = time.time() + given.limit_s
    try:
        for word in ("ready", "done"):
            for one in running:
                if word == "done":
                    if time.time() > end:
                        break
                    one.stdin.write("\n")
                    one.stdin.flush()
                for line in one.stdout:
                    if line.strip() == word:
                        break
                    print(line, end="", flush=True)
    finally:
        for one in running:
            one.kill()
            one.wait()


if __name__ == "__main__":
    main()
