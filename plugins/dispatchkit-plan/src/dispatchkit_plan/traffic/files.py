"""Read traffic files for all commands.

The format is detected from the content: a step trace, a histogram, or a server log. To support
another log format, extend ``parse_log``.
"""

from __future__ import annotations

import itertools
import os
from typing import IO

from dispatchkit.errors import TraceError
from dispatchkit.observe import (
    DEFAULT_MAX_BYTES,
    Blocks,
    StepTrace,
    iter_line_blocks,
    parse_trace,
    trace_name,
)

from dispatchkit_plan.traffic.counts import (
    SizeHistogram,
    parse_cudagraph_stats,
    parse_histogram,
)
from dispatchkit_plan.traffic.iteration_log import IterationLog

__all__ = ["read_steps", "read_workload"]


def read_workload(
    path: str | os.PathLike[str] | IO[bytes],
    *,
    name: str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> StepTrace | SizeHistogram:
    """Read a step trace, a histogram or a server log.

    The format is detected from the content. The file is read once, so it may be a pipe.

    Args:
        path: Path, or an open binary file; plain or gzip.
        name: Name of the file in messages; by default, its path.
        max_bytes: Maximum number of bytes of text to read, after decompression.

    Raises:
        TraceError: The file has an unknown format, or is damaged.
    """
    name = trace_name(path) if name is None else name
    blocks = iter(iter_line_blocks(path, max_bytes=max_bytes, name=name))
    head: list[tuple[int, list[str]]] = []
    for block in blocks:
        head.append(block)
        text = next((line for line in block[1] if line.strip()), None)
        if text is not None:
            break
    else:
        raise TraceError(name, None, "the file is empty. Record a trace with `dispatchkit record`.")
    whole = itertools.chain(head, blocks)
    cells = [cell.strip() for cell in text.split(",")]
    if {"step", "t_s"} & set(cells) or (text.lstrip().startswith("{") and "num_tokens" in text):
        return parse_trace(name, whole)
    if "count" in cells:
        return parse_histogram(name, whole)
    if "num_tokens" in cells:
        return parse_trace(name, whole)
    return parse_log(name, whole, head)


def read_steps(
    path: str | os.PathLike[str] | IO[bytes],
    *,
    name: str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> StepTrace:
    """Read any file that ``read_workload`` accepts, as single steps.

    If the file contains only counts, each kind of step is spread evenly over the trace, and
    ``has_order`` of the trace is False.

    Raises:
        TraceError: As for ``read_workload``, or the file counts no steps or more than 5 million.
    """
    found = read_workload(path, name=name, max_bytes=max_bytes)
    return found if isinstance(found, StepTrace) else found.steps()


def parse_log(
    name: str, blocks: Blocks, head: list[tuple[int, list[str]]]
) -> StepTrace | SizeHistogram:
    """Return the steps or counts in a server log."""
    iterations = IterationLog()
    stats = parse_cudagraph_stats(name, iterations.reading(blocks))
    trace = iterations.trace(name)
    if trace is not None:
        return trace  # single steps in order are preferred to counts
    if stats is not None:
        return stats.histogram()
    # Most likely a trace without num_tokens in its first line; parse_trace raises the error.
    return parse_trace(name, head)
