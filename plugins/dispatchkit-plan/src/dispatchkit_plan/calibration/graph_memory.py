"""Measure the memory of graphs, and forecast it from a few captures.

A graph uses memory in three places: the pool that torch reserves, the outputs that graphs share,
and the driver, which keeps an executable form of each graph. torch does not report the driver's
memory, so it is computed as the used memory of the device minus the memory that torch reserved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from dispatchkit.backends import features_of
from dispatchkit.dispatch import Decision, GraphView, Reason
from dispatchkit.errors import CaptureError, ConfigError
from dispatchkit.execute import GraphRunner, StaticInput
from dispatchkit.keys import (
    Batch,
    BatchDescriptor,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
    check_capture_sizes,
    check_count,
)

from dispatchkit_plan.memory import (
    SEGMENT_BYTES,
    MemoryForecast,
    MemorySample,
    forecast_memory,
    spread_sizes,
)

__all__ = ["MeasuredRunner", "MemoryMeter", "forecast_graph_memory", "make_measured_runner"]

_GRAPH_MODES = (RuntimeMode.FULL, RuntimeMode.PIECEWISE)


class EverySizePolicy:
    """Policy that declares every size in every graph mode of the configuration."""

    name = "measure"

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return one key for each size and graph mode."""
        wanted = {
            RuntimeMode.FULL: config.mode.has_full_cudagraphs(),
            RuntimeMode.PIECEWISE: config.mode.has_piecewise_cudagraphs(),
        }
        return [
            GraphKey(mode, BatchDescriptor(size))
            for size in config.sizes
            for mode in _GRAPH_MODES
            if wanted[mode]
        ]

    def decide(self, batch: Batch, graphs: GraphView) -> Decision:
        """Choose the smallest ready graph, preferably FULL, or eager if no graph is ready."""
        for mode in _GRAPH_MODES:
            if batch.allows(mode):
                for key in graphs.covering(batch, mode):
                    if graphs.is_ready(key):
                        return Decision.replay(key)
        return Decision.eager(Reason.CEILING)


@attrs.frozen
class MeasuredRunner:
    """A runner to measure, and its inputs.

    Attributes:
        runner: Runner without a memory limit, which captures only on request.
        specs: Static inputs by name.
    """

    runner: GraphRunner
    specs: Mapping[str, StaticInput]


def make_measured_runner(
    step: Any,
    *,
    inputs: Mapping[str, StaticInput] | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
    sizes: Sequence[int] | None = None,
    eager_sizes: Sequence[int] = (),
    every_size: bool = True,
    **settings: Any,
) -> MeasuredRunner:
    """Return a new runner to measure a step; a runner given as ``step`` is not changed.

    Args:
        step: Runner to copy, or a step to create a runner for.
        inputs: Static inputs, if ``step`` is not a runner.
        example: One tensor for each input, instead of ``inputs``.
        sizes: Sizes to capture; by default, the runner's sizes.
        eager_sizes: Further sizes that the runner must accept.
        every_size: Whether to declare every size in every graph mode, instead of the keys of the
            runner's policy.
        settings: Further settings of the runner, if ``step`` is not a runner.

    Raises:
        ConfigError: A setting is invalid.
    """
    if isinstance(step, GraphRunner):
        if inputs is not None or example is not None or settings:
            own = {"inputs": inputs, "example": example}
            given = {**settings, **{name: one for name, one in own.items() if one is not None}}
            name = min(given)
            raise ConfigError(
                name,
                given[name],
                "omitted if step is a runner",
                f"Pass {name} when you create the runner.",
            )
        runner = step
    else:
        if sizes is not None:
            settings["sizes"] = sizes
        policy = settings.pop("policy", EverySizePolicy() if every_size else None)
        runner = GraphRunner(step, inputs, example=example, policy=policy, **settings)
    wanted = runner.config.sizes if sizes is None else check_capture_sizes(tuple(sizes))
    if not wanted:
        raise ConfigError("sizes", wanted, "a list of at least one size to measure")
    config = attrs.evolve(
        runner.config,
        sizes=wanted,
        max_num_tokens=max(runner.config.max_num_tokens, *wanted, *eager_sizes, 1),
    )
    limits = attrs.evolve(runner.spec.options.memory, max_graphs=None, max_bytes=None)
    spec = attrs.evolve(
        runner.spec.without_memory(),
        backend=runner.backend,
        lazy=False,
        options=attrs.evolve(
            runner.spec.options, config=config, memory=limits, strict=False, check=0
        ),
    )
    if every_size:
        spec = spec.with_policy(EverySizePolicy(), None)
    return MeasuredRunner(
        runner=GraphRunner(**spec.arguments()),
        specs=spec.static_inputs,
    )


