"""The recorder keeps steps in a ring and returns them as a step trace."""

from __future__ import annotations

import pytest

from dispatchkit.errors import ConfigError
from dispatchkit.keys import Axis, DispatchConfig
from dispatchkit.observe.recorder import StepRecorder
from dispatchkit.observe.trace import read_trace

CONFIG = DispatchConfig(sizes=[1, 2, 4, 8], max_loras=2, query_lens=(2,))


def test_steps_come_back_in_order_with_their_facts():
    recorder = StepRecorder(CONFIG)
    recorder.add(6, 3, 1, 1)
    recorder.add(8, 4, 1, 0)
    trace = recorder.trace()
    assert [(s.step, s.num_tokens, s.num_reqs, s.num_active_loras) for s in trace] == [
        (0, 6, 3, 1),
        (1, 8, 4, 0),
    ]
    assert [(s.uniform_decode, s.max_query_len) for s in trace] == [(True, 2), (True, 2)]
    assert trace[0].t_s == 0.0 <= trace[1].t_s


def test_facts_that_a_step_lacks_are_left_out_for_all():
    recorder = StepRecorder(CONFIG)
    recorder.add(6, 3, 0, 0)
    recorder.add(5, 0, 0, 0)
    recorder.add(8, 0, 1, 0)
    trace = recorder.trace()
    assert "num_reqs" not in trace.columns
    assert "max_query_len" not in trace.columns
    assert list(trace.column("uniform_decode")) == [0, 0, 1]


def test_requests_of_a_uniform_batch_follow_from_its_tokens():
    recorder = StepRecorder(CONFIG)
    recorder.add(6, 0, 1, 0)
    assert [s.num_reqs for s in recorder.trace()] == [3]


def test_a_uniform_batch_that_is_none_is_recorded_as_mixed():
    recorder = StepRecorder(CONFIG)
    recorder.add(7, 3, 1, 0)
    assert [s.uniform_decode for s in recorder.trace()] == [False]


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 7, 8, 11])
def test_a_full_ring_keeps_the_last_steps_and_counts_the_others(steps):
    recorder = StepRecorder(CONFIG, capacity=4)
    for number in range(steps):
        recorder.add(number + 1, 0, 0, 0)
    kept = list(range(max(0, steps - 4), steps))
    trace = recorder.trace()
    assert [s.step for s in trace] == kept
    assert [s.num_tokens for s in trace] == [number + 1 for number in kept]
    assert (recorder.num_steps, recorder.num_lost) == (steps, max(0, steps - 4))


def test_a_step_whose_dispatch_raises_is_not_recorded():
    recorder = StepRecorder(CONFIG)

    def dispatch(num_tokens, num_reqs, uniform, loras, ceiling):
        if num_tokens > 8:
            raise ValueError(num_tokens)
        return ceiling

    listening = recorder.recording(dispatch)
    assert listening(3, ceiling=1) == 1
    with pytest.raises(ValueError, match="9"):
        listening(9)
    assert [s.num_tokens for s in recorder.trace()] == [3]


def test_a_saved_trace_reads_back(tmp_path):
    recorder = StepRecorder(CONFIG)
    for tokens in (8, 2, 5):
        recorder.add(tokens, 1, 0, 2)
    path = tmp_path / "steps.csv.gz"
    assert recorder.save(path) == 3
    assert list(read_trace(path).column("num_tokens")) == [8, 2, 5]


@pytest.mark.parametrize("capacity", [0, -1, True, 2.0])
def test_impossible_capacities_are_refused(capacity):
    with pytest.raises(ConfigError, match="capacity"):
        StepRecorder(CONFIG, capacity=capacity)


def test_values_of_axes_are_columns_of_their_own():
    """The value itself if known, otherwise a value of the same bucket."""
    axes = [Axis("length", (4, 16)), Axis("kind", (0, 7), exact=True)]
    config = DispatchConfig(sizes=[1, 2, 4, 8], max_loras=2, axes=axes)
    recorder = StepRecorder(config, capacity=3)
    recorder.add(1, 1, 0, config.variant(length=1, kind=0))  # overwritten by the fourth
    recorder.add(3, 3, 0, config.variant(2, length=9, kind=7))
    recorder.add(5, 1, 0, int(config.variant(length=3, kind=0)))
    recorder.add(8, 1, 0, int(config.variant(1, length=99, kind=5)))
    trace = recorder.trace()
    assert trace.axes == ("length", "kind")
    assert [dict(step.axes) for step in trace] == [
        {"length": 9, "kind": 7},
        {"length": 4, "kind": 0},
        {"length": 17, "kind": 8},
    ]
    assert list(trace.column("num_active_loras")) == [2, 0, 1]
    assert recorder.axes()[2] == {"length": None, "kind": None}
    assert recorder.num_lost == 1


def test_values_beyond_what_a_trace_holds_stay_outside():
    config = DispatchConfig(sizes=[1], axes=[Axis("length", (4,))])
    recorder = StepRecorder(config)
    recorder.add(1, 1, 0, config.variant(length=10**30))
    assert recorder.trace()[0].axes["length"] == 2**31 - 1


def test_a_step_without_tokens_costs_the_others_no_fact():
    """All its facts are known: it has no request and no longest one."""
    recorder = StepRecorder(CONFIG)
    recorder.add(6, 3, 1, 0)
    recorder.add(0, 0, 1, 0)
    recorder.add(0, 0, 0, 0)
    trace = recorder.trace()
    assert list(trace.column("num_reqs")) == [3, 0, 0]
    assert list(trace.column("max_query_len")) == [2, 0, 0]


def test_no_request_is_longer_than_the_step():
    """A class of requests of at most four tokens includes a step of two."""
    recorder = StepRecorder(DispatchConfig(query_lens=4, varlen_decode=True))
    recorder.add(2, 1, 2, 0)
    recorder.add(6, 2, 2, 0)
    assert list(recorder.trace().column("max_query_len")) == [2, 4]


def test_adapters_above_the_limit_there_was_at_first_are_recorded():
    """A swap may raise the limit while steps are recorded."""
    recorder = StepRecorder(CONFIG)
    recorder.add(4, 4, 0, 5)
    assert [step.num_active_loras for step in recorder.trace()] == [5]
