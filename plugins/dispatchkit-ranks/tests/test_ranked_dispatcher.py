"""Ranks decide the same for any batches, learners and lost keys."""

from __future__ import annotations

import json
import random
import threading
import warnings

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import all_good, run_ranks
from rank_policies import MAX_NUM_TOKENS, Smallest, Wilful, make_dispatcher, random_batch

from dispatchkit import (
    Axis,
    Batch,
    BatchDescriptor,
    CellUpdate,
    Decision,
    Dispatcher,
    GraphKey,
    KeyState,
    Outcome,
    RuntimeMode,
    load_plugins,
)
from dispatchkit.errors import (
    ConfigError,
    DescriptorError,
    NoGraphError,
    PolicyError,
    RankError,
)

from dispatchkit_ranks import LeaderPolicy, RankedDispatcher, differences, fingerprint
from dispatchkit_ranks.shared_keys import SharedKeys

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE
# An example creates several threads and dispatchers, so there are a quarter as many.
some = settings(max_examples=max(5, settings.default.max_examples // 4))


def shown(decision):
    """Return the part that is equal on all ranks; reasons for unused graphs may differ."""
    return decision.mode, str(decision.key), decision.padded_num_tokens, decision.timed


def change_a_key(dispatcher, rng):
    """Apply a random change to a key of one rank."""
    registry = dispatcher.registry
    key = rng.choice(sorted(registry, key=str))
    state = registry.get(key).state
    kind = rng.choice(("lose", "lose", "again", "off", "on", "mode"))
    if kind == "lose" and state is KeyState.CAPTURED:
        rng.choice((registry.failed, registry.evicted, registry.stale))(key, "test")
    elif kind == "again" and state is not KeyState.CAPTURED:
        registry.captured(key, "again")
    elif kind in ("off", "on"):
        registry.set_enabled(kind == "on", key=key)
    elif kind == "mode":
        registry.set_enabled(rng.random() < 0.7, mode=key.mode)


def random_steps(ranks, policy, seed, num_steps):
    """Run random batches and lost keys on a rank; return the decisions."""
    rng = random.Random(f"{seed}/{ranks.rank}")
    dispatcher = make_dispatcher(policy, max_loras=2)
    ranked = RankedDispatcher(dispatcher, ranks, epoch_steps=3)
    found = []
    for _ in range(num_steps):
        if rng.random() < 0.3:
            change_a_key(dispatcher, rng)
        batch = (0,) if rng.random() < 0.2 else random_batch(rng, dispatcher.config)
        agreed = ranked.agree(*batch)
        decision = dispatcher.dispatch(*agreed[:5])
        found.append((agreed, shown(decision)))
        if not batch[0] or not agreed.num_tokens:
            continue
        own = dispatcher.batch(*batch)
        assert own.allows(decision.mode)
        assert decision.padded_num_tokens >= own.num_tokens
        assert decision.key is None or decision.key.covers(own)
        facts = dispatcher.batch(*agreed[:5])
        dispatcher.observe(Outcome(facts, decision, elapsed_us=rng.uniform(1.0, 9.0)))
    return found


@some
@given(st.integers(2, 3), st.integers(0, 1 << 32), st.sampled_from(["alone", "leader"]))
def test_all_ranks_decide_the_same(size, seed, rule):
    """Different batches, adapters, learners, lost and recovered keys: one answer per step."""

    def run(ranks):
        policy = Smallest(eager_below=2)
        if rule == "leader":
            policy = LeaderPolicy(policy, Wilful(seed) if ranks.rank == 0 else None)
        return random_steps(ranks, policy, seed, 8)

    first, *others = all_good(run_ranks(size, run))
    for other in others:
        assert other == first


@pytest.mark.parametrize("learner", [None, "adaptive"])
def test_ranks_with_installed_policies_decide_the_same(learner):
    """vLLM's rule on all ranks, and a leader that learns from its own times."""
    pytest.importorskip("dispatchkit_vllm")
    plugins = load_plugins()
    if learner is not None:
        pytest.importorskip("dispatchkit_adaptive")

    def run(ranks):
        policy = plugins.create_policy("vllm")
        if learner is not None:
            learns = plugins.create_policy(learner) if ranks.rank == 0 else None
            policy = LeaderPolicy(policy, learns)
        return random_steps(ranks, policy, 1, 150)

    first, second = all_good(run_ranks(2, run))
    assert first == second
    assert len({each[1][1] for each in first}) > 5


@some
@given(st.integers(2, 4), st.integers(0, 1 << 32))
def test_the_rule_is_most_tokens_least_mode_and_dispatch_again(size, seed):
    """vLLM's data-parallel rule, computed step by step with plain dispatchers."""
    rng = random.Random(seed)
    plain = make_dispatcher(Smallest(eager_below=3))
    steps = [[random_batch(rng, plain.config) for _ in range(size)] for _ in range(6)]

    def run(ranks):
        ranked = RankedDispatcher(make_dispatcher(Smallest(eager_below=3)), ranks)
        return [shown(ranked.dispatch(*step[ranks.rank])) for step in steps]

    for found in all_good(run_ranks(size, run)):
        for step, got in zip(steps, found, strict=True):
            mode = min(plain.dispatch(*batch).mode for batch in step)
            mode = min(mode, *(batch[4] for batch in step))
            classes = {batch[2] for batch in step}
            expected = plain.dispatch(
                max(batch[0] for batch in step),
                max(batch[1] for batch in step),
                classes.pop() if len(classes) == 1 else 0,
                0,
                int(mode),
            )
            assert got == shown(expected)


@some
@given(st.integers(0, 1 << 32))
def test_a_steady_step_has_one_exchange(seed):
    """Agreement costs one small collective, for any batches."""

    def run(ranks):
        rng = random.Random(f"{seed}/{ranks.rank}")
        ranked = RankedDispatcher(make_dispatcher(), ranks)
        before = ranks.num_exchanges
        for _ in range(5):
            ranked.dispatch(*random_batch(rng, ranked.dispatcher.config))
        return ranks.num_exchanges - before

    assert all_good(run_ranks(2, run)) == [5, 5]


def test_a_key_lost_on_one_rank_is_used_by_none_until_it_is_back():
    """A rank without the graph would run other collectives than the others."""
    key = GraphKey(PIECEWISE, BatchDescriptor(4))

    def run(ranks):
        dispatcher = make_dispatcher()
        ranked = RankedDispatcher(dispatcher, ranks)
        found = [str(ranked.dispatch(3).key)]
        if ranks.rank == 1:
            dispatcher.registry.failed(key, "out of memory")
        found.append(str(ranked.dispatch(3).key))
        withheld = ranked.withheld
        if ranks.rank == 1:
            dispatcher.registry.captured(key, "again")
        found.append(str(ranked.dispatch(3).key))
        return found, withheld, ranked.withheld

    first, second = all_good(run_ranks(2, run))
    assert first[0] == second[0] == ["PIECEWISE tokens=4", "PIECEWISE tokens=8", str(key)]
    assert first[1] == {key: {1: "out of memory"}}
    assert (second[1], first[2], second[2]) == ({}, {}, {})


def test_what_the_user_switched_off_stays_off_when_the_other_rank_is_back():
    """Withheld keys and the user's own switches are separate."""
    key = GraphKey(PIECEWISE, BatchDescriptor(4))

    def run(ranks):
        dispatcher = make_dispatcher()
        ranked = RankedDispatcher(dispatcher, ranks)
        if ranks.rank == 1:
            dispatcher.registry.failed(key, "out of memory")
        ranked.dispatch(3)
        dispatcher.registry.set_enabled(False, key=key)
        ranked.dispatch(3)
        if ranks.rank == 1:
            dispatcher.registry.captured(key, "again")
        off = str(ranked.dispatch(3).key)
        dispatcher.registry.set_enabled(True, key=key)
        return off, str(ranked.dispatch(3).key)

    for found in all_good(run_ranks(2, run)):
        assert found == ("PIECEWISE tokens=8", "PIECEWISE tokens=4")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_key_that_fails_to_capture_on_one_rank_is_used_by_none(failing):
    """Ranks capture in one order, and a failure affects only its key."""
    bad = GraphKey(FULL, BatchDescriptor(8, 8, True, query_len=1))

    def run(ranks):
        dispatcher = make_dispatcher(captured=False)
        ranked = RankedDispatcher(dispatcher, ranks)
        order = []

        def capture(key):
            order.append(str(key))
            if key == bad and ranks.rank == failing:
                raise MemoryError("no room")
            dispatcher.registry.captured(key, "graph")

        lost = ranked.capture(capture)
        assert {each.mode for each in map(ranked.dispatch, (8, 8), (8, 8), (1, 1))} == {PIECEWISE}
        assert ranked.dispatch(4, 4, 1).mode is FULL
        again = ranked.capture(lambda key: dispatcher.registry.captured(key, "graph"))
        assert ranked.dispatch(8, 8, 1).key == bad
        return order, lost, again

    first, second = all_good(run_ranks(2, run))
    assert first == second
    assert first[0] == sorted(first[0], key=lambda name: -int(name.split("tokens=")[1].split()[0]))
    assert first[1] == {bad: {failing: "MemoryError: no room"}}
    assert first[2] == {}


def test_the_leaders_table_travels_between_two_steps():
    """Changes learned by the leader take effect on all ranks together, including one-shots."""

    class Once:
        name = "once"

        def declare(self, config):
            return Smallest().declare(config)

        def decide(self, batch, graphs):
            return None

        def observe(self, outcome):
            batch = outcome.batch
            return [
                CellUpdate(batch, Decision.eager("learnt")),
                CellUpdate(batch, Decision.eager("probe", timed=True), one_shot=True),
            ]

    def run(ranks):
        learner = Once() if ranks.rank == 0 else None
        dispatcher = make_dispatcher(LeaderPolicy(Smallest(), learner))
        ranked = RankedDispatcher(dispatcher, ranks, epoch_steps=4)
        early = Outcome(Batch(3), Decision.eager("start"), elapsed_us=1.0)
        dispatcher.observe(early)
        found = []
        for step in range(6):
            found.append(ranked.dispatch(3).reason)
            if step == 1:
                dispatcher.observe(Outcome(Batch(3), Decision.eager("x"), elapsed_us=5.0))
        return found, ranked.epoch

    for found in all_good(run_ranks(3, run)):
        assert found == (["hit", "hit", "hit", "hit", "probe", "learnt"], 1)


def test_a_range_of_sizes_is_asked_again_on_every_rank():
    """Published answers of the range are forgotten, and earlier pending ones are not published."""
    learner = Wilful()
    answers = iter(
        [
            [CellUpdate(Batch(size), Decision.eager("learnt")) for size in (2, 3, 5)],
            [CellUpdate(Batch(4), Decision.eager("old")), CellUpdate(Batch(3), None, up_to=4)],
        ]
    )
    learner.observe = lambda outcome: next(answers)
    learner.decide = lambda batch, graphs: None
    leader, other = LeaderPolicy(Smallest(), learner), LeaderPolicy(Smallest())
    tables = {policy: make_dispatcher(policy) for policy in (leader, other)}
    leader.is_observing = True
    for _ in range(2):
        leader.observe(Outcome(Batch(3), Decision.eager("x"), elapsed_us=5.0))
        news = leader.take_updates()
        for policy, table in tables.items():
            policy.apply_updates(news, table)
    assert not leader.has_updates
    for table in tables.values():
        found = {size: table.dispatch(size).reason for size in (2, 3, 4, 5)}
        assert found == {2: "learnt", 3: "hit", 4: "hit", 5: "learnt"}


def test_outcomes_of_start_up_teach_nothing():
    """While other ranks are starting, a step's time is not representative."""

    def run(ranks):
        policy = LeaderPolicy(Smallest(), Wilful() if ranks.rank == 0 else None)
        dispatcher = make_dispatcher(policy)
        ranked = RankedDispatcher(dispatcher, ranks, epoch_steps=1)
        for _ in range(3):
            dispatcher.observe(Outcome(Batch(3), Decision.eager("x"), elapsed_us=1e6))
        ranked.dispatch(3)
        return policy.has_updates, ranked.epoch

    assert all_good(run_ranks(2, run)) == [(False, 0), (False, 0)]


def test_a_learner_that_raises_changes_nothing_of_what_is_served():
    """Only the leader records the fault, and all ranks serve the table."""

    class Broken(Wilful):
        def observe(self, outcome):
            raise ZeroDivisionError("no samples")

    def run(ranks):
        policy = LeaderPolicy(Smallest(), Broken() if ranks.rank == 0 else None)
        dispatcher = make_dispatcher(policy)
        ranked = RankedDispatcher(dispatcher, ranks, epoch_steps=1)
        found = [str(ranked.dispatch(3).key)]
        outcome = Outcome(Batch(3), Decision.eager("x"), elapsed_us=1.0)
        if ranks.rank == 0:
            message = r"'wilful' failed in observe\(\): ZeroDivisionError: no samples\."
            with pytest.warns(RuntimeWarning, match=message):
                dispatcher.observe(outcome)
        found.append(str(ranked.dispatch(3).key))
        return found, policy.num_learner_errors

    found = all_good(run_ranks(2, run))
    assert found == [(["PIECEWISE tokens=4"] * 2, 1), (["PIECEWISE tokens=4"] * 2, 0)]


def test_what_no_policy_may_choose_is_left_out_of_the_table_on_all_ranks():
    """Only the leader has a learner, whose fault must not end a step on any rank."""

    class Small(Wilful):
        def observe(self, outcome):
            yield CellUpdate(
                outcome.batch, Decision.replay(GraphKey(PIECEWISE, BatchDescriptor(1)))
            )

    def run(ranks):
        policy = LeaderPolicy(Smallest(), Small() if ranks.rank == 0 else None)
        dispatcher = make_dispatcher(policy)
        ranked = RankedDispatcher(dispatcher, ranks, epoch_steps=1)
        decision = ranked.dispatch(3)
        dispatcher.observe(Outcome(dispatcher.batch(3), decision, elapsed_us=1.0))
        found = [str(ranked.dispatch(3).key) for _ in range(2)]
        return found, policy.num_learner_errors, dispatcher.num_policy_errors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = all_good(run_ranks(2, run))
    assert found == [(["PIECEWISE tokens=4"] * 2, 1, 0), (["PIECEWISE tokens=4"] * 2, 0, 0)]


def test_a_learner_that_stops_half_way_through_its_answer_changes_nothing():
    class HalfWay(Wilful):
        def observe(self, outcome):
            yield CellUpdate(outcome.batch, Decision.eager("x"))
            raise ZeroDivisionError

    policy = LeaderPolicy(Smallest(), HalfWay())
    policy.is_observing = True
    message = r"'wilful' failed in observe\(\): ZeroDivisionError\."
    with pytest.warns(RuntimeWarning, match=message):
        policy.observe(Outcome(Batch(3), Decision.eager("x"), elapsed_us=1.0))
    assert not policy.has_updates
    assert policy.num_learner_errors == 1


def test_a_fault_of_the_policy_on_one_rank_is_told_to_the_others():
    """In strict mode it raises before the exchange, in which the others wait for it."""

    class Faulty(Smallest):
        is_faulty = False

        def decide(self, batch, graphs):
            if self.is_faulty and batch.num_tokens == 3:
                raise ZeroDivisionError
            return super().decide(batch, graphs)

    def run(ranks):
        plain, policy = make_dispatcher(), Faulty()
        dispatcher = Dispatcher(policy, plain.config, registry=plain.registry, strict=True)
        ranked = RankedDispatcher(dispatcher, ranks)
        policy.is_faulty = True
        with pytest.raises(PolicyError if ranks.rank else RankError):
            ranked.agree(3 if ranks.rank else 2)
        return ranks.meeting.failed[0]

    assert all_good(run_ranks(2, run)) == [1, 1]


def withheld_on_this_rank():
    """Return a withholder, its report, and a key that another rank has lost."""
    dispatcher = make_dispatcher()
    keys = SharedKeys(dispatcher)
    key = next(iter(dispatcher.registry))
    mine = keys.report()
    other = json.loads(mine)
    other["ready"].remove(str(key))
    return dispatcher.registry, keys, mine, json.dumps({**other, "lost": {str(key): "lost"}}), key


def test_a_key_that_is_switched_off_stays_so_whatever_becomes_of_its_mode():
    registry, keys, mine, other, key = withheld_on_this_rank()
    keys.merge_reports([mine, other])
    registry.set_enabled(False, key=key)
    registry.set_enabled(False, mode=key.mode)
    registry.set_enabled(True, mode=key.mode)
    keys.merge_reports([mine, mine])
    assert not registry.is_enabled(key)


def test_a_key_that_changes_on_another_thread_during_a_merge_is_news():
    registry, keys, mine, other, key = withheld_on_this_rank()
    threads = []

    def is_enabled(one):
        if not threads:  # in the middle of the merge
            lost = next(each for each in registry if each != key)
            threads.append(threading.Thread(target=registry.failed, args=(lost, "broken")))
            threads[0].start()
            threads[0].join(0.05)  # without the registry's lock it would have finished
        return key not in registry._disabled_keys

    registry.is_enabled = is_enabled
    keys.merge_reports([mine, other])
    threads[0].join()
    assert keys.has_changes


def test_a_withheld_key_that_is_forgotten_is_withheld_no_more():
    registry, keys, mine, other, key = withheld_on_this_rank()
    keys.merge_reports([mine, other])
    registry.forget(key)
    keys.restore_all()
    assert not keys.withheld


def test_nothing_is_exchanged_where_nothing_can_differ():
    """Tensor parallelism under one scheduler: equal batches, equal answers."""

    def run(ranks):
        ranked = RankedDispatcher(make_dispatcher(), ranks, same_batches=True)
        before = ranks.num_exchanges
        found = [shown(ranked.dispatch(n)) for n in (1, 5, 8)]
        return ranks.num_exchanges - before, ranked.needs_agreement, found

    first, second = all_good(run_ranks(2, run))
    assert first == second
    assert first[:2] == (0, False)


def test_a_lost_key_stops_a_rank_where_the_others_could_not_learn_of_it():
    """Without an exchange the others would replay a graph that this rank lacks."""

    def run(ranks):
        dispatcher = make_dispatcher()
        ranked = RankedDispatcher(dispatcher, ranks, same_batches=True)
        ranked.dispatch(3)
        dispatcher.registry.set_enabled(False, mode=FULL)
        ranked.sync_keys()
        agreed = ranked.dispatch(2, 2, 1).mode
        if ranks.rank == 1:
            dispatcher.registry.failed(GraphKey(PIECEWISE, BatchDescriptor(4)), "broken")
            with pytest.raises(RankError, match="check_every"):
                ranked.dispatch(3)
        return agreed, str(ranks.meeting.failed)

    first, second = run_ranks(2, run)
    assert first[0] is second[0] is PIECEWISE
    assert "A graph of this rank changed" in second[1]


def test_a_check_finds_batches_that_differ_after_all():
    """Equal batches are promised, and checked at intervals."""

    def run(ranks):
        ranked = RankedDispatcher(make_dispatcher(), ranks, same_batches=True, check_every=4)
        found = []
        for step in range(1, 9):
            found.append(step)
            ranked.dispatch(3 if step != 6 or ranks.rank == 0 else 4)
        return found

    for error in run_ranks(2, run):
        assert isinstance(error, RankError)
        assert error.step == 8


def test_impossible_facts_can_be_tried_again():
    """They are refused before any exchange; the others wait meanwhile."""

    def run(ranks):
        ranked = RankedDispatcher(make_dispatcher(), ranks)
        if ranks.rank == 0:
            with pytest.raises(DescriptorError, match="num_tokens"):
                ranked.dispatch(MAX_NUM_TOKENS + 1)
        return shown(ranked.dispatch(2)), ranked.step

    first, second = all_good(run_ranks(2, run))
    assert first == second
    assert first[1] == 1


def test_no_common_mode_is_refused_on_every_rank_and_the_next_step_works():
    """One rank allows only FULL, the other at most PIECEWISE."""

    def run(ranks):
        ranked = RankedDispatcher(make_dispatcher(), ranks)
        with pytest.raises(NoGraphError) as caught:
            ranked.dispatch(2, 2, 1, 0, 4 if ranks.rank == 0 else 1)
        return caught.value.reason, ranked.dispatch(2, 2, 1).mode

    assert all_good(run_ranks(2, run)) == [("no_common_mode", FULL)] * 2


def test_switches_are_on_where_all_ranks_have_them_on():
    """Everything that changes the collectives inside a step is part of the agreement."""

    def run(ranks):
        ranked = RankedDispatcher(make_dispatcher(), ranks, switches=("microbatch", "quant"))
        own = 0b11 if ranks.rank == 0 else 0b10
        return ranked.agree(2, switches=own).switches, ranked.agree(2).switches

    assert all_good(run_ranks(2, run)) == [(0b10, 0b11)] * 2


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"sizes": (1, 4, 8)}, "config.sizes"),
        ({"max_loras": 3}, "config.max_loras"),
        ({"policy": Smallest(eager_below=5)}, "policy's decisions"),
        ({"facts": {"model": "other"}}, "model"),
        ({"switches": ("microbatch",)}, "switches"),
    ],
)
def test_ranks_that_are_not_set_up_alike_stop_at_once(odd, what):
    """A difference that appears while serving would be a hang."""

    def run(ranks):
        settings = {"facts": {"model": "same"}, **(odd if ranks.rank == 1 else {})}
        options = {name: settings.pop(name) for name in ("facts", "switches") if name in settings}
        return RankedDispatcher(make_dispatcher(**settings), ranks, **options)

    for error in run_ranks(3, run):
        assert isinstance(error, RankError)
        assert error.reason == "differs"
        assert what in str(error)
        assert "rank 1 has" in str(error)


