"""Reading whatever a user has of their traffic: the one way in for every command.

The content says what a file is: a step trace, a histogram, or the log of a server. Further forms of
logs are added to ``parse_log``.
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
    """Read a step trace, a histogram or a server's log, told apart by the content.

    The file is read once, so that it may be a pipe.

    Args:
        path: The file, or an open binary one; plain or gzip.
        name: What messages call it; by default its path.
        max_bytes: Most bytes of text to read, after unpacking.

    Raises:
        TraceError: It is none of them, or a damaged one.
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
        raise TraceError(name, None, "is empty.")
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
    """Read any file that ``read_workload`` takes, as single steps.

    Where the file has counts only, the steps are spread evenly, and ``has_order`` is False.

    Raises:
        TraceError: As for ``read_workload``, or the file counts more than 5 million steps.
    """
    found = read_workload(path, name=name, max_bytes=max_bytes)
    return found if isinstance(found, StepTrace) else found.steps()


def parse_log(
    name: str, blocks: Blocks, head: list[tuple[int, list[str]]]
) -> StepTrace | SizeHistogram:
    """Return what the log of a server says of its steps."""
    iterations = IterationLog()
    stats = parse_cudagraph_stats(name, iterations.reading(blocks))
    trace = iterations.trace(name)
    if trace is not None:
        return trace  # single steps, in their order, and not counts alone
    if stats is not None:
        return stats.histogram()
    # Most likely a trace with a wrong first line, so say that; it has no num_tokens.
    return parse_trace(name, head)
