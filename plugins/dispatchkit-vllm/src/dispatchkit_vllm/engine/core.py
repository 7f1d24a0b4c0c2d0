"""A policy in front of one of vLLM's dispatchers.

vLLM's own class manages keys, captures and replays. A policy only chooses among the graphs of this
class. vLLM's class decides a step itself if the policy is not asked, raises an error, or makes a
choice that cannot run. A policy that fails in a step therefore does not stop the engine.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from dispatchkit import (
    Batch,
    Decision,
    DispatchConfig,
    Dispatcher,
    GraphKey,
    Policy,
    Reason,
    RuntimeMode,
    load_plugins,
)
from dispatchkit.dispatch import policy_name
from dispatchkit.errors import ConfigError, NoGraphError, PolicyError, counted

from dispatchkit_vllm.engine.log import log
from dispatchkit_vllm.engine.settings import EngineSettings
from dispatchkit_vllm.runner_rule import RunnerRule, use_rule

__all__ = [
    "Answer",
    "PolicyCore",
    "UnfitPolicyError",
    "check_policy",
    "make_policy",
    "refuse_learning",
]

#: Reasons, besides ``policy_error``, why vLLM's own dispatcher decided instead of the policy.
EAGER_REFUSED, UNFIT_CHOICE = "eager_not_allowed", "unfit_choice"


class UnfitPolicyError(ConfigError):
    """Raised for a policy that declares graphs that the model runner does not capture."""


@attrs.frozen(eq=False)
class Answer:
    """A decision prepared for the model runner.

    Attributes:
        result: The return value of the runner's ``dispatch``.
        decision: Decision of the policy, with its reason.
        batch: The batch that the policy decided for.
        num_reqs: Number of requests that ``result`` is valid for; None for any number.
    """

    result: Any
    decision: Decision
    batch: Batch
    num_reqs: int | None = None


def make_policy(settings: EngineSettings, rule: RunnerRule) -> Policy:
    """Create the configured policy; the name ``vllm`` selects the runner's own rule."""
    with use_rule(rule):
        return load_plugins().create_policy(settings.policy, **settings.policy_options)


def check_policy(settings: EngineSettings) -> None:
    """Validate the configured policy's name and options by creating the policy once.

    Raises:
        UnknownNameError: No policy has the configured name; the error suggests similar names.
        ConfigError: An option of the policy is invalid.
    """
    if settings.policy:
        load_plugins().create_policy(settings.policy, **settings.policy_options)


