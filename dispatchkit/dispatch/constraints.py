"""Hard constraints, which every decision of a policy must satisfy."""

from __future__ import annotations

from typing import Any

import attrs

from dispatchkit.dispatch.decision import Decision
from dispatchkit.dispatch.policy import GraphView
from dispatchkit.errors import counted
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import RuntimeMode


def broken_constraint(answer: Any, batch: Batch, graphs: GraphView) -> str | None:
    """Describe the hard constraint that a decision violates, or return None."""
    if isinstance(answer, GraphKey):
        return f"returned the key {answer}. Return a Decision: Decision.replay(key)."
    if not isinstance(answer, Decision):
        return f"returned {answer!r}; return a Decision or None."
    if not answer.reason:
        what = answer.graphs or "eager"
        return f"chose {what} without a reason; give one, because steps are counted by reason."
    if answer.parts:
        return _broken_by_split(answer, batch, graphs)
    key = answer.key
    if key is None:
        if answer.mode is not RuntimeMode.NONE:
            return (
                f"chose mode {answer.mode.name} without a key. Use Decision.replay(key), or "
                "Decision.eager(reason) to run eager."
            )
        return None
    if answer.mode is not key.mode:
        return (
            f"chose mode {answer.mode.name} with a key of mode {key.mode.name}; the modes must be "
            "equal. Decision.replay(key) sets the mode."
        )
    return _broken_by_key(key, batch, graphs)


def may_be_split(batch: Batch) -> bool:
    """Return whether a batch may be split: only mixed batches may, not decode batches.

    The rows of a decode batch are grouped by request, and its graphs are captured for a fixed
    number of requests.
    """
    return not batch.uniform and batch.max_query_len is None


def part_of(batch: Batch, num_tokens: int) -> Batch:
    """Return a part of a batch, with an upper bound for its number of requests."""
    reqs = None if batch.num_reqs is None else min(batch.num_reqs, num_tokens)
    return attrs.evolve(batch, num_tokens=num_tokens, num_reqs=reqs)


def _broken_by_split(answer: Decision, batch: Batch, graphs: GraphView) -> str | None:
    parts, key = answer.parts, answer.key
    shown = " + ".join(map(str, parts))
    if not graphs.may_split:
        return (
            f"split a batch into {shown}, but its rows are not declared independent. Split only "
            "if GraphView.may_split is true; RunnerOptions(rows_independent=True) enables splits."
        )
    if not may_be_split(batch):
        return f"split a batch ({batch}); only mixed batches may be split, not decode batches."
    if len(parts) < 2:
        return (
            f"split a batch into {shown}; a split needs at least two "
            "parts. Use Decision.replay for one graph."
        )
    for part in parts:
        if part.key.mode is not answer.mode:
            return f"split a batch into {shown}; all parts must have mode {answer.mode.name}."
    if key != parts[0].key:
        return (
            f"split a batch into {shown} with the key {key}; the key must be that of the first "
            "part. Decision.split(parts) sets the key."
        )
    total = sum(part.num_tokens for part in parts)
    if total != batch.num_tokens:
        rows = counted(batch.num_tokens, "row")
        only = "only " if total < batch.num_tokens else ""
        return f"split {rows} into {shown}, but these parts have {only}{counted(total, 'row')}."
    sizes = [part.key.num_tokens for part in parts]
    if sizes != sorted(sizes, reverse=True):
        # Splits with the same graphs in different orders would be counted and timed separately.
        return f"split a batch into {shown}; put larger graphs first."
    for part in parts:
        if broken := _broken_by_key(part.key, part_of(batch, part.num_tokens), graphs):
            return f"split {counted(batch.num_tokens, 'row')} and {broken}"
    return None


def _broken_by_key(key: GraphKey, batch: Batch, graphs: GraphView) -> str | None:
    if key not in graphs:
        return f"chose {key}, which is not in the registry. Choose a declared key, or return None."
    if not batch.allows(key.mode):
        names = ", ".join(sorted(mode.name for mode in batch.allowed_modes))
        return f"chose {key}, but this batch allows only {names}. Batch.allows() checks modes."
    if key.num_tokens < batch.num_tokens:
        size = counted(batch.num_tokens, "token")
        return f"chose {key} for {size}; a graph must be at least as large as its batch."
    if not key.covers(batch):
        return (
            f"chose {key}, which cannot serve this batch ({batch}). GraphView.covering() yields "
            "suitable keys."
        )
    why = graphs.why_not(key)
    if why is not None:
        return f"chose {key}, which cannot run now: {why}. GraphView.is_ready() checks keys."
    return None
