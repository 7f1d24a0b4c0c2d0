"""Derive a configuration and ``dispatch`` arguments from a trace."""

from __future__ import annotations

import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dispatchkit.errors import TraceError
from dispatchkit.keys.capture_sizes import CaptureSizeWarning
from dispatchkit.keys.checks import check_counts, check_instance
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.observe.trace import AXIS_PREFIX, StepTrace

__all__ = ["trace_config", "trace_variants"]


def trace_config(
    trace: StepTrace, *, sizes: Sequence[int] | None = None, mode: str = "FULL_AND_PIECEWISE"
) -> DispatchConfig:
    """Return a configuration for the batches of a trace.

    ``max_num_tokens`` is the largest number of tokens in a step, but at least the largest capture
    size (512 if ``sizes`` is None). ``max_num_seqs`` is the largest number of requests, but at
    least 256, and never above ``max_num_tokens``. The query length is the most frequent query
    length of uniform decode steps; 1 if there are none.

    Raises:
        ConfigError: ``trace`` is not a ``StepTrace``, or a size or the mode is invalid.
    """
    check_instance(trace, StepTrace, "trace", "Read a file with read_trace(path).")
    names = trace.columns
    if sizes is not None:
        sizes = check_counts(sizes, "sizes")
    tokens = max(trace.column("num_tokens"), default=1)
    limit = max(tokens, 512 if sizes is None else max(sizes, default=1), 1)
    query_lens: Counter[int] = Counter()
    if "uniform_decode" in names and "max_query_len" in names:
        pairs = zip(trace.column("uniform_decode"), trace.column("max_query_len"), strict=True)
        query_lens = Counter(length for uniform, length in pairs if uniform and length)
    most = max(trace.column("num_reqs"), default=1) if "num_reqs" in names else 1
    given: dict[str, Any] = {} if sizes is None else {"sizes": sizes}
    loras = max(trace.column("num_active_loras"), default=0) if "num_active_loras" in names else 0
    with warnings.catch_warnings():
        # Steps above the largest size are expected here, and run eager.
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return DispatchConfig(
            mode=mode,
            max_num_tokens=limit,
            max_num_seqs=min(max(most, 256), limit),
            query_lens=query_lens.most_common(1)[0][0] if query_lens else 1,
            max_loras=loras,
            **given,
        )


def trace_variants(trace: StepTrace, config: DispatchConfig) -> array[Any]:
    """Return the ``loras`` argument of ``dispatch`` for each step of a trace.

    The argument is the number of adapters, but at most ``config.max_loras``. If the configuration
    has axes, the argument is the variant, which encodes the number of adapters and the axis
    buckets.

    Raises:
        TraceError: The trace lacks the column of an axis of the configuration.
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
            f"the trace has no column {AXIS_PREFIX + missing[0]!r} for the axis {missing[0]!r}; "
            "record it, or remove the axis from the configuration. Axes in the trace: "
            f"{', '.join(trace.axes) or 'none'}.",
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
