"""PolicyTests: what every policy must keep to, and what some policies claim.

Each test is one property, checked on random small cases with a fixed seed; its docstring says
why a policy that breaks it does harm. The core set holds for every policy. A *trait* is tested
where the policy claims it (``traits``) and skipped by name where it does not.

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
_MODES = "config.mode.decode_mode() and mixed_mode() name what may be declared"
_MAX_CALIBRATION_ROUNDS = 50
_ONE_MODE = {RuntimeMode.PIECEWISE: 1, RuntimeMode.FULL: 6}  # that mode or eager


class PolicyTests(CaseRunner):
    """Subclass it, name the subclass ``Test…`` and define ``make_policy``.

    Attributes:
        seed: Of the random cases; the same seed gives the same cases.
        max_examples: Cases per property under a hypothesis profile of 100; scaled with it.
    """

    # -- what is declared ---------------------------------------------------------------

    @for_all_cases(share=0.5)
    def test_declare_is_deterministic(self, case: Case) -> None:
        """The same configuration gives the same keys in the same order.

        Ranks capture in that order, each in its own process: one that declares other keys,
        or in another order, hangs in the first collective of a capture.
        """
        for what, policy in (("again", case.policy), ("of a fresh policy", case.make_policy())):
            keys = case.declare(policy)
            if keys != case.keys:
                differing = [str(key) for key in {*keys} ^ {*case.keys}]
                case.fail(f"declare, asked {what}, differs: {differing or 'in order'}")

    @for_all_cases(share=0.5)
    def test_declared_keys_keep_within_the_limits(self, case: Case) -> None:
        """Keys fit the configured buffers, requests, adapters, query lengths and mode.

        Static inputs are as large as the configuration says. A larger key captures past
        their end; one of a mode that is not configured captures what attention cannot do.
        (One adapter more than ``max_loras`` is allowed: the base model counts as one.)
        """
        config, mode = case.config, case.config.mode
        for key in case.keys:
            if not isinstance(key, GraphKey):
                case.fail(f"declare returned {key!r}, which is no GraphKey")
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
                f"a query length that is none of {config.query_lens}": (
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
        """No batch within the limits makes ``decide`` raise or answer something else.

        It is asked while serving. What it raises costs every such step its graph. Deciding
        changes nothing either: what may be dispatched is the executor's to say.
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
        """The key that is chosen is one of those declared: one function makes both.

        Two pieces of code that compute keys drift apart; from then on the graph captured
        for a batch is never found, and every such step is eager without an error.
        """
        known = set(case.keys)
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and key not in known:
                case.fail(f"chose {key}, which was not declared", batch)

    @for_all_cases()
    def test_chosen_graph_covers_the_batch(self, case: Case) -> None:
        """A bucket is never smaller than the batch in tokens, requests or adapters.

        Rows beyond the bucket would not be computed, and read by the caller as if they were.
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
        """A graph of uniform decode batches never serves a mixed batch, or another length.

        Its attention was captured for exactly so many tokens per request; on any other
        batch it computes something else without an error.
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
        """A mode that is not allowed for a batch is not chosen, whatever is preferred.

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
        """A graph that is not captured, failed, evicted, stale or disabled is not chosen.

        There is nothing to replay: the dispatcher runs such a step eager as a fault of the
        policy, though another graph may be ready.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is not None and not case.graphs.is_ready(key):
                case.fail(f"chose {key}, which cannot run: {case.graphs.why_not(key)}", batch)

    @for_all_cases()
    def test_a_batch_that_fits_a_graph_gets_one_or_a_reason(self, case: Case) -> None:
        """Eager comes with a reason, and the reason is true.

        No silent downgrade: the operator sees why a step was eager, and acts on it. A wrong
        reason sends them to capture sizes that exist.
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
                case.fail(f"answered eager ({reason}), though {fits} is ready and fits", batch)
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
        """Where batches may be split, each row is in one part, and each part in a graph for it.

        A row in no part would be read as if it was computed; one in two would change state
        twice. Adapters, axes, requests and modes bind a part like a batch of its own. A policy
        that never splits keeps this.
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
        """Under some plain configuration, with every graph captured, some batch replays.

        A policy that never chooses a graph keeps every other property.
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
            "No batch at a capture size got a graph under any plain configuration, though all "
            "graphs were captured."
        )

    # -- what the dispatcher's table relies on ------------------------------------------

    @for_all_cases()
    def test_same_batch_same_decision(self, case: Case) -> None:
        """Asked again while nothing changed, it answers the same, whatever came between.

        The dispatcher asks once for each cell of its table and serves that answer for
        millions of steps. An answer that is different by the hour is never seen, and two
        ranks that filled the cell at different times disagree.
        """
        batches = list(case.batches())
        first = [case.decide(batch) for batch in batches]
        for batch, before in zip(reversed(batches), reversed(first), strict=True):
            if (now := case.decide(batch)) != before:
                case.fail(f"answered {before}, then {now}", batch)

    @for_all_cases()
    def test_same_history_same_decision(self, case: Case) -> None:
        """Two fresh policies that see the same steps decide the same.

        Ranks see the same steps. Chance drawn from a generator of its own seed, the clock or
        the address of an object makes them disagree.
        """
        other = case.make_policy()
        case.declare(other)
        for batch in case.batches():
            mine, theirs = case.decide(batch), case.decide(batch, other)
            if mine != theirs:
                case.fail(f"answered {mine}, and a fresh policy {theirs}", batch)

    @for_all_cases()
    def test_number_of_requests_only_bounds(self, case: Case) -> None:
        """An answer without knowing the requests holds for any number up to its bound.

        The bound is that of the chosen key, or ``max_num_reqs`` of the decision where that
        is smaller. The table has no axis for requests: it keeps this one answer, and
        compares. Where requests matter more, set ``max_num_reqs``.
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
        """A change to a graph too small for a batch, or of a mode not allowed, is no matter.

        The dispatcher empties only the cells that a changed graph could serve. An answer that
        looks at others (how many are captured, say) is not asked for again, and stays as it
        was.
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
                    case.fail(f"answered {before}, and {after} once {what}", batch)

    @for_all_cases(share=0.5)
    def test_table_follows_captures_evictions_and_failures(self, case: Case) -> None:
        """Served through a dispatcher, no change ever leads to a graph that is not ready.

        And at each step the table gives what the policy, asked anew, would answer.
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
                case.fail(f"the table has no graph, though {anew.key} would be chosen", batch)
            return
        for key in served.keys:
            why = dispatcher.graphs.why_not(key)
            if why is not None:
                case.fail(f"the table serves {key}, which cannot run: {why}", batch)
        if (served.key, served.parts) != (anew.key, anew.parts):
            case.fail(f"the table serves {served}; asked anew it answers {anew}", batch)

    # -- what a policy that learns keeps to -----------------------------------------------

    @for_all_cases(learning=True)
    def test_what_is_learnt_keeps_the_constraints(self, case: Case) -> None:
        """Every change that ``observe`` asks for is one the dispatcher may put in its table.

        A refused change is counted as a fault, and what was learnt is lost.
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
        """However long a step took that did not complete, later answers are the same.

        A replay that failed after 2 µs would else be the fastest choice ever seen.
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
                case.fail(f"a failed step's time changed what is learnt: {mine}, {theirs}")
            if case.decide(outcome.batch) != case.decide(outcome.batch, other):
                case.fail("a failed step's time changed what is decided", outcome.batch)

    @for_all_cases(learning=True)
    def test_same_outcomes_same_updates(self, case: Case) -> None:
        """Two policies that see the same outcomes ask for the same changes.

        A recorded trace would else not reproduce a run, and ranks that agreed on times drift
        apart.
        """
        other = case.make_policy()
        case.declare(other)
        for outcome in self._outcomes(case, case.policy, list(case.batches(4)), failures=False):
            case.decide(outcome.batch, other)  # both serve the step
            mine = self._observe(case, case.policy, outcome)
            theirs = self._observe(case, other, outcome)
            if mine != theirs:
                case.fail(f"the same outcome gave {mine} and {theirs}", outcome.batch)

    @for_all_cases(share=0.2, learning=True)
    def test_calibration_ends_and_keeps_the_constraints(self, case: Case) -> None:
        """``calibration_runs`` asks for steps that can run, and at some time for none.

        A runner asks after each capture until it gets none, and times nothing else meanwhile.
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
        """Yield outcomes of steps, each decided when the ones before have been learnt from."""
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
        """What a policy has beside ``declare`` and ``decide`` is of the form that is read.

        A dispatcher refuses the policy otherwise: a ``pace`` below 1, say.
        """
        PolicyParts.of(self.make_policy())

    def test_traits_are_known(self) -> None:
        """What is claimed is a trait that there is.

        A misspelt one is tested by nobody, and whoever relies on it (ranks that want a policy
        without state, say) finds that it is not claimed.
        """
        unknown = policy_traits(self.make_policy()) - TRAITS
        if unknown:
            claimed, known = ", ".join(sorted(unknown)), ", ".join(sorted(TRAITS))
            raise AssertionError(f"claims {claimed}; traits are {known}")

    @for_all_cases(trait="smallest_bucket")
    def test_trait_smallest_bucket(self, case: Case) -> None:
        """Of the graphs of the mode it chose, none that is ready and covers is smaller.

        Padding is computed for nothing; who claims this never pads more than the mode needs.
        """
        for batch in case.batches():
            key = case.decide(batch).key
            if key is None:
                continue
            for other in case.admissible(batch):
                if other.mode is key.mode and other.num_tokens < key.num_tokens:
                    case.fail(f"chose {key}, though {other} is smaller and ready", batch)

    @for_all_cases(trait="monotone", all_captured=True)
    def test_trait_monotone(self, case: Case) -> None:
        """With every graph captured, more tokens never get a smaller bucket.

        Times then grow with the batch, and whoever plans sizes may bisect.
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
        """FULL goes before PIECEWISE, and PIECEWISE before eager, wherever each would be chosen.

        A batch that may run in more modes is never served in a lesser one for it.
        """
        for batch in case.batches():
            chosen = case.decide(batch).mode
            for mode, code in _ONE_MODE.items():
                if mode <= chosen or mode not in ALLOWED_MODES[batch.allowed]:
                    continue
                alone = case.decide(attrs.evolve(batch, allowed=code)).key
                if alone is not None:
                    case.fail(f"chose {chosen.name}, though {alone} is chosen by itself", batch)

    @for_all_cases(trait="stateless")
    def test_trait_stateless(self, case: Case) -> None:
        """What it decided, or was told, before makes no difference.

        Any process, at any time, gives the same answer: ranks need not agree on anything.
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
                    case.fail(f"answered {before}, and {who} {now}", batch)

    def test_trait_stateless_in_another_process(self) -> None:
        """The same answers come from other processes, with other hash seeds.

        The order of sets differs there, and so does anything sorted by an address.
        """
        self.skip_unless("stateless", learning=False)
        try:
            first, second = (sample_answers_elsewhere(self.make_policy(), n) for n in (0, 1))
        except TypeError as error:
            raise unittest.SkipTest(f"not tried in another process: {error}") from error
        for here, there in zip(first, second, strict=True):
            if here != there:
                raise AssertionError(f"Another process answers otherwise: {here}; {there}")

    @for_all_cases(trait="all_keys_reachable", all_captured=True, share=0.3)
    def test_trait_all_keys_reachable(self, case: Case) -> None:
        """Every key that is declared is chosen for some batch.

        A graph that nothing can choose costs capture time and memory for nothing.
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
                case.fail(f"declared {key}, which no batch of its size is given")
