"""Inputs and results of a replay: stale rows, fills, poison, results, types, state."""

from __future__ import annotations

import queue
import re
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from played_tape import PlayedTape  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    BufferOptions,
    CaptureOptions,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    StepState,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError, DescriptorError, InputError, UnknownNameError  # noqa: E402
from dispatchkit.execute import EagerStepWarning, PaddedDrawsWarning  # noqa: E402


def same(actual, expected):
    torch.testing.assert_close(actual, expected, equal_nan=True)


# -- filler rows ----------------------------------------------------------------------------


def test_only_stale_rows_are_reset(make_runner):
    """Rows that already contain fill, or that no graph reads, are not written again."""
    options = RunnerOptions(capture=CaptureOptions(prove_rows=False))
    runner = make_runner(lambda tokens: tokens, options=options)
    runner.capture()
    buffers = runner.lanes[0].lane.buffers
    assert (buffers.clean_from, buffers.clean_to) == (0, 8)
    runner(torch.ones(5, dtype=torch.int64))
    assert (buffers.clean_from, buffers.clean_to) == (5, 8)
    buffers.tensors[0][6] = 99  # beyond the rows of any call, so nothing resets it
    runner(torch.ones(3, dtype=torch.int64))
    assert buffers.tensors[0].tolist() == [1, 1, 1, 0, 1, 0, 99, 0]
    assert (buffers.clean_from, buffers.clean_to) == (3, 4)
    runner(torch.ones(5, dtype=torch.int64))
    assert buffers.tensors[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert (buffers.clean_from, buffers.clean_to) == (5, 8)


def test_buffers_hold_the_largest_bucket_and_give_no_shorter_slice(make_runner):
    """The checked rows are the cut rows: too many are an error, never fewer rows."""
    buffers = make_runner(lambda tokens: tokens + 1, sizes=(2, 8)).lanes[0].lane.buffers
    assert buffers.num_rows == 8
    assert [len(buffers.views(rows)[0]) for rows in (0, 3, 8)] == [0, 3, 8]
    for rows in (9, -1):
        with pytest.raises(ConfigError, match="from 0 to 8"):
            buffers.views(rows)


def test_each_input_has_its_own_fill_everywhere(make_runner, backend):
    """Warmup, capture and every replay use the same fill."""
    seen = Mock()

    def step(tokens, scale):
        if not backend.is_capturing():  # a read of a value would be refused
            seen(frozenset(tokens.tolist()), frozenset(scale.tolist()))
        return tokens, (tokens == 7).sum(), (scale == 0.5).sum()

    inputs = {
        "tokens": StaticInput((None,), "int64", fill=7),
        "scale": StaticInput((None,), torch.float32, fill=0.5),
    }
    # Otherwise the proof replays graphs on noise too.
    options = RunnerOptions(capture=CaptureOptions(prove_rows=False))
    runner = make_runner(step, inputs, options=options)
    assert runner.capture().failed == {}
    assert {one.args for one in seen.call_args_list} == {(frozenset({7}), frozenset({0.5}))}
    runner(torch.zeros(8, dtype=torch.int64), torch.zeros(8))
    _, sevens, halves = runner(torch.zeros(5, dtype=torch.int64), torch.zeros(5))
    assert (int(sevens), int(halves)) == (3, 3)


def test_poisoned_buffers_do_not_show(make_runner):
    """Buffers are full of NaN before; real rows equal eager's."""
    weight = torch.randn(4, 4)
    runner = make_runner(
        lambda x: torch.softmax(x @ weight, -1), {"x": StaticInput((None, 4), "float32")}
    )
    runner.capture()
    for rows in (3, 8, 5):
        runner.lanes[0].lane.buffers.poison()
        x = torch.randn(rows, 4)
        same(runner(x), torch.softmax(x @ weight, -1))


def test_function_across_rows_sees_fill_and_the_true_row_count(make_runner):
    """A step across rows masks by the device's row count, so poison does not show."""

    def step(x, num_rows):
        real = torch.arange(x.shape[0]) < num_rows
        kept = torch.where(real[:, None], x, torch.zeros(()))
        return x - kept.sum(0) / num_rows, kept.sum(0)

    runner = make_runner(
        step,
        {"x": StaticInput((None, 3), "float32", fill=9.0)},
        options=RunnerOptions(buffers=BufferOptions(row_count="num_rows")),
    )
    runner.capture()
    for rows in (8, 3, 5, 1, 3):
        runner.lanes[0].lane.buffers.poison()
        x = torch.randn(rows, 3)
        same(runner(x), (x - x.mean(0), x.sum(0)))
        same(runner(x, ceiling=0), (x - x.mean(0), x.sum(0)))


def test_unused_rows_write_to_a_sink(make_runner):
    """Filler rows write by index to a place that is never read; other places are unchanged."""
    cache = torch.zeros(10)  # place 9 is the sink

    def step(slots, values):
        cache.index_copy_(0, slots, values)
        return cache[slots] * 2

    inputs = {
        "slots": StaticInput((None,), "int64", fill=9),
        "values": StaticInput((None,), "float32", fill=-1.0),
    }
    runner = make_runner(step, inputs, state=StepState(scratch=[cache]))
    runner.capture()
    assert cache[:9].tolist() == [0.0] * 9
    same(runner(torch.tensor([4, 2, 0]), torch.tensor([1.0, 2.0, 3.0])), torch.tensor([2.0, 4, 6]))
    assert cache[:9].tolist() == [3.0, 0, 2, 0, 1, 0, 0, 0, 0]


# -- results ----------------------------------------------------------------------------------


def test_owned_results_keep_their_values(make_runner):
    """This holds over later calls of any key, for nested results and views of views."""
    runner = make_runner(lambda tokens: {"a": (tokens * 2, tokens[None].T), "b": [tokens.sum()]})
    runner.capture()
    kept = []
    for rows in (8, 3, 3, 5, 8, 1):
        given = torch.randint(0, 100, (rows,))
        kept.append((given, runner(given)))
    for given, result in kept:
        same(result, {"a": (given * 2, given[:, None]), "b": [given.sum()]})


def test_views_are_valid_until_the_next_call(make_runner):
    runner = make_runner(lambda tokens: tokens * 2, outputs="view")
    runner.capture()
    first = runner(torch.arange(3))
    same(first, torch.arange(3) * 2)
    second = runner(torch.arange(5) + 10)
    assert second.data_ptr() == first.data_ptr()
    assert first.tolist() == [20, 22, 24]  # overwritten, as documented


def test_owned_results_do_not_hold_the_bucket(make_runner):
    runner = make_runner(lambda tokens: tokens * 2)
    runner.capture()
    assert runner(torch.arange(5)).untyped_storage().nbytes() == 5 * 8


def test_output_without_a_batch_dimension_is_measured_not_guessed(make_runner):
    """A fixed dimension equal to a bucket is not treated as the batch."""
    table = torch.arange(8)
    runner = make_runner(lambda tokens: (tokens, table * tokens.sum()))
    runner.capture()
    result = runner(torch.tensor([1, 2, 3, 4, 5]))
    assert result[1].shape == (8,)
    same(result[1], table * 15)
    assert runner(torch.tensor([1, 2]))[1].shape == (8,)


def test_batch_dimension_elsewhere_than_in_front(make_runner):
    runner = make_runner(lambda x: x.T.contiguous(), {"x": StaticInput((3, None), "float32")})
    runner.capture()
    x = torch.randn(3, 5)
    same(runner(x), x.T)
    columns = make_runner(lambda x: x + 1, {"x": StaticInput((3, None), "float32")})
    columns.capture()
    same(columns(x), x + 1)


def test_single_size_is_measured_at_another(make_runner):
    runner = make_runner(lambda tokens: tokens.repeat(2, 1), sizes=(1,), max_num_tokens=1)
    runner.capture()
    same(runner(torch.tensor([5])), torch.tensor([[5], [5]]))
    assert runner.stats().steps_by_mode["FULL"] == 1


@pytest.mark.parametrize(
    "step",
    [lambda tokens: tokens[:, None] * tokens, lambda tokens: tokens.repeat(2)],
    ids=["two dimensions", "twice the rows"],
)
def test_output_that_cannot_be_cut_serves_full_buckets_with_the_way_out(make_runner, step):
    runner = make_runner(step)
    assert runner.capture().num_graphs == 4
    with pytest.warns(EagerStepWarning, match="rows_not_the_bucket.*output_batch_dims"):
        same(runner(torch.arange(3)), step(torch.arange(3)))
    same(runner(torch.arange(4)), step(torch.arange(4)))
    assert runner.stats().eager_by_reason == {"rows_not_the_bucket": 1}
    assert "replays only batches of 4 rows (rows_not_the_bucket: output 0 has no batch dim" in str(
        runner
    )


def test_declared_batch_dimensions(make_runner):
    def step(tokens):
        return {"rows": tokens, "table": torch.ones(8, 4) * tokens.sum()}

    runner = make_runner(
        step,
        options=RunnerOptions(
            buffers=BufferOptions(output_batch_dims={"rows": 0, "table": None}),
            capture=CaptureOptions(warmups=0),
        ),
    )
    assert runner.capture().failed == {}
    same(runner(torch.arange(5)), step(torch.arange(5)))


@pytest.mark.parametrize("dims", [1, {"rows": None}, [0, 0, 0]])
def test_declared_batch_dimensions_that_do_not_fit(make_runner, dims):
    runner = make_runner(
        lambda tokens: (tokens, tokens + 1),
        options=RunnerOptions(buffers=BufferOptions(output_batch_dims=dims)),
    )
    failed = runner.capture().failed
    assert len(failed) == 4
    assert all("output_layout" in why for why in failed.values())


def test_outputs_that_change_between_warmup_and_capture_are_compared(make_runner):
    calls = queue.SimpleQueue()

    def step(tokens):
        calls.put(None)
        return tokens if calls.qsize() == 1 else tokens.double()

    options = RunnerOptions(
        buffers=BufferOptions(output_batch_dims=0), capture=CaptureOptions(prove_rows=False)
    )
    (why,) = make_runner(step, sizes=[4], options=options).capture().failed.values()
    assert "output 0 is a torch.float64 tensor of shape (4,) instead of a torch.int64" in why


def test_python_numbers_among_outputs(make_runner):
    """The number of rows is that of the call; constants are unchanged."""
    runner = make_runner(lambda tokens: (tokens, tokens.shape[0], "fixed", None, 3))
    runner.capture()
    for rows in (5, 8, 2):
        assert runner(torch.arange(rows))[1:] == (rows, "fixed", None, 3)


def test_state_that_is_returned_is_the_callers_own(make_runner):
    """As in eager, it is the tensor itself, not a copy of a cache."""
    cache = torch.zeros(4)

    def step(tokens):
        cache.add_(1)
        return tokens, cache

    runner = make_runner(step, state=[cache])
    runner.capture()
    _, found = runner(torch.arange(3))
    assert found.data_ptr() == cache.data_ptr()
    assert cache.tolist() == [1.0] * 4


# -- order ------------------------------------------------------------------------------------


@pytest.mark.slow_except("0", "1", "2")
@pytest.mark.parametrize("seed", range(8))
def test_order_with_the_callers_streams_in_both_directions(make_runner, seed):
    """Inputs are read after the caller's stream wrote them; results are complete when read.

    The deferred tape runs the work of two streams in a seeded order, constrained only by waits.
    """
    backend = TapeBackend(scheduler=seed)
    runner = make_runner(lambda tokens: tokens * 2 + 1, backend=backend)
    runner.capture()
    streams = [backend.new_stream(), backend.new_stream()]
    kept = []
    for number, rows in enumerate((8, 3, 5, 8, 1, 4, 2, 7)):
        with backend.use_stream(streams[number % 2]):
            given = torch.arange(rows) + number
            given = given * 3
            kept.append((number, rows, runner(given)))
    backend.synchronize()
    for number, rows, result in kept:
        same(result, (torch.arange(rows) + number) * 3 * 2 + 1)


def test_stream_change_is_the_only_wait(make_runner, backend, monkeypatch):
    """On one stream nothing waits; after a change the new stream waits for the old."""
    runner = make_runner(lambda tokens: tokens + 1)
    runner.capture()
    runner(torch.arange(3))
    other = backend.new_stream()
    waits = []
    plain = type(other).wait_stream
    monkeypatch.setattr(
        type(other), "wait_stream", lambda self, one: (waits.append(one), plain(self, one))
    )
    for _ in range(3):
        runner(torch.arange(3))
    assert waits == []
    with backend.use_stream(other):
        runner(torch.arange(3))
        runner(torch.arange(3))
    assert len(waits) == 1


# -- accepted calls -------------------------------------------------------------------------

X = {"x": StaticInput((None, 2), "float32"), "bias": StaticInput((2,), "float32")}


@pytest.fixture
def linear(make_runner):
    runner = make_runner(lambda x, bias: x + bias, X)
    runner.capture()
    return runner


GOOD = {"x": torch.ones(3, 2), "bias": torch.ones(2)}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"x": torch.ones(3, 2, dtype=torch.float64)},
            "must have dtype torch.float32, got torch.float64",
        ),
        ({"x": torch.ones(3, 2, device="meta")}, "must be on cpu, got meta"),
        ({"x": torch.ones(3)}, "shape"),
        ({"x": torch.ones(3, 3)}, r"must have shape \(rows, 2\), got \(3, 3\)"),
        ({"x": torch.ones(())}, "shape"),
        ({"x": [[1.0, 2.0]]}, "must be a tensor.*host=True"),
        ({"x": torch.ones(3, 2).numpy()}, "must be a tensor.*host=True"),
        ({"x": None}, "must be a tensor"),
        ({"bias": torch.ones(3)}, "'bias'"),
        ({"x": torch.ones(3, 2, requires_grad=True)}, "gradient"),
        ({"extra": torch.ones(3)}, "Unknown input 'extra'"),
        ({"celing": 0}, "Unknown input 'celing'. .*Did you mean 'ceiling'?"),
    ],
)
def test_input_that_does_not_fit_is_refused_before_anything_is_touched(linear, changed, match):
    linear(**GOOD)
    before = [tensor.clone() for tensor in linear.lanes[0].lane.buffers.tensors]
    stats = linear.stats()
    with pytest.raises(InputError, match=match):
        linear(**{**GOOD, **changed})
    same(linear.lanes[0].lane.buffers.tensors, before)
    assert linear.stats() == stats


