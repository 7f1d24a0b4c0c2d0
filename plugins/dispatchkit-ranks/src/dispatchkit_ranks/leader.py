"""LeaderPolicy: one rank learns, and all ranks decide from what it has published.

Each rank measures different times, so policies that learn on every rank drift apart. Here
every rank serves the answers of a base policy that does not learn, overridden by the updates
that the leader published; these take effect on all ranks between the same two steps.
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
from dispatchkit.errors import ConfigError, DescriptorError, PolicyError
from dispatchkit.keys import Batch, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.once import Once

_BATCH = tuple(field.name for field in attrs.fields(Batch))


class LeaderPolicy:
    """Serve a base policy, overridden by what the leader's learner has published.

    Args:
        base: Answers where the learner has published nothing; it must have the trait
            ``stateless``, and be the same on all ranks.
        learner: On the leader (rank 0 of the agreement) the policy that learns; None on all
            other ranks.

    Attributes:
        num_learner_errors: How often the learner raised, or requested something no policy may
            choose; such a request is ignored.
        is_listening: Whether outcomes are passed to the learner. False until ranks run steps
            together: step times while other ranks are still starting are not representative.

    Raises:
        ConfigError: The base does not have the trait ``stateless``.
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
                "Ranks that fall back on it must get the same answers.",
            )
        self.base, self.learner = base, learner
        self.name: str = f"leader({policy_name(base)})"
        self.num_learner_errors: int = 0
        self._once = Once()
        self.is_listening = False
        self._known: dict[Batch, Decision] = {}
        self._steady: dict[Batch, Decision | None] = {}
        self._ranges: list[CellUpdate] = []
        self._one_shots: list[tuple[Batch, Decision]] = []

    # -- deciding -----------------------------------------------------------------------

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of the base; the learner chooses among them."""
        if self.learner is not None:
            self._ask("declare", config, read=list)
        return self.base.declare(config)

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return what the leader published for a batch, else the base's answer."""
        served = self._known.get(batch)
        if served is None or (served.key is not None and not graphs.is_ready(served.key)):
            served = self.base.decide(batch, graphs)
        if self.learner is not None and batch.num_reqs is None:
            wanted = self._ask("decide", batch, graphs, read=_decision)
            if wanted is not None and wanted != served:
                self._steady[batch] = wanted
        return served

    def observe(self, outcome: Outcome) -> None:
        """Pass an outcome to the learner; its updates are kept until they are published."""
        if self.learner is None or not self.is_listening:
            return
        for update in self._ask("observe", outcome, read=_updates) or ():
            if update.one_shot and update.decision is not None:
                self._one_shots.append((update.batch, update.decision))
            elif update.up_to:
                self._ranges.append(update)
                for batch in filter(update.is_about, list(self._steady)):
                    del self._steady[batch]  # requested earlier
            elif not update.one_shot:
                self._steady[update.batch] = update.decision

    # -- publishing ---------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether the learner has updates to publish."""
        return bool(self._ranges or self._steady or self._one_shots)

    def take_news(self) -> str:
        """Return the learner's updates as text, and clear them."""
        ranges, steady, one_shots = self._ranges, self._steady, self._one_shots
        self._ranges, self._steady, self._one_shots = [], {}, []
        return json.dumps(
            [_encoded(one.batch, None, False, one.up_to) for one in ranges]
            + [_encoded(batch, decision, False) for batch, decision in steady.items()]
            + [_encoded(batch, decision, True) for batch, decision in one_shots]
        )

    def put_news(self, text: str, dispatcher: Dispatcher) -> int:
        """Serve what the leader published from now on; return the number of cells it affects.

        Updates that no policy may choose are ignored on all ranks, and counted as learner errors.
        """
        keys = {str(key): key for key in dispatcher.registry}
        served = 0
        for update in [_decoded(item, keys) for item in json.loads(text)]:
            try:
                dispatcher.update(update)
            except (DescriptorError, PolicyError) as error:
                if self.learner is not None:
                    self._blame("observe", error)
                continue
            served += 1
            if not update.one_shot:
                if update.decision is None:
                    for batch in filter(update.is_about, list(self._known)):
                        del self._known[batch]
                else:
                    self._known[update.batch] = update.decision
        return served

    # -- inside -------------------------------------------------------------------------

    def _ask(self, method: str, *args: Any, read: Callable[[Any], Any]) -> Any:
        """Call the learner and read its answer; a learner that fails changes no answers."""
        call = getattr(self.learner, method, None)
        try:
            return None if call is None else read(call(*args))
        except Exception as error:  # noqa: BLE001 - a policy may raise anything; it is reported
            self._blame(method, error)
            return None

    def _blame(self, method: str, error: Exception) -> None:
        self.num_learner_errors += 1
        if self._once.first():
            warnings.warn(
                f"Policy {policy_name(self.learner)!r}, {method}: raised "
                f"{type(error).__name__}: {error}. The ranks continue with what it published "
                "before.",
                RuntimeWarning,
                stacklevel=4,
            )


def _updates(answer: Any) -> list[CellUpdate]:
    """Return a learner's updates, all read before any is applied."""
    updates = list(answer or ())
    for update in updates:
        if not isinstance(update, CellUpdate):
            raise TypeError(f"it answered {update!r:.60}; only CellUpdates are allowed")
    return updates


def _decision(answer: Any) -> Decision | None:
    if answer is not None and not isinstance(answer, Decision):
        raise TypeError(f"it answered {answer!r:.60}; a Decision or None is allowed")
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
    # The key no longer exists: ask the base again, as on every other rank.
    key = keys.get(name)
    decision = None if key is None else Decision.replay(key, reason, timed=timed)
    return CellUpdate(batch, decision, one_shot)
