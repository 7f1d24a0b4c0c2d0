"""Forecast the memory of graphs captured by any code, from a few sample captures."""

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
    """Forecast the memory of the graphs that a function captures for given sizes.

    The largest size, the smallest size and some sizes in between are captured. Their graphs are
    kept until all are measured, and then released. Keep ``high_bytes + driver_high_bytes`` of the
    device's memory free; the rest can be used for other purposes, such as a key/value cache::

        memory = forecast(capture, sizes)
        torch.cuda.empty_cache()  # return the memory of the sampled graphs to the device
        free, _ = torch.cuda.mem_get_info()
        cache_bytes = free - memory.high_bytes - memory.driver_high_bytes

    Args:
        capture: Function that captures a graph for a given size and returns an object that keeps
            the graph and its outputs alive. It is called for sizes in descending order; capture all
            sizes in this order later, too. All captures may share one pool; the earlier graphs
            keep it alive.
        sizes: All sizes that will be captured, at least two different ones.
        samples: Maximum number of sizes to capture, at least 2.
        warm_up: Function that runs, at a given size, the code that ``capture`` captures. It is
            called for each sampled size before the first capture, so that kernels and libraries
            loaded on first use are not counted.
        backend: Backend of the device, or the backend's name. The backend must report the memory of
            the device.
        progress: Function that is called with the number of captured sizes and the total number.

    Raises:
        ConfigError: A setting is invalid, or the backend does not report memory.
    """
    samples = check_count(samples, "samples", minimum=2)
    wanted = sorted(check_capture_sizes(tuple(sizes)), reverse=True)
    if len(wanted) < 2:
        raise ConfigError("sizes", wanted, "a list of at least two different sizes")
    if not callable(capture):
        raise ConfigError("capture", capture, "a function that captures a graph for a given size")
    device = resolve_backend(backend)
    meter = features_of(device).meters
    if meter is None:
        raise ConfigError("backend", device.name, "a backend with device_memory(), such as 'cuda'")
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
        # Ignore memory that other code releases during the captures.
        reserved = max(reserved, taken[-1].reserved_bytes if taken else 0)
        taken.append(MemorySample(size, reserved, max(0, held), max(0, driver)))
    kept.clear()
    if progress is not None:
        progress(len(chosen), len(chosen))
    is_device = torch.device(device.torch_device).type == "cuda"
    # CUDA allocates whole segments; other backends, including the tape, allocate exact sizes.
    return forecast_memory(taken, wanted, segment_bytes=SEGMENT_BYTES if is_device else 0)
