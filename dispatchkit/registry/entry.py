"""GraphEntry: a key and the state of its graph."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from dispatchkit.keys.batch import GraphKey


class KeyState(enum.StrEnum):
    """The state of a key's graph.

    A key is DECLARED, then CAPTURED, and may become EVICTED, STALE or FAILED. It can be captured
    again from each of these states.
    """

    DECLARED = "declared"
    CAPTURED = "captured"
    EVICTED = "evicted"
    FAILED = "failed"
    STALE = "stale"


@attrs.frozen
class GraphEntry:
    """A key and its graph; immutable, so each transition creates a new entry.

    Attributes:
        key: Key of the graph.
        state: The state of its graph.
        graph: The executor's graph object, with everything it reads; opaque to the registry.
        num_bytes: Memory attributed to the graph; 0 if it shares the memory of another graph.
        reason: Why the graph failed, was evicted or became stale.
        attempts: Capture attempts since the last success.
    """

    key: GraphKey
    state: KeyState = KeyState.DECLARED
    graph: Any = attrs.field(default=None, repr=False, eq=False)
    num_bytes: int = 0
    reason: str = ""
    attempts: int = 0
