"""The dispatcher: answers of steps, emptied cells, and faults of policies."""

from __future__ import annotations

import copy
import threading
import warnings

import attrs
import pytest

from dispatchkit.dispatch import CellUpdate, Decision, Dispatcher, Outcome, Reason, explain
from dispatchkit.dispatch import table as table_module
from dispatchkit.errors import ConfigError, DescriptorError, NoGraphError, PolicyError
from dispatchkit.keys import (
    ALLOWED_MODES,
    Batch,
    BatchDescriptor,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
    allowed_modes_code,
)
from dispatchkit.registry import GraphRegistry
from dispatchkit.testing import SmallestPolicy

NONE, PIECEWISE, FULL = RuntimeMode


def mixed(num_tokens, **facts):
    return GraphKey(PIECEWISE, BatchDescriptor(num_tokens, **facts))


def decode(num_tokens, query_len=1, **facts):
    return GraphKey(
        FULL,
        BatchDescriptor(
            num_tokens,
            num_reqs=num_tokens // query_len,
            uniform=True,
            query_len=query_len,
            **facts,
        ),
    )


class AskedPolicy(SmallestPolicy):
    """Records the batches that it is asked about."""

    def __init__(self):
        self.asked = []

    def decide(self, batch, graphs):
        self.asked.append(batch)
        return super().decide(batch, graphs)


def make(policy=None, *, captured=True, registry=None, **options):
    """Return a dispatcher with sizes 8, 16 and 32 and every graph captured."""
    config_options = {
        name: options.pop(name)
        for name in ("sizes", "max_num_tokens", "max_num_seqs", "query_lens", "max_loras")
        if name in options
    }
    sizes = config_options.setdefault("sizes", (8, 16, 32))
    config_options.setdefault("max_num_tokens", sizes[-1] if sizes else None)
    config = options.pop("config", None) or DispatchConfig(**config_options)
    dispatcher = Dispatcher(policy or AskedPolicy(), config, registry=registry, **options)
    if captured:
        for key in dispatcher.registry:
            dispatcher.registry.captured(key, object())
    if isinstance(dispatcher.policy, AskedPolicy):
        dispatcher.policy.asked.clear()
    return dispatcher


# -- answers of steps -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 16, 32])
def test_below_at_and_above_every_size(size):
    """Each batch gets the smallest size that holds it."""
    dispatcher = make()
    above = {8: 16, 16: 32}.get(size)
    assert dispatcher.dispatch(size - 1).key == mixed(size)
    assert dispatcher.dispatch(size).key == mixed(size)
    if above:
        assert dispatcher.dispatch(size + 1).key == mixed(above)


def test_maximum_off_the_step_has_a_bucket():
    """One below, at and above the maximum: two graphs and an error."""
    dispatcher = make(config=DispatchConfig(max_num_tokens=100))
    assert dispatcher.dispatch(100).key == mixed(100)
    assert dispatcher.dispatch(97).key == mixed(100)
    with pytest.raises(DescriptorError, match=r"from 0 to 100 \(max_num_tokens\), got 101"):
        dispatcher.dispatch(101)


def test_batch_above_the_last_size_runs_eager():
    """No larger graph is used, even if the limit is far higher."""
    with pytest.warns(UserWarning, match="33 to 64"):
        dispatcher = make(sizes=(8, 32), max_num_tokens=64)
    decision = dispatcher.dispatch(33)
    assert (decision.mode, decision.key, decision.reason) == (NONE, None, "above_largest_size")
    assert decision.padded_num_tokens == 33
    assert decision.padding == 0


def test_uniform_batch_gets_its_own_graph_and_mixed_the_other():
    dispatcher = make()
    assert dispatcher.dispatch(7, 7, True).key == decode(8)
    assert dispatcher.dispatch(7, 7, 1).key == decode(8)
    assert dispatcher.dispatch(7, 3, False).key == mixed(8)


def test_uniform_argument_indexes_query_lengths():
    dispatcher = make(query_lens=(4, 2))
    assert dispatcher.dispatch(8, 2, 1).key == decode(8, 4)
    assert dispatcher.dispatch(8, 4, 2).key == decode(8, 2)
    assert dispatcher.dispatch(8, 4, 0).key == mixed(8)


def test_adapters_have_an_axis_of_their_own():
    dispatcher = make(max_loras=2)
    assert dispatcher.dispatch(8, 0, 0, 0).key == mixed(8)
    assert dispatcher.dispatch(8, 0, 0, 1).key == mixed(8, num_active_loras=2)
    assert dispatcher.dispatch(8, 8, 1, 2).key == decode(8, num_active_loras=2)


@pytest.mark.parametrize("code", range(len(ALLOWED_MODES)))
@pytest.mark.parametrize("uniform", [0, 1])
def test_allowed_modes_are_obeyed(code, uniform):
    dispatcher = make()
    wanted = [FULL, PIECEWISE] if uniform else [PIECEWISE]
    best = next((mode for mode in wanted if mode in ALLOWED_MODES[code]), NONE)
    if best is NONE and NONE not in ALLOWED_MODES[code]:
        with pytest.raises(NoGraphError):
            dispatcher.dispatch(8, 8 * uniform, uniform, 0, code)
        return
    assert dispatcher.dispatch(8, 8 * uniform, uniform, 0, code).mode is best


def test_runtime_mode_is_a_ceiling():
    """Cascade attention excludes FULL, even if the policy prefers it."""
    dispatcher = make()
    assert dispatcher.dispatch(8, 8, 1, 0, PIECEWISE).key == mixed(8)
    assert dispatcher.dispatch(8, 8, 1, 0, FULL).key == decode(8)
    assert dispatcher.dispatch(8, 8, 1, 0, NONE).mode is NONE


def test_empty_batch_is_eager_without_asking():
    dispatcher = make()
    assert dispatcher.dispatch(0).reason == "empty_batch"
    assert dispatcher.policy.asked == []
    with pytest.raises(DescriptorError, match="num_reqs"):
        dispatcher.dispatch(0, 1)


def test_decision_is_bound_to_its_cell():
    decision = make().dispatch(5)
    assert (decision.num_tokens, decision.padded_num_tokens, decision.padding) == (5, 8, 3)
    assert decision.policy == "smallest"
    assert decision.max_num_reqs == 5
    assert str(decision) == "replay PIECEWISE tokens=8 (hit)"


def test_policy_is_asked_once_per_cell():
    dispatcher = make()
    first = dispatcher.dispatch(5)
    assert dispatcher.dispatch(5) is first
    assert dispatcher.dispatch(5, 3) is first
    assert len(dispatcher.policy.asked) == 1
    dispatcher.dispatch(6)
    assert len(dispatcher.policy.asked) == 2
    assert dispatcher.num_filled_cells == 2


def test_filled_cell_is_served_by_the_table_alone(monkeypatch):
    """The cold path acquires a lock and costs many times as much."""
    dispatcher = make(query_lens=(1, 2), max_loras=1)
    calls = [
        (num_tokens, num_reqs, uniform, loras, ceiling)
        for num_tokens in (0, 8)
        for num_reqs in ((0, 1) if num_tokens else (0,))
        for uniform in (0, 1, 2)
        for loras in (0, 1)
        for ceiling in (0, 1, 2)
    ]
    first = [dispatcher.dispatch(*call) for call in calls]
    monkeypatch.delattr(Dispatcher, "_dispatch_cold")
    assert all(dispatcher.dispatch(*call) is one for call, one in zip(calls, first, strict=True))


@pytest.mark.parametrize("max_list_cells", [10**6, 0])
def test_a_row_holds_what_dispatch_returns_and_follows_every_change(max_list_cells, monkeypatch):
    """Row lookups return only decisions that dispatch would return."""
    monkeypatch.setattr(table_module, "MAX_LIST_CELLS", max_list_cells)
    dispatcher = make()
    row = dispatcher.row(1)
    assert row[5].max_num_reqs == -1
    found = dispatcher.dispatch(5, 5, 1)
    assert row[5] is found
    dispatcher.update(CellUpdate(dispatcher.batch(5, 0, 1), Decision.eager("slow")))
    assert (row[5].reason, row[5].max_num_reqs) == ("slow", 5)
    batch = dispatcher.batch(5, 0, 1)
    dispatcher.update(CellUpdate(batch, Decision.eager("probe"), one_shot=True))
    assert row[5].max_num_reqs == -1, "a one-shot decision is taken by dispatch alone"
    assert dispatcher.dispatch(5, 5, 1).reason == "probe"
    assert row[5].reason == "slow"
    dispatcher.registry.evicted(decode(8))
    assert row[5].max_num_reqs == -1
    assert dispatcher.row(1) is row
    dispatcher.swap(AskedPolicy())
    assert dispatcher.row(1) is not row


