"""PolicyTests: properties of every policy, and traits that some claim.

Each test is one property, checked on small random cases with a fixed seed. Its docstring explains
the harm of violating it. The core set applies to every policy. A *trait* is tested if the policy
claims it (``traits``), and otherwise skipped by name.

``run_policy_conformance`` runs the same methods without pytest.
"""

from __future__ import annotations

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
from dispatchkit.errors import ConfigError, NoGraphError
from dispatchkit.keys import ALLOWED_MODES, Batch, CUDAGraphMode, GraphKey, RuntimeMode
from dispatchkit.registry import GraphRegistry
from dispatchkit.testing import strategies
from dispatchkit.testing.cases import Case, CaseRunner, for_all_cases
from dispatchkit.testing.samples import (
    graph_view,
    make_batch,
    sample_answers_elsewhere,
    usual_configs,
)

_OF_ONE_KEY = ("captured", "failed", "evicted", "stale", "disabled", "enabled")
_MODES = "config.mode.decode_mode() and mixed_mode() return the modes that may be declared"
_MAX_CALIBRATION_ROUNDS = 50
_ONE_MODE = {RuntimeMode.PIECEWISE: 1, RuntimeMode.FULL: 6}  # that mode or eager


class PolicyTests(CaseRunner):
    """Subclass it, name the subclass ``Test…`` and define ``make_policy``.

    Attributes:
        seed: Seed of the random cases; the same seed gives the same cases.
        max_examples: Cases per property under a hypothesis profile of 100; scaled with it.
    """

    # -- what is declared ---------------------------------------------------------------

    @for_all_cases(share=0.5)
    def test_declare_is_deterministic(self, case: Case) -> None:
        """The same configuration gives the same keys in the same order.

        Ranks capture in that order, each in its own process. A rank that declares other keys, or
        another order, hangs in the first collective of a capture.
        """
        for what, policy in (("again", case.policy), ("of a fresh policy", case.make_policy())):
            keys = case.declare(policy)
            if keys != case.keys:
                differing = [str(key) for key in {*keys} ^ {*case.keys}]
                case.fail(f"declare, called {what}, differs: {differing or 'in order'}")

    @for_all_cases(share=0.5)
    def test_declared_keys_keep_within_the_limits(self, case: Case) -> None:
        """Keys fit the configured buffers, requests, adapters, query lengths and mode.

        Static inputs are as large as the configuration says. A larger key would capture past their
        end; a key of a mode that is not configured may capture attention that cannot be captured.
        (One adapter more than ``max_loras`` is allowed: the base model counts as one.)
        """
        config, mode = case.config, case.config.mode
        for key in case.keys:
            if not isinstance(key, GraphKey):
                case.fail(f"declare returned {key!r}, which is not a GraphKey")
            own = key.descriptor
            decode = own.uniform or own.max_query_len is not None
            faults = {
                f"more tokens than max_num_tokens ({config.max_num_tokens})": (
                    own.num_tokens > config.max_num_tokens
                ),
                f"more requests than max_num_seqs ({config.max_num_seqs})": (
                    (own.num_reqs or 0) > config.max_num_seqs
                ),
                f"more adapters than max_loras ({config.max_loras})": (
                    own.num_active_loras > config.max_loras + (config.max_loras > 0)
                ),
                f"a query length not in {config.query_lens}": (
                    own.uniform and own.query_len not in config.query_lens
                ),
                f"a part of a request of {own.query_len} tokens": (
                    own.uniform and own.num_tokens % own.query_len != 0
                ),
                f"mode {key.mode} though the configured mode is {mode}; {_MODES}": (
                    not mode.has_mode(CUDAGraphMode[key.mode.name])
                ),
                f"FULL for mixed batches though the configured mode is {mode}; {_MODES}": (
                    key.mode is RuntimeMode.FULL
                    and not decode
                    and mode.mixed_mode() is not CUDAGraphMode.FULL
                ),
            }
            for fault in (text for text, broken in faults.items() if broken):
                case.fail(f"declared {key}: {fault}")

    # -- what is decided ----------------------------------------------------------------

    @for_all_cases()
    def test_every_batch_gets_an_answer(self, case: Case) -> None:
        """For batches within the limits, ``decide`` does not raise and returns a valid type.

        It is called while serving: if it raises, all such steps run eager. It must not change the
        registry, since the executor controls which keys may be dispatched.
        """
        before = dict(case.registry.entries)
        for batch in case.batches():
            decision = case.decide(batch)
            mode = RuntimeMode.NONE if decision.key is None else decision.key.mode
            if decision.mode is not mode:
                case.fail(f"answered mode {decision.mode} with key {decision.key}", batch)
            if before != dict(case.registry.entries):
                case.fail("decide changed the registry", batch)

    @for_all_cases()
    def test_chosen_key_was_declared(self, case: Case) -> None:
        """The chosen key is one of those declared, so one function should create both.

        If two pieces of code compute keys, they drift apart. Then the graph captured for a batch is
        never found, and every such step runs eager without an error.
        """
        known = set(case.keys)
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and key not in known:
                case.fail(f"chose {key}, which was not declared", batch)

    @for_all_cases()
    def test_chosen_graph_covers_the_batch(self, case: Case) -> None:
        """A bucket is never smaller than the batch in tokens, requests or adapters.

        Rows beyond the bucket would not be computed, but the caller would read them.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is None:
                continue
            own = key.descriptor
            for what, has, needs in (
                ("tokens", own.num_tokens, batch.num_tokens),
                ("requests", own.num_reqs, batch.num_reqs),
                ("adapters", own.num_active_loras, batch.num_active_loras),
            ):
                if has is not None and needs is not None and has < needs:
                    case.fail(f"chose {key} for {needs} {what}", batch)

    @for_all_cases()
    def test_uniform_graph_serves_only_its_own_query_length(self, case: Case) -> None:
        """A uniform decode graph never serves a mixed batch or another query length.

        Its attention was captured for exactly that many tokens per request; on any other batch it
        computes wrong results without an error.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is None:
                continue
            own = key.descriptor
            wrong_length = own.uniform and not (batch.uniform and batch.query_len == own.query_len)
            too_long = own.max_query_len is not None and (
                batch.max_query_len is None or batch.max_query_len > own.max_query_len
            )
            if wrong_length or too_long:
                kind = f"uniform {batch.query_len}" if batch.uniform else "mixed"
                case.fail(f"chose {key} for a {kind} batch", batch)

    @for_all_cases()
    def test_constraints_go_before_preferences(self, case: Case) -> None:
        """A mode that a batch does not allow is never chosen.

        Cascade attention cannot run in a FULL graph; ranks that agreed on PIECEWISE hang
        when one of them replays FULL.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and not batch.allows(key.mode):
                names = ", ".join(sorted(mode.name for mode in batch.allowed_modes))
                case.fail(f"chose {key}, but only {names} may run", batch)

    @for_all_cases()
    def test_only_ready_graphs_are_chosen(self, case: Case) -> None:
        """Graphs that are failed, evicted, stale, disabled or not captured are not chosen.

        There is nothing to replay, so the dispatcher runs such a step eager, as a fault of the
        policy, although another graph may be ready.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and not case.graphs.is_ready(key):
                case.fail(f"chose {key}, which cannot run: {case.graphs.why_not(key)}", batch)

    @for_all_cases()
    def test_a_batch_that_fits_a_graph_gets_one_or_a_reason(self, case: Case) -> None:
        """Eager comes with a reason, and the reason is true.

        No silent downgrade: operators see why a step ran eager, and act on it. A wrong reason would
        make them, for example, add capture sizes that exist.
        """
        for batch in case.batches():
            decision = case.decide(batch)
            if decision.key is not None:
                continue
            reason = decision.reason
            fits = next(case.admissible(batch), None)
            known = {case.graphs.why_not(key) for key in case.keys}
            if not reason or reason == Reason.HIT:
                case.fail(f"answered eager with the reason {reason!r}", batch)
            if reason == Reason.ABOVE_LARGEST and fits is not None:
                case.fail(f"answered eager ({reason}), although {fits} is ready and fits", batch)
            if reason == Reason.EMPTY_BATCH:
                case.fail(f"answered eager ({reason}) for {batch.num_tokens} tokens", batch)
            of_states = (
                *(Reason.NOT_CAPTURED, Reason.CAPTURE_FAILED, Reason.EVICTED),
                *(Reason.STALE, Reason.DISABLED),
            )
            if reason in of_states and reason not in known:
                case.fail(f"answered eager ({reason}), but no graph is so", batch)

    @for_all_cases()
    def test_a_split_batch_is_served_once_and_in_order(self, case: Case) -> None:
        """In a split batch, each row is in exactly one part, and each part has a suitable graph.

        A row in no part would be read without being computed; a row in two would change state
        twice. Limits on adapters, axes, requests and modes apply to each part as to a batch. A
        policy that never splits passes.
        """
        case.graphs.may_split = True
        learns = callable(getattr(case.policy, "observe", None))
        batches = list(case.batches())
        for batch in batches:
            decision = case.decide(batch)
            problem = broken_constraint(decision, batch, case.graphs) if decision.parts else None
            if problem is not None:
                case.fail(problem, batch)
        outcomes = self._outcomes(case, case.policy, batches[:4], failures=False)
        for outcome in outcomes if learns else ():
            for update in self._observe(case, case.policy, outcome):
                if update.decision is None or not update.decision.parts:
                    continue
                problem = broken_constraint(update.decision, update.batch, case.graphs)
                if problem is not None:
                    case.fail(f"observe asked for a decision that {problem}", update.batch)

    def test_a_plain_batch_gets_a_graph(self) -> None:
        """With all graphs captured, some batch replays under some plain configuration.

        A policy that never chooses a graph would pass all other tests.
        """
        for config in usual_configs():
            policy = self.make_policy()
            try:
                keys = list(policy.declare(config))
            except ConfigError:
                continue
            registry = GraphRegistry()
            registry.declare(keys)
            for key in keys:
                registry.captured(key, object())
            view = graph_view(registry, config)
            for num_tokens in config.sizes:
                for uniform in range(config.num_query_classes):
                    answer = policy.decide(make_batch(config, num_tokens, uniform=uniform), view)
                    if answer is not None and answer.key is not None:
                        return
        raise AssertionError(
            "No batch at a capture size got a graph under any plain configuration, although all "
            "graphs were captured."
        )

    # -- what the dispatcher's table relies on ------------------------------------------

    @for_all_cases()
    def test_same_batch_same_decision(self, case: Case) -> None:
        """Asked again without a change, it answers the same, whatever it decided in between.

        The dispatcher asks once per cell of its table and serves that answer for millions of steps.
        A different later answer would never be used, and two ranks that filled the cell at
        different times would disagree.
        """
        batches = list(case.batches())
        first = [case.decide(batch) for batch in batches]
        for batch, before in zip(reversed(batches), reversed(first), strict=True):
            if (now := case.decide(batch)) != before:
                case.fail(f"answered {before}, then {now}", batch)

    @for_all_cases()
    def test_same_history_same_decision(self, case: Case) -> None:
        """Two fresh policies that see the same steps make the same decisions.

        Ranks see the same steps. A differently seeded generator, the clock or the address of an
        object would make them disagree.
        """
        other = case.make_policy()
        case.declare(other)
        for batch in case.batches():
            mine, theirs = case.decide(batch), case.decide(batch, other)
            if mine != theirs:
                case.fail(f"answered {mine}, but a fresh policy answered {theirs}", batch)

    @for_all_cases()
    def test_number_of_requests_only_bounds(self, case: Case) -> None:
        """An answer without knowing the requests holds for any number up to its bound.

        The bound is that of the chosen key, or the decision's ``max_num_reqs`` if smaller. The
        table has no axis for requests: it stores one answer and compares. If requests matter more,
        set ``max_num_reqs``.
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
                        f"answered {unknown} for an unknown number of requests (good for up to "
                        f"{limit}), but {known} for {num_reqs}",
                        batch,
                    )

    @for_all_cases()
    def test_answers_depend_only_on_graphs_that_could_serve(self, case: Case) -> None:
        """Changes to graphs that are too small for a batch, or of other modes, do not matter.

        The dispatcher empties only the cells that a changed graph could serve. An answer that
        depends on other graphs (for example, on how many are captured) is not updated.
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
                change = case.change(elsewhere, _OF_ONE_KEY)
                after = case.decide(batch)
                if change is not None and before.key != after.key:
                    what = f"{change.key} was {change.kind}"
                    case.fail(f"answered {before}, but {after} after {what}", batch)

    @for_all_cases(share=0.5)
    def test_table_follows_captures_evictions_and_failures(self, case: Case) -> None:
        """Served through a dispatcher, a graph that is not ready is never chosen after a change.

        At each step the table serves what the policy would answer now.
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
                case.fail(f"the table has no graph, although {anew.key} would be chosen", batch)
            return
        for key in served.keys:
            why = dispatcher.graphs.why_not(key)
            if why is not None:
                case.fail(f"the table serves {key}, which cannot run: {why}", batch)
        if (served.key, served.parts) != (anew.key, anew.parts):
            case.fail(f"the table serves {served}, but the policy now answers {anew}", batch)

    # -- what a policy that learns keeps to -----------------------------------------------

    @for_all_cases(learning=True)
    def test_what_is_learnt_keeps_the_constraints(self, case: Case) -> None:
        """Every change that ``observe`` requests is valid for the dispatcher's table.

        A refused change is counted as a fault, and what was learned is lost.
        """
        for outcome in self._outcomes(case, case.policy, list(case.batches(4)), failures=True):
            for update in self._observe(case, case.policy, outcome):
                if not isinstance(update, CellUpdate):
                    case.fail(f"observe returned {update!r}; CellUpdates are allowed")
                if update.decision is None:
                    continue
                problem = broken_constraint(update.decision, update.batch, case.graphs)
                if problem is not None:
                    case.fail(f"observe asked for a decision that {problem}", update.batch)
                if update.decision.key is None and not update.batch.allows(RuntimeMode.NONE):
                    case.fail("observe asked for eager where it is not allowed", update.batch)

    @for_all_cases(learning=True)
    def test_failures_teach_nothing_about_latency(self, case: Case) -> None:
        """The time of a step that did not complete has no effect on later answers.

        Otherwise a replay that failed after 2 µs would be the fastest choice ever seen.
        """
        other = case.make_policy()
        case.declare(other)
        for outcome in self._outcomes(case, case.policy, list(case.batches(4)), failures=True):
            twin = outcome
            if not outcome.completed:
                outcome = attrs.evolve(outcome, elapsed_us=0.001)
                twin = attrs.evolve(outcome, elapsed_us=1e9)
            case.decide(outcome.batch, other)  # both serve the step
            mine = self._observe(case, case.policy, outcome)
            theirs = self._observe(case, other, twin)
            if mine != theirs:
                case.fail(f"a failed step's time changed what is learned: {mine}, {theirs}")
            if case.decide(outcome.batch) != case.decide(outcome.batch, other):
                case.fail("a failed step's time changed what is decided", outcome.batch)

    @for_all_cases(learning=True)
    def test_same_outcomes_same_updates(self, case: Case) -> None:
        """Two policies that see the same outcomes request the same changes.

        Otherwise a recorded trace would not reproduce a run, and ranks that agreed on times would
        drift apart.
        """
        other = case.make_policy()
        case.declare(other)
        for outcome in self._outcomes(case, case.policy, list(case.batches(4)), failures=False):
            case.decide(outcome.batch, other)  # both serve the step
            mine = self._observe(case, case.policy, outcome)
            theirs = self._observe(case, other, outcome)
            if mine != theirs:
                case.fail(f"the same outcome led to {mine} and {theirs}", outcome.batch)

    @for_all_cases(share=0.2, learning=True)
    def test_calibration_ends_and_keeps_the_constraints(self, case: Case) -> None:
        """``calibration_runs`` requests steps that can run, and eventually none.

        A runner calls it after each capture until it returns no runs, and measures nothing else
        meanwhile.
        """
        ask = PolicyParts.of(case.policy).calibration_runs
        if ask is None:
            return
        for _ in range(_MAX_CALIBRATION_ROUNDS):
            runs = list(ask(case.graphs))
            for run in runs:
                if not isinstance(run, CalibrationRun):
                    case.fail(f"calibration_runs returned {run!r}; CalibrationRuns are allowed")
                problem = broken_constraint(run.decision, run.batch, case.graphs)
                if problem is not None:
                    case.fail(f"calibration_runs asked for a step that {problem}", run.batch)
                decision = attrs.evolve(run.decision, num_tokens=run.batch.num_tokens)
                for _ in range(run.runs):
                    self._observe(case, case.policy, Outcome(run.batch, decision, 100.0))
            if not runs:
                return
        case.fail(f"calibration_runs asked for more after {_MAX_CALIBRATION_ROUNDS} rounds")

    def _outcomes(
        self, case: Case, policy: Policy, batches: list[Batch], *, failures: bool
    ) -> Iterator[Outcome]:
        """Yield outcomes of steps, each decided after learning from the earlier ones."""
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
        except Exception as error:  # noqa: BLE001 - whatever a policy raises is a finding
            case.fail(f"observe raised {type(error).__name__}: {error}", outcome.batch, cause=error)

    # -- optional parts and traits --------------------------------------------------------

    def test_optional_parts_can_be_used(self) -> None:
        """The parts of a policy other than ``declare`` and ``decide`` have a valid form.

        Otherwise the dispatcher refuses the policy, for example for a ``pace`` below 1.
        """
        PolicyParts.of(self.make_policy())

    def test_traits_are_known(self) -> None:
        """All claims are existing traits.

        A misspelled trait is never tested, and code that relies on it (such as ranks that need a
        stateless policy) finds that it is not claimed.
        """
        unknown = policy_traits(self.make_policy()) - TRAITS
        if unknown:
            claimed, known = ", ".join(sorted(unknown)), ", ".join(sorted(TRAITS))
            raise AssertionError(f"claims unknown traits: {claimed}; the traits are {known}")

    @for_all_cases(trait="smallest_bucket")
    def test_trait_smallest_bucket(self, case: Case) -> None:
        """No ready graph of the chosen mode that covers the batch is smaller.

        Padding is wasted work; a policy with this trait never pads more than the mode requires.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is None:
                continue
            for other in case.admissible(batch):
                if other.mode is key.mode and other.num_tokens < key.num_tokens:
                    case.fail(f"chose {key}, although {other} is smaller and ready", batch)

    @for_all_cases(trait="monotone", all_captured=True)
    def test_trait_monotone(self, case: Case) -> None:
        """With all graphs captured, more tokens never get a smaller bucket.

        Then times grow with the batch, and planning of sizes may bisect.
        """
        for batch in case.batches(4, known_reqs=False):
            below: GraphKey | None = None
            for num_tokens in range(1, case.config.max_num_tokens + 1):
                key = case.decide(attrs.evolve(batch, num_tokens=num_tokens)).key
                if key is None:
                    continue
                if below is not None and key.num_tokens < below.num_tokens:
                    case.fail(f"chose {below}, but {key} for more tokens ({num_tokens})", batch)
                below = key

    @for_all_cases(trait="order")
    def test_trait_order(self, case: Case) -> None:
        """FULL is preferred to PIECEWISE, and PIECEWISE to eager, whenever each would be chosen.

        Allowing more modes never makes a batch run in a lesser one.
        """
        for batch in case.batches():
            chosen = case.decide(batch).mode
            for mode, code in _ONE_MODE.items():
                if mode <= chosen or mode not in ALLOWED_MODES[batch.allowed]:
                    continue
                alone = case.decide(attrs.evolve(batch, allowed=code)).key
                if alone is not None:
                    case.fail(
                        f"chose {chosen.name}, although {alone} is chosen if it is the only one "
                        "allowed",
                        batch,
                    )

    @for_all_cases(trait="stateless")
    def test_trait_stateless(self, case: Case) -> None:
        """Earlier decisions and observations make no difference.

        Every process gives the same answer at any time, so ranks need not synchronize.
        """
        batches = list(case.batches())
        answers = [case.decide(batch) for batch in batches]
        if callable(getattr(case.policy, "observe", None)):
            for outcome in self._outcomes(case, case.policy, batches[:4], failures=True):
                self._observe(case, case.policy, outcome)
        fresh = case.make_policy()
        for batch, before in zip(reversed(batches), reversed(answers), strict=True):
            for who, policy in (("later", case.policy), ("from a fresh policy", fresh)):
                if (now := case.decide(batch, policy)) != before:
                    case.fail(f"answered {before}, but {who} {now}", batch)

    def test_trait_stateless_in_another_process(self) -> None:
        """Other processes, with other hash seeds, give the same answers.

        The order of sets differs there, as does anything sorted by address.
        """
        self.skip_unless("stateless", learning=False)
        try:
            first, second = (sample_answers_elsewhere(self.make_policy(), n) for n in (0, 1))
        except TypeError as error:
            raise unittest.SkipTest(str(error)) from error
        for here, there in zip(first, second, strict=True):
            if here != there:
                raise AssertionError(f"Another process answers differently: {here}; {there}")

    @for_all_cases(trait="all_keys_reachable", all_captured=True, share=0.3)
    def test_trait_all_keys_reachable(self, case: Case) -> None:
        """Every declared key is chosen for some batch.

        A graph that is never chosen wastes capture time and memory.
        """
        config = case.config
        for key in case.keys:
            tried = (
                make_batch(config, size, num_reqs=reqs, uniform=kind, loras=loras, allowed=allowed)
                for allowed in (2, 1)
                for kind in range(config.num_query_classes)
                for loras in range(config.max_loras + 1)
                for size in {key.num_tokens, max(1, key.num_tokens - 1)}
                for reqs in (None, key.descriptor.num_reqs)
            )
            if not any(case.decide(batch).key == key for batch in tried):
                case.fail(f"declared {key}, which is not chosen for any batch of its size")
