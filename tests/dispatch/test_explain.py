"""The lines of an explanation."""

from __future__ import annotations

import re

import attrs
import pytest

from dispatchkit.dispatch import Decision, Dispatcher, Explanation, Reason, StepCost, explain
from dispatchkit.dispatch.explain import Candidate, MeasuredTime
from dispatchkit.keys import (
    Batch,
    BatchDescriptor,
    CaptureSizeWarning,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
)
from dispatchkit.testing import OneBucketPolicy

KEY = GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(8))
LARGER = GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(16))
EAGER = Explanation(Batch(8), Decision.eager(Reason.NO_KEY), "mine", ())
COST = StepCost(model="m", step_us=1200.4, eager_us=3400, lost_us=0, measured=True)


def test_cost_says_what_is_lost_and_how_far_it_was_measured():
    assert str(COST) == "1,200 µs; eager 3,400 µs (cost model m)"
    beyond = attrs.evolve(COST, lost_us=12, measured=False)
    assert str(beyond) == (
        "1,200 µs; eager 3,400 µs; a graph of the exact size would save 12 µs "
        "(cost model m; extrapolated beyond its measurements)"
    )
    assert "   cost: 1,200 µs; eager 3,400 µs (cost model m)" in str(attrs.evolve(EAGER, cost=COST))


def test_measured_times_say_how_many_and_how_busy_the_stream_was():
    one = MeasuredTime(steps=1, median_us=1234.56, clock="device", queued=True)
    more = MeasuredTime(steps=2, median_us=3, clock="host", queued=False)
    assert str(one) == "1,234.6 µs, median of 1 step, behind other work (device time)"
    assert str(more) == "3.0 µs, median of 2 steps, on an idle stream (host time)"
    lines = str(attrs.evolve(EAGER, times=(one, more))).splitlines()
    assert f"   measured here: {one}; {more}" in lines
    timed = attrs.evolve(EAGER, times=(), decision=attrs.evolve(EAGER.decision, timed=True))
    assert "measured here: no step with this decision has been timed yet" in str(timed)
    assert "measured here" not in str(attrs.evolve(EAGER, times=()))
    assert "measured here" not in str(EAGER)


def test_a_mode_without_graphs_is_the_only_cause():
    none = Dispatcher(OneBucketPolicy(), DispatchConfig(mode="NONE", sizes=[8]))
    assert str(explain(none, 3)).count("graph") == 0
    with pytest.warns(CaptureSizeWarning, match="is empty"):
        empty = Dispatcher(OneBucketPolicy(), DispatchConfig(sizes=[], max_num_tokens=8))
    assert explain(empty, 3).because == "configuration: there are no capture sizes"


@pytest.mark.parametrize(("largest", "above"), [(7, True), (8, False), (9, False)])
def test_batch_without_a_graph_is_told_whether_size_or_kind_is_why(largest, above):
    """It appears once: in the decision's reason or, if that differs, after it."""
    told = attrs.evolve(EAGER, decision=Decision.eager("mine"), largest=largest)
    last = str(told).splitlines()[-1]
    if above:
        assert last == "   no declared graph is large enough for the batch"
    else:
        assert last == "   no graph is declared for this kind of batch"
    assert told.nearest == ""
    too_large = attrs.evolve(told, decision=Decision.eager(Reason.ABOVE_LARGEST))
    by_size = "constraint: no declared graph is large enough for the batch; the largest has 7"
    by_kind = "constraint: no graph for this kind of batch is large enough"
    assert too_large.because == (f"{by_size} tokens" if above else by_kind)
    of_kind = attrs.evolve(told, decision=Decision.eager(Reason.NO_KEY))
    for once in (too_large, of_kind):
        assert str(once).splitlines()[-1] == f"   because: {once.because}"