def test_a_row_of_no_kind_of_batch_is_refused_by_name():
    for facts, field in (
        ({"uniform": 2}, "uniform"),
        ({"loras": 1}, "loras"),
        ({"ceiling": 9}, "ceiling"),
    ):
        with pytest.raises(DescriptorError, match=field):
            make().row(**facts)


def test_what_is_not_said_of_a_batch_is_not_assumed():
    dispatcher = make(query_lens=(1, 2), max_loras=1)
    assert dispatcher.batch(8) == Batch(8)
    assert dispatcher.dispatch(8).key == dispatcher.dispatch(8, 0, 0, 0, 2).key == mixed(8)
    assert not Decision.eager("x").timed
    assert not Decision.replay(mixed(8)).timed


def test_lazy_is_what_was_set_last():
    dispatcher = make(lazy=True)
    assert dispatcher.lazy is True
    dispatcher.set_lazy(False)
    assert dispatcher.lazy is False


def test_modes_are_those_the_executor_can_do():
    assert make().modes == {FULL, PIECEWISE}
    assert make(modes=[FULL]).modes == {FULL}


def test_copy_of_a_policy_sees_the_same_graphs():
    graphs = make().graphs
    assert copy.deepcopy(graphs) is graphs


def test_each_epoch_is_told_with_the_policy_before():
    told = []
    dispatcher = make(on_swap=lambda *facts: told.append(facts))
    assert dispatcher.swap(TwoWidthsPolicy()) == 1
    assert dispatcher.swap() == 2
    name = dispatcher.policy_name
    assert told == [("smallest", None, 0), (name, "smallest", 1), (name, name, 2)]


def test_batch_of_a_policy_says_nothing_that_is_not_known():
    dispatcher = make(query_lens=(2,), max_loras=1)
    dispatcher.dispatch(8, 4, 1, 1, 1)
    assert dispatcher.policy.asked == [
        Batch(8, uniform=True, query_len=2, max_query_len=2, num_active_loras=1, allowed=1)
    ]


def test_plan_is_made_once_per_cell_by_the_executor():
    made = []
    dispatcher = make(bind=lambda decision, batch: made.append((decision, batch)) or len(made))
    assert dispatcher.dispatch(5).plan == 1
    assert dispatcher.dispatch(5).plan == 1
    assert dispatcher.dispatch(6).plan == 2
    assert [(d.key, b.num_tokens) for d, b in made] == [(mixed(8), 5), (mixed(8), 6)]


# -- refused facts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("num_tokens", -1, "max_num_tokens"),
        ("num_tokens", -33, "max_num_tokens"),
        ("num_tokens", -34, "max_num_tokens"),
        ("num_tokens", 33, "max_num_tokens"),
        ("num_tokens", 8.0, "max_num_tokens"),
        ("num_tokens", 8.5, "max_num_tokens"),
        ("num_tokens", None, "max_num_tokens"),
        ("num_tokens", "8", "max_num_tokens"),
        ("num_tokens", [8], "max_num_tokens"),
        ("num_tokens", 10**30, "max_num_tokens"),
        ("num_reqs", -1, "number of tokens"),
        ("num_reqs", 9, "number of tokens"),
        ("num_reqs", 2.0, "number of tokens"),
        ("num_reqs", None, "number of tokens"),
        ("uniform", -1, "query lengths"),
        ("uniform", 2, "query lengths"),
        ("uniform", None, "query lengths"),
        ("uniform", 1.0, "query lengths"),
        ("loras", -1, "max_loras"),
        ("loras", 2, "max_loras"),
        ("loras", 0.0, "max_loras"),
        ("ceiling", -1, "codes of allowed modes"),
        ("ceiling", -7, "codes of allowed modes"),
        ("ceiling", 7, "codes of allowed modes"),
        ("ceiling", "FULL", "codes of allowed modes"),
        ("ceiling", None, "codes of allowed modes"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_impossible_fact_is_refused_by_name(field, value, limit, warm):
    """A negative index must not read a list from its end, even in filled rows."""
    dispatcher = make(max_loras=1)
    if warm:
        for allowed in range(3):
            for uniform in (0, 1):
                for loras in (0, 1):
                    for num_tokens in (8, 31, 32):
                        dispatcher.dispatch(num_tokens, 0, uniform, loras, allowed)
    facts = {"num_tokens": 8, "num_reqs": 1, "uniform": 0, "loras": 0, "ceiling": 2}
    with pytest.raises(DescriptorError) as caught:
        dispatcher.dispatch(**{**facts, field: value})
    assert caught.value.field == field
    assert limit in str(caught.value)


def test_more_requests_than_the_limit_are_refused():
    dispatcher = make(max_num_seqs=4)
    assert dispatcher.dispatch(8, 4).key == mixed(8)
    with pytest.raises(DescriptorError, match=r"num_reqs .* from 0 to 4 \(max_num_seqs\), got 5"):
        dispatcher.dispatch(8, 5)


@pytest.mark.parametrize("kind", ["int64", "int32", "int16", "uint8", "uint64", "intp"])
def test_numpy_numbers_are_numbers(kind):
    number = getattr(pytest.importorskip("numpy"), kind)
    dispatcher = make(max_loras=1)
    expected = dispatcher.dispatch(7, 7, 1, 1, 2)
    for _ in range(2):
        got = dispatcher.dispatch(number(7), number(7), number(1), number(1), number(2))
        assert got is expected
    with pytest.raises(DescriptorError):
        dispatcher.dispatch(number(33))


def test_numpy_flags_are_flags():
    """Callers have results such as ``(lens == lens[0]).all()``."""
    np = pytest.importorskip("numpy")
    dispatcher = make()
    assert dispatcher.dispatch(7, 7, np.bool_(True)) is dispatcher.dispatch(7, 7, 1)
    assert dispatcher.dispatch(7, 3, np.bool_(False)) is dispatcher.dispatch(7, 3, 0)


def test_small_numpy_number_beside_a_large_one_does_not_overflow():
    """Combining an 8-bit number with a large int raises OverflowError in numpy."""
    np = pytest.importorskip("numpy")
    dispatcher = make(config=DispatchConfig(max_num_tokens=512))
    assert dispatcher.dispatch(400, np.int8(3)).key == mixed(400)
    with pytest.raises(DescriptorError):
        dispatcher.dispatch(np.int8(3), 400)


# -- requests ----------------------------------------------------------------------------


class TwoWidthsPolicy:
    """FULL for few requests, PIECEWISE for any number."""

    name = "two-widths"

    def declare(self, config):
        self.few = GraphKey(FULL, BatchDescriptor(16, num_reqs=4))
        self.any = mixed(16)
        return [self.few, self.any]

    def decide(self, batch, graphs):
        ready = [
            key
            for mode in (FULL, PIECEWISE)
            for key in graphs.covering(batch, mode)
            if batch.allows(mode) and graphs.is_ready(key)
        ]
        return Decision.replay(ready[0]) if ready else Decision.eager("nothing")


def test_more_requests_than_the_graph_holds_take_another():
    dispatcher = make(TwoWidthsPolicy())
    policy = dispatcher.policy
    assert dispatcher.dispatch(10).key == policy.few
    assert dispatcher.dispatch(10, 4).key == policy.few
    assert dispatcher.dispatch(10, 5).key == policy.any
    assert dispatcher.dispatch(10, 5) is dispatcher.dispatch(10, 5)
    assert dispatcher.dispatch(10, 4).key == policy.few


def test_bound_of_a_decision_is_obeyed():
    class Bounded(TwoWidthsPolicy):
        def decide(self, batch, graphs):
            if batch.num_reqs is None or batch.num_reqs <= 2:
                return attrs.evolve(Decision.eager("few"), max_num_reqs=2)
            return Decision.replay(self.any) if batch.allows(PIECEWISE) else Decision.eager("no")

    dispatcher = make(Bounded())
    reasons = [dispatcher.dispatch(10, num_reqs).reason for num_reqs in (0, 1, 2, 3, 10)]
    assert reasons == ["few", "few", "few", "hit", "hit"]


class ChangesItsMind(TwoWidthsPolicy):
    """Runs any number of requests eager after its decision is changed."""

    def __init__(self):
        self.mind = None

    def decide(self, batch, graphs):
        if self.mind is not None and (batch.num_reqs or 0) > 4:
            return Decision.eager(self.mind)
        return super().decide(batch, graphs)


@pytest.mark.parametrize("learnt", [False, True])
def test_answers_by_requests_are_forgotten_with_their_cell(learnt):
    """They belong to the cell's answer and expire with it."""
    dispatcher = make(ChangesItsMind())
    policy = dispatcher.policy
    assert dispatcher.dispatch(10, 5).key == policy.any
    policy.mind = "too many"
    assert dispatcher.dispatch(10, 5).key == policy.any, "nobody said that it changed"
    answer = Decision.replay(policy.few, "learnt") if learnt else None
    dispatcher.update(CellUpdate(Batch(10), answer))
    assert dispatcher.dispatch(10, 4).reason == ("learnt" if learnt else "hit")
    assert dispatcher.dispatch(10, 5).reason == "too many"


def test_answers_by_requests_do_not_go_before_a_probe():
    dispatcher = make(TwoWidthsPolicy())
    assert dispatcher.dispatch(10, 5).key == dispatcher.policy.any
    dispatcher.update(CellUpdate(Batch(10), Decision.eager("probe"), one_shot=True))
    assert [dispatcher.dispatch(10, 5).reason for _ in range(2)] == ["probe", "hit"]


def test_answers_by_requests_end_with_their_epoch():
    dispatcher = make(TwoWidthsPolicy())
    assert dispatcher.dispatch(10, 5).reason == "hit"
    changed = ChangesItsMind()
    changed.mind = "too many"
    dispatcher.swap(changed)
    assert dispatcher.dispatch(10, 4).reason == "hit"
    assert [dispatcher.dispatch(10, 5).reason for _ in range(2)] == ["too many"] * 2


def test_no_answer_by_requests_is_eager_where_that_is_not_allowed():
    """A kept answer would be served the second time."""
    dispatcher = make(TwoWidthsPolicy())
    dispatcher.registry.evicted(dispatcher.policy.any)
    assert dispatcher.dispatch(10, 4, 0, 0, 5).key == dispatcher.policy.few
    for _ in range(3):
        with pytest.raises(NoGraphError):
            dispatcher.dispatch(10, 5, 0, 0, 5)


def test_answer_by_requests_is_kept_where_eager_is_not_allowed():
    dispatcher = make(TwoWidthsPolicy())
    answer = dispatcher.dispatch(10, 5, 0, 0, 5)
    assert answer.key == dispatcher.policy.any
    assert dispatcher.dispatch(10, 5, 0, 0, 5) is answer


def test_answers_by_requests_follow_the_registry():
    dispatcher = make(TwoWidthsPolicy())
    policy = dispatcher.policy
    assert dispatcher.dispatch(10, 5).key == policy.any
    dispatcher.registry.evicted(policy.any)
    assert dispatcher.dispatch(10, 5).reason == "nothing"
    assert dispatcher.dispatch(10, 4).key == policy.few


def test_answers_by_requests_are_bounded(monkeypatch):
    """Servers run many request counts, and memory must not grow with them."""
    monkeypatch.setattr(table_module, "MAX_COLD_CELLS", 10)
    dispatcher = make(TwoWidthsPolicy(), config=DispatchConfig(sizes=(16,)))
    for num_tokens in range(5, 17):
        for num_reqs in range(5, num_tokens + 1):
            assert dispatcher.dispatch(num_tokens, num_reqs).key == dispatcher.policy.any
    kept = dispatcher._epoch.table.by_reqs
    assert sum(map(len, kept.values())) <= 10


# -- where eager is not allowed ----------------------------------------------------------


def test_no_graph_and_no_eager_is_an_error_that_names_what_is_near():
    """A rank that agreed on FULL must not run anything else."""
    dispatcher = make(captured=False)
    with pytest.raises(NoGraphError) as caught:
        dispatcher.dispatch(10, 10, 1, 0, 5)
    assert caught.value.reason == "not_captured"
    assert caught.value.nearest == (
        "FULL tokens=16 reqs=16 uniform=1",
        "PIECEWISE tokens=16",
    )
    assert "the batch allows only FULL, PIECEWISE" in str(caught.value)


def test_refused_step_is_served_once_the_graph_is_there():
    dispatcher = make(captured=False)
    for _ in range(2):
        with pytest.raises(NoGraphError):
            dispatcher.dispatch(10, 0, 0, 0, 3)
    dispatcher.registry.captured(mixed(16), object())
    assert dispatcher.dispatch(10, 0, 0, 0, 3).key == mixed(16)
    dispatcher.registry.failed(mixed(16), "error")
    with pytest.raises(NoGraphError):
        dispatcher.dispatch(10, 0, 0, 0, 3)


def test_eager_cannot_be_learnt_where_it_is_not_allowed():
    dispatcher = make()
    batch = Batch(10, allowed=3)
    for one_shot in (False, True):
        with pytest.raises(PolicyError, match="chose eager, but this batch allows only PIECEWISE"):
            dispatcher.update(CellUpdate(batch, Decision.eager("slow"), one_shot))
    assert dispatcher.dispatch(10, 0, 0, 0, 3).key == mixed(16)


def test_one_shot_on_a_cell_without_a_graph_leaves_no_eager_behind():
    """The steady answer of the cell is an error, which must not be replaced by eager."""
    dispatcher = make(captured=False)
    dispatcher.registry.captured(mixed(32), object())
    with pytest.raises(NoGraphError):
        dispatcher.dispatch(10, 0, 0, 0, 4)
    policy_says = dispatcher.dispatch(10, 0, 0, 0, 3)
    assert policy_says.key == mixed(32)
    dispatcher.update(CellUpdate(Batch(10, allowed=3), Decision.replay(mixed(32)), one_shot=True))
    dispatcher.registry.evicted(mixed(32))
    for _ in range(3):
        with pytest.raises(NoGraphError):
            dispatcher.dispatch(10, 0, 0, 0, 3)


def test_empty_batch_where_eager_is_not_allowed_is_refused():
    with pytest.raises(NoGraphError) as caught:
        make().dispatch(0, 0, 0, 0, 4)
    assert caught.value.reason == "empty_batch"


# -- ready graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda registry, key: registry.failed(key, "error"), "capture_failed"),
        (lambda registry, key: registry.evicted(key), "evicted"),
        (lambda registry, key: registry.stale(key, "moved"), "stale"),
        (lambda registry, key: registry.set_enabled(False, key=key), "disabled"),
        (lambda registry, key: registry.set_enabled(False, mode=key.mode), "disabled"),
        (lambda registry, key: registry.forget(key), "no_key"),
    ],
)
def test_lost_graph_empties_its_cells_and_gives_the_reason(change, reason):
    dispatcher = make(sizes=(8,))
    assert dispatcher.dispatch(5).key == mixed(8)
    change(dispatcher.registry, mixed(8))
    decision = dispatcher.dispatch(5)
    assert (decision.key, decision.reason) == (None, reason)