def test_a_policy_that_learns_on_every_rank_is_refused():
    """What one rank learns is unknown to the others."""

    def run(ranks):
        return RankedDispatcher(make_dispatcher(Wilful()), ranks)

    found = run_ranks(2, run)
    assert any(isinstance(error, ConfigError) and "LeaderPolicy" in str(error) for error in found)


def test_only_a_dispatcher_is_ranked():
    with pytest.raises(ConfigError, match=r"a Dispatcher, got 3\. For a GraphRunner, use R"):
        RankedDispatcher(3, None)


def test_a_lazy_dispatcher_is_refused():
    """A capture within a step may fail on one rank only."""

    def run(ranks):
        plain = make_dispatcher(captured=False)
        return RankedDispatcher(Dispatcher(Smallest(), plain.config, lazy=True), ranks)

    assert any(isinstance(error, ConfigError) for error in run_ranks(2, run))


def test_a_dispatcher_that_may_split_batches_is_refused():
    """Ranks agree on one graph; the parts of another rank's batch would differ."""

    def run(ranks):
        config = make_dispatcher().config
        made = Dispatcher(Smallest(), config, may_split=True)
        for key in made.registry:
            made.registry.captured(key, object())
        return RankedDispatcher(made, ranks)

    found = run_ranks(2, run)
    assert any(
        isinstance(error, ConfigError) and "rows_independent" in str(error) for error in found
    )