def test_nearest_is_the_graph_that_could_run_and_then_the_least_padding():
    evicted, ready = Candidate(KEY, False, "evicted", 0), Candidate(LARGER, False, None, 8)
    told = attrs.evolve(EAGER, candidates=(evicted, ready))
    assert told.nearest == f"{LARGER}: ready, not preferred"
    lines = str(told).splitlines()
    assert f"   nearest graph: {told.nearest}" in lines
    assert f"   {KEY}: evicted (padding 0)" in lines
    assert f"   {LARGER}: ready, not preferred (padding 8)" in lines
    assert not any("no graph" in line or "no declared" in line for line in lines[4:])
    both = attrs.evolve(evicted, key=LARGER, padding=8), evicted
    assert attrs.evolve(EAGER, candidates=both).nearest == f"{KEY}: evicted"


def test_replay_and_empty_batch_have_no_nearest():
    assert attrs.evolve(EAGER, decision=Decision.replay(KEY)).nearest == ""
    empty = Explanation(Batch(0), Decision.eager(Reason.EMPTY_BATCH), "mine", ())
    assert empty.nearest == ""
    assert "nearest" not in str(empty)


def test_facts_of_the_batch_come_first():
    batch = Batch(8, num_reqs=4, uniform=True, query_len=2, num_active_loras=1, axes=(64, None))
    axes = {"length": 64, "kind": None}
    first = str(attrs.evolve(EAGER, batch=batch, axes=axes)).splitlines()[0]
    assert first == (
        "8 tokens, 4 requests, uniform decode (2 tokens per request), 1 adapter, length in "
        "bucket 64, kind outside all buckets; allowed: NONE, PIECEWISE, FULL"
    )
    assert str(EAGER).splitlines()[0] == "8 tokens, mixed; allowed: NONE, PIECEWISE, FULL"


def test_one_of_a_kind_is_not_written_as_several():
    one = Batch(1, num_reqs=1, num_active_loras=1)
    text = str(attrs.evolve(EAGER, batch=one, decision=Decision.eager("no_key")))
    assert text.startswith("1 token, 1 request, mixed, 1 adapter;")
    assert not re.search(r"\b1 \w+s\b", text)


def test_what_is_behind_a_decision_is_a_fault_a_state_or_the_policy():
    assert attrs.evolve(EAGER, fault="it raised").because == "policy: it raised"
    assert EAGER.because == "configuration: no graph is declared for this kind of batch"
    assert attrs.evolve(EAGER, decision=Decision.replay(KEY)).because == "policy: chose this graph"
    own = attrs.evolve(EAGER, decision=Decision.eager("padding_limit"))
    assert own.because == "policy: chose eager, reason 'padding_limit'"


class Largest:
    name = "largest"

    def declare(self, config):
        return [GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(n)) for n in config.sizes]

    def decide(self, batch, graphs):
        for key in reversed([*graphs.covering(batch, RuntimeMode.PIECEWISE)]):
            return Decision.replay(key)
        return Decision.eager(Reason.NO_KEY)


def test_so_many_graphs_of_each_mode_are_shown_and_the_chosen_one_always():
    config = DispatchConfig(sizes=(8, 16, 24, 32))
    table = Dispatcher(Largest(), config, lazy=True)
    for per_mode in (1, 2, 3):
        shown = [one.key.num_tokens for one in explain(table, 5, per_mode=per_mode).candidates]
        assert shown == [*[8, 16, 24][:per_mode], 32]
    assert len(explain(table, 5).candidates) == 3
    assert explain(table, 5).largest == 32
    assert [one.chosen for one in explain(table, 5).candidates] == [False, False, True]


def test_largest_of_no_graphs_is_nothing():
    class Nothing(Largest):
        def declare(self, config):
            return []

    table = Dispatcher(Nothing(), DispatchConfig(sizes=(8,)))
    assert explain(table, 5).largest == 0


@pytest.mark.parametrize("kind", [StepCost, MeasuredTime])
def test_numbers_of_a_cost_are_given_by_name(kind):
    """Several numbers of one type are easily swapped."""
    with pytest.raises(TypeError, match="positional"):
        kind(*range(len(attrs.fields(kind))))


def test_explanation_of_little_knows_of_no_graph_and_no_axis():
    assert (EAGER.largest, EAGER.fault, EAGER.axes) == (0, "", {})
    assert len({EAGER, attrs.evolve(EAGER, axes={"length": 16})}) == 2  # may be in a set