def test_missing_and_doubled_inputs_are_refused(linear):
    """A missing, unknown or duplicate input is an error by name before any write."""
    with pytest.raises(InputError, match="Missing input 'bias'"):
        linear(x=GOOD["x"])
    with pytest.raises(InputError, match="by position and by keyword"):
        linear(GOOD["x"], x=GOOD["x"])
    with pytest.raises(InputError, match="3 positional inputs"):
        linear(GOOD["x"], GOOD["bias"], GOOD["bias"])


def test_batched_inputs_of_different_rows_are_refused(make_runner):
    inputs = {"a": StaticInput((None,), "int64"), "b": StaticInput((None,), "int64")}
    runner = make_runner(lambda a, b: a + b, inputs)
    runner.capture()
    with pytest.raises(InputError, match="'b' has 1 row, but 'a' has 3"):
        runner(torch.arange(3), torch.arange(1))


def test_gradient_inputs_are_fine_where_gradients_are_off(linear):
    x = torch.ones(3, 2, requires_grad=True)
    with torch.no_grad():
        result = linear(x=x, bias=GOOD["bias"])
    assert not result.requires_grad
    assert all(not tensor.requires_grad for tensor in linear.lanes[0].lane.buffers.tensors)


def test_results_carry_no_gradient_in_any_mode(make_runner):
    weight = torch.ones(2, 2, requires_grad=True)
    runner = make_runner(lambda x: x @ weight, {"x": StaticInput((None, 2), "float32")})
    runner.capture()
    x = torch.ones(3, 2)
    assert not runner(x).requires_grad
    assert not runner(x, ceiling=0).requires_grad