@contextmanager
def suppressed_warnings() -> Iterator[None]:
    """Suppress all warnings, because measurements use unusual sizes and modes on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class MemoryMeter:
    """Meter for the memory of the graphs captured since the meter was created.

    Args:
        runner: Runner that captures the graphs.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner
        self._device = features_of(runner.backend).meters
        self._pool = runner.num_bytes
        self._held = self._in_use()
        self._outside = self._outside_torch()

    def _in_use(self) -> int:
        if self._device is None:
            return self._runner.num_bytes
        return self._device.device_memory().held_bytes

    def _outside_torch(self) -> int:
        if self._device is None:
            return 0
        self._runner.backend.synchronize()
        now = self._device.device_memory()
        return now.used_bytes - now.reserved_bytes

    def pool_bytes(self) -> int:
        """Return the growth of the pool and the shared outputs, in bytes."""
        return self._runner.num_bytes - self._pool

    def held_bytes(self) -> int:
        """Return the growth, in bytes, of torch memory that is in use even while no graph runs.

        Concurrent allocations by other code are included.
        """
        return max(0, self._in_use() - self._held)

    def driver_bytes(self) -> int:
        """Return the growth, in bytes, of the used device memory that torch did not reserve.

        The memory of other processes is included.
        """
        return max(0, self._outside_torch() - self._outside)


def forecast_graph_memory(
    step: Any,
    *,
    samples: int = 10,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> MemoryForecast:
    """Forecast the memory of a runner's graphs by capturing a few of its sizes.

    The largest size, the smallest size and some sizes in between are captured into a separate pool,
    which is released at the end.

    Args:
        step: Runner to copy, or a step to create a runner for. The runner is not changed.
        samples: Maximum number of sizes to capture, at least 2.
        progress: Function that is called with the number of captured sizes and the total number.
        options: ``sizes``, by default the runner's sizes. If ``step`` is not a runner, also
            ``inputs`` or ``example``, and further settings of the runner.

    Raises:
        ConfigError: A setting is invalid.
        CaptureError: One of the sizes could not be captured.
    """
    samples = check_count(samples, "samples", minimum=2)
    with suppressed_warnings():
        runner = make_measured_runner(step, every_size=False, **options).runner
        keys: dict[int, list[GraphKey]] = {}
        for key in runner.registry:
            if key.mode is RuntimeMode.FULL or runner.controls.can_split:
                keys.setdefault(key.num_tokens, []).append(key)
        sizes = sorted(keys, reverse=True)
        if len(sizes) < 2:
            raise ConfigError(
                "sizes",
                sizes,
                "a list of at least two sizes with graphs",
                message=""
                if sizes
                else f"The runner cannot capture graphs in mode {runner.config.mode.name}.",
                hint="" if sizes else "Set mode='FULL', and at least two sizes.",
            )
        runner.controls.warm_up()
        meter = MemoryMeter(runner)
        taken = []
        chosen = spread_sizes(sizes, samples)
        try:
            for done, size in enumerate(chosen):
                if progress is not None:
                    progress(done, len(chosen))
                report = runner.capture(keys[size])
                for key, why in (report.failed | report.skipped).items():
                    raise CaptureError(
                        f"{key} was not captured ({why}), so its memory cannot be measured. "
                        "Change the step so that it can be captured, or omit "
                        f"{key.num_tokens} from sizes.",
                        key=str(key),
                    )
                pool, held = meter.pool_bytes(), meter.held_bytes()
                taken.append(MemorySample(size, pool, held, meter.driver_bytes()))
        finally:
            runner.clear()
    if progress is not None:
        progress(len(chosen), len(chosen))
    is_device = torch.device(runner.backend.torch_device).type == "cuda"
    # CUDA allocates whole segments; other backends, including the tape, allocate exact sizes.
    return forecast_memory(taken, sizes, segment_bytes=SEGMENT_BYTES if is_device else 0)
