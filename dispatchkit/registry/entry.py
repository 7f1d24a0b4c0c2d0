"""GraphEntry: one key and the state of its graph."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from dispatchkit.keys.batch import GraphKey


class KeyState(enum.StrEnum):
    """The state of a key's graph.

    DECLARED → CAPTURED → EVICTED, STALE or FAILED; all of these may be captured again.
    """

    DECLARED = "declared"
    CAPTURED = "captured"
    EVICTED = "evicted"
    FAILED = "failed"
    STALE = "stale"


@attrs.frozen
class GraphEntry:
    """A key with its graph. Immutable: each transition creates a new entry.

    Attributes:
        key: The key.
        state: The state of its graph.
        graph: What the executor replays, with everything it reads; opaque here.
        num_bytes: Memory it is charged with; 0 if it shares another's.
        reason: Why it failed, was evicted or became stale.
        attempts: Capture attempts since the last success.
    """

    key: GraphKey
    state: KeyState = KeyState.DECLARED
    graph: Any = attrs.field(default=None, repr=False, eq=False)
    num_bytes: int = 0
    reason: str = ""
    attempts: int = 0