AXES = (Axis("length", (4, 16, 64)), Axis("kind", (1, 3), exact=True))


def with_axes(policy=None, axes=AXES):
    """Return a captured dispatcher of a policy without axes."""
    config = attrs.evolve(make_dispatcher(max_loras=2).config, axes=axes)
    made = Dispatcher(policy or Smallest(), config)
    for key in made.registry:
        made.registry.captured(key, object())
    return made


@settings(max_examples=4)
@given(st.integers(2, 3), st.integers(0, 1 << 32), st.sampled_from([0, 3]))
def test_values_of_axes_are_agreed_on(size, seed, same_every):
    """The largest value of any rank selects the bucket; differing exact values are outside it."""

    def run(ranks):
        rng = random.Random(f"{seed}/{0 if same_every else ranks.rank}")
        together = random.Random(seed)
        dispatcher = with_axes()
        config = dispatcher.config
        options = {"same_batches": True, "check_every": same_every} if same_every else {}
        ranked = RankedDispatcher(dispatcher, ranks, **options)
        found = []
        for _ in range(8):
            idle = rng.random() < 0.2
            kind = together.choice((1, 3, 3)) if together.random() < 0.7 else rng.choice((1, 2, 3))
            values = {"length": rng.choice((1, 4, 5, 16, 40, 64, 65)), "kind": kind}
            tokens, loras = rng.randint(1, MAX_NUM_TOKENS), rng.choice((0, 0, 0, 2))
            variant = config.variant(loras, **values)
            agreed = ranked.agree(*((0,) if idle else (tokens, 0, 0, variant)))
            own = None if idle else (tokens, values["length"], kind, loras)
            found.append((own, agreed, shown(dispatcher.dispatch(*agreed[:5]))))
        return found, config

    results = all_good(run_ranks(size, run))
    config = results[0][1]
    for step in zip(*(found for found, _ in results), strict=True):
        assert len({one[1:] for one in step}) == 1
        owns = [own for own, _, _ in step if own is not None]
        _, agreed, (mode, key, _, _) = step[0]
        if not owns:
            assert (agreed.num_tokens, agreed.axes) == (0, ())
            continue
        tokens, length, _, loras = (max(values) for values in zip(*owns, strict=True))
        kinds = {own[2] for own in owns}
        kind = kinds.pop() if len(kinds) == 1 else None
        assert (agreed.num_tokens, agreed.axes) == (tokens, (length, kind))
        assert config.variants.facts(agreed.loras)[0] == loras
        if length <= 64 and kind in (1, 3):
            bucket = min(one for one in (4, 16, 64) if one >= length)
            assert key.endswith(f"axes={bucket},{kind}")
        else:
            assert (mode, key) == (RuntimeMode.NONE, "None")


