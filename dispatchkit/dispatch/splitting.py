"""Splitting: which graphs a mixed batch of independent rows is cut over.

What policies may use that split; the dispatcher checks whatever they answer (``constraints``).
"""

from __future__ import annotations

from dispatchkit.dispatch.constraints import may_be_split, part_of
from dispatchkit.dispatch.decision import Part
from dispatchkit.dispatch.policy import GraphView
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import RuntimeMode

#: Each part is a launch, and copies of its own.
MAX_PARTS = 8


def greedy_parts(
    batch: Batch, graphs: GraphView, mode: RuntimeMode, *, max_parts: int = MAX_PARTS
) -> tuple[Part, ...]:
    """Return a batch cut over graphs that can run now: full ones, and one for what is left.

    The full ones are of the largest size that the batch fills, and the last is the smallest that
    covers the rest: the fewest launches, not the least padding.

    Args:
        batch: What is to run.
        graphs: The graphs.
        mode: Of the graphs.
        max_parts: Most parts.

    Returns:
        The parts in their order; none where the batch may not be split, a graph would be missing,
        or one alone would do.
    """
    if not graphs.may_split or not may_be_split(batch) or not batch.allows(mode):
        return ()
    num_tokens, ready = batch.num_tokens, _by_size(batch, graphs, mode)
    full = max((size for size in ready if size <= num_tokens), default=0)
    if not full:
        return ()
    key, count, rest = ready[full], num_tokens // full, num_tokens % full
    if count + (rest > 0) > max_parts:
        return ()
    parts = [Part(key, full)] * count
    if rest:
        left = part_of(batch, rest)
        last = next((one for one in ready.values() if one.covers(left)), None)
        if last is None or last.num_tokens > full:
            return ()
        parts.append(Part(last, rest))
    if not key.covers(part_of(batch, full)):
        return ()
    return tuple(parts) if len(parts) > 1 else ()


def _by_size(batch: Batch, graphs: GraphView, mode: RuntimeMode) -> dict[int, GraphKey]:
    """Return a graph of each size for parts of a batch, those with the fewest adapters."""
    found: dict[int, GraphKey] = {}
    for key in graphs.covering(part_of(batch, 1), mode):
        if graphs.is_ready(key):
            found.setdefault(key.num_tokens, key)
    return found
