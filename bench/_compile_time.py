"""What torch.compile has spent in this process, tuning of kernels included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter
from typing import Any

import attrs
import torch
from torch._dynamo.utils import counters, cumulative_time_spent_ns
from torch._guards import CompileContext


@attrs.frozen
class CompileTime:
    """Seconds of compilation, and what came of it.

    Attributes:
        compiling: Dynamo and all that it calls.
        tuning: Kernels of Triton tried out in several forms at their first call, which comes
            after that; what is tried out within the compilation is not counted twice.
        graphs: How many graphs that made.
        found: For how many of them kernels were found on the disk.
    """

    compiling: float
    tuning: float
    graphs: int
    found: int

    def since(self, before: CompileTime) -> CompileTime:
        """Return what was spent after another moment."""
        return CompileTime(
            self.compiling - before.compiling,
            self.tuning - before.tuning,
            self.graphs - before.graphs,
            self.found - before.found,
        )

    @property
    def total(self) -> float:
        """All seconds."""
        return self.compiling + self.tuning


_tuning = {"depth": 0, "seconds": 0.0}


def compile_time() -> CompileTime:
    """Return what has been spent so far, since ``load_compiler`` at the earliest."""
    return CompileTime(
        cumulative_time_spent_ns["entire_frame_compile"] / 1e9,
        _tuning["seconds"],
        counters["stats"]["unique_graphs"],
        counters["inductor"]["fxgraph_cache_hit"],
    )


@functools.cache
def load_compiler(device: torch.device) -> None:
    """Compile something small, so that imports are no part of the first measured compilation.

    From then on the tuning of kernels is counted. Source: ``CachingAutotuner`` in
    torch/_inductor/runtime/triton_heuristics.py and ``dynamo_timed`` in torch/_dynamo/utils.py
    of torch 2.11 to 2.13, whose own sum counts what lies within a compilation too.
    """
    torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    for name in ("benchmark_all_configs", "coordinate_descent_tuning"):
        setattr(CachingAutotuner, name, _counted(getattr(CachingAutotuner, name)))


def _counted(tune: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tune)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if _tuning["depth"] or CompileContext.current_compile_id() is not None:
            return tune(*args, **kwargs)
        _tuning["depth"] += 1
        start = perf_counter()
        try:
            return tune(*args, **kwargs)
        finally:
            _tuning["seconds"] += perf_counter() - start
            _tuning["depth"] -= 1

    return counted
