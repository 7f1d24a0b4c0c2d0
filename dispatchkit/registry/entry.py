"""GraphEntry: a key and the state of its graph."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from dispatchkit.keys.batch import GraphKey


class KeyState(enum.StrEnum):
    """The state of a key's graph.

    A key is DECLARED first. A capture makes it CAPTURED or, if the capture fails, FAILED. A
    captured key may become EVICTED, STALE or FAILED. Every state allows another capture.
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
        graph: The executor's object for the graph; the registry only stores it.
        num_bytes: Memory in bytes that the capture added; 0 if the graph fits into the memory of
            other graphs, or was captured outside the runner.
        reason: Why the graph failed, was evicted or became stale; otherwise empty.
        attempts: Number of failures since the last successful capture. Failed captures, replays,
            proofs of rows and checks all count.
    """

    key: GraphKey
    state: KeyState = KeyState.DECLARED
    graph: Any = attrs.field(default=None, repr=False, eq=False)
    num_bytes: int = 0
    reason: str = ""
    attempts: int = 0
