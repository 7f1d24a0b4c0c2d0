"""The arguments of each recorded step's ``dispatch`` under a configuration."""

from __future__ import annotations

from array import array
from typing import Any

from dispatchkit.errors import TraceError
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.observe.trace import AXIS_PREFIX, StepTrace

__all__ = ["trace_variants"]


def trace_variants(trace: StepTrace, config: DispatchConfig) -> array[Any]:
    """Return what each step has for ``loras``: its adapters, with axes its variant.

    More adapters than the configuration has are taken as the most it has.

    Raises:
        TraceError: The trace has no column for an axis of the configuration.
    """
    loras = array("q", bytes(8 * len(trace)))
    if "num_active_loras" in trace.columns:
        most = config.max_loras
        loras = array("q", (min(number, most) for number in trace.column("num_active_loras")))
    if not config.axes:
        return loras
    names = [axis.name for axis in config.axes]
    missing = [name for name in names if name not in trace.axes]
    if missing:
        raise TraceError(
            trace.source,
            None,
            f"has no column {AXIS_PREFIX + missing[0]!r}, the values of the axis {missing[0]!r}; "
            f"its axes: {', '.join(trace.axes) or 'none'}.",
        )
    columns = [trace.column(AXIS_PREFIX + name) for name in names]
    known: dict[tuple[int, ...], int] = {}
    found = array("q")
    for row in zip(loras, *columns, strict=True):
        variant = known.get(row)
        if variant is None:
            values = dict(zip(names, row[1:], strict=True))
            variant = known[row] = int(config.variants.of_values(row[0], values))
        found.append(variant)
    return found
