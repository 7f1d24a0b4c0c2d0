"""Adapt policies that do not support axes to configurations with axes.

The keys and decisions of these policies have no axes. Each key is declared for every combination of
buckets. ``decide`` receives a view that contains only the keys with the buckets of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from dispatchkit.dispatch.decision import CellUpdate, Decision, Outcome
from dispatchkit.dispatch.policy import GraphView
from dispatchkit.keys.axes import AxisBuckets
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import RuntimeMode


def declares_axes(keys: Iterable[GraphKey]) -> bool:
    """Return whether any of a policy's keys has axes."""
    return any(key.descriptor.axes for key in keys)


def expand_keys(keys: Iterable[GraphKey], config: DispatchConfig) -> list[GraphKey]:
    """Return each key with every combination of buckets."""
    combinations = config.variants.combinations()
    return [_with_axes(key, axes) for key in keys for axes in combinations]


def is_outside(batch: Batch) -> bool:
    """Return whether an axis value of a batch is outside all buckets."""
    return None in batch.axes


class PlainView(GraphView):
    """A view of the graphs for one combination of axis buckets; its keys have no axes.

    Args:
        view: The view of all graphs.
        axes: The bucket of each axis.
    """

    def __init__(self, view: GraphView, axes: AxisBuckets) -> None:
        self.config: DispatchConfig = view.config
        self.may_split: bool = view.may_split
        self._view, self._axes = view, axes

    @property
    def revision(self) -> tuple[object, ...]:
        """A value that changes whenever the contents of the view change."""
        return self._axes, *self._view.revision

    def why_not(self, key: GraphKey) -> str | None:
        """Return the reason why a key cannot run now, or None if it can."""
        return self._view.why_not(_with_axes(key, self._axes))

    def covering(self, batch: Batch, mode: RuntimeMode) -> Iterator[GraphKey]:
        """Yield a mode's keys that cover a batch, smallest first."""
        for key in self._view.covering(attrs.evolve(batch, axes=self._axes), mode):
            yield _with_axes(key, ())

    def _keys(self) -> list[GraphKey]:
        return [_with_axes(key, ()) for key in self._view if key.descriptor.axes == self._axes]

    def __iter__(self) -> Iterator[GraphKey]:
        return iter(self._keys())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, GraphKey) and _with_axes(key, self._axes) in self._view

    def __len__(self) -> int:
        return len(self._keys())


def without_axes(batch: Batch) -> Batch:
    """Return a batch without its axes."""
    return attrs.evolve(batch, axes=()) if batch.axes else batch


def answer_with_axes(decision: Decision, axes: AxisBuckets) -> Decision:
    """Return a decision with axis buckets added to its keys."""
    key = getattr(decision, "key", None)  # broken_constraint reports invalid answers
    if key is None:
        return decision
    parts = tuple(attrs.evolve(part, key=_with_axes(part.key, axes)) for part in decision.parts)
    return attrs.evolve(decision, key=_with_axes(key, axes), parts=parts)


def outcome_without_axes(outcome: Outcome) -> Outcome:
    """Return an outcome without the axes of its batch and keys."""
    plain = answer_with_axes(outcome.decision, ())
    return attrs.evolve(outcome, batch=without_axes(outcome.batch), decision=plain)


def update_with_axes(update: CellUpdate, axes: AxisBuckets) -> CellUpdate:
    """Return an update with axis buckets added to its batch and keys."""
    answer = update.decision
    return attrs.evolve(
        update,
        batch=attrs.evolve(update.batch, axes=axes),
        decision=None if answer is None else answer_with_axes(answer, axes),
    )


def _with_axes(key: GraphKey, axes: AxisBuckets) -> GraphKey:
    buckets: Any = axes  # buckets of a key are never None
    return GraphKey(key.mode, attrs.evolve(key.descriptor, axes=buckets))
