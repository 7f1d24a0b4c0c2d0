"""The deferred tape: a missing wait changes results, and a present wait suffices."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from dispatchkit.backends.tape import TapeBackend

SEEDS = range(25)


def pipeline(backend, *, feed=True, fetch=True, free=True):
    """Run three stages: the caller writes an input, a lane replays, the caller reads.

    feed: the lane waits for the caller's input. fetch: the caller waits for the lane's
    result. free: the caller waits before it overwrites what the lane still reads.
    """
    lane, caller = backend.new_stream(), backend.new_stream()
    static = torch.zeros(4)
    graph = backend.capture(lambda: static * 2 + 1, stream=lane, pool=backend.new_pool())
    results = []
    for value in (1.0, 2.0, 3.0):
        with backend.use_stream(caller):
            if free:
                caller.wait_stream(lane)
            static.fill_(value)
            if feed:
                lane.wait_stream(caller)
            with backend.use_stream(lane):
                graph.replay()
            if fetch:
                caller.wait_stream(lane)
            results.append(graph.outputs.clone())
            if free:
                lane.wait_stream(caller)
    backend.synchronize()
    return [result[0].item() for result in results]


RIGHT = [3.0, 5.0, 7.0]


@pytest.mark.slow_except("0", "1", "2", "3", "4")
@pytest.mark.parametrize("seed", SEEDS)
def test_with_all_waits_every_interleaving_is_right(seed):
    assert pipeline(TapeBackend(scheduler=seed)) == RIGHT


@pytest.mark.parametrize("missing", ["feed", "fetch"])
def test_a_missing_wait_shows(missing):
    wrong = [
        seed for seed in SEEDS if pipeline(TapeBackend(scheduler=seed), **{missing: False}) != RIGHT
    ]
    assert len(wrong) >= len(SEEDS) // 4


def test_overwriting_an_input_too_early_shows():
    """Nothing is fetched in between, so only ``free`` separates input and replay."""

    def spoiled(seed):
        backend = TapeBackend(scheduler=seed)
        lane, caller = backend.new_stream(), backend.new_stream()
        static, total = torch.zeros(4), torch.zeros(4)
        graph = backend.capture(lambda: total.add_(static), stream=lane, pool=backend.new_pool())
        for value in (1.0, 2.0, 3.0):
            with backend.use_stream(caller):
                static.fill_(value)
            lane.wait_stream(caller)
            with backend.use_stream(lane):
                graph.replay()
        backend.synchronize()
        return total[0].item() != 6.0

    assert sum(map(spoiled, SEEDS)) >= len(SEEDS) // 4


def test_at_once_no_wait_is_missed():
    assert pipeline(TapeBackend(), feed=False, fetch=False, free=False) == RIGHT


def test_the_same_seed_gives_the_same_interleaving():
    def trace(seed):
        return pipeline(TapeBackend(scheduler=seed), feed=False, fetch=False, free=False)

    assert [repr(trace(seed)) for seed in SEEDS] == [repr(trace(seed)) for seed in SEEDS]


def test_results_hold_poison_until_their_stream_has_run():
    backend = TapeBackend(scheduler=3)
    stream = backend.new_stream()
    x = torch.ones(4)
    for _ in range(20):
        with backend.use_stream(stream):
            y = x + 1
        if not stream.query():
            break
    assert y.isnan().all()
    stream.synchronize()
    assert y.tolist() == [2.0] * 4


def test_the_default_stream_runs_what_it_is_given_at_once():
    backend = TapeBackend(scheduler=0)
    x = torch.zeros(4)
    graph = backend.capture(lambda: x + 1, stream=backend.new_stream(), pool=backend.new_pool())
    graph.replay()
    assert graph.outputs.tolist() == [1.0] * 4


def test_a_wait_of_the_default_stream_runs_what_it_waits_for():
    backend = TapeBackend(scheduler=0)
    stream = backend.new_stream()
    with backend.use_stream(stream):
        y = torch.ones(4) * torch.ones(4) + 1
    backend.current_stream().wait_stream(stream)
    assert y.tolist() == [2.0] * 4


def test_the_default_stream_defers_inside_use_stream_and_is_done_after_it():
    backend = TapeBackend(scheduler=2)
    x = torch.ones(4)
    with backend.use_stream(backend.current_stream()):
        y = x * 2
        for _ in range(5):
            y = y + 1
    assert y.tolist() == [7.0] * 4


def test_a_read_by_the_host_waits_for_the_current_stream():
    backend = TapeBackend(scheduler=5)
    x = torch.ones(4)
    with backend.use_stream(backend.new_stream()):
        y = x * 3
        assert y.sum().item() == 12.0
        assert (y + 1).tolist() == [4.0] * 4
        assert (y + 2).numpy().tolist() == [5.0] * 4
        assert (y + 3).nonzero().shape == (4, 1)
        assert "6." in repr(y + 3)


@pytest.mark.parametrize("seed", range(8))
def test_draws_come_in_the_order_of_the_host(seed):
    backend = TapeBackend(scheduler=seed)
    streams = [backend.new_stream(), backend.new_stream()]
    graph = backend.capture(lambda: torch.rand(3), stream=streams[0], pool=backend.new_pool())
    torch.manual_seed(9)
    expected = [torch.rand(3) for _ in range(6)]
    torch.manual_seed(9)
    drawn = []
    for turn in range(3):
        mine, other = streams[turn % 2], streams[(turn + 1) % 2]
        mine.wait_stream(other)  # the graph's output may be overwritten only now
        with backend.use_stream(mine):
            graph.replay()
            drawn.append(graph.outputs.clone())
            drawn.append(torch.rand(3))
    backend.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_an_error_of_queued_work_is_raised_where_it_is_waited_for():
    backend = TapeBackend(scheduler=1)
    stream = backend.new_stream()
    x, indices = torch.ones(4), torch.tensor([7])

    def work():
        with backend.use_stream(stream):
            for _ in range(10):
                x[indices]
        stream.synchronize()

    with pytest.raises((IndexError, RuntimeError)):
        work()


@pytest.mark.parametrize("seed", range(4))
def test_a_training_step_may_be_deferred(seed):
    backend = TapeBackend(scheduler=seed)
    x, weight = torch.randn(5, 4), torch.randn(4, 4, requires_grad=True)
    twin = weight.detach().clone().requires_grad_()
    with backend.use_stream(backend.new_stream()):
        (x @ weight).tanh().pow(2).mean().backward()
    backend.synchronize()
    (x @ twin).tanh().pow(2).mean().backward()
    torch.testing.assert_close(weight.grad, twin.grad)


def test_an_event_is_done_when_its_stream_has_run_up_to_it():
    backend = TapeBackend(scheduler=4)
    stream, event = backend.new_stream(), backend.new_event()
    x = torch.zeros(4)
    with backend.use_stream(stream):
        for _ in range(4):
            x.add_(1)
        event.record()
        for _ in range(40):
            x.add_(1)
    event.synchronize()
    assert event.query()
    assert 4.0 <= x[0].item() <= 44.0
    backend.synchronize()
    assert x[0].item() == 44.0


def test_a_released_graph_still_runs_what_was_queued():
    backend = TapeBackend(scheduler=6)
    stream = backend.new_stream()
    counter = torch.zeros(2)
    graph = backend.capture(lambda: counter.add_(1), stream=stream, pool=backend.new_pool())
    with backend.use_stream(stream):
        for _ in range(5):
            graph.replay()
    graph.release()
    backend.synchronize()
    assert counter.tolist() == [5.0, 5.0]


def test_queued_work_does_not_run_in_the_middle_of_a_capture():
    """Its writes would count as the capture's and be put back."""
    backend = TapeBackend(scheduler=7)
    stream, other = backend.new_stream(), backend.new_stream()
    state = torch.zeros(2)
    with backend.use_stream(other):
        for _ in range(6):
            state.add_(1)
    graph = backend.capture(lambda: state.add_(10), stream=stream, pool=backend.new_pool())
    backend.synchronize()
    assert state.tolist() == [6.0, 6.0]
    graph.replay()
    assert state.tolist() == [16.0, 16.0]