def test_lost_graph_makes_room_for_the_next_larger():
    dispatcher = make()
    before = dispatcher.dispatch(5)
    dispatcher.registry.evicted(mixed(8))
    after = dispatcher.dispatch(5)
    assert after.key == mixed(16)
    assert after.revision > before.revision
    dispatcher.registry.captured(mixed(8), object())
    assert dispatcher.dispatch(5).key == mixed(8)
    assert dispatcher.dispatch(5).revision > after.revision


def test_only_cells_that_the_key_could_serve_are_emptied():
    dispatcher = make()
    large, full = dispatcher.dispatch(20), dispatcher.dispatch(5, 5, 1)
    small = dispatcher.dispatch(5)
    ceiling = dispatcher.dispatch(5, 0, 0, 0, 1)
    dispatcher.registry.evicted(mixed(8))
    assert dispatcher.dispatch(20) is large, "larger than the key"
    dispatcher.registry.evicted(decode(8))
    assert dispatcher.dispatch(5, 0, 0, 0, 1) is not ceiling
    assert dispatcher.dispatch(5, 5, 1) is not full
    assert dispatcher.dispatch(5) is not small


def test_change_of_a_full_graph_leaves_cells_that_may_not_use_it():
    dispatcher = make()
    ceiling = dispatcher.dispatch(5, 5, 1, 0, PIECEWISE)
    dispatcher.registry.evicted(decode(8))
    assert dispatcher.dispatch(5, 5, 1, 0, PIECEWISE) is ceiling


def test_declared_graphs_run_only_where_capture_is_lazy():
    eager = make(captured=False).dispatch(8)
    assert (eager.key, eager.reason) == (None, "not_captured")
    assert make(captured=False, lazy=True).dispatch(8).key == mixed(8)


def test_lazy_capture_does_not_try_a_failed_key_again():
    dispatcher = make(captured=False, lazy=True)
    dispatcher.registry.failed(mixed(8), "host_sync")
    assert dispatcher.dispatch(8).key == mixed(16)
    dispatcher.registry.captured(mixed(16), object())
    dispatcher.registry.evicted(mixed(16))
    assert dispatcher.dispatch(8).key == mixed(16), "an evicted one is captured anew"


def test_switching_lazy_capture_decides_anew():
    dispatcher = make(captured=False)
    assert dispatcher.dispatch(8).reason == "not_captured"
    dispatcher.set_lazy(True)
    assert dispatcher.dispatch(8).key == mixed(8)
    dispatcher.set_lazy(False)
    assert dispatcher.dispatch(8).reason == "not_captured"


def test_mode_the_executor_cannot_do_is_named():
    dispatcher = make(modes=[FULL])
    decision = dispatcher.dispatch(8)
    assert (decision.key, decision.reason) == (None, "piecewise_unsupported")
    assert dispatcher.dispatch(8, 8, 1).key == decode(8)


