"""PolicyTests, the test kit for policies.

Each test checks one property on small random cases with a fixed seed. The docstring of a test
explains the harm of violating its property. The core set of tests applies to every policy. A
*trait* is an optional property, which is tested if the policy lists it in ``traits`` and skipped
otherwise.

``run_policy_conformance`` runs the same methods without pytest.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Callable, Iterable, Iterator

import attrs

from dispatchkit.dispatch import (
    TRAITS,
    CalibrationRun,
    CellUpdate,
    Dispatcher,
    Outcome,
    Policy,
    PolicyParts,
    Reason,
    policy_traits,
)
from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.errors import NoGraphError, counted, describe_exception
from dispatchkit.keys import ALLOWED_MODES, Batch, CUDAGraphMode, GraphKey, RuntimeMode
from dispatchkit.registry import GraphRegistry
from dispatchkit.testing import strategies
from dispatchkit.testing.cases import (
    Case,
    CaseRunner,
    declared_keys,
    for_all_cases,
    show_different,
)
from dispatchkit.testing.samples import (
    graph_view,
    make_batch,
    sample_answers_elsewhere,
    usual_configs,
)

_KEY_CHANGES = ("captured", "failed", "evicted", "stale", "disabled", "enabled")
_MODE_HINT = "config.mode.decode_mode() and mixed_mode() return the modes that may be declared"
_MAX_CALIBRATION_ROUNDS = 50
# For each mode, the ``allowed`` code of batches that may run in this mode or eager.
_ALLOWED_CODE = {RuntimeMode.PIECEWISE: 1, RuntimeMode.FULL: 6}


class PolicyTests(CaseRunner):
    """Test kit for a policy.

    Subclass it under a name that starts with ``Test``, and define ``make_policy``.

    Attributes:
        seed: Seed of the random cases; the same seed gives the same cases.
        max_examples: Number of cases per property (fewer for slow properties), if the hypothesis
            profile has its default ``max_examples`` of 100. With 200, the number of cases doubles.
    """

    # -- declared keys ------------------------------------------------------------------

    @for_all_cases(share=0.5)
    def test_declare_is_deterministic(self, case: Case) -> None:
        """For the same configuration, ``declare`` returns the same keys in the same order.

        Each rank captures in this order, in its own process. Ranks that disagree on the keys or
        their order hang in the first collective of a capture.
        """
        for call, policy in (
            ("a second call", case.policy),
            ("a call on a fresh policy", case.make_policy()),
        ):
            keys = case.declare(policy)
            if keys != case.keys:
                differing = sorted(map(str, {*keys} ^ {*case.keys}))
                more = f", and {len(differing) - 6} more" if len(differing) > 6 else ""
                problem = "the same keys in a different order or number"
                if differing:
                    problem = (
                        "different keys than the first call; the keys in only one of the two "
                        f"results are {', '.join(differing[:6])}{more}"
                    )
                case.fail(f"In {call}, declare returned {problem}")

    @for_all_cases(share=0.5)
    def test_declared_keys_keep_within_the_limits(self, case: Case) -> None:
        """Keys respect the configured limits, query lengths and mode.

        The configuration determines the size of static inputs. The capture of a key beyond the
        configured limits would read past the end of these inputs. The attention backend may be
        unable to capture in a mode that is not configured. (If ``max_loras`` is not 0, a key may
        have ``max_loras`` + 1 adapters, because the base model counts as one.)
        """
        config, mode = case.config, case.config.mode
        most_loras = config.max_loras + (config.max_loras > 0)
        for key in case.keys:
            descriptor = key.descriptor
            decode = descriptor.uniform or descriptor.max_query_len is not None
            faults = {
                f"it has more tokens than max_num_tokens ({config.max_num_tokens})": (
                    descriptor.num_tokens > config.max_num_tokens
                ),
                f"it has more requests than max_num_seqs ({config.max_num_seqs})": (
                    (descriptor.num_reqs or 0) > config.max_num_seqs
                ),
                f"it has more than {counted(most_loras, 'adapter')} "
                f"(max_loras is {config.max_loras})": (descriptor.num_active_loras > most_loras),
                f"its query_len {descriptor.query_len} is not in query_lens {config.query_lens}": (
                    descriptor.uniform and descriptor.query_len not in config.query_lens
                ),
                f"its num_tokens is not a multiple of query_len ({descriptor.query_len})": (
                    descriptor.uniform and descriptor.num_tokens % descriptor.query_len != 0
                ),
                f"its mode is {key.mode}, though the configured mode is {mode}; {_MODE_HINT}": (
                    not mode.has_mode(CUDAGraphMode[key.mode.name])
                ),
                f"it is FULL for mixed batches, though the configured mode is {mode}; "
                f"{_MODE_HINT}": (
                    key.mode is RuntimeMode.FULL
                    and not decode
                    and mode.mixed_mode() is not CUDAGraphMode.FULL
                ),
            }
            for fault in (text for text, broken in faults.items() if broken):
                case.fail(f"declare returned {key}: {fault}")

    # -- decisions ----------------------------------------------------------------------

    @for_all_cases()
    def test_every_batch_gets_an_answer(self, case: Case) -> None:
        """For batches within the limits, ``decide`` does not raise, and returns a Decision or None.

        The dispatcher calls ``decide`` while serving. If ``decide`` raises for a batch, every step
        with an equal batch runs eager, or raises in strict mode. ``decide`` must not change the
        registry, because the executor controls which keys can be dispatched.
        """
        before = dict(case.registry.entries)
        for batch in case.batches():
            decision = case.decide(batch)
            mode = RuntimeMode.NONE if decision.key is None else decision.key.mode
            if decision.mode is not mode:
                case.fail(
                    f"decide returned mode {decision.mode} with key {decision.key}; "
                    "the mode must be that of the key, or NONE without a key",
                    batch,
                )
            if before != dict(case.registry.entries):
                case.fail("decide changed the registry, which only the executor may change", batch)

    @for_all_cases()
    def test_chosen_key_was_declared(self, case: Case) -> None:
        """``decide`` chooses only declared keys.

        Create the keys for ``declare`` and ``decide`` in one function. If two functions create the
        keys, the keys will eventually differ. The captured graphs are then never used, and
        steps run eager.
        """
        known = set(case.keys)
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and key not in known:
                case.fail(f"decide chose {key}, which declare did not return", batch)

    @for_all_cases()
    def test_chosen_graph_covers_the_batch(self, case: Case) -> None:
        """The bucket has at least as many tokens, requests and adapters as the batch.

        With a smaller bucket, the caller would read rows that the graph did not compute.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is None:
                continue
            descriptor = key.descriptor
            for what, has, needs in (
                ("num_tokens", descriptor.num_tokens, batch.num_tokens),
                ("num_reqs", descriptor.num_reqs, batch.num_reqs),
                ("num_active_loras", descriptor.num_active_loras, batch.num_active_loras),
            ):
                if has is not None and needs is not None and has < needs:
                    problem = f"decide chose {key} for a batch with {what}={needs}"
                    case.fail(f"{problem}, but the key allows at most {has}", batch)

    @for_all_cases()
    def test_uniform_graph_serves_only_its_own_query_length(self, case: Case) -> None:
        """A uniform decode graph never serves a mixed batch or a different query length.

        Its attention was captured for exactly ``query_len`` tokens per request. For other batches,
        the graph computes wrong results without an error.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is None:
                continue
            descriptor = key.descriptor
            wrong_length = descriptor.uniform and not (
                batch.uniform and batch.query_len == descriptor.query_len
            )
            too_long = descriptor.max_query_len is not None and (
                batch.max_query_len is None or batch.max_query_len > descriptor.max_query_len
            )
            if wrong_length or too_long:
                kind = "a mixed batch"
                if batch.uniform:
                    length = counted(batch.query_len, "token")
                    kind = f"a uniform batch with {length} per request"
                elif batch.max_query_len is not None:
                    length = counted(batch.max_query_len, "token")
                    kind = f"a decode batch with up to {length} per request"
                case.fail(f"decide chose {key} for {kind}", batch)

    @for_all_cases()
    def test_constraints_go_before_preferences(self, case: Case) -> None:
        """A mode that a batch does not allow is never chosen.

        Cascade attention cannot run in a FULL graph. Ranks that agreed on PIECEWISE hang if one of
        them replays FULL.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and not batch.allows(key.mode):
                names = ", ".join(sorted(mode.name for mode in batch.allowed_modes))
                case.fail(f"decide chose {key}, but the batch allows only {names}", batch)

    @for_all_cases()
    def test_only_ready_graphs_are_chosen(self, case: Case) -> None:
        """Graphs that cannot run are never chosen.

        Failed, stale and disabled graphs cannot run. Evicted and uncaptured graphs can run only
        with lazy capture, which first captures them. If a graph that cannot run is chosen, the
        dispatcher counts a fault of the policy and runs the step eager, even if another graph is
        ready.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and not case.graphs.is_ready(key):
                why = case.graphs.why_not(key)
                case.fail(f"decide chose {key}, which cannot run: {why}", batch)

    @for_all_cases()
    def test_a_batch_that_fits_a_graph_gets_one_or_a_reason(self, case: Case) -> None:
        """Every eager decision gives a reason, and the reason is correct.

        Operators act on the reasons of eager steps. For example, a wrong reason could make
        operators add capture sizes that already exist.
        """
        for batch in case.batches():
            decision = case.decide(batch)
            if decision.key is not None:
                continue
            reason = decision.reason
            fits = next(case.admissible(batch), None)
            known = {case.graphs.why_not(key) for key in case.keys}
            if not reason or reason == Reason.HIT:
                case.fail(
                    f"decide returned eager with the reason {reason!r}; give the reason why no "
                    "graph runs",
                    batch,
                )
            if reason == Reason.ABOVE_LARGEST and fits is not None:
                case.fail(
                    f"decide returned eager ({reason}), although {fits} is ready and fits", batch
                )
            if reason == Reason.EMPTY_BATCH:
                case.fail(
                    f"decide returned eager ({reason}) for {counted(batch.num_tokens, 'token')}, "
                    "but this reason is only for empty batches",
                    batch,
                )
            graph_states = (
                *(Reason.NOT_CAPTURED, Reason.CAPTURE_FAILED, Reason.EVICTED),
                *(Reason.STALE, Reason.DISABLED),
            )
            if reason in graph_states and reason not in known:
                case.fail(f"decide returned eager ({reason}), but no graph is in this state", batch)

    @for_all_cases()
    def test_a_split_batch_is_served_once_and_in_order(self, case: Case) -> None:
        """In a split batch, each row is in exactly one part, and each part has a suitable graph.

        If a row is in no part, the caller reads a result that was never computed. If a row is in
        two parts, the step updates the state of the row twice. The limits of a batch on adapters,
        axes, requests and modes also apply to each part. A policy that never splits batches passes.
        """
        case.graphs.may_split = True
        learns = callable(getattr(case.policy, "observe", None))
        batches = list(case.batches())
        for batch in batches:
            decision = case.decide(batch)
            problem = broken_constraint(decision, batch, case.graphs) if decision.parts else None
            if problem is not None:
                case.fail(f"decide {problem}", batch)
        outcomes = self._outcomes(case, case.policy, batches[:4], failures=False)
        for outcome in outcomes if learns else ():
            for update in self._observe(case, case.policy, outcome):
                if update.decision is None or not update.decision.parts:
                    continue
                problem = broken_constraint(update.decision, update.batch, case.graphs)
                if problem is not None:
                    case.fail(f"observe requested an invalid decision: {problem}", update.batch)

    def test_a_plain_batch_gets_a_graph(self) -> None:
        """If all graphs are captured, ``decide`` chooses a graph for at least one typical batch.

        A policy that never chooses a graph would pass all other tests of the core set.
        """
        accepted = 0
        for config in usual_configs():
            policy = self.make_policy()
            keys = declared_keys(policy, config)
            if keys is None:
                continue
            accepted += 1
            registry = GraphRegistry()
            registry.declare(keys)
            for key in keys:
                registry.captured(key, object())
            view = graph_view(registry, config)
            rng = random.Random(self.seed)
            case = Case(policy, config, keys, registry, view, self.make_policy, rng)
            for num_tokens in config.sizes:
                for uniform in range(config.num_query_classes):
                    batch = make_batch(config, num_tokens, uniform=uniform)
                    if case.decide(batch).key is not None:
                        return
        problem = (
            "decide chose no graph for any batch at a capture size in the configurations of "
            "usual_configs(), although all declared graphs were captured."
        )
        if not accepted:
            problem = (
                "declare rejected every configuration of usual_configs(); accept at least one."
            )
        raise AssertionError(f"{problem} usual_configs() is in dispatchkit.testing.samples.")

    # -- assumptions of the dispatcher's table ------------------------------------------

    @for_all_cases()
    def test_same_batch_same_decision(self, case: Case) -> None:
        """Until a graph changes, ``decide`` returns the same decision for equal batches.

        The dispatcher calls ``decide`` once per cell of its table and reuses the decision for
        millions of steps. A later, different decision would never take effect, and ranks that fill
        the cell at different times would disagree.
        """
        batches = list(case.batches())
        first = [case.decide(batch) for batch in batches]
        for batch, before in zip(reversed(batches), reversed(first), strict=True):
            if (now := case.decide(batch)) != before:
                first_text, then = show_different(before, now)
                case.fail(f"decide returned {first_text}, then {then}", batch)

    @for_all_cases()
    def test_same_history_same_decision(self, case: Case) -> None:
        """Two fresh policies make the same decisions for the same batches.

        All ranks run the same batches. Decisions that depend on a random seed, the clock or the
        address of an object would differ between ranks.
        """
        other = case.make_policy()
        case.declare(other)
        for batch in case.batches():
            mine, theirs = case.decide(batch), case.decide(batch, other)
            if mine != theirs:
                text, other_text = show_different(mine, theirs)
                case.fail(
                    f"decide returned {text}, but a fresh policy returned {other_text}", batch
                )

    @for_all_cases()
    def test_number_of_requests_only_bounds(self, case: Case) -> None:
        """A decision for ``num_reqs=None`` holds for any number of requests up to its bound.

        The bound is the number of requests of the chosen key, or the decision's ``max_num_reqs`` if
        smaller. The table stores one decision for all numbers of requests, and calls ``decide``
        again only above the bound. If a decision depends on the number of requests, set
        ``max_num_reqs`` to the largest number for which it holds.
        """
        for batch in case.batches(known_reqs=False):
            unknown = case.decide(batch)
            limit = min(batch.num_tokens, case.config.max_num_seqs, unknown.max_num_reqs)
            if unknown.key is not None and unknown.key.descriptor.num_reqs is not None:
                limit = min(limit, unknown.key.descriptor.num_reqs)
            for num_reqs in sorted({1, limit // 2, limit} - {0}):
                if num_reqs > limit:
                    continue
                known = case.decide(attrs.evolve(batch, num_reqs=num_reqs))
                if known.key != unknown.key:
                    case.fail(
                        f"decide returned {unknown} for an unknown number of requests (valid for "
                        f"up to {limit}), but {known} for num_reqs={num_reqs}",
                        batch,
                    )

    @for_all_cases()
    def test_answers_depend_only_on_graphs_that_could_serve(self, case: Case) -> None:
        """A decision does not depend on graphs that are too small or whose mode is not allowed.

        If a graph changes, the dispatcher clears only the cells that the graph could serve. A
        decision that depends on other graphs (for example, on the number of captured graphs) would
        become outdated.
        """
        for batch in case.batches(10):
            elsewhere = [
                key
                for key in case.keys
                if key.num_tokens < batch.num_tokens or not batch.allows(key.mode)
            ]
            if not elsewhere:
                continue
            before = case.decide(batch)
            for _ in range(3):
                change = case.change(elsewhere, _KEY_CHANGES)
                after = case.decide(batch)
                if change is not None and before.key != after.key:
                    case.fail(
                        f"decide returned {before}, but {after} after {change.key} changed to "
                        f"{change.kind!r}",
                        batch,
                    )

    @for_all_cases(share=0.5)
    def test_table_follows_captures_evictions_and_failures(self, case: Case) -> None:
        """After each change of a graph, the dispatcher serves the policy's current decisions.

        An outdated cell of its table would select a graph that is no longer ready.
        """
        dispatcher = Dispatcher(
            case.policy,
            case.config,
            registry=case.registry,
            strict=True,
            may_split=case.rng.random() < 0.5,
            origin="under test",
        )
        try:
            for batch in case.batches(30):
                if case.keys and case.rng.random() < 0.4:
                    case.change(case.keys, strategies.CHANGE_KINDS)
                self._step(case, dispatcher, batch)
        finally:
            dispatcher.close()

    @staticmethod
    def _step(case: Case, dispatcher: Dispatcher, batch: Batch) -> None:
        config = case.config
        uniform = 0
        if batch.uniform:
            uniform = 1 + config.query_lens.index(batch.query_len)
        elif batch.max_query_len is not None:
            uniform = config.num_query_classes - 1
        loras, allowed = batch.num_active_loras, batch.allowed
        anew = dispatcher.decide(batch)
        try:
            served = dispatcher.dispatch(
                batch.num_tokens, batch.num_reqs or 0, uniform, loras, allowed
            )
        except NoGraphError:
            if anew.key is not None:
                case.fail(f"the table has no graph, although the policy chooses {anew.key}", batch)
            return
        for key in served.keys:
            why = dispatcher.graphs.why_not(key)
            if why is not None:
                case.fail(f"the table serves {key}, which cannot run: {why}", batch)
        if (served.key, served.parts) != (anew.key, anew.parts):
            case.fail(f"the table serves {served}, but the policy now returns {anew}", batch)

    # -- learning policies ----------------------------------------------------------------

    @for_all_cases(learning=True)
    def test_what_is_learnt_keeps_the_constraints(self, case: Case) -> None:
        """Every change that ``observe`` requests satisfies the hard constraints.

        The dispatcher rejects other changes and counts a fault of the policy.
        """
        for outcome in self._outcomes(case, case.policy, list(case.batches(4)), failures=True):
            for update in self._observe(case, case.policy, outcome):
                if not isinstance(update, CellUpdate):
                    case.fail(f"observe returned {update!r}; return only CellUpdates")
                if update.decision is None:
                    continue
                problem = broken_constraint(update.decision, update.batch, case.graphs)
                if problem is not None:
                    case.fail(f"observe requested an invalid decision: {problem}", update.batch)
                if update.decision.key is None and not update.batch.allows(RuntimeMode.NONE):
                    case.fail(
                        "observe requested eager, which the batch does not allow", update.batch
                    )

    @for_all_cases(learning=True)
    def test_failures_teach_nothing_about_latency(self, case: Case) -> None:
        """The time of a step that did not complete has no effect on later decisions.

        Otherwise, a replay that failed after 2 µs would seem the fastest choice.
        """
        other = case.make_policy()
        case.declare(other)
        for outcome in self._outcomes(case, case.policy, list(case.batches(4)), failures=True):
            twin = outcome
            if not outcome.completed:
                outcome = attrs.evolve(outcome, elapsed_us=0.001)
                twin = attrs.evolve(outcome, elapsed_us=1e9)
            case.decide(outcome.batch, other)  # both policies have decided for the batch
            mine = self._observe(case, case.policy, outcome)
            theirs = self._observe(case, other, twin)
            if mine != theirs:
                case.fail(
                    f"the time of a failed step changed the updates of observe: {mine} with "
                    f"0.001 µs, but {theirs} with 1e9 µs"
                )
            if case.decide(outcome.batch) != case.decide(outcome.batch, other):
                case.fail("the time of a failed step changed a decision", outcome.batch)

    @for_all_cases(learning=True)
    def test_same_outcomes_same_updates(self, case: Case) -> None:
        """Two fresh policies request the same changes after the same outcomes.

        Otherwise, a recorded trace would not reproduce a run, and ranks that use the same measured
        times would diverge.
        """
        other = case.make_policy()
        case.declare(other)
        for outcome in self._outcomes(case, case.policy, list(case.batches(4)), failures=False):
            case.decide(outcome.batch, other)  # both policies have decided for the batch
            mine = self._observe(case, case.policy, outcome)
            theirs = self._observe(case, other, outcome)
            if mine != theirs:
                case.fail(
                    f"observe returned {mine}, but a fresh policy returned {theirs} after the same "
                    "outcomes",
                    outcome.batch,
                )

    @for_all_cases(share=0.2, learning=True)
    def test_calibration_ends_and_keeps_the_constraints(self, case: Case) -> None:
        """``calibration_runs`` requests only steps that can run, and eventually returns no runs.

        After each capture, a runner calls ``calibration_runs`` until it returns no runs. Until
        then, no other step runs.
        """
        ask = PolicyParts.of(case.policy).calibration_runs
        if ask is None:
            return
        for _ in range(_MAX_CALIBRATION_ROUNDS):
            runs = list(ask(case.graphs))
            for run in runs:
                if not isinstance(run, CalibrationRun):
                    case.fail(f"calibration_runs returned {run!r}; return only CalibrationRuns")
                problem = broken_constraint(run.decision, run.batch, case.graphs)
                if problem is not None:
                    case.fail(f"calibration_runs requested an invalid step: {problem}", run.batch)
                decision = attrs.evolve(run.decision, num_tokens=run.batch.num_tokens)
                for _ in range(run.runs):
                    self._observe(case, case.policy, Outcome(run.batch, decision, 100.0))
            if not runs:
                return
        case.fail(
            f"calibration_runs still requested runs after {_MAX_CALIBRATION_ROUNDS} calls; "
            "return an empty list when no more runs are needed"
        )

    def _outcomes(
        self, case: Case, policy: Policy, batches: list[Batch], *, failures: bool
    ) -> Iterator[Outcome]:
        """Yield outcomes of random steps; each decision is made when its outcome is requested."""
        rng = case.rng
        for _ in range(20):
            batch = rng.choice(batches)
            decision = case.decide(batch, policy)
            yield Outcome(
                batch,
                attrs.evolve(decision, num_tokens=batch.num_tokens, policy="under test"),
                elapsed_us=rng.randint(1, 5000) / 4 if rng.random() < 0.8 else None,
                queued=rng.random() < 0.5,
                completed=not failures or rng.random() < 0.7,
            )

    @staticmethod
    def _observe(case: Case, policy: Policy, outcome: Outcome) -> list[CellUpdate]:
        observe: Callable[[Outcome], Iterable[CellUpdate] | None] = getattr(policy, "observe")  # noqa: B009
        try:
            return list(observe(outcome) or ())
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            case.fail(f"observe {describe_exception(error)}", outcome.batch, cause=error)

    # -- optional parts and traits --------------------------------------------------------

    def test_optional_parts_can_be_used(self) -> None:
        """The optional attributes and methods of the policy are valid.

        Otherwise, the dispatcher rejects the policy, for example for a ``pace`` below 1.
        """
        PolicyParts.of(self.make_policy())

    def test_traits_are_known(self) -> None:
        """All claimed traits exist.

        A misspelled trait is never tested. Code that requires the trait (for example, ranks require
        a stateless policy) treats it as not claimed.
        """
        unknown = policy_traits(self.make_policy()) - TRAITS
        if unknown:
            claimed, known = ", ".join(sorted(unknown)), ", ".join(sorted(TRAITS))
            raise AssertionError(
                f"The policy claims unknown traits: {claimed}; known traits: {known}"
            )

    @for_all_cases(trait="smallest_bucket")
    def test_trait_smallest_bucket(self, case: Case) -> None:
        """The chosen graph is the smallest ready graph of its mode that covers the batch.

        Padding is wasted work, and a policy with this trait adds as little as possible.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is None:
                continue
            for other in case.admissible(batch):
                if other.mode is key.mode and other.num_tokens < key.num_tokens:
                    case.fail(f"decide chose {key}, although {other} is smaller and ready", batch)

    @for_all_cases(trait="monotone", all_captured=True)
    def test_trait_monotone(self, case: Case) -> None:
        """If all graphs are captured, a larger batch never gets a smaller bucket.

        Step times then grow with the batch, so a planner can bisect capture sizes.
        """
        for batch in case.batches(4, known_reqs=False):
            below: GraphKey | None = None
            for num_tokens in range(1, case.config.max_num_tokens + 1):
                key = case.decide(attrs.evolve(batch, num_tokens=num_tokens)).key
                if key is None:
                    continue
                if below is not None and key.num_tokens < below.num_tokens:
                    case.fail(
                        f"decide chose {below} for a smaller batch, but {key} for a batch of "
                        f"{counted(num_tokens, 'token')}",
                        batch,
                    )
                below = key

    @for_all_cases(trait="order")
    def test_trait_order(self, case: Case) -> None:
        """Allowing more modes for a batch never lowers the mode in which it runs.

        From highest to lowest, the modes are FULL, PIECEWISE and eager. For example, if the policy
        chooses a FULL graph when PIECEWISE is not allowed, it also chooses FULL when PIECEWISE is
        allowed.
        """
        for batch in case.batches():
            chosen = case.decide(batch).mode
            for mode, code in _ALLOWED_CODE.items():
                if mode <= chosen or mode not in ALLOWED_MODES[batch.allowed]:
                    continue
                alone = case.decide(attrs.evolve(batch, allowed=code)).key
                if alone is not None:
                    case.fail(
                        f"decide chose {chosen.name}, but chose {alone} when only {mode.name} and "
                        "eager were allowed",
                        batch,
                    )

    @for_all_cases(trait="stateless")
    def test_trait_stateless(self, case: Case) -> None:
        """Decisions do not depend on earlier decisions or observations.

        Every process makes the same decisions at any time, so ranks need not synchronize.
        """
        batches = list(case.batches())
        answers = [case.decide(batch) for batch in batches]
        if callable(getattr(case.policy, "observe", None)):
            for outcome in self._outcomes(case, case.policy, batches[:4], failures=True):
                self._observe(case, case.policy, outcome)
        fresh = case.make_policy()
        for batch, before in zip(reversed(batches), reversed(answers), strict=True):
            for who, policy in (("later", case.policy), ("a fresh policy", fresh)):
                if (now := case.decide(batch, policy)) != before:
                    text, now_text = show_different(before, now)
                    case.fail(f"decide returned {text}, but {who} returned {now_text}", batch)

    def test_trait_stateless_in_another_process(self) -> None:
        """Processes with different hash seeds make the same decisions.

        The order of a set, or of objects sorted by address, can differ between processes.
        """
        self.skip_unless("stateless", learning=False)
        try:
            first, second = (sample_answers_elsewhere(self.make_policy(), n) for n in (0, 1))
        except TypeError as error:
            raise unittest.SkipTest(str(error)) from error
        for here, there in zip(first, second, strict=True):
            if here != there:
                raise AssertionError(
                    f"Two processes with different hash seeds gave different answers: {here} and "
                    f"{there}"
                )

    @for_all_cases(trait="all_keys_reachable", all_captured=True, share=0.3)
    def test_trait_all_keys_reachable(self, case: Case) -> None:
        """Each declared key is chosen for at least one batch.

        A graph that is never chosen wastes capture time and memory.
        """
        config = case.config
        for key in case.keys:
            sizes = sorted({max(1, key.num_tokens - 1), key.num_tokens})
            tried = (
                make_batch(config, size, num_reqs=reqs, uniform=kind, loras=loras, allowed=allowed)
                for allowed in (2, 1)
                for kind in range(config.num_query_classes)
                for loras in range(config.max_loras + 1)
                for size in sizes
                for reqs in (None, key.descriptor.num_reqs)
            )
            if not any(case.decide(batch).key == key for batch in tried):
                case.fail(
                    f"declare returned {key}, but decide did not choose it for any batch with "
                    f"num_tokens={' or '.join(map(str, sizes))}"
                )
