"""GraphEntry: one key and the state of its graph."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from dispatchkit.keys.batch import GraphKey


class KeyState(enum.StrEnum):
    """Where a key is in its life.

    DECLARED → CAPTURED → EVICTED, STALE or FAILED; all of these may be captured again.
    """

    DECLARED = "declared"
    CAPTURED = "captured"
    EVICTED = "evicted"
    FAILED = "failed"
    STALE = "stale"


@attrs.frozen
class GraphEntry:
    """A key with its graph. Immutable: each transition makes a new entry.

    Attributes:
        key: Its name.
        state: Where it is in its life.
        graph: What the executor replays, and all that its graph reads; opaque here.
        num_bytes: Memory it is charged with, 0 where it shares another's.
        reason: Why it is failed, evicted or stale.
        attempts: Captures tried since the last success.
    """

    key: GraphKey
    state: KeyState = KeyState.DECLARED
    graph: Any = attrs.field(default=None, repr=False, eq=False)
    num_bytes: int = 0
    reason: str = ""
    attempts: int = 0
