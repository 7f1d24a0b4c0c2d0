"""Random programs: a replay computes what eager computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from dispatchkit.backends.tape import TapeBackend
from dispatchkit.errors import CaptureError

SIZE = 6


def _set_row(values, state):
    values[0][1].fill_(2.0)
    return values[0] * 1


# Each accepts the existing tensors (all SIZE x SIZE, the newest first) and the outside state, and
# returns a new tensor or None.
STEPS = {
    "add": lambda values, state: values[0] + values[-1],
    "scale": lambda values, state: values[0] * 0.5 - 1,
    "matmul": lambda values, state: values[0] @ values[-1] / SIZE,
    "tanh": lambda values, state: values[0].tanh(),
    "transpose": lambda values, state: values[0].t(),
    "view and copy": lambda values, state: values[0].t().contiguous().view(SIZE, SIZE) + 1,
    "own in place": lambda values, state: values[0].clone().mul_(2).add_(values[-1]),
    "own row": lambda values, state: _set_row([values[0].clone()], state),
    "sort": lambda values, state: values[0].sort(dim=1).values,
    "gather": lambda values, state: values[0][values[-1][:, 0].argsort()],
    "softmax": lambda values, state: values[0].softmax(0),
    "cat": lambda values, state: torch.cat([values[0][:2], values[-1][2:]]),
    "two results": lambda values, state: values[0].max(dim=1, keepdim=True).values + values[-1],
    "state in place": lambda values, state: state.add_(values[0].tanh()),
    "state view": lambda values, state: state[2:4].mul_(0.5) * 1 + values[0][:2],
    "state read": lambda values, state: state * 1,
    "rand": lambda values, state: torch.rand(SIZE, SIZE) + values[0],
    "dropout": lambda values, state: torch.nn.functional.dropout(values[0], 0.5),
    "randperm": lambda values, state: values[0][torch.randperm(SIZE)],
    "arange": lambda values, state: values[0] + torch.arange(SIZE),
    "bfloat16": lambda values, state: values[0].bfloat16().float(),
    "where": lambda values, state: torch.where(values[0] > 0, values[0], values[-1]),
}


def run_program(names, x, state):
    values = [x]
    for name in names:
        made = STEPS[name](values, state)
        if made.shape == (SIZE, SIZE):
            values.insert(0, made)
    return [value * 1 for value in values[:3]] + [values[0]]


programs = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=10)


@given(names=programs, mode=st.sampled_from(["no_grad", "inference_mode"]))
def test_replays_of_random_programs_equal_eager(names, mode):
    backend = TapeBackend()
    stream, pool = backend.new_stream(), backend.new_pool()
    x, state = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    start = state.clone()
    with getattr(torch, mode)():
        # Two graphs in one pool must tolerate each other's use of the shared memory.
        graph = backend.capture(lambda: run_program(names, x, state), stream=stream, pool=pool)
        other = backend.capture(
            lambda: run_program(names[::-1], x * 2, start * 1), stream=stream, pool=pool
        )
        assert torch.equal(state, start)
        for seed in range(2):
            x.copy_(torch.randn(SIZE, SIZE))
            eager_state = state.clone()
            torch.manual_seed(seed)
            expected = run_program(names, x.clone(), eager_state)
            torch.manual_seed(seed)
            graph.replay()
            assert all(
                torch.equal(got, want) for got, want in zip(graph.outputs, expected, strict=True)
            )
            assert torch.equal(state, eager_state)
            other.replay()


@given(names=programs, fails_at=st.integers(0, 10))
def test_random_programs_that_fail_change_nothing(names, fails_at):
    backend = TapeBackend()
    stream, pool = backend.new_stream(), backend.new_pool()
    x, state = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    start, x_start = state.clone(), x.clone()
    generator = torch.get_rng_state()

    def run():
        run_program(names[:fails_at], x, state)
        raise ValueError("on purpose")

    with pytest.raises(CaptureError):
        backend.capture(run, stream=stream, pool=pool)
    assert torch.equal(state, start)
    assert torch.equal(x, x_start)
    assert torch.equal(torch.get_rng_state(), generator)
    assert backend.pool_bytes(pool) == 0


@given(
    work=st.lists(st.tuples(st.booleans(), st.sampled_from(sorted(STEPS))), max_size=12),
    scheduler=st.integers(0, 1000),
)
def test_two_streams_that_wait_for_each_other_give_the_serial_result(work, scheduler):
    backend = TapeBackend(scheduler=scheduler)
    streams = [backend.new_stream(), backend.new_stream()]
    x, state = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    eager_state = state.clone()
    torch.manual_seed(0)
    expected = run_program([name for _, name in work], x.clone(), eager_state)
    torch.manual_seed(0)
    values = [x]
    for on_second, name in work:
        mine, other = streams[on_second], streams[not on_second]
        mine.wait_stream(other)
        with backend.use_stream(mine):
            made = STEPS[name](values, state)
            if made.shape == (SIZE, SIZE):
                values.insert(0, made)
    backend.synchronize()
    assert torch.equal(values[0], expected[-1])
    assert torch.equal(state, eager_state)
