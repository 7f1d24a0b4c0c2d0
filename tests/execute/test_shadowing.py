"""A shadow beside a serving runner: no effect on steps, then promoted or discarded."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from dispatchkit.errors import ConfigError, RegistryError, SwapError  # noqa: E402


@pytest.fixture
def runner(make_runner):
    made = make_runner(lambda tokens: tokens * 2, policy="vllm")
    made.capture()
    return made


def serve(runner, rows=(3, 3, 7)):
    for number in rows:
        assert torch.equal(runner(torch.arange(number)), torch.arange(number) * 2)


def test_a_shadow_changes_no_step_and_tells_where_it_would(runner):
    shadow = runner.start_shadow(policy="threshold", policy_options={"max_tokens": 2})
    serve(runner)
    assert shadow.poll() == 3
    assert shadow.poll() == 0
    report = shadow.report()
    assert (report.active, report.candidate) == ("vllm", "threshold")
    assert sorted((one.min_tokens, one.steps) for one in report.differences) == [(3, 2), (7, 1)]
    assert runner.stats().steps_by_mode == {"NONE": 0, "PIECEWISE": 0, "FULL": 3}
    assert runner.dispatcher.epoch == 0
    shadow.discard()
    assert not runner.taps.is_shadowed


def test_some_steps_are_timed_and_priced(runner):
    shadow = runner.start_shadow(sizes=(1, 4, 8), sample_every=2)
    serve(runner, (3, 4, 8, 7, 1, 1) * 8)
    runner.drain(wait=True)
    shadow.poll()
    report = shadow.report()
    assert report.steps == report.same_steps == 48
    assert report.active_us == report.candidate_us > 0
    assert report.error_us == 0.0  # the same steps on both sides: no doubt about no gain


def test_a_promoted_candidate_is_in_force(runner):
    shadow = runner.start_shadow(sizes=(3, 8))
    serve(runner)
    shadow.poll()
    report = shadow.promote(max_graphs=9)
    assert [key.num_tokens for key in report.captured] == [3]
    assert runner.config.sizes == (3, 8)
    assert runner.lanes[0].lifecycle.budget.max_graphs == 9
    assert shadow.report().steps == 3
    serve(runner)
    with pytest.raises(RegistryError, match="follows no more"):
        shadow.poll()


def test_a_promotion_that_fails_leaves_both(runner, backend):
    shadow = runner.start_shadow(sizes=(3, 8))
    backend.capture_fault = ValueError("planted")
    with pytest.raises(SwapError, match="planted"):
        shadow.promote()
    backend.capture_fault = None
    serve(runner)
    assert shadow.poll() == 3
    assert runner.config.sizes == (1, 2, 4, 8)


def test_a_candidate_with_other_query_lengths_is_promoted(runner, backend):
    config = attrs.evolve(runner.config, query_lens=(2,), sizes=(6, 8))
    shadow = runner.start_shadow(config=config)
    serve(runner)
    backend.capture_fault = ValueError("planted")
    with pytest.raises(SwapError, match="planted"):
        shadow.promote()
    backend.capture_fault = None
    serve(runner)
    assert shadow.poll() == 6
    shadow.promote()
    assert runner.config.query_lens == (2,)
    assert not runner.taps.is_shadowed
    serve(runner)


def test_a_discarded_shadow_leaves_nothing_behind(runner):
    shadow = runner.start_shadow(sizes=(3, 8), sample_every=1)
    serve(runner)
    shadow.discard()
    serve(runner)
    runner.drain(wait=True)
    assert shadow.report().error_us is None  # it heard of no time
    assert sorted(key.num_tokens for key in runner.registry) == [1, 2, 4, 8]
    other = runner.start_shadow(sizes=(3, 8))
    shadow.discard()  # again: the other is not ended by it
    serve(runner)
    assert other.poll() == 3


def test_there_is_one_shadow_at_a_time(runner):
    runner.start_shadow(sizes=(3, 8))
    with pytest.raises(ConfigError, match="Discard or promote"):
        runner.start_shadow(sizes=(2, 8))


def test_a_recording_and_a_shadow_follow_the_same_steps(runner):
    shadow = runner.start_shadow(sizes=(3, 8), sample_every=2)
    recorder = runner.start_recording()
    told = []
    runner.taps.on_decision(told.append)
    serve(runner)
    assert (recorder.num_steps, shadow.poll(), len(told)) == (3, 3, 3)
    runner.stop_recording()
    serve(runner)
    assert (recorder.num_steps, shadow.poll()) == (3, 3)
    shadow.discard()
    runner.start_recording()
    serve(runner)
    assert shadow.report().steps == 6


def test_no_change_and_no_such_policy_are_refused(runner):
    with pytest.raises(ConfigError, match="no change"):
        runner.start_shadow()
    with pytest.raises(ConfigError, match="policy"):
        runner.start_shadow(policy="nobody")
    with pytest.raises(ConfigError, match="sample_every"):
        runner.start_shadow(sizes=(3, 8), sample_every=0)
    assert not runner.taps.is_shadowed


def test_how_often_a_step_is_timed_may_be_text(runner):
    runner.start_shadow(policy="threshold", sample_every="2")
    serve(runner)
    assert runner.stats().steps == 3