# -- faults of policies ---------------------------------------------------------------------


class Faulty(AskedPolicy):
    """Behaves correctly until an answer is set, so that probes detect no fault."""

    name = "faulty"

    def __init__(self, answer=None):
        super().__init__()
        self.bad = False
        self.answer = answer

    def decide(self, batch, graphs):
        if not self.bad:
            return super().decide(batch, graphs)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


FAULTS = [
    (Decision.replay(mixed(4)), "not in the registry"),
    (Decision.replay(mixed(8)), "for 10 tokens; a graph must be at least as large"),
    (Decision.replay(decode(16)), "which cannot serve"),
    (Decision(FULL, None, "x"), "chose mode FULL without a key"),
    (Decision(FULL, mixed(16), "x"), "chose mode FULL with a key of mode PIECEWISE"),
    ((PIECEWISE, mixed(16)), "return a Decision or None"),
    (mixed(16), r"Return a Decision: Decision.replay\(key\)"),
    (True, "return a Decision or None"),
    (ZeroDivisionError("by zero"), r"raised ZeroDivisionError on a batch \(.*mixed; allowed: "),
    (ZeroDivisionError("by zero"), r": by zero \(test_dispatcher\.py:\d+\)\."),
]


@pytest.mark.parametrize(("answer", "said"), FAULTS)
def test_late_fault_runs_eager_is_counted_and_warned_of_once(answer, said):
    dispatcher = make(Faulty(answer), origin="dispatchkit-faulty 1.0")
    dispatcher.policy.bad = True
    with pytest.warns(RuntimeWarning, match=said) as told:
        decision = dispatcher.dispatch(10)
    assert len(told) == 1
    assert "'faulty' (dispatchkit-faulty 1.0): decide" in str(told[0].message)
    assert (decision.key, decision.reason) == (None, "policy_error")
    assert dispatcher.num_policy_errors == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatcher.dispatch(10) is decision
        dispatcher.dispatch(11)
    assert dispatcher.num_policy_errors == 2


@pytest.mark.parametrize(("answer", "said"), FAULTS)
def test_late_fault_raises_in_strict_mode(answer, said):
    dispatcher = make(Faulty(answer), strict=True)
    dispatcher.policy.bad = True
    with pytest.raises(PolicyError, match=said) as caught:
        dispatcher.dispatch(10)
    error = caught.value
    assert (error.policy, error.hook) == ("faulty", "decide")
    if isinstance(answer, Exception):
        assert error.__cause__ is answer
    else:
        assert error.value == answer
    dispatcher.policy.bad = False
    assert dispatcher.dispatch(10).key == mixed(16), "a raised step fills no cell"


@pytest.mark.parametrize(
    ("answer", "said"), [pair for pair in FAULTS if "10 tokens" not in pair[1]]
)
def test_fault_is_found_when_built_and_when_swapped(answer, said):
    bad = Faulty(answer)
    bad.bad = True
    said = said.replace("which cannot serve", "chose FULL tokens=16")
    with pytest.raises(PolicyError, match=said) as caught:
        make(bad, origin="dispatchkit-faulty 1.0")
    assert caught.value.origin == "dispatchkit-faulty 1.0"
    dispatcher = make()
    kept = dispatcher.dispatch(10)
    with pytest.raises(PolicyError, match=said):
        dispatcher.swap(bad)
    assert dispatcher.dispatch(10) is kept, "a refused policy changes nothing"
    assert (dispatcher.epoch, dispatcher.policy_name) == (0, "smallest")


def test_mode_that_is_not_allowed_is_a_fault():
    """Constraints outrank preferences."""
    dispatcher = make(Faulty(Decision.replay(mixed(16))))
    dispatcher.policy.bad = True
    with pytest.warns(RuntimeWarning, match="but this batch allows only NONE"):
        assert dispatcher.dispatch(10, 0, 0, 0, 0).reason == "policy_error"


def test_graph_that_cannot_run_is_a_fault():
    dispatcher = make(Faulty(Decision.replay(mixed(16))))
    dispatcher.policy.bad = True
    dispatcher.registry.evicted(mixed(16))
    with pytest.warns(RuntimeWarning, match="which cannot run now: evicted"):
        assert dispatcher.dispatch(10).reason == "policy_error"


def test_not_mine_is_eager_with_a_reason():
    dispatcher = make(Faulty(None))
    dispatcher.policy.bad = True
    assert dispatcher.dispatch(10).reason == "no_policy_answered"
    assert dispatcher.num_policy_errors == 0


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda config: [8], "contains 8, which is not a GraphKey; return a list of GraphKeys"),
        (lambda config: [None], "contains None, which is not a GraphKey; return a list of"),
        (lambda config: 1 / 0, "declare raised ZeroDivisionError"),
    ],
)
def test_bad_declaration_is_refused(declare, said):
    policy = AskedPolicy()
    policy.declare = declare
    with pytest.raises(PolicyError, match=said) as caught:
        make(policy)
    assert caught.value.hook == "declare"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"policy": 3},
            r"policy must be an object with the methods declare\(config\) and .* got 3",
        ),
        ({"policy": "vllm"}, r"pass load_plugins\(\)\.create_policy\('vllm'\)"),
        ({"config": None}, r"config must be a DispatchConfig, got None. Write DispatchConfig\("),
        ({"config": {"sizes": [8]}}, "config must be a DispatchConfig, got {'sizes'"),
        (
            {"modes": 3},
            r"modes must be a list .* got 3. Put a single mode in a list, for ex.* \[Runtime",
        ),
        ({"modes": "FULL"}, "modes must be a list of runtime modes, got 'FULL'"),
        ({"modes": ["FUL"]}, "modes must be one of: FULL, NONE, PIECEWISE, got 'FUL'. Did you"),
        ({"registry": 3}, "registry must be a GraphRegistry, or None for a new one, got 3"),
        ({"lazy": "no"}, "lazy must be True or False"),
        ({"strict": 0}, "strict must be True or False"),
        ({"may_split": None}, "may_split must be True or False"),
        ({"bind": 3}, "bind must be a function, or None, got 3"),
        ({"on_swap": "x"}, "on_swap must be a function"),
        ({"on_fault": []}, "on_fault must be a function"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    right = {"policy": SmallestPolicy(), "config": DispatchConfig(sizes=(8,))}
    with pytest.raises(ConfigError, match=message):
        Dispatcher(**{**right, **arguments})


def test_modes_may_be_names():
    dispatcher = Dispatcher(SmallestPolicy(), DispatchConfig(sizes=(8,)), modes=["full"], lazy=True)
    assert dispatcher.modes == {RuntimeMode.FULL}
    assert dispatcher.dispatch(3, ceiling=1).key is None


def test_only_a_dispatcher_is_explained():
    with pytest.raises(ConfigError, match=r"a Dispatcher, got 3. For a GraphRunner, call runner"):
        explain(3, 3)


def test_only_more_tokens_than_the_limit_suggest_a_higher_limit():
    dispatcher = make(max_num_tokens=32)
    with pytest.raises(DescriptorError, match=r"got 33\. Raise max_num_tokens"):
        dispatcher.dispatch(33)
    with pytest.raises(DescriptorError, match=r"got 1\. Raise max_loras"):
        dispatcher.dispatch(3, loras=1)
    for bad in (-1, 3.5, "3"):
        with pytest.raises(DescriptorError) as caught:
            dispatcher.dispatch(bad)
        assert "Raise" not in str(caught.value)


@pytest.mark.parametrize("method", ["declare", "decide"])
def test_policy_without_a_method_is_refused(method):
    policy = AskedPolicy()
    for value, problem in ((None, "is missing"), ("text", "is 'text', not a method")):
        setattr(policy, method, value)
        with pytest.raises(
            PolicyError, match=rf"{method} {problem}; a policy needs declare\(config\)"
        ):
            make(policy)


def test_refused_policy_declares_nothing():
    registry = GraphRegistry()
    bad = Faulty(True)
    bad.bad = True
    with pytest.raises(PolicyError):
        make(bad, registry=registry)
    assert len(registry) == 0


# -- learning ----------------------------------------------------------------------------


def test_steady_change_stays_until_something_could_matter():
    dispatcher = make()
    before = dispatcher.dispatch(5)
    dispatcher.update(CellUpdate(Batch(5), Decision.replay(mixed(32), "faster")))
    after = dispatcher.dispatch(5, 3)
    assert (after.key, after.reason, after.padding) == (mixed(32), "faster", 27)
    assert after.revision > before.revision
    assert dispatcher.dispatch(5) is after
    dispatcher.registry.evicted(mixed(8))
    assert dispatcher.dispatch(5).key == mixed(16)


def test_one_shot_is_served_once_and_the_steady_one_is_back():
    dispatcher = make()
    steady = dispatcher.dispatch(5)
    probe = Decision.replay(mixed(32), "probe", timed=True)
    dispatcher.update(CellUpdate(Batch(5), probe, one_shot=True))
    shot = dispatcher.dispatch(5, 2)
    assert (shot.key, shot.reason, shot.timed, shot.one_shot) == (mixed(32), "probe", True, True)
    assert [dispatcher.dispatch(5) for _ in range(3)] == [steady] * 3
    assert not steady.one_shot


def test_steady_one_is_back_before_the_step_runs():
    """A failing step or another thread must not run the probe again."""
    dispatcher = make()
    steady = dispatcher.dispatch(5)
    dispatcher.update(CellUpdate(Batch(5), Decision.eager("probe"), one_shot=True))
    dispatcher.dispatch(5)
    assert dispatcher._rows[2][0][0][5] is steady


def test_one_shots_wait_in_order():
    dispatcher = make()
    for number in range(3):
        dispatcher.update(CellUpdate(Batch(5), Decision.eager(f"probe {number}"), one_shot=True))
    reasons = [dispatcher.dispatch(5).reason for _ in range(4)]
    assert reasons == ["probe 0", "probe 1", "probe 2", "hit"]


def test_steady_change_leaves_a_waiting_probe():
    dispatcher = make()
    dispatcher.update(CellUpdate(Batch(5), Decision.eager("probe"), one_shot=True))
    dispatcher.update(CellUpdate(Batch(5), Decision.eager("steady")))
    assert [dispatcher.dispatch(5).reason for _ in range(3)] == ["probe", "steady", "steady"]


def test_probe_waits_for_a_batch_it_holds_for():
    """With too many requests for the probe's graph, the step is served and the probe remains."""
    dispatcher = make(TwoWidthsPolicy())
    policy = dispatcher.policy
    dispatcher.update(CellUpdate(Batch(10), Decision.eager("steady")))
    dispatcher.update(CellUpdate(Batch(10), Decision.replay(policy.few, "probe"), one_shot=True))
    assert dispatcher.dispatch(10, 5).reason == "steady"
    assert dispatcher.dispatch(10, 5).reason == "steady"
    assert dispatcher.dispatch(10, 4).reason == "probe"
    assert dispatcher.dispatch(10, 4).reason == "steady"


def test_probe_of_a_lost_graph_is_dropped():
    dispatcher = make()
    dispatcher.update(CellUpdate(Batch(5), Decision.replay(mixed(32)), one_shot=True))
    dispatcher.registry.failed(mixed(32), "error")
    assert dispatcher.dispatch(5).key == mixed(8)


def test_ask_again_asks_again():
    dispatcher = make()
    dispatcher.update(CellUpdate(Batch(5), Decision.eager("learnt")))
    assert dispatcher.dispatch(5).reason == "learnt"
    dispatcher.update(CellUpdate(Batch(5), None))
    assert dispatcher.dispatch(5).key == mixed(8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((3, None), "batch must be a Batch, got 3. Pass the batch of the outcome"),
        ((Batch(3), 8), "decision must be a Decision, or None, got 8. Create one with Decision"),
    ],
)
def test_an_update_is_of_a_batch_and_a_decision(values, message):
    with pytest.raises(DescriptorError, match=message):
        CellUpdate(*values)