def test_ranks_with_other_axes_are_not_set_up_alike():
    """The fingerprint includes axes and the answers of a policy without axes."""

    def run(ranks):
        buckets = (4, 16, 64) if ranks.rank == 0 else (4, 16)
        return RankedDispatcher(with_axes(axes=[Axis("length", buckets)]), ranks)

    assert all("config.axes" in str(error) for error in run_ranks(2, run))
    facts = [fingerprint(with_axes(Smallest(eager_below=below))) for below in (0, 3)]
    assert list(differences(facts, (0, 1))) == ["digest of the policy's decisions"]


def test_axes_with_a_leader_are_refused():
    def run(ranks):
        return RankedDispatcher(with_axes(LeaderPolicy(Smallest())), ranks)

    assert any("empty with a LeaderPolicy" in str(error) for error in run_ranks(2, run))


def test_too_many_axes_for_one_row_are_refused():
    axes = [Axis(f"a{number}", (1,), exact=True) for number in range(9)]

    def run(ranks):
        return RankedDispatcher(with_axes(axes=axes), ranks)

    assert any(str(error).startswith("axes must be") for error in run_ranks(2, run))


def test_a_learner_on_another_rank_than_the_first_is_refused_and_stops_all():
    """The others must not wait for a rank that could not start."""

    def run(ranks):
        return RankedDispatcher(make_dispatcher(LeaderPolicy(Smallest(), Wilful())), ranks)

    first, second = run_ranks(2, run)
    assert isinstance(first, RankError)
    assert isinstance(second, ConfigError)
    assert "on rank 0 of the agreement only" in str(second)


def test_a_base_that_learns_is_refused():
    """All ranks fall back on the base and must get the same answer from it."""
    with pytest.raises(ConfigError, match="stateless"):
        LeaderPolicy(Wilful())


def test_one_rank_alone_decides_as_its_dispatcher_does():
    """The same program runs on one GPU, without any cost."""

    def run(ranks):
        ranked = RankedDispatcher(make_dispatcher(Wilful()), ranks)
        before = ranks.num_exchanges
        return shown(ranked.dispatch(3)), ranks.num_exchanges - before

    assert all_good(run_ranks(1, run)) == [(shown(make_dispatcher(Wilful()).dispatch(3)), 0)]
