"""What graphs of anyone take in memory, forecast from a few that are captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispatchkit.backends import GraphBackend, features_of, resolve_backend
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_capture_sizes, check_count

from dispatchkit_plan.memory import (
    SEGMENT_BYTES,
    MemoryForecast,
    MemorySample,
    forecast_memory,
    spread_sizes,
)

__all__ = ["forecast"]


def forecast(
    capture: Callable[[int], Any],
    sizes: Sequence[int],
    *,
    samples: int = 10,
    warm_up: Callable[[int], Any] | None = None,
    backend: str | GraphBackend = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> MemoryForecast:
    """Forecast what the graphs of all sizes will take, whoever captures them.

    The largest size, the smallest and some between are captured and kept; then they are let go
    of. What remains of the device's memory beside ``high_bytes + driver_high_bytes`` of the
    forecast can be given to something else for good, such as a key-value cache::

        forecast = forecast(capture, sizes)
        free, _ = torch.cuda.mem_get_info()
        cache_bytes = free - forecast.high_bytes - forecast.driver_high_bytes - headroom

    Args:
        capture: Captures the graph of a size, and returns what keeps it and its outputs alive.
            Called largest first, as all sizes should be. It may use one pool for all: what it
            returned for earlier sizes is alive.
        sizes: All sizes that will be captured; at least two.
        samples: Most sizes to capture, at least 2.
        warm_up: Runs the step at a size, for each size that is captured and before the first:
            kernels and libraries that are loaded for the first time are then no part of what
            graphs take.
        backend: The device; one that says what it has handed out.
        progress: Told (done, total) captured sizes.

    Raises:
        ConfigError: A setting cannot be used, or the backend does not say what its device has
            handed out.
    """
    samples = check_count(samples, "samples", minimum=2)
    wanted = sorted(check_capture_sizes(tuple(sizes)), reverse=True)
    if len(wanted) < 2:
        raise ConfigError("sizes", wanted, "at least two, to forecast some from others")
    if not callable(capture):
        raise ConfigError("capture", capture, "a function of a size that captures its graph")
    device = resolve_backend(backend)
    meter = features_of(device).meters
    if meter is None:
        raise ConfigError("backend", device.name, "one that has device_memory(), such as 'cuda'")
    chosen = spread_sizes(wanted, samples)
    if warm_up is not None:
        for size in chosen:
            warm_up(size)
    device.synchronize()
    before = meter.device_memory()
    kept: list[Any] = []
    taken: list[MemorySample] = []
    for done, size in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen))
        kept.append(capture(size))
        device.synchronize()
        now = meter.device_memory()
        reserved = now.reserved_bytes - before.reserved_bytes
        driver = (now.used_bytes - now.reserved_bytes) - (before.used_bytes - before.reserved_bytes)
        held = now.held_bytes - before.held_bytes
        # What somebody else let go of meanwhile is no part of a graph.
        reserved = max(reserved, taken[-1].reserved_bytes if taken else 0)
        taken.append(MemorySample(size, reserved, max(0, held), max(0, driver)))
    kept.clear()
    if progress is not None:
        progress(len(chosen), len(chosen))
    is_device = torch.device(device.torch_device).type == "cuda"
    # Other devices, the tape too, hand out what is asked for and no whole segments.
    return forecast_memory(taken, wanted, segment_bytes=SEGMENT_BYTES if is_device else 0)