def test_one_shots_that_wait_can_be_dropped():
    dispatcher = make()
    steady = dispatcher.dispatch(5)
    for _ in range(2):
        dispatcher.update(CellUpdate(Batch(5), Decision.eager("probe"), one_shot=True))
    dispatcher.update(CellUpdate(Batch(5), None, one_shot=True))
    assert dispatcher.dispatch(5) is steady
    dispatcher.update(CellUpdate(Batch(5), None, one_shot=True))  # none waits
    assert dispatcher.dispatch(5) is steady


def test_ask_again_may_name_a_range_of_sizes():
    """The range belongs to one kind of batch; a waiting one-shot decision is still served."""
    dispatcher = make(query_lens=(1, 2))
    for size in range(1, 12):
        for uniform in (0, 1):
            learnt = CellUpdate(dispatcher.batch(size, 0, uniform), Decision.eager("learnt"))
            dispatcher.update(learnt)
    dispatcher.update(CellUpdate(Batch(7), Decision.eager("probe"), one_shot=True))
    asked = CellUpdate(Batch(5), None, up_to=9)
    dispatcher.update(asked)
    assert dispatcher.dispatch(7).reason == "probe"
    again = [size for size in range(1, 12) if dispatcher.dispatch(size).reason != "learnt"]
    assert again == [5, 6, 7, 8, 9] == [n for n in range(1, 12) if asked.is_about(Batch(n))]
    assert all(dispatcher.dispatch(size, size, 1).reason == "learnt" for size in range(1, 12))
    dispatcher.update(CellUpdate(Batch(11), None, up_to=10**9))


@pytest.mark.parametrize(
    ("decision", "up_to", "message"),
    [
        (None, -1, r"a non-negative whole number, got -1\.$"),
        (None, 2.0, r"a non-negative whole number, got 2\.0\.$"),
        (Decision.eager("x"), 9, r"0 if a decision is given, got 9\. To set the decision"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(decision, up_to, message):
    with pytest.raises(DescriptorError, match=message):
        CellUpdate(Batch(5), decision, up_to=up_to)


def test_a_range_of_one_shot_decisions_is_refused():
    with pytest.raises(DescriptorError, match=r"0 if one_shot=True, got 9\. To drop"):
        CellUpdate(Batch(5), None, one_shot=True, up_to=9)


def test_change_for_one_cell_changes_no_other():
    dispatcher = make(query_lens=(1, 2), max_loras=1)
    cells = [
        (5, 0, uniform, loras, allowed)
        for uniform in range(3)
        for loras in range(2)
        for allowed in (0, 1, 2)
    ]
    before = {cell: dispatcher.dispatch(*cell) for cell in cells}
    batch = dispatcher.batch(5, 0, 2, 1, 1)
    dispatcher.update(CellUpdate(batch, Decision.eager("learnt")))
    for cell in cells:
        changed = dispatcher.dispatch(*cell) is not before[cell]
        assert changed is (cell == (5, 0, 2, 1, 1))


def test_mixed_batch_with_a_known_longest_request_is_a_mixed_cell():
    """Without varying decode it has no separate class, and must not use the last uniform class."""
    dispatcher = make()
    dispatcher.update(CellUpdate(Batch(5, max_query_len=1), Decision.eager("learnt")))
    assert dispatcher.dispatch(5).reason == "learnt"
    assert dispatcher.dispatch(5, 5, 1).key == decode(8)


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        (Batch(33), "num_tokens"),
        (Batch(0), "num_tokens"),
        (Batch(5, num_reqs=6), "num_reqs"),
        (Batch(5, num_active_loras=1), "loras"),
        (Batch(4, uniform=True, query_len=2), "query_len"),
        (Batch(4, uniform=True), "query_len"),
    ],
)
def test_change_for_an_impossible_batch_is_refused_by_name(batch, field):
    with pytest.raises(DescriptorError) as caught:
        make().update(CellUpdate(batch, Decision.eager("learnt")))
    assert caught.value.field == field


def test_change_to_a_graph_lost_since_is_no_fault():
    """The policy learns from a step before the eviction, of which it is not notified."""
    dispatcher = make(strict=True)
    dispatcher.update(CellUpdate(Batch(5), Decision.eager("old")))
    dispatcher.registry.evicted(mixed(32))
    dispatcher.update(CellUpdate(Batch(5), Decision.replay(mixed(32))))
    dispatcher.update(CellUpdate(Batch(5), Decision.replay(mixed(32)), one_shot=True))
    assert dispatcher.dispatch(5).key == mixed(8)
    assert dispatcher.num_policy_errors == 0


class Learner(AskedPolicy):
    """Returns the given changes and records outcomes."""

    name = "learner"

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)
        self.told = []

    def observe(self, outcome):
        self.told.append(outcome)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def outcome_of(dispatcher, num_tokens=5):
    decision = dispatcher.dispatch(num_tokens)
    return Outcome(dispatcher.batch(num_tokens), decision, elapsed_us=10.0)


def test_observed_outcome_reaches_policy_and_table():
    update = CellUpdate(Batch(5), Decision.eager("faster_eager"))
    dispatcher = make(Learner([update], None, ()))
    for _ in range(3):
        outcome = outcome_of(dispatcher)
        dispatcher.observe(outcome)
        assert dispatcher.policy.told[-1] is outcome
        assert dispatcher.dispatch(5).reason == "faster_eager"


