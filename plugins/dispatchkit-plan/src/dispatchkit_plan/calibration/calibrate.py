"""Measure the time of a step on this device, eager and replayed, for each size.

If the runner has an axis, every size is measured with every bucket of the axis.

The step runs in a new runner with a graph for every size and mode. A runner passed to ``calibrate``
keeps its graphs, counters and policy. State that the step changes (such as a key/value cache) and
the state of random generators are saved and restored.

The time of a step is the time that it adds to a sequence of steps. The pace determines how this
sequence is launched:

- ``queued``: steps are launched without waiting, and the device is synchronized at the end. The
  time of a step is the host time or the device time, whichever is longer.
- ``waited``: each step is launched after the previous step has ended, as in a loop that reads
  sampled tokens. The time of a step is the sum of host and device time, minus their overlap.

If a backend, such as the tape, has no timing events, times are measured with the host clock, and
the ``clock`` of the cost model is ``host``.
"""

from __future__ import annotations

import functools
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from dispatchkit.backends import GraphBackend
from dispatchkit.errors import CaptureError, ConfigError, counted
from dispatchkit.execute import GraphRunner, StaticInput, preserved_state, sample_inputs
from dispatchkit.keys import GraphKey, RuntimeMode, check_count, check_counts, check_instance

from dispatchkit_plan.calibration.graph_memory import (
    MeasuredRunner,
    MemoryMeter,
    make_measured_runner,
    suppressed_warnings,
)
from dispatchkit_plan.costs import CostModel

__all__ = ["DEFAULT_MODEL", "Pace", "calibrate", "load_runner"]

#: The runner that is measured by default: the decoder of the demo.
DEFAULT_MODEL = "dispatchkit.demo.models:decoder"
# Maximum spread of the samples of a steady measurement, relative to their median.
_STEADY = 0.25
# Relative spread above which the times are not meaningful.
_BUSY = 0.5

Pace = Literal["queued", "waited"]
#: Duration of a sample in microseconds, long enough that its first and last step have little
#: influence. Samples of very short steps are shorter, because a sample has at most ``_MAX_STEPS``
#: steps.
_SAMPLE_US = 5_000.0
_MAX_STEPS = 200
_LEAD_IN = 2

Arm = tuple[RuntimeMode, int, int]  # mode, number of tokens, value of the axis (0: no axis)


