"""Budgets of a plan: a number of graphs, or a limit on memory or capture time."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import numpy as np

from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

from dispatchkit_plan.costs import CostModel, Curve
from dispatchkit_plan.optimal import FloatArray, IntArray

__all__ = ["Budget", "make_budget"]


@attrs.frozen(eq=False)
class Budget:
    """Limit on the number of graphs, or on their total memory or capture time.

    Attributes:
        graphs: Number of graphs to plan; None if memory or capture time is limited.
        setting: Name of the limiting argument, ``memory_bytes`` or ``capture_time_s``; empty if
            ``graphs`` is given.
        limit: Maximum total memory in bytes, or capture time in seconds.
        price: Memory in bytes, or capture time in seconds, of a graph of each candidate size; None
            if ``graphs`` is given.
    """

    graphs: int | None
    setting: str = ""
    limit: float = 0.0
    price: FloatArray | None = None


def make_budget(
    graphs: int | None,
    memory_bytes: float | None,
    capture_time_s: float | None,
    bytes_per_graph: float | None,
    capture_s_per_graph: float | None,
    model: CostModel | None,
    candidates: IntArray,
) -> Budget:
    """Validate the arguments that limit a plan, and return the budget.

    Args:
        graphs: Number of graphs to plan.
        memory_bytes: Maximum total memory of the graphs, in bytes.
        capture_time_s: Maximum total capture time of the graphs, in seconds.
        bytes_per_graph: Memory of each graph in bytes; overrides the cost model.
        capture_s_per_graph: Time of each capture in seconds; overrides the cost model.
        model: Cost model, which may contain the memory and capture time of each size.
        candidates: Sizes that may be captured.

    Raises:
        ConfigError: No budget or several budgets are given, the budget is invalid, or the memory or
            capture time of a graph is unknown.
    """
    given = {
        name: value
        for name, value in [
            ("graphs", graphs),
            ("memory_bytes", memory_bytes),
            ("capture_time_s", capture_time_s),
        ]
        if value is not None
    }
    if len(given) != 1:
        raise ConfigError(
            "budget",
            given or None,
            "given as exactly one of graphs, memory_bytes and capture_time_s",
            "Pass only the tightest budget."
            if given
            else "Pass graphs=24, for example, or --graphs 24 on the command line.",
        )
    if graphs is not None:
        graphs = check_count(graphs, "graphs")
        if graphs > len(candidates):
            raise ConfigError(
                "graphs",
                graphs,
                f"at most {len(candidates)}, the number of candidate sizes",
                "Plan fewer graphs, raise max_size, or reduce align.",
            )
        return Budget(graphs)
    if memory_bytes is not None:
        curve, flat = (model.graph_bytes if model else None), bytes_per_graph
        setting, limit, scale, per = "memory_bytes", memory_bytes, 1.0, "bytes_per_graph"
    else:
        assert_time = capture_time_s if capture_time_s is not None else 0.0
        curve, flat = (model.capture_us if model else None), capture_s_per_graph
        setting, limit, scale, per = "capture_time_s", assert_time, 1e-6, "capture_s_per_graph"
    if not _positive(limit):
        raise ConfigError(setting, limit, "a number greater than 0")
    return Budget(
        None, setting, float(limit), _prices(setting, per, curve, flat, scale, candidates)
    )


def _positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # isfinite would convert the number to a float, which overflows for large integers.
    return number and 0 < value <= sys.float_info.max


def _prices(
    setting: str,
    per: str,
    curve: Curve | None,
    flat: float | None,
    scale: float,
    candidates: IntArray,
) -> FloatArray:
    if flat is not None:
        if not _positive(flat):
            raise ConfigError(per, flat, "a number greater than 0")
        return np.full(len(candidates), float(flat))
    if curve is None:
        field = "graph_bytes" if setting == "memory_bytes" else "capture_us"
        raise ConfigError(
            per,
            None,
            f"given with {setting}",
            f"Alternatively, pass a cost model that has {field}.",
        )
    return np.array([curve(int(size)) * scale for size in candidates])