def test_policy_that_does_not_learn_is_not_told():
    dispatcher = make()
    dispatcher.observe(outcome_of(dispatcher))
    assert dispatcher.num_policy_errors == 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RuntimeError("no sample"), "RuntimeError: no sample"),
        ([CellUpdate(Batch(5), Decision.replay(mixed(4)))], "not in the registry"),
        ([CellUpdate(Batch(10), Decision.replay(mixed(8)))], "a graph must be at least as large"),
        ([Decision.eager("x")], "return only CellUpdates"),
        (7, "TypeError"),
        ([CellUpdate(Batch(99), Decision.eager("x"))], "DescriptorError"),
    ],
)
def test_faulty_observe_is_named_counted_and_does_not_stop_the_step(answer, said):
    dispatcher = make(Learner(answer, answer), origin="dispatchkit-learner 2")
    outcome = outcome_of(dispatcher)
    with pytest.warns(RuntimeWarning, match=said) as told:
        dispatcher.observe(outcome)
    text = str(told[0].message)
    assert text.startswith("Policy 'learner' (dispatchkit-learner 2): observe ")
    assert text.count("learner 2") == 1
    dispatcher.observe(outcome)
    assert (len(told), dispatcher.num_policy_errors) == (1, 2)
    assert dispatcher.dispatch(5) is outcome.decision


def test_faulty_observe_raises_in_strict_mode():
    dispatcher = make(Learner(RuntimeError("no sample")), strict=True)
    with pytest.raises(PolicyError, match="no sample"):
        dispatcher.observe(outcome_of(dispatcher))


def test_changes_before_a_faulty_one_stay():
    good = CellUpdate(Batch(5), Decision.eager("learnt"))
    bad = CellUpdate(Batch(6), Decision.replay(mixed(4)))
    dispatcher = make(Learner([good, bad]))
    with pytest.warns(RuntimeWarning, match="not in the registry"):
        dispatcher.observe(outcome_of(dispatcher))
    assert dispatcher.dispatch(5).reason == "learnt"
    assert dispatcher.dispatch(6).key == mixed(8)


# -- swaps -------------------------------------------------------------------------------


def test_swap_installs_an_empty_table_and_grows_the_epoch():
    dispatcher = make()
    old = dispatcher.dispatch(5)
    dispatcher.update(CellUpdate(Batch(6), Decision.eager("learnt")))
    assert dispatcher.swap(AskedPolicy()) == 1
    assert dispatcher.num_filled_cells == 0
    new = dispatcher.dispatch(5)
    assert new.key == old.key
    assert new.revision > old.revision
    assert dispatcher.dispatch(6).reason == "hit"
    assert dispatcher.swap(origin="ignored") == 2
    assert dispatcher.epoch == 2


def test_swap_to_another_policy_takes_name_and_origin():
    dispatcher = make(origin="first 1.0")
    dispatcher.swap(Faulty(), origin="second 2.0")
    assert (dispatcher.policy_name, dispatcher.policy_origin) == ("faulty", "second 2.0")
    dispatcher.swap(config=DispatchConfig(sizes=(4,)))
    assert (dispatcher.policy_name, dispatcher.policy_origin) == ("faulty", "second 2.0")


def test_swap_of_the_configuration_takes_its_limits():
    dispatcher = make()
    dispatcher.swap(config=DispatchConfig(sizes=(64,), max_num_tokens=64))
    assert dispatcher.dispatch(64).reason == "not_captured"
    dispatcher.registry.captured(mixed(64), object())
    assert dispatcher.dispatch(64).key == mixed(64)
    dispatcher.swap(config=DispatchConfig(sizes=(4,), max_num_tokens=4))
    with pytest.raises(DescriptorError, match="from 0 to 4"):
        dispatcher.dispatch(5)
    dispatcher.swap(config=DispatchConfig(sizes=(4,)))
    assert dispatcher.dispatch(5).reason == "above_largest_size"


@pytest.mark.parametrize("number", [int, "int64"])
def test_where_no_limit_is_stated_a_larger_batch_runs_eager(number):
    """Numbers may have any type; impossible facts are still refused."""
    number = number if number is int else getattr(pytest.importorskip("numpy"), number)
    bound = []
    dispatcher = make(
        config=DispatchConfig(sizes=(8, 16), max_loras=1),
        bind=lambda decision, batch: bound.append((decision, batch)) or len(bound),
    )
    del bound[:]
    decision = dispatcher.dispatch(number(17), number(17), 0, 1)
    assert (decision.key, decision.reason) == (None, "above_largest_size")
    assert decision is dispatcher.dispatch(17, 17, 0, 1)
    ((_, batch),) = bound
    assert (batch.num_tokens, batch.num_reqs, batch.num_active_loras) == (17, 17, 1)
    assert dispatcher.dispatch(10**6).reason == "above_largest_size"
    for facts in ((17, 18), (17, -1), (17, 0, 2), (17, 0, 0, 2), (17, 0, 0, 0, 9), (17, 1.0)):
        with pytest.raises(DescriptorError):
            dispatcher.dispatch(*facts)
    with pytest.raises(NoGraphError):
        dispatcher.dispatch(17, ceiling=allowed_modes_code({RuntimeMode.FULL}))
    limited = make(config=DispatchConfig(sizes=(8,), max_num_seqs=4))
    with pytest.raises(DescriptorError, match="max_num_seqs"):
        limited.dispatch(9, 9)


def test_swap_keeps_graphs_that_both_policies_know():
    dispatcher = make()
    graph = dispatcher.registry.get(mixed(8)).graph
    dispatcher.swap(AskedPolicy())
    assert dispatcher.registry.get(mixed(8)).graph is graph


def test_closed_dispatcher_no_longer_listens():
    dispatcher = make()
    before = dispatcher.dispatch(5)
    dispatcher.close()
    dispatcher.registry.evicted(mixed(8))
    assert dispatcher.dispatch(5) is before


def test_dispatchers_sharing_a_registry_follow_the_same_changes():
    """Each lane has its own table; all share the registry."""
    registry = GraphRegistry()
    first, second = make(registry=registry), make(registry=registry)
    assert first.dispatch(5).key == second.dispatch(5).key == mixed(8)
    registry.evicted(mixed(8))
    assert first.dispatch(5).key == second.dispatch(5).key == mixed(16)


# -- large tables ------------------------------------------------------------------------


@pytest.fixture
def huge():
    """Return a dispatcher with more than a million cells, whose rows are dicts."""
    dispatcher = make(
        config=DispatchConfig(sizes=(8, 16, 60_000), max_num_tokens=60_000, max_loras=4)
    )
    assert isinstance(dispatcher.dispatch(1), Decision)
    assert isinstance(dispatcher._rows[2][0][0], dict)
    return dispatcher


def test_huge_table_answers_as_a_list_does(huge):
    assert huge.dispatch(59_999).key == mixed(60_000)
    assert huge.dispatch(5, 5, 1, 3).key == decode(8, num_active_loras=4)
    first = huge.dispatch(9)
    assert huge.dispatch(9) is first
    huge.registry.evicted(mixed(16))
    assert huge.dispatch(9).key == mixed(16, num_active_loras=4)
    assert huge.dispatch(59_999).key == mixed(60_000)


@pytest.mark.parametrize("value", [-1, -60_001, 60_001, 8.0, 0.5, None, "8"])
def test_huge_table_refuses_what_a_list_does(huge, value):
    """A dict finds 8.0 at key 8 and has no bounds."""
    huge.dispatch(8)
    with pytest.raises(DescriptorError, match="num_tokens"):
        huge.dispatch(value)


def test_huge_table_has_one_shots_and_changes_too(huge):
    steady = huge.dispatch(7)
    huge.update(CellUpdate(Batch(7), Decision.eager("probe"), one_shot=True))
    assert huge.dispatch(7).reason == "probe"
    assert huge.dispatch(7) is steady
    kept = huge.dispatch(9)
    huge.update(CellUpdate(Batch(6), None, up_to=8))
    assert huge.dispatch(7) is not steady
    assert huge.dispatch(9) is kept
    huge.update(CellUpdate(Batch(2000), Decision.eager("probe"), one_shot=True))
    assert [huge.dispatch(2000).reason for _ in range(2)] == ["probe", "hit"]


def test_huge_table_is_bounded(huge, monkeypatch):
    """New sizes do not fill memory; a dropped cell is decided again."""
    monkeypatch.setattr(table_module, "MAX_COLD_CELLS", 50)
    for num_tokens in range(1, 301):
        assert huge.dispatch(num_tokens).padded_num_tokens >= num_tokens
    assert len(huge._rows[2][0][0]) <= 50
    assert huge.num_filled_cells <= 50
    assert huge.dispatch(3).key == mixed(8)