def test_inference_mode_of_the_caller(make_runner):
    """Captured outside and called inside, and vice versa."""
    runner = make_runner(lambda tokens: tokens * 2, lazy=True)
    with torch.inference_mode():
        same(runner(torch.arange(3)), torch.arange(3) * 2)
    same(runner(torch.arange(3)), torch.arange(3) * 2)
    with torch.inference_mode():
        same(runner(torch.arange(7)), torch.arange(7) * 2)
    assert runner.stats().steps_by_mode["FULL"] == 3


def test_other_autocast_than_at_capture_runs_eager(make_runner):
    """There is no silent conversion: the result is eager's under that setting."""
    weight = torch.randn(4, 4)
    runner = make_runner(lambda x: x @ weight, {"x": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.randn(3, 4)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(EagerStepWarning, match="autocast"),
    ):
        result = runner(x)
    assert result.dtype is torch.bfloat16
    assert runner(x).dtype is torch.float32
    assert runner.stats().eager_by_reason == {"autocast": 1}


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("starts_under_it", [False, True])
def test_autocast_is_seen_by_calls_whose_look_is_known(make_runner, quiet, dtype, starts_under_it):
    """The quick check of inputs includes autocast, so that nothing else is checked."""
    weight = torch.randn(4, 4)
    inputs = {"x": StaticInput((None, 4), dtype)}
    runner = make_runner(lambda x: x.float() @ weight, inputs)
    runner.capture()
    x = torch.ones(4, 4).to(runner.buffers["x"].dtype)  # a full bucket has no padding to check
    for number in range(8):
        is_on = (number // 2 + starts_under_it) % 2 == 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            assert runner(x).dtype is (torch.bfloat16 if is_on else torch.float32)
    assert runner.stats().eager_by_reason == {"autocast": 4}


@pytest.mark.parametrize("change", ["autocast", "training", "value"])
def test_a_call_under_other_facts_than_the_graph_proves_nothing_of_its_rows(
    make_runner, quiet, change
):
    """Its rows would be compared with eager under other conditions and be rejected."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
            self.factor = 3

        def forward(self, x):
            return x.float() @ self.weight * (2 if self.training else self.factor)

    module = Model().eval()
    runner = make_runner(module, {"x": StaticInput((None, 4), "int64")})
    runner.capture()
    x = torch.arange(12).view(3, 4)
    module.train(change == "training")
    if change == "value":
        module.factor = 5
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
        runner(x)
    module.eval()
    runner.capture()
    same(runner(x), module(x))
    assert runner.stats().steps_by_mode["FULL"] == 1


@pytest.mark.parametrize("change", ["training", "value"])
def test_values_of_a_call_under_other_facts_are_not_those_of_a_graph(make_runner, quiet, change):
    """A replay would return wrong values undetected."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 3

        def forward(self, x):
            return x * self.factor, x.shape[0] * (2 if self.training else self.factor)

    module = Model().eval()
    runner = make_runner(module, {"x": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.ones(3, 4)
    module.train(change == "training")
    module.factor = 5 if change == "value" else 3
    assert runner(x)[1] == module(x)[1]
    module.eval()
    module.factor = 3
    runner.capture()
    assert runner(x)[1] == 9
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_capture_under_autocast_serves_calls_under_it(make_runner, quiet):
    weight = torch.randn(4, 4)
    runner = make_runner(lambda x: x @ weight, {"x": StaticInput((None, 4), "float32")})
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        runner.capture()
        assert runner(x).dtype is torch.bfloat16
    assert runner(x).dtype is torch.float32
    assert runner.stats().steps_by_mode == {"NONE": 1, "PIECEWISE": 0, "FULL": 1}


def test_training_mode_of_a_module_is_part_of_what_a_graph_was_made_for(make_runner, quiet):
    class Model(torch.nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    module = Model().eval()
    runner = make_runner(module, {"x": StaticInput((None, 4), "float32")})
    runner.capture()
    x = torch.ones(3, 4)
    same(runner(x), x * 3)
    module.train()
    same(runner(x), x * 2)
    module.eval()
    same(runner(x), x * 3)
    assert runner.stats().eager_by_reason == {"training_mode": 1}


def test_a_step_with_python_effects_runs_eager_and_says_which(make_runner):
    """A replay runs no Python, so the appended values would be missing."""
    log = []

    def step(tokens):
        log.append(tokens.shape[0])
        return tokens

    runner = make_runner(step)
    failed = runner.capture().failed
    assert all(reason.startswith("python_state: Each call") for reason in failed.values())
    assert log == []
    with pytest.warns(EagerStepWarning, match="python_state"):
        runner(torch.arange(3))
    assert log == [3]
    assert runner.stats().eager_by_reason == {"python_state": 1}
    reason = next(iter(failed.values()))
    assert "log[0] (function " in reason
    assert f"{__file__}:" in reason


# -- declarations -----------------------------------------------------------------------------


class TestStaticInput:
    @pytest.mark.parametrize(
        "shape", [(None, None), (-1,), (True,), (1.5,), ("two rows",), "rows", 1.5, {"x": 3}]
    )
    def test_bad_shapes(self, shape):
        with pytest.raises(ConfigError, match=r"a tuple .* For example, pass \(None, 16\)"):
            StaticInput(shape, "int64")

    @pytest.mark.parametrize("host", ["no", 1, None])
    def test_host_is_a_flag(self, host):
        with pytest.raises(ConfigError, match="host must be True or False"):
            StaticInput((None,), "int64", host=host)

    def test_bad_dtype_names_the_nearest(self):
        with pytest.raises(UnknownNameError) as caught:
            StaticInput((None,), "int46")
        assert "int4" in caught.value.nearest or "int16" in caught.value.nearest
        with pytest.raises(UnknownNameError) as caught:
            StaticInput((None,), "flot32")
        assert re.fullmatch(
            r"dtype must be one of \d+ names, got 'flot32'\. Did you mean 'float32'.*\? "
            r"Common dtypes: bool, int32, .*",
            str(caught.value),
        )
        assert "float8_e4m3fn" in caught.value.known

    @pytest.mark.parametrize(
        ("fill", "dtype"),
        [
            ("x", "int64"),
            (1.5, "int64"),
            (-1, "uint8"),
            (300, "uint8"),
            (float("nan"), "int32"),
            (2**40, "int32"),
            (2**70, "int64"),
            (2, "bool"),
            (1e6, "float16"),
            (1e6, "float8_e4m3fn"),
            (float("inf"), "float8_e4m3fn"),
            (1e300, "float32"),
            (1j, "float32"),
            ([1], "int64"),
            (None, "float32"),
        ],
    )
    def test_fill_must_be_of_the_type(self, fill, dtype):
        """Torch truncates some silently: 1.5 to 1, -1 to 255."""
        with pytest.raises(ConfigError, match="fill"):
            StaticInput((None,), dtype, fill=fill)

    @pytest.mark.parametrize(
        ("fill", "dtype"),
        [
            (0.1, "float16"),
            (float("-inf"), "float16"),
            (True, "int64"),
            (255, "uint8"),
            (1, "bool"),
        ],
    )
    def test_fill_that_the_type_holds_or_rounds_is_taken(self, fill, dtype):
        held = StaticInput((None,), dtype, fill=fill).full(1, torch.device("cpu"))
        assert held.item() == pytest.approx(float(fill), rel=1e-3)

    def test_no_batched_input(self, make_runner):
        with pytest.raises(ConfigError, match="at least one batched input"):
            make_runner(lambda x: x, {"x": StaticInput((3,), "int64")})

    @pytest.mark.parametrize("name", ["num_reqs", "ceiling", "not a name"])
    def test_names_of_a_calls_own_words(self, make_runner, name):
        with pytest.raises(ConfigError, match="identifiers other than"):
            make_runner(lambda **x: x, {name: StaticInput((None,), "int64")})


# -- state ------------------------------------------------------------------------------------


def test_one_call_is_one_step_of_visible_state(make_runner):
    """This holds with any warmups and captures."""
    counter = torch.zeros(1)

    def step(tokens):
        counter.add_(1)
        return tokens + counter.long()

    runner = make_runner(step, state=[counter], lazy=True)
    for number, rows in enumerate((8, 3, 5, 8, 1)):
        same(runner(torch.arange(rows)), torch.arange(rows) + number + 1)
    assert counter.item() == 5


def test_undeclared_writes_are_found_saved_and_put_back(make_runner):
    counter = torch.zeros(3)
    cache = torch.arange(12.0).view(3, 4)

    def step(tokens):
        counter[1] += 1  # through a view
        torch.add(cache[0], 1, out=cache[0])
        return tokens

    runner = make_runner(step)
    runner.capture()
    assert counter.tolist() == [0, 0, 0]
    assert cache[0].tolist() == [0, 1, 2, 3]
    runner(torch.arange(3))
    assert counter.tolist() == [0, 1, 0]
    assert cache[0].tolist() == [1, 2, 3, 4]


def test_undeclared_state_beyond_the_limit_is_named(make_runner, quiet):
    cache = torch.zeros(100)

    def step(tokens):
        cache.add_(1)
        return tokens

    runner = make_runner(step, options=RunnerOptions(capture=CaptureOptions(state_limit_bytes=399)))
    failed = runner.capture().failed
    assert len(failed) == 4
    text = next(iter(failed.values()))
    assert "undeclared_state" in text
    assert "(100,)" in text
    assert "state=[tensor]" in text
    assert "state_limit_bytes by at least 1." in text
    assert cache[0] == 0
    runner(torch.arange(3))  # eager, once
    assert cache[0] == 1


def test_random_numbers_come_as_in_eager(make_runner):
    """At the bucket's size the sequence is eager's, and a capture draws nothing."""
    runner = make_runner(lambda x: x + torch.randn_like(x), {"x": StaticInput((None,), "float32")})
    torch.manual_seed(3)
    runner.capture()
    x = torch.zeros(8)
    torch.manual_seed(5)
    got = [runner(x) for _ in range(3)]
    torch.manual_seed(5)
    assert torch.equal(torch.stack(got), torch.stack([torch.randn(8) for _ in range(3)]))
    torch.manual_seed(3)
    make_runner(lambda x: x + torch.randn_like(x), {"x": StaticInput((None,), "float32")}).capture()
    first = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(1))


def test_state_between_pieces(make_runner):
    """An eager piece writes a cache that a graph piece reads."""
    cache = torch.zeros(16)

    def write(x):
        cache[: x.shape[0]] += x
        return x

    pieces = [
        graph_piece(lambda tokens: tokens * 1.0),
        eager_piece(write),
        graph_piece(lambda x: x + cache.sum()),
    ]
    runner = make_runner(pieces, state=[cache])
    runner.capture()
    assert cache.sum() == 0
    expected = 0
    for rows, ceiling in ((3, 1), (5, 2), (8, 1), (2, 0)):
        x = torch.arange(rows)
        expected += int(x.sum())
        same(runner(x, ceiling=ceiling), x + float(expected))


def test_step_that_writes_into_its_input_is_not_captured(make_runner, quiet):
    """Eager changes the caller's tensor, which a graph cannot, so the step stays eager."""

    def step(x):
        return x.add_(1) * 2

    runner = make_runner(step, {"x": StaticInput((None,), "float32")})
    failed = runner.capture().failed
    assert len(failed) == 4
    assert all(why.startswith("input_written:") for why in failed.values())
    assert runner.lanes[0].lane.buffers.tensors[0].tolist() == [0.0] * 8
    x = torch.zeros(3)
    same(runner(x), torch.full((3,), 2.0))
    assert x.tolist() == [1.0] * 3


# -- inputs in the buffers they are copied to -------------------------------------------------

PAIR = {"x": StaticInput((None, 2), "float32"), "z": StaticInput((None, 2), "float32")}


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 2).clone()


class TestOverlappingInputs:
    """A batch in the runner's own static inputs keeps the values it had when passed."""

    @pytest.fixture
    def runner(self, make_runner):
        runner = make_runner(lambda x, z: x * 10 + z, PAIR)
        runner.capture()
        runner.buffers["x"][:8] = rows(1, 2, 3, 4, 5, 6, 7, 8)
        runner.buffers["z"][:8] = rows(8, 7, 6, 5, 4, 3, 2, 1)
        return runner

    def test_rows_moved_up(self, runner):
        x, z = runner.buffers["x"], runner.buffers["z"]
        same(runner(x[1:4], z[:3]), rows(28, 37, 46))

    def test_inputs_crossed(self, runner):
        """Each input is at the destination of the other."""
        x, z = runner.buffers["x"], runner.buffers["z"]
        same(runner(z[:3], x[:3]), rows(81, 72, 63))
        same(runner(x=rows(1, 1), z=rows(2, 2)), rows(12, 12))

    def test_one_row_for_all(self, runner):
        x, z = runner.buffers["x"], runner.buffers["z"]
        same(runner(x[2:3].expand(4, 2), z[4:8]), rows(34, 33, 32, 31))

    def test_an_alias_made_elsewhere(self, runner):
        x, z = runner.buffers["x"].detach(), runner.buffers["z"].view(-1).view(-1, 2)
        same(runner(x=z[1:3], z=x[2:4]), rows(73, 64))

    def test_inputs_that_the_step_returned(self, make_runner):
        """With views of one graph, the results are the static inputs themselves."""
        runner = make_runner(lambda x, z: (z, x), PAIR, sizes=(4,), outputs="view")
        runner.capture()
        pair = runner(rows(1, 2), rows(3, 4))
        for _ in range(3):
            expected = [one.clone() for one in pair[::-1]]
            pair = runner(*pair)
            for one, other in zip(pair, expected, strict=True):
                same(one, other)

    @pytest.mark.parametrize("way", [TapeBackend, PlayedTape])
    def test_host_inputs(self, make_runner, way):
        """By pinned memory and by a copy node, and next to an input on the device."""
        kinds = {"x": True, "z": True, "y": False}
        inputs = {name: StaticInput((None,), "int64", host=host) for name, host in kinds.items()}
        runner = make_runner(lambda x, z, y: x * 10 + z + y * 100, inputs, backend=way())
        runner.capture()
        x, z, y = (runner.buffers[name] for name in kinds)
        runner.buffers.wait()
        x[:4] = y[:4] = torch.tensor([1, 2, 3, 4])
        z[:4] = torch.tensor([5, 6, 7, 8])
        same(runner(z[:3], x[1:4], y[1:4]), torch.tensor([252, 363, 474]))


@pytest.mark.parametrize("name", ["x", "length"])
def test_row_count_is_no_name_that_something_else_has(name):
    """The runner would pass its value instead of the caller's, and results would be wrong."""
    with pytest.raises(ConfigError, match="row_count must be a name that no input or axis has"):
        GraphRunner(
            lambda x, length: x + length,
            {"x": StaticInput((None, 2), "float32")},
            axes=[Axis("length", (1, 2))],
            sizes=[4],
            backend="tape",
            options=RunnerOptions(buffers=BufferOptions(row_count=name)),
        )


@pytest.mark.parametrize("generators", [torch.default_generator, [5], ["cpu"]])
def test_generators_are_a_list_of_generators(generators):
    with pytest.raises(
        ConfigError, match=r"generators(\[0\] must be a torch.Generator| must be a list)"
    ):
        StepState(generators=generators)


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.tensor([3, 4]), torch.tensor([])])
def test_a_tensor_that_is_no_whole_number_is_refused(make_runner, value):
    """It is refused as any other wrong value; a tensor with one integer is accepted."""
    runner = make_runner(lambda tokens: tokens)
    assert runner.dispatcher.dispatch(torch.tensor(3)) is runner.dispatcher.dispatch(3)
    for call in (runner.dispatcher.dispatch, runner.explain, runner.run_in_place):
        with pytest.raises(DescriptorError, match="num_tokens must be a whole number"):
            call(value)
    for fact in ("num_reqs", "uniform", "loras", "ceiling"):
        allowed = r"0 \(max_loras\)" if fact == "loras" else "a whole number"
        with pytest.raises(DescriptorError, match=f"{fact} must be {allowed}"):
            runner(torch.arange(3), **{fact: value})


NOISE = torch.Generator().manual_seed(0)
DRAWING = {
    "by its shape": lambda x: x + torch.rand(x.shape),
    "like it": lambda x: x + torch.randn_like(x),
    "dropout": lambda x: torch.nn.functional.dropout(x + 1, 0.5, training=True),
    "from a generator of its own": lambda x: x + torch.rand(x.shape, generator=NOISE),
}


@pytest.mark.parametrize("how", DRAWING)
def test_padded_draws_are_said(make_runner, how):
    """Padding draws too, which shifts later numbers; exact sizes draw eager's numbers."""
    step, state = DRAWING[how], StepState(generators=[NOISE])
    x, inputs = torch.zeros(3, 2), {"x": StaticInput((None, 2), "float32")}

    def drawn(call):
        torch.manual_seed(1)
        NOISE.manual_seed(1)
        return [call(x) for _ in range(3)]

    exact = make_runner(step, inputs, sizes=(3,), state=state)
    exact.capture()
    assert not exact.explain(3).note
    same(drawn(exact), drawn(step))
    padded = make_runner(step, inputs, sizes=(4,), state=state)
    padded.capture()
    assert "for padding rows too" in str(padded.explain(3))
    assert not padded.explain(4).note
    with pytest.warns(PaddedDrawsWarning, match="first such step had 3 tokens and was padded to 4"):
        padded(x)
    drawn(padded)  # warned once


def test_a_padded_step_that_draws_nothing_has_no_note(make_runner):
    runner = make_runner(lambda tokens: tokens * 2)
    runner.capture()
    assert not runner.explain(3).note
    runner(torch.arange(3))
