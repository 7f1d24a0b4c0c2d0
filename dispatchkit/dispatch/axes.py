"""Use policies that are unaware of axes under configurations that have some.

Such a policy declares and decides as if there were no axes. Each of its keys exists once per
combination of buckets, and when it decides it sees only the keys of the batch's combination.
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


def knows_axes(keys: Iterable[GraphKey]) -> bool:
    """Return whether a policy declares keys with axes itself."""
    return any(key.descriptor.axes for key in keys)


def expanded(keys: Iterable[GraphKey], config: DispatchConfig) -> list[GraphKey]:
    """Return each key once per combination of buckets."""
    combinations = config.variants.combinations()
    return [_with_axes(key, axes) for key in keys for axes in combinations]


def is_outside(batch: Batch) -> bool:
    """Return whether a value of a batch lies outside all buckets of its axis."""
    return None in batch.axes


class PlainView(GraphView):
    """The graphs of one combination of buckets, shown without axes.

    Args:
        view: All graphs.
        axes: The buckets.
    """

    def __init__(self, view: GraphView, axes: AxisBuckets) -> None:
        self.config: DispatchConfig = view.config
        self.may_split: bool = view.may_split
        self._view, self._axes = view, axes

    @property
    def revision(self) -> tuple[object, ...]:
        """A value that stays equal as long as the view's contents do not change."""
        return self._axes, *self._view.revision

    def why_not(self, key: GraphKey) -> str | None:
        """Return why a key cannot run now, as a reason to count; None if it can."""
        return self._view.why_not(_with_axes(key, self._axes))

    def covering(self, batch: Batch, mode: RuntimeMode) -> Iterator[GraphKey]:
        """Yield the known keys of a mode that can compute the batch, smallest first."""
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
    """Return a batch as a policy unaware of axes sees it."""
    return attrs.evolve(batch, axes=())


def answer_with_axes(decision: Decision, axes: AxisBuckets) -> Decision:
    """Return a policy's answer with the batch's buckets added to its keys."""
    key = getattr(decision, "key", None)  # the validator reports invalid answers
    if key is None:
        return decision
    parts = tuple(attrs.evolve(part, key=_with_axes(part.key, axes)) for part in decision.parts)
    return attrs.evolve(decision, key=_with_axes(key, axes), parts=parts)


def outcome_without_axes(outcome: Outcome) -> Outcome:
    """Return an outcome as a policy unaware of axes sees it."""
    plain = answer_with_axes(outcome.decision, ())
    return attrs.evolve(outcome, batch=without_axes(outcome.batch), decision=plain)


def update_with_axes(update: CellUpdate, axes: AxisBuckets) -> CellUpdate:
    """Return a policy's update for the buckets of the batch it learned from."""
    answer = update.decision
    return attrs.evolve(
        update,
        batch=attrs.evolve(update.batch, axes=axes),
        decision=None if answer is None else answer_with_axes(answer, axes),
    )


def _with_axes(key: GraphKey, axes: AxisBuckets) -> GraphKey:
    buckets: Any = axes  # no key has None among them
    return GraphKey(key.mode, attrs.evolve(key.descriptor, axes=buckets))
