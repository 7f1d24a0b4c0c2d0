"""Measure the time that torch.compile spends in this process, including autotuning."""

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
    """Time that torch.compile has spent, in seconds, and the number of graphs.

    Attributes:
        compiling: Time spent in Dynamo and everything that it calls.
        tuning: Time spent on autotuning Triton kernels on their first call, after compilation.
            Tuning during compilation is part of ``compiling``.
        graphs: Number of compiled graphs.
        found: Number of graphs whose kernels were found in the cache on disk.
    """

    compiling: float
    tuning: float
    graphs: int
    found: int

    def since(self, before: CompileTime) -> CompileTime:
        """Return the difference from an earlier measurement."""
        return CompileTime(
            self.compiling - before.compiling,
            self.tuning - before.tuning,
            self.graphs - before.graphs,
            self.found - before.found,
        )

    @property
    def total(self) -> float:
        """Total time in seconds."""
        return self.compiling + self.tuning


_tuning = {"depth": 0, "seconds": 0.0}


def compile_time() -> CompileTime:
    """Return the time spent so far. Autotuning is measured once ``load_compiler`` has run."""
    return CompileTime(
        cumulative_time_spent_ns["entire_frame_compile"] / 1e9,
        _tuning["seconds"],
        counters["stats"]["unique_graphs"],
        counters["inductor"]["fxgraph_cache_hit"],
    )


@functools.cache
def load_compiler(device: torch.device) -> None:
    """Load torch.compile by compiling a small function, and start measuring autotuning.

    The first measured compilation then does not include imports. Source: ``CachingAutotuner`` in
    torch/_inductor/runtime/triton_heuristics.py and ``dynamo_timed`` in torch/_dynamo/utils.py of
    torch 2.11 to 2.13. The total of ``dynamo_timed`` includes tuning during compilation.
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