@pytest.mark.slow
def test_hundred_thousand_keys():
    """Keys for every size and number of adapters; each batch gets its own key."""

    class Many:
        name = "many"

        def declare(self, config):
            return [
                mixed(size, num_active_loras=loras)
                for size in config.sizes
                for loras in range(config.max_loras + 1)
            ]

        def decide(self, batch, graphs):
            key = mixed(batch.num_tokens, num_active_loras=batch.num_active_loras)
            if batch.allows(PIECEWISE) and graphs.is_ready(key):
                return Decision.replay(key)
            return Decision.eager("not_ready")

    config = DispatchConfig(sizes=range(1, 10_001), max_loras=9)
    dispatcher = Dispatcher(Many(), config, lazy=True)
    assert len(dispatcher.registry) == 100_000
    for num_tokens, loras in ((1, 0), (10_000, 9), (5_000, 4)):
        assert dispatcher.dispatch(num_tokens, 0, 0, loras).key == mixed(
            num_tokens, num_active_loras=loras
        )
    dispatcher.registry.set_enabled(False, mode=PIECEWISE)
    assert dispatcher.dispatch(5_000, 0, 0, 4).reason == "not_ready"


# -- threads -----------------------------------------------------------------------------


def run_all(*targets):
    """Run functions in threads; raise the first exception."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[target], daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


def test_threads_dispatch_while_keys_change():
    """Each answer covers its batch, and the final state equals that of a fresh dispatcher."""
    dispatcher = make()
    sizes = range(1, 33)

    def serve():
        for _ in range(60):
            for num_tokens in sizes:
                decision = dispatcher.dispatch(num_tokens, num_tokens, 1)
                assert decision.num_tokens == num_tokens
                assert decision.key is None or decision.key.num_tokens >= num_tokens

    def change():
        for _ in range(60):
            for key in (decode(8), mixed(16), decode(32)):
                dispatcher.registry.evicted(key)
                dispatcher.registry.captured(key, object())

    run_all(serve, serve, change)
    for num_tokens in sizes:
        expected = next(size for size in (8, 16, 32) if size >= num_tokens)
        assert dispatcher.dispatch(num_tokens, num_tokens, 1).key == decode(expected)


def test_each_probe_is_served_to_one_thread():
    dispatcher = make()
    number = 300
    for index in range(number):
        dispatcher.update(CellUpdate(Batch(5), Decision.eager(f"probe {index}"), one_shot=True))
    served = []
    run_all(*[lambda: served.extend(dispatcher.dispatch(5).reason for _ in range(200))] * 3)
    probes = [reason for reason in served if reason.startswith("probe")]
    assert len(probes) == len(set(probes)) == number
    assert len(served) == 600


def test_swap_while_another_thread_captures_does_not_deadlock():
    """A swap declares keys while a capture notifies the table, a risk of crossed locks."""
    dispatcher = make()
    swapping = threading.Event()

    class Slow(AskedPolicy):
        def declare(self, config):
            swapping.set()
            return super().declare(config)

    def swap():
        for _ in range(50):
            dispatcher.swap(Slow())

    def capture():
        swapping.wait(timeout=30)
        for _ in range(500):
            dispatcher.registry.evicted(mixed(8))
            dispatcher.registry.captured(mixed(8), object())

    run_all(swap, capture)
    assert dispatcher.epoch == 50


def test_threads_dispatch_while_the_configuration_shrinks_and_grows():
    """Limits and table belong to one epoch: an answer or a typed error, never an IndexError."""
    dispatcher = make()
    small, large = DispatchConfig(sizes=(8,)), dispatcher.config

    def swap():
        for _ in range(30):
            dispatcher.swap(config=small)
            dispatcher.swap(config=large)

    refused = []

    def serve():
        for _ in range(1500):
            try:
                assert dispatcher.dispatch(30).num_tokens == 30
            except DescriptorError as error:
                refused.append(error.field)

    run_all(swap, serve, serve)
    assert set(refused) <= {"num_tokens"}


# -- explain -----------------------------------------------------------------------------


def test_explanation_names_choice_and_what_was_near():
    dispatcher = make(origin="here 1.0")
    dispatcher.registry.evicted(mixed(8))
    told = explain(dispatcher, 5, 3)
    assert told.decision.key == mixed(16)
    assert [(each.key, each.chosen, each.why_not, each.padding) for each in told.candidates] == [
        (mixed(8), False, "evicted", 3),
        (mixed(16), True, None, 11),
    ]
    text = str(told)
    assert text.startswith("5 tokens, 3 requests, mixed; allowed: NONE, PIECEWISE, FULL\n-> replay")
    assert "   policy smallest (here 1.0); padding 11 tokens" in text
    assert "PIECEWISE tokens=8: evicted (padding 3)" in text


def test_explanation_tells_an_empty_batch_from_the_smallest():
    dispatcher = make()
    assert explain(dispatcher, 0).decision.reason == Reason.EMPTY_BATCH
    assert explain(dispatcher, 1).decision.key == mixed(8)


def test_explanation_leaves_the_table_alone():
    dispatcher = make()
    explain(dispatcher, 5)
    assert dispatcher.num_filled_cells == 0
    with pytest.raises(DescriptorError):
        explain(dispatcher, -1)


@pytest.mark.parametrize("is_limited", [True, False])
@pytest.mark.parametrize("facts", [(33,), (33, 33), (1000, 2, 1), (33, 0, 0, 0, 1)])
def test_explanation_above_the_table_is_what_a_step_does(is_limited, facts):
    """Exceeding max_num_tokens is an error only if the user set it."""
    limit = {"max_num_tokens": 32} if is_limited else {}
    dispatcher = Dispatcher(SmallestPolicy(), DispatchConfig(sizes=(8, 32), **limit))
    told = explain(dispatcher, *facts)
    assert (told.decision.key, told.decision.reason) == (None, Reason.ABOVE_LARGEST)
    assert told.batch.num_tokens == facts[0]
    assert told.nearest == ""
    if is_limited:
        limit = "the batch is larger than max_num_tokens, which is 32 tokens"
        assert told.because == f"constraint: {limit}"
        with pytest.raises(DescriptorError) as caught:
            dispatcher.dispatch(*facts)
        assert told.error == told.to_json()["error"] == f"DescriptorError: {caught.value}"
        assert f"-> raises {told.error}" in str(told)
    else:
        assert told.because.endswith("large enough for the batch; the largest has 32 tokens")
        assert told.error == ""
        assert dispatcher.dispatch(*facts).reason == told.decision.reason


def test_a_decision_made_anew_has_the_tokens_of_its_batch():
    """Otherwise its padding would cover the whole bucket."""
    dispatcher = make()
    anew, served = dispatcher.decide(dispatcher.batch(5)), dispatcher.dispatch(5)
    assert (anew.key, anew.num_tokens, anew.padding) == (served.key, 5, 3)
    assert (anew.max_num_reqs, anew.policy) == (served.max_num_reqs, served.policy)
    assert dispatcher.decide(Batch(0)).reason == Reason.EMPTY_BATCH


def test_only_a_batch_within_the_limits_is_decided_anew():
    """Dispatch refuses it too."""
    dispatcher = Dispatcher(SmallestPolicy(), DispatchConfig(sizes=(8,), max_num_tokens=8))
    for impossible in (Batch(9), Batch(3, uniform=True, query_len=2), Batch(3, num_active_loras=1)):
        with pytest.raises(DescriptorError):
            dispatcher.decide(impossible)
    with pytest.raises(DescriptorError, match=r"batch must be a Batch, got 3. Dispatcher.batch"):
        dispatcher.decide(3)
    unlimited = Dispatcher(SmallestPolicy(), DispatchConfig(sizes=(8,)))
    assert unlimited.decide(Batch(9)).reason == Reason.ABOVE_LARGEST
    # vLLM's manager has batches with more requests than tokens; its facade decides them again.
    assert isinstance(dispatcher.decide(Batch(3, num_reqs=5)), Decision)


def test_an_error_above_the_table_names_the_size_of_the_batch():
    only_full = allowed_modes_code({RuntimeMode.FULL})
    dispatcher = Dispatcher(SmallestPolicy(), DispatchConfig(sizes=(1,)))
    with pytest.raises(NoGraphError, match=r"No graph for 3 tokens .* so that a graph covers"):
        dispatcher.dispatch(3, ceiling=only_full)
    with pytest.raises(NoGraphError, match=r"No graph for 1 token .* so that a graph covers"):
        dispatcher.dispatch(1, ceiling=only_full)
    with pytest.raises(
        NoGraphError,
        match=r"Nearest: FULL .* or capture or enable (this graph|one of these graphs)",
    ):
        dispatcher.dispatch(1, 1, uniform=True, ceiling=only_full)
    with pytest.raises(NoGraphError, match=r"only FULL\. Allow NONE for empty batches"):
        dispatcher.dispatch(0, ceiling=only_full)


def test_explanation_of_a_batch_above_all_graphs():
    with pytest.warns(UserWarning, match="33 to 64"):
        dispatcher = make(sizes=(32,), max_num_tokens=64)
    assert "no declared graph is large enough" in str(explain(dispatcher, 40))


def test_explanation_tells_a_kind_without_graphs_from_a_size_above_them():
    """ "Too large" would mislead the user to capture sizes that exist."""
    dispatcher = make()
    for key in [key for key in dispatcher.registry if not key.descriptor.uniform]:
        dispatcher.registry.forget(key)
    told = explain(dispatcher, 5)
    assert "no graph is declared for this kind of batch" in str(told)
    assert "large enough" not in str(told)


def test_a_class_in_place_of_a_policy_is_told_from_a_policy():
    with pytest.raises(PolicyError, match=r"'AskedPolicy'.*pass an instance, AskedPolicy"):
        Dispatcher(AskedPolicy, DispatchConfig(sizes=(8,)))


def test_explanation_says_what_is_not_allowed():
    told = explain(make(), 5, 5, True, 0, PIECEWISE)
    by_key = {each.key: each.why_not for each in told.candidates}
    assert by_key[decode(8)] == "mode not allowed for this batch"
    assert told.decision.key == mixed(8)
    assert "uniform decode (1 token per request)" in str(told)


def test_explanation_counts_no_fault_and_warns_of_none():
    """An explanation is not a step, and does not raise in any mode."""
    told_faults = []
    for strict in (False, True):
        policy = Faulty(ZeroDivisionError("by zero"))
        dispatcher = make(policy, strict=strict, on_fault=lambda *facts: told_faults.append(facts))
        policy.bad = True
        told = explain(dispatcher, 5)
        assert told.decision.reason == Reason.POLICY_ERROR
        assert "ZeroDivisionError" in told.because
        assert dispatcher.num_policy_errors == 0
    assert told_faults == []


@pytest.mark.parametrize("call", ["dispatch", "decide", "observe"])
def test_whoever_hears_of_a_fault_may_wait_for_another_thread(call):
    """No lock is held, so another thread may switch a key, which needs the registry's lock."""
    heard = []

    def on_fault(error, num_tokens, epoch):
        switch = dispatcher.registry.set_enabled
        facts = {"target": switch, "args": (False,), "kwargs": {"key": mixed(8)}, "daemon": True}
        other = threading.Thread(**facts)
        other.start()
        other.join(timeout=20)
        heard.append((error.hook, num_tokens, epoch, other.is_alive()))

    policy = Faulty(ZeroDivisionError("by zero"))
    policy.observe = lambda outcome: 1 / 0
    dispatcher = make(policy, on_fault=on_fault)
    policy.bad = True
    outcome = Outcome(dispatcher.batch(5), Decision.replay(mixed(8)), 1.0)
    given = {"dispatch": 5, "decide": dispatcher.batch(5), "observe": outcome}
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        getattr(dispatcher, call)(given[call])
    told = ("observe", None) if call == "observe" else ("decide", 5)
    assert heard == [(*told, 0, False)]