class PolicyCore:
    """A policy with its decisions prepared for one model runner.

    Args:
        policy: The policy that decides for each batch.
        config: Sizes, limits and modes of the runner.
        graphs: Graphs that the runner captures, each with the value that the runner's ``dispatch``
            returns for it.
        eager: Function that takes a batch and its number of requests, and returns what the
            runner's ``dispatch`` returns if the batch runs eager.
        runner: Name of the runner in messages.

    Attributes:
        fallbacks: Number of steps, by reason, for which the policy was asked but the runner's own
            dispatcher decided.
        learns: Whether the policy has an ``observe`` method to learn from outcomes.

    Raises:
        UnfitPolicyError: The policy declares a graph that the runner does not capture.
        PolicyError: The policy is invalid.
    """

    def __init__(
        self,
        policy: Policy,
        config: DispatchConfig,
        graphs: Mapping[GraphKey, Any],
        *,
        eager: Callable[[Batch, int], Any],
        runner: str,
    ) -> None:
        self.policy = policy
        self.config = config
        self.runner = runner
        self.learns = callable(getattr(policy, "observe", None))
        self.fallbacks: Counter[str] = Counter()
        self._graphs = graphs
        self._eager = eager
        self._warned: set[str] = set()
        self._named = f"Policy {policy_name(policy)!r}"
        self._fault: PolicyError | None = None
        self.dispatcher = Dispatcher(
            policy, config, lazy=True, bind=self._bind, on_fault=self._keep_fault
        )
        self._check_fit(self.dispatcher.registry)
        self._dispatch = self.dispatcher.dispatch

    # -- setup --------------------------------------------------------------------------

    def _check_fit(self, keys: Iterable[GraphKey]) -> None:
        """Reject a policy that declares graphs that the runner does not capture."""
        for key in keys:
            if self._result_of(key) is not None:
                continue
            like = [str(one) for one in self._graphs if one.num_tokens == key.num_tokens]
            captured = "The runner captures no graph of that size."
            if like:
                captured = f"Captured graphs of that size: {'; '.join(like)}."
            raise UnfitPolicyError(
                "policy",
                policy_name(self.policy),
                f"a policy for the graphs of {self.runner}",
                f"It declares {key}, which this runner does not capture. {captured} Choose another "
                "policy, such as 'vllm', or other options.",
            )

    def _result_of(self, key: GraphKey) -> Any:
        """Return the runner's result for a graph, or None if the runner lacks the graph."""
        found = self._graphs.get(key)
        if found is None and key.descriptor.num_reqs is not None:
            # A graph for any number of requests also serves a limited number.
            general = attrs.evolve(key.descriptor, num_reqs=None)
            found = self._graphs.get(GraphKey(key.mode, general))
        return found

    def _bind(self, decision: Decision, batch: Batch) -> Answer | None:
        """Return the answer for a cell; None if the runner's own dispatcher must decide."""
        if decision.reason == Reason.POLICY_ERROR:
            return None
        if decision.key is None:
            # A cell does not depend on the number of requests, so derive this number from the size.
            # For a mixed batch, assume one token per request. The second runner replaces the result
            # if the actual number of requests differs.
            per_req = batch.query_len if batch.uniform else 1
            num_reqs = batch.num_reqs or batch.num_tokens // per_req
            return Answer(self._eager(batch, num_reqs), decision, batch, num_reqs)
        result = self._result_of(decision.key)
        # A graph serves only batches with the same number of adapters.
        if result is None or decision.key.descriptor.num_active_loras != batch.num_active_loras:
            return None
        return Answer(result, decision, batch)

    def fill(self) -> int:
        """Fill the cells of the ceilings FULL and PIECEWISE; return the number of filled cells.

        Afterwards, a step with one of these ceilings waits for the policy only if its batch has
        more requests than the decision in its cell is valid for.
        """
        config = self.config
        cases = sorted({0, *(key.descriptor.num_active_loras for key in self._graphs)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `ask` logs the policy's errors
            for ceiling in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
                for kind in range(config.num_query_classes):
                    for case in cases:
                        for num_tokens in range(1, config.max_num_tokens + 1):
                            self.ask(num_tokens, 0, kind, case, int(ceiling))
        self.fallbacks.clear()
        return self.dispatcher.num_filled_cells

    def never_replayed(self) -> list[GraphKey]:
        """Return the graphs that the policy does not choose for batches of exactly their size."""
        found = []
        for key in self._graphs:
            own = key.descriptor
            kind = next(
                (
                    index
                    for index in range(self.config.num_query_classes)
                    if _is_kind(self.config.query_class(index), key)
                ),
                0,
            )
            batch = self.dispatcher.batch(
                own.num_tokens, 0, kind, own.num_active_loras, int(key.mode)
            )
            decision, fault = self.dispatcher.preview(batch)
            chosen = None if decision.key is None else self._result_of(decision.key)
            if fault is not None or chosen != self._graphs[key]:
                found.append(key)
        return found

    # -- the step -----------------------------------------------------------------------

    def ask(
        self, num_tokens: int, num_reqs: int, kind: int, loras: int, ceiling: int
    ) -> Answer | None:
        """Return the policy's answer; None if the runner's own dispatcher must decide."""
        try:
            decision = self._dispatch(num_tokens, num_reqs, kind, loras, ceiling)
        except NoGraphError as error:
            if error.reason == Reason.POLICY_ERROR:
                self._fall_back_from_fault(num_tokens)
                return None
            batch = f"a batch of {counted(num_tokens, 'token')}"
            what = f"{self._named} chose eager for {batch}, which must not run eager"
            self._fall_back(EAGER_REFUSED, what)
            return None
        except Exception as error:  # noqa: BLE001 - no error of a policy may stop a step
            what = f"{self._named} made no decision: {type(error).__name__}: {error}"
            self._fall_back(Reason.POLICY_ERROR, what)
            return None
        answer: Answer | None = decision.plan
        if answer is not None:
            return answer
        if decision.key is None:
            self._fall_back_from_fault(num_tokens)
        else:
            batch = f"a batch of {counted(num_tokens, 'token')}"
            what = f"{self._named} chose {decision.key}, which cannot serve {batch}"
            self._fall_back(UNFIT_CHOICE, what)
        return None

    def _fall_back_from_fault(self, num_tokens: int) -> None:
        batch = f"a batch of {counted(num_tokens, 'token')}"
        what = f"{self._named} raised an error or returned an invalid decision for {batch}"
        self._fall_back(Reason.POLICY_ERROR, what if self._fault is None else str(self._fault))

    def _keep_fault(self, error: PolicyError, num_tokens: int | None, epoch: int) -> None:
        self._fault = error

    def _fall_back(self, reason: str, what: str) -> None:
        self.fallbacks[reason] += 1
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning(
                "%s. vLLM's own dispatcher decides instead. Further cases are not logged; metrics "
                "count these steps with reason 'vllm'.",
                what.rstrip(" .:"),
            )


def _is_kind(query_class: tuple[bool, int, int | None], key: GraphKey) -> bool:
    uniform, query_len, longest = query_class
    own = key.descriptor
    if own.uniform:
        return uniform and query_len == own.query_len
    if own.max_query_len is not None:
        return not uniform and longest is not None
    return not uniform and longest is None


def refuse_learning(policy: Policy, world_size: int) -> None:
    """Reject a learning policy if several ranks must make the same decisions.

    Raises:
        ConfigError: The policy learns, and there are several ranks.
    """
    if callable(getattr(policy, "observe", None)) and world_size > 1:
        raise ConfigError(
            "policy",
            policy_name(policy),
            f"a policy that does not learn, because there are {world_size} ranks",
            "Each rank would measure different times, and ranks that decide differently hang. "
            "Choose a policy without an observe() method, such as 'vllm'.",
        )
