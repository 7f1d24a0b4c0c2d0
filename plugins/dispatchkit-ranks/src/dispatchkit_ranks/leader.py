"""A policy that learns on one rank and publishes its updates to all ranks.

Each rank measures different times, so policies that learn on every rank would diverge. With a
leader, every rank follows a stateless base policy, except for batches for which the leader
published a different decision. Updates take effect on all ranks between the same two steps.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from dispatchkit.dispatch import (
    CellUpdate,
    Decision,
    Dispatcher,
    GraphView,
    Outcome,
    Policy,
    policy_name,
    policy_traits,
)
from dispatchkit.errors import ConfigError, DescriptorError, PolicyError, format_value
from dispatchkit.keys import Batch, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.once import Once

_BATCH = tuple(field.name for field in attrs.fields(Batch))


class LeaderPolicy:
    """A base policy whose decisions a leader can override by publishing updates.

    Args:
        base: The policy for batches without a published update. It must have the trait
            ``stateless`` and be the same on all ranks.
        learner: On the leader (rank 0 of the agreement), the policy that learns; None on all
            other ranks.

    Attributes:
        num_learner_errors: Number of errors that the learner raised, plus the number of its updates
            that were ignored because their decisions are not allowed.
        is_observing: Whether the learner receives outcomes. False until the ranks run steps
            together, because step times during start-up are not representative.

    Raises:
        ConfigError: The base policy does not have the trait ``stateless``.
    """

    base: Policy
    learner: Policy | None

    traits: frozenset[str] = frozenset()

    def __init__(self, base: Policy, learner: Policy | None = None) -> None:
        if "stateless" not in policy_traits(base):
            raise ConfigError(
                "base",
                policy_name(base),
                "a policy with the trait 'stateless'",
                "All ranks must get the same decisions from the base policy. To use a policy that "
                "learns, pass it as learner= on rank 0.",
            )
        self.base, self.learner = base, learner
        self.name: str = f"leader({policy_name(base)})"
        self.num_learner_errors: int = 0
        self._once = Once()
        self.is_observing = False
        self._published: dict[Batch, Decision] = {}
        self._steady: dict[Batch, Decision | None] = {}
        self._ranges: list[CellUpdate] = []
        self._one_shots: list[tuple[Batch, Decision]] = []

    # -- deciding -----------------------------------------------------------------------

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of the base policy, among which the learner chooses."""
        if self.learner is not None:
            self._call_learner("declare", config, read=list)
        return self.base.declare(config)

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the published decision for a batch, or else the decision of the base policy.

        The base policy also decides if the graph of the published decision is not ready.
        """
        served = self._published.get(batch)
        if served is None or (served.key is not None and not graphs.is_ready(served.key)):
            served = self.base.decide(batch, graphs)
        if self.learner is not None and batch.num_reqs is None:
            wanted = self._call_learner("decide", batch, graphs, read=_decision)
            if wanted is not None and wanted != served:
                self._steady[batch] = wanted
        return served

    def observe(self, outcome: Outcome) -> None:
        """Pass an outcome to the learner, and store the resulting updates for ``take_updates``."""
        if self.learner is None or not self.is_observing:
            return
        for update in self._call_learner("observe", outcome, read=_updates) or ():
            if update.one_shot and update.decision is not None:
                self._one_shots.append((update.batch, update.decision))
            elif update.up_to:
                self._ranges.append(update)
                for batch in filter(update.is_about, list(self._steady)):
                    del self._steady[batch]  # superseded by this update
            elif not update.one_shot:
                self._steady[update.batch] = update.decision

    # -- publishing ---------------------------------------------------------------------

    @property
    def has_updates(self) -> bool:
        """Whether the learner has updates to publish."""
        return bool(self._ranges or self._steady or self._one_shots)

    def take_updates(self) -> str:
        """Return the unpublished updates as text, and clear them."""
        ranges, steady, one_shots = self._ranges, self._steady, self._one_shots
        self._ranges, self._steady, self._one_shots = [], {}, []
        return json.dumps(
            [_encoded(one.batch, None, False, one.up_to) for one in ranges]
            + [_encoded(batch, decision, False) for batch, decision in steady.items()]
            + [_encoded(batch, decision, True) for batch, decision in one_shots]
        )

    def apply_updates(self, text: str, dispatcher: Dispatcher) -> int:
        """Apply published updates, and return how many were applied.

        Updates with decisions that are not allowed are ignored on all ranks. The leader counts them
        as learner errors.
        """
        keys = {str(key): key for key in dispatcher.registry}
        served = 0
        for update in [_decoded(item, keys) for item in json.loads(text)]:
            try:
                dispatcher.update(update)
            except (DescriptorError, PolicyError) as error:
                if self.learner is not None:
                    name = policy_name(self.learner)
                    self._count_error(f"An update from policy {name!r} was ignored", error)
                continue
            served += 1
            if not update.one_shot:
                if update.decision is None:
                    for batch in filter(update.is_about, list(self._published)):
                        del self._published[batch]
                else:
                    self._published[update.batch] = update.decision
        return served

    # -- internals ----------------------------------------------------------------------

    def _call_learner(self, method: str, *args: Any, read: Callable[[Any], Any]) -> Any:
        """Return the validated result of a learner's method; None if it fails."""
        call = getattr(self.learner, method, None)
        try:
            return None if call is None else read(call(*args))
        except Exception as error:  # noqa: BLE001 - a policy may raise any error; it is counted
            self._count_error(f"Policy {policy_name(self.learner)!r} failed in {method}()", error)
            return None

    def _count_error(self, what: str, error: Exception) -> None:
        self.num_learner_errors += 1
        if self._once.first():
            cause = f"{type(error).__name__}: {error}".rstrip(".: ")
            warnings.warn(
                f"{what}: {cause}. The ranks continue with the base policy and the learner's other "
                "updates. Further errors are only counted, in num_learner_errors.",
                RuntimeWarning,
                stacklevel=4,
            )


def _updates(answer: Any) -> list[CellUpdate]:
    """Return the validated updates of a learner."""
    updates = list(answer or ())
    for update in updates:
        if not isinstance(update, CellUpdate):
            raise TypeError(f"expected CellUpdate objects, got {format_value(update)}")
    return updates


def _decision(answer: Any) -> Decision | None:
    if answer is not None and not isinstance(answer, Decision):
        raise TypeError(f"expected a Decision or None, got {format_value(answer)}")
    return answer


def _encoded(batch: Batch, decision: Decision | None, one_shot: bool, up_to: int = 0) -> list[Any]:
    answer = None
    if decision is not None:
        key = None if decision.key is None else str(decision.key)
        answer = [key, str(decision.reason), decision.timed]
    return [[getattr(batch, name) for name in _BATCH], answer, one_shot, up_to]


def _decoded(item: list[Any], keys: dict[str, GraphKey]) -> CellUpdate:
    facts, answer, one_shot, up_to = item
    values = dict(zip(_BATCH, facts, strict=True))
    batch = Batch(**{**values, "axes": tuple(values["axes"])})
    if answer is None:
        return CellUpdate(batch, None, one_shot, up_to)
    name, reason, timed = answer
    if name is None:
        return CellUpdate(batch, Decision(RuntimeMode.NONE, None, reason, timed), one_shot)
    # If the key was removed, clear the decision, so that the base policy decides on all ranks.
    key = keys.get(name)
    decision = None if key is None else Decision.replay(key, reason, timed=timed)
    return CellUpdate(batch, decision, one_shot)