def test_what_came_of_an_earlier_policys_decision_is_nothing_to_this_one():
    """A step may be measured under one policy and reported after another has replaced it."""

    class Learning(AskedPolicy):
        def __init__(self):
            super().__init__()
            self.heard = []

        def observe(self, outcome):
            self.heard.append(outcome.elapsed_us)

    old, new = Learning(), Learning()
    dispatcher = make(old)
    before = dispatcher.dispatch(5)
    dispatcher.swap(new)
    dispatcher.observe(Outcome(dispatcher.batch(5), before, 1.0))
    dispatcher.observe(Outcome(dispatcher.batch(5), dispatcher.dispatch(5), 2.0))
    assert (old.heard, new.heard) == ([], [2.0])
    # A new table keeps the policy's history.
    before = dispatcher.dispatch(5)
    dispatcher.swap()
    dispatcher.observe(Outcome(dispatcher.batch(5), before, 3.0))
    assert new.heard == [2.0, 3.0]
    # Outcomes that were never in a table are accepted.
    dispatcher.observe(Outcome(dispatcher.batch(5), Decision.replay(mixed(8)), 4.0))
    assert new.heard == [2.0, 3.0, 4.0]


def test_explanation_is_what_the_next_step_gets():
    """It reports the table's answer instead of asking the policy, and consumes nothing."""
    dispatcher = make()
    batch = dispatcher.batch(5)
    dispatcher.update(CellUpdate(batch, Decision.replay(mixed(32), "learnt")))
    dispatcher.update(CellUpdate(batch, Decision.replay(mixed(16), "probe"), one_shot=True))
    for _ in range(2):
        told = explain(dispatcher, 5)
        assert (told.decision.key, told.decision.one_shot) == (mixed(16), True)
        assert "for one step only" in str(told)
    assert dispatcher.dispatch(5).key == mixed(16)
    assert explain(dispatcher, 5).decision.key == mixed(32) == dispatcher.dispatch(5).key


def test_explanation_asks_as_a_step_does_with_many_requests():
    """A step gets the answer for any number of requests while it holds for its number."""
    for num_reqs in (1, 2, 3, 8):
        dispatcher, other = make(TwoWidthsPolicy()), make(TwoWidthsPolicy())
        assert explain(dispatcher, 8, num_reqs).decision.key == other.dispatch(8, num_reqs).key
        other.dispatch(8, 1)
        assert explain(other, 8, num_reqs).decision.key == other.dispatch(8, num_reqs).key


def test_explanation_says_that_a_step_raises_where_eager_is_not_allowed():
    dispatcher = make(captured=False)
    only_full = ALLOWED_MODES.index(frozenset({FULL}))
    told = explain(dispatcher, 5, ceiling=only_full)
    assert "-> raises NoGraphError: eager is not allowed" in str(told)
    with pytest.raises(NoGraphError):
        dispatcher.dispatch(5, 0, 0, 0, only_full)


@pytest.mark.parametrize("value", [1.0, 2.5, float("inf"), float("nan"), "3", None, 1j, [1]])
def test_a_number_that_is_not_whole_is_refused_by_name(value):
    for name in ("num_tokens", "num_reqs", "loras"):
        with pytest.raises(DescriptorError) as caught:
            make(max_loras=2).dispatch(**{"num_tokens": 8, "num_reqs": 1, name: value})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("declared", "said"),
    [(None, "returned None; return a list of GraphKeys"), (3, "returned 3; return a list of")],
)
def test_what_is_declared_in_place_of_keys_is_named(declared, said):
    policy = AskedPolicy()
    policy.declare = lambda config: declared
    with pytest.raises(PolicyError, match=said):
        make(policy)


def test_key_above_the_largest_batch_is_refused():
    """Otherwise buffers would have rows that no batch uses."""
    policy = AskedPolicy()
    policy.declare = lambda config: [mixed(1_000_000)]
    with pytest.raises(PolicyError, match="but max_num_tokens is 32"):
        make(policy)


def test_update_that_is_none_is_the_policys_fault():
    policy = Learner()
    policy.observe = lambda outcome: [3]
    dispatcher = make(policy)
    with pytest.warns(
        RuntimeWarning, match=r"observe returned 3; return only CellUpdates\. Decisions"
    ):
        dispatcher.observe(Outcome(dispatcher.batch(8), dispatcher.dispatch(8)))


def test_a_replay_needs_a_key():
    with pytest.raises(DescriptorError, match=r"key must be a GraphKey, got 8\. graphs\.covering"):
        Decision.replay(8)


@pytest.mark.parametrize("reason", [None, "", 3])
def test_decision_needs_a_reason_to_be_counted_by(reason):
    with pytest.raises(DescriptorError, match="reason must be a non-empty string"):
        Decision.eager(reason)
    with pytest.raises(DescriptorError, match="reason must be a non-empty string"):
        Decision.replay(mixed(8), reason)
    policy = Faulty(Decision(NONE, None, ""))
    dispatcher = make(policy)
    policy.bad = True
    with pytest.warns(RuntimeWarning, match="without a reason"):
        assert dispatcher.dispatch(8).reason == Reason.POLICY_ERROR


def test_a_view_says_why_no_key_covers_a_batch():
    graphs = make().graphs
    assert graphs.why_no_key(Batch(33)) == "above_largest_size"
    assert graphs.why_no_key(Batch(5, num_active_loras=1)) == "no_key"
    assert graphs.why_no_key(Batch(5, allowed=int(NONE))) == "ceiling"
    config = DispatchConfig(sizes=(8, 32), mode="FULL_DECODE_ONLY")
    decode_only = Dispatcher(SmallestPolicy(), config).graphs
    assert decode_only.why_no_key(Batch(5)) == "mode_none"
    assert decode_only.why_no_key(Batch(33, uniform=True, query_len=1)) == "above_largest_size"


def test_a_view_tells_that_what_it_shows_has_changed():
    """A policy may therefore cache results derived from it."""
    dispatcher = make()
    seen = [dispatcher.graphs.revision]
    for change in (
        lambda: dispatcher.registry.evicted(mixed(8)),
        lambda: dispatcher.registry.set_enabled(False, mode=FULL),
        lambda: dispatcher.set_lazy(True),
        dispatcher.swap,
    ):
        assert dispatcher.graphs.revision == seen[-1]
        change()
        assert dispatcher.graphs.revision not in seen
        seen.append(dispatcher.graphs.revision)
