"""Hard constraints: what no policy may choose, whatever it prefers."""

from __future__ import annotations

from typing import Any

from dispatchkit.dispatch.decision import Decision
from dispatchkit.dispatch.policy import GraphView
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import RuntimeMode


def broken_constraint(answer: Any, batch: Batch, graphs: GraphView) -> str | None:
    """Return which hard constraint an answer breaks, in words; None if it may stand."""
    if not isinstance(answer, Decision):
        how = " Decision.replay(key) makes one." if isinstance(answer, GraphKey) else ""
        return f"answered {answer!r}; a Decision or None is allowed.{how}"
    if not answer.reason:
        return f"answered {answer!r} without a reason; each step is counted by one."
    key = answer.key
    if key is None:
        if answer.mode is not RuntimeMode.NONE:
            return f"chose mode {answer.mode.name} without a key; only NONE has no key."
        return None
    if answer.mode is not key.mode:
        return f"chose mode {answer.mode.name} with a key of mode {key.mode.name}."
    if key not in graphs:
        return f"chose {key}, which is not in the registry. Return one it declared, or None."
    if not batch.allows(key.mode):
        names = ", ".join(sorted(mode.name for mode in batch.allowed_modes))
        return f"chose {key}, but this batch allows only {names}."
    if key.num_tokens < batch.num_tokens:
        return f"chose {key} for {batch.num_tokens} tokens; a bucket is never smaller."
    if not key.covers(batch):
        return f"chose {key}, which cannot serve {batch}."
    why = graphs.why_not(key)
    if why is not None:
        return f"chose {key}, which cannot run now: {why}."
    return None