def test_results_are_of_the_type_that_this_call_gives():
    """Calls that differ only in a number's type or torch's default dtype return other types."""
    backend = TapeBackend(scheduler=0)
    ones = torch.ones(2, dtype=torch.int64)
    before = torch.get_default_dtype()
    try:
        with backend.use_stream(backend.new_stream()):
            found = [(ones * 1).dtype, (ones * 1.0).dtype, (ones * True).dtype, (ones / 2).dtype]
            torch.set_default_dtype(torch.float64)
            found.append((ones / 2).dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.int64, torch.float32, torch.int64, torch.float32, torch.float64]


def test_what_a_replay_overwrites_is_overwritten_in_its_turn():
    """This concerns outputs of later captures, even if another stream's block runs the queue."""
    tape = TapeBackend(scheduler=19)  # a seed for which the other block runs all of it
    stream, other, pool, x = tape.new_stream(), tape.new_stream(), tape.new_pool(), torch.ones(4)
    first = tape.capture(lambda: (x + 1) * 2, stream=stream, pool=pool)
    second = tape.capture(lambda: (x + 2) * 3, stream=stream, pool=pool)
    with tape.use_stream(stream):
        first.replay()
        second.replay()
    with tape.use_stream(other):
        stream.synchronize()
    tape.synchronize()
    assert second.outputs.tolist() == [9.0] * 4