def calibrate(
    step: Any,
    *,
    inputs: Mapping[str, StaticInput] | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
    sizes: Sequence[int] | None = None,
    eager_sizes: Sequence[int] | None = None,
    make_inputs: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    pace: Pace = "queued",
    samples: int = 7,
    name: str = "",
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> CostModel:
    """Measure the costs of a step: time (eager and replayed), memory and capture time.

    Args:
        step: Runner, which is not changed, or a function, module or list of pieces to create a
            runner for.
        inputs: Static inputs, if ``step`` is not a runner.
        example: One tensor for each input, instead of ``inputs``.
        sizes: Sizes to capture and replay; by default, the runner's sizes.
        eager_sizes: Sizes to run eager; by default, ``sizes`` and larger sizes up to
            ``max_num_tokens`` of the runner.
        make_inputs: Function that returns the inputs for a number of rows and, if the runner has an
            axis, a value of the axis. By default, floating-point inputs are random, and all other
            inputs contain their fill value.
        pace: ``queued`` to launch steps without waiting, or ``waited`` to launch each step after
            the previous step has ended; see the docstring of the module.
        samples: Number of samples per size and mode; the cost model contains their median.
        name: Name of the cost model; by default, the names of the step and the device.
        progress: Function that is called with the number of finished samples and the total number.
        settings: Further settings of the runner (``backend``, ``state``, ``mode``...), if ``step``
            is not a runner.

    Returns:
        The cost model; write it with ``save_cost_model``.

    Raises:
        ConfigError: A setting is invalid, the mode uses no graphs, or the runner has several axes.
        CaptureError: No size could be captured.
    """
    if pace not in ("queued", "waited"):
        raise ConfigError("pace", pace, "'queued' or 'waited'")
    samples = check_count(samples, "samples")
    check_instance(name, str, "name")
    for setting, function in (("make_inputs", make_inputs), ("progress", progress)):
        if function is not None and not callable(function):
            raise ConfigError(setting, function, "a function, or None")
    asked = () if eager_sizes is None else check_counts(eager_sizes, "eager_sizes")
    with suppressed_warnings():
        measured = make_measured_runner(
            step, inputs=inputs, example=example, sizes=sizes, eager_sizes=asked, **settings
        )
        runner = measured.runner
        if not len(runner.registry):
            allowed = "a mode that uses graphs, such as FULL_AND_PIECEWISE"
            raise ConfigError("mode", str(runner.config.mode), allowed)
        axes = runner.config.axes
        if len(axes) > 1:
            allowed = "a list of at most one axis, because costs are measured along a single axis"
            raise ConfigError("axes", [axis.name for axis in axes], allowed)
        graphs = {value: _capture(runner, value) for value in _values(runner)}
        eager = sorted(set(asked)) or _eager_sizes(runner)
        with preserved_state(runner):
            arms = [(RuntimeMode.NONE, size, value) for value in graphs for size in eager]
            arms += [
                (key.mode, key.num_tokens, value)
                for value, found in graphs.items()
                for key in found.captured
            ]
            make = functools.partial(_inputs, measured, make_inputs)
            times = _measure(runner, arms, make, pace, samples, progress)
        source = _source(runner, graphs, times, pace, samples)
        runner.clear()
    info = runner.backend.device_info()
    shared: dict[str, Any] = {
        "name": name or f"{_step_name(step)} on {info.get('device', runner.backend.name)}",
        "source": source,
        "clock": "device" if runner.backend.capabilities.device_timing else "host",
    }
    along = [(value, _curves(times, value, found)) for value, found in graphs.items()]
    if not axes:
        return CostModel(**shared, **along[0][1])
    return CostModel(
        **shared,
        **along[-1][1],
        axis=axes[0].name,
        along=[(value, CostModel(**shared, **curves)) for value, curves in along],
    )


def _values(runner: GraphRunner) -> Sequence[int]:
    """Return the buckets of the axis, or a single 0 if there is no axis."""
    axes = runner.config.axes
    return axes[0].buckets if axes else (0,)


def _inputs(
    measured: MeasuredRunner,
    make: Callable[..., Mapping[str, torch.Tensor]] | None,
    size: int,
    value: int,
) -> dict[str, Any]:
    """Return the arguments of a call with ``size`` rows, including the value of the axis."""
    axes = measured.runner.config.axes
    if make is not None:
        return {**make(size, value), axes[0].name: value} if axes else dict(make(size))
    device = torch.device(measured.runner.backend.torch_device)
    if not axes:
        return dict(sample_inputs(measured.specs, size, device))
    name = axes[0].name
    specs = {
        key: attrs.evolve(spec, shape=tuple(value if dim == name else dim for dim in spec.shape))
        for key, spec in measured.specs.items()
    }
    return {**sample_inputs(specs, size, device), name: value}


def _curves(times: Mapping[Arm, _Times], value: int, graphs: _Graphs) -> dict[str, Any]:
    """Return the curves of a cost model for one value of the axis."""
    curves = {
        mode: [
            (size, us.median)
            for (one, size, at), us in times.items()
            if one is mode and at == value
        ]
        for mode in RuntimeMode
    }
    full, pieces = curves[RuntimeMode.FULL], curves[RuntimeMode.PIECEWISE]
    return {
        "eager_us": curves[RuntimeMode.NONE],
        "graph_us": full or pieces,
        "piecewise_us": pieces if full and pieces else None,
        "graph_bytes": graphs.bytes_per_graph,
        "capture_us": graphs.us_per_graph,
    }


def load_runner(model: str = DEFAULT_MODEL, *, folder: Path | None = None) -> GraphRunner:
    """Return the runner that an importable function creates.

    Args:
        model: Function as ``module:function``; it takes no arguments and returns a ``GraphRunner``.
        folder: Folder that is searched for the module first.

    Raises:
        ConfigError: ``model`` is malformed, the module or function does not exist, or the
            function does not return a ``GraphRunner``.
    """
    form = "'module:function', the name of a function that returns a GraphRunner"
    module_name, _, function = model.partition(":")
    if not module_name or not function:
        raise ConfigError("model", model, form)
    before = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        found: Any = importlib.import_module(module_name)
        for part in function.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports is missing
        raise ConfigError(
            "model", model, form, f"Python cannot find the module {error.name!r}."
        ) from error
    except AttributeError as error:
        raise ConfigError("model", model, form, f"{error}.") from error
    finally:
        sys.path[:] = before
    runner = found() if callable(found) else found
    if not isinstance(runner, GraphRunner):
        what = "The function returned" if callable(found) else f"{function!r} is"
        raise ConfigError(
            "model", model, form, f"{what} an object of type {type(runner).__name__}."
        )
    return runner


# -- graphs -------------------------------------------------------------------------------


@attrs.frozen
class _Graphs:
    """Captured graphs, with their memory and capture times.

    Attributes:
        captured: Keys with a graph.
        failed: Keys without a graph, with the reason.
        bytes_per_graph: (size, bytes) pairs; the memory of a size is divided by its number of
            graphs.
        us_per_graph: (size, microseconds) pairs; the capture time of a size is divided by its
            number of graphs.
    """

    captured: list[GraphKey]
    failed: dict[GraphKey, str]
    bytes_per_graph: list[tuple[int, float]]
    us_per_graph: list[tuple[int, float]]


def _capture(runner: GraphRunner, value: int) -> _Graphs:
    """Capture the graphs for one value of the axis, and measure their memory and capture times."""
    runner.controls.warm_up()  # loads libraries before the first measured capture
    axes = (value,) if runner.config.axes else ()
    declared = [key for key in runner.registry if key.descriptor.axes == axes]
    meter = MemoryMeter(runner)
    captured: list[GraphKey] = []
    failed: dict[GraphKey, str] = {}
    num_bytes, times = [], []
    before = 0
    for size in sorted({key.num_tokens for key in declared}, reverse=True):
        keys = [key for key in declared if key.num_tokens == size]
        report = runner.capture(keys)
        failed |= report.failed | report.skipped
        done = [key for key in keys if runner.controls.has(key)]
        captured += done
        if done:
            now = meter.pool_bytes()
            num_bytes.append((size, max(0, now - before) / len(done)))
            times.append((size, report.seconds * 1e6 / len(done)))
            before = now
    if not captured:
        key, why = next(iter(failed.items()))
        raise CaptureError(
            f"No size of the step could be captured. The first failure was {key}: "
            f"{why.removesuffix('.')}. Change the step so that a GraphRunner can capture it, then "
            "calibrate again.",
            key=str(key),
            reason="error",
        )
    # The driver sometimes allocates a large block, so divide the driver's memory among the graphs.
    share = meter.driver_bytes() / len(captured)
    return _Graphs(captured, failed, [(size, own + share) for size, own in num_bytes], times)


# -- times --------------------------------------------------------------------------------


@attrs.frozen
class _Times:
    """Median time of a step in microseconds, and the relative spread of its samples.

    The spread is the interquartile range, or the full range if there are fewer than four samples.
    """

    median: float
    spread: float


def _measure(
    runner: GraphRunner,
    arms: Sequence[Arm],
    make: Callable[[int, int], Mapping[str, Any]],
    pace: Pace,
    samples: int,
    progress: Callable[[int, int], None] | None,
) -> dict[Arm, _Times]:
    """Return the times of all arms, sampled in turn so that clock drift affects them equally."""
    calls = {(size, value): make(size, value) for _, size, value in arms}
    take = {"queued": _queued, "waited": _waited}[pace]
    found: dict[Arm, list[float]] = {arm: [] for arm in arms}
    num_steps: dict[Arm, int] = {}
    for arm in arms:
        run = _run(runner, arm[0], calls[arm[1:]])
        take(runner.backend, run, 1)
        once = take(runner.backend, run, 3)
        num_steps[arm] = max(3, min(_MAX_STEPS, math.ceil(_SAMPLE_US / max(once, 1.0))))
    for turn in range(samples):
        for index, arm in enumerate(arms):
            if progress is not None:
                progress(turn * len(arms) + index, samples * len(arms))
            run = _run(runner, arm[0], calls[arm[1:]])
            found[arm].append(take(runner.backend, run, num_steps[arm]))
    if progress is not None:
        progress(samples * len(arms), samples * len(arms))
    return {arm: _summary(us) for arm, us in found.items()}


def _run(runner: GraphRunner, mode: RuntimeMode, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that runs one step in a mode, by calling the runner."""
    call: Callable[..., Any] = functools.partial(runner, ceiling=int(mode))
    return lambda: call(**arguments)


def _queued(backend: GraphBackend, run: Callable[[], Any], steps: int) -> float:
    """Return the microseconds per step, measured without waiting between steps."""
    start, end = backend.new_event(timing=True), backend.new_event(timing=True)
    backend.synchronize()
    for _ in range(_LEAD_IN):
        run()  # lead-in: on an idle device, the first step's time includes its launch latency
    start.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_us(end) / steps


def _steadiness(times: Mapping[Arm, _Times], samples: int) -> str:
    """Describe how much the samples vary."""
    if samples == 1:
        return "A single sample does not show how much the times vary."
    extent = "interquartile range" if samples >= 4 else "range"  # see _summary
    worst = max(time.spread for time in times.values())
    if worst <= _STEADY:
        return f"The {extent} of each step's samples is at most {worst:.1%} of their median."
    if worst <= _BUSY:
        return (
            f"The samples vary: the {extent} of a step's samples is up to {worst:.0%} of their "
            "median. Measure again on an idle machine."
        )
    return (
        f"The machine was busy: the {extent} of a step's samples is up to {worst:.0%} of their "
        "median, so these times are not reliable. Measure again on an idle machine."
    )


def _waited(backend: GraphBackend, run: Callable[[], Any], steps: int) -> float:
    """Return the microseconds per step, measured with a wait after each step."""
    run()
    backend.synchronize()
    start = time.perf_counter_ns()
    for _ in range(steps):
        run()
        backend.synchronize()
    return (time.perf_counter_ns() - start) / 1e3 / steps


def _summary(us: list[float]) -> _Times:
    ordered = sorted(us)
    middle = statistics.median(ordered)
    quarter = len(ordered) // 4
    spread = ordered[-1 - quarter] - ordered[quarter]
    return _Times(middle, spread / middle if middle else 0.0)


def _eager_sizes(runner: GraphRunner) -> list[int]:
    """Return the sizes to run eager: captured sizes, and larger ones up to ``max_num_tokens``."""
    sizes = set(runner.config.sizes)
    size, limit = max(sizes), runner.config.max_num_tokens
    while size < limit:
        size = min(limit, size + max(1, size // 4))
        sizes.add(size)
    return sorted(sizes)


def _source(
    runner: GraphRunner,
    graphs: Mapping[int, _Graphs],
    times: Mapping[Arm, _Times],
    pace: Pace,
    samples: int,
) -> str:
    info = ", ".join(f"{key} {value}" for key, value in runner.backend.device_info().items())
    clock = {"queued": "timing events", "waited": "the host clock"}[pace]
    if not runner.backend.capabilities.device_timing:
        clock = "the host clock, because the backend has no timing events"
    launched = {"queued": "without waiting", "waited": "one at a time"}[pace]
    text = (
        f"Backend {runner.backend.name}: {info}. Steps are launched {launched} (pace {pace}) and "
        f"timed with {clock}; "
        f"times are medians of {counted(samples, 'sample')}. {_steadiness(times, samples)}"
    )
    failed = {key: why for found in graphs.values() for key, why in found.failed.items()}
    if failed:
        listed = "; ".join(f"{key}: {why}" for key, why in list(failed.items())[:3])
        text += f" Not captured: {counted(len(failed), 'key')} ({listed})."
    return text


def _step_name(step: Any) -> str:
    if isinstance(step, GraphRunner):
        return "runner"
    return getattr(step, "__name__", type(step).__name__)
