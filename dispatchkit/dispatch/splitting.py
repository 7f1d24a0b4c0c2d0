"""Choose the graphs over which a mixed batch of independent rows is split.

Policies that split batches use this module; ``constraints`` validates their decisions.
"""

from __future__ import annotations

from dispatchkit.dispatch.constraints import may_be_split, part_of
from dispatchkit.dispatch.decision import Part
from dispatchkit.dispatch.policy import GraphView
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import RuntimeMode

#: Default maximum number of parts. Each part costs a launch and copies.
MAX_PARTS = 8


def greedy_parts(
    batch: Batch, graphs: GraphView, mode: RuntimeMode, *, max_parts: int = MAX_PARTS
) -> tuple[Part, ...]:
    """Split a batch into parts that fill their graphs, and one part for the remaining rows.

    All filled graphs have the same size, the largest that does not exceed the batch. The last graph
    is the smallest that covers the remaining rows. Only graphs that can run now are used. The split
    minimizes launches, not padding.

    Args:
        batch: The batch to split.
        graphs: The policy's view of the graphs.
        mode: The runtime mode of the graphs.
        max_parts: Largest number of parts.

    Returns:
        The parts in order. Empty if the batch must not be split, only one part or more than
        ``max_parts`` parts would be needed, or no suitable graph is ready for a part.
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
    """Return, by size, the ready graphs that can serve rows of a batch.

    If several graphs have the same size, the one for the fewest adapters is returned.
    """
    found: dict[int, GraphKey] = {}
    for key in graphs.covering(part_of(batch, 1), mode):
        if graphs.is_ready(key):
            found.setdefault(key.num_tokens, key)
    return found
