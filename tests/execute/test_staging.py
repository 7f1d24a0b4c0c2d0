"""Host inputs: accepted values, values that graphs read, and the reuse of memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from dispatchkit import (  # noqa: E402
    StaticInput,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import CaptureError, InputError  # noqa: E402
from dispatchkit.execute import sample_inputs  # noqa: E402
from dispatchkit.execute.io.staging import StagingBuffers  # noqa: E402

HOST = {
    "tokens": StaticInput((None,), "int64", fill=7, host=True),
    "scale": StaticInput((None, 2), "float32", fill=0.5, host=True),
}


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def step(tokens, scale):
    return tokens * 2, scale.sum(-1), tokens.sum(), scale.sum()


def call(rows, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(1, 100, rows), generator.random((rows, 2), dtype=np.float32)


def expected(tokens, scale, bucket):
    """Return the result of a replay at a bucket with fill after the call's rows."""
    tokens, scale = torch.tensor(tokens), torch.tensor(scale)
    missing = bucket - len(tokens)
    return (
        tokens * 2,
        scale.sum(-1),
        tokens.sum() + 7 * missing,
        torch.cat([scale, torch.full((missing, 2), 0.5)]).sum(),
    )


BUCKETS = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 7: 8, 8: 8}


# -- accepted values ------------------------------------------------------------------------


@pytest.mark.parametrize("ceiling", [2, 0])
@pytest.mark.parametrize(
    "form",
    [
        lambda array: array,
        torch.from_numpy,
        lambda array: array.tolist(),
        lambda array: np.asfortranarray(np.repeat(array, 2, 0))[::2],
        lambda array: torch.from_numpy(array).requires_grad_(array.dtype == np.float32),
    ],
    ids=["array", "tensor", "list", "strided", "under no_grad"],
)
def test_arrays_cpu_tensors_and_lists_give_the_same(make_runner, quiet, form, ceiling):
    runner = make_runner(step, HOST, proves=False)
    runner.capture()
    for rows in (8, 3, 5, 1):
        tokens, scale = call(rows, rows)
        with torch.no_grad():
            got = runner(form(tokens), form(scale), ceiling=ceiling)
        want = expected(tokens, scale, BUCKETS[rows] if ceiling else rows)
        same(got[:3], want[:3])
        torch.testing.assert_close(got[3], want[3])


def test_host_inputs_inside_somebody_elses_capture_are_refused(make_runner, backend):
    """Otherwise every replay of that graph would use the capture's values."""
    runner = make_runner(step, HOST, proves=False)
    runner.capture()
    runner(*call(3))
    for run in (lambda: runner(*call(3)), lambda: runner.run_in_place(3)):
        with pytest.raises(CaptureError, match="'tokens' cannot be used inside") as caught:
            backend.capture(run, stream=backend.new_stream(), pool=backend.new_pool())
        assert isinstance(caught.value.__cause__, InputError)
    same(runner(*call(3))[0], torch.tensor(call(3)[0]) * 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "float16", "uint8"])
def test_types_that_numpy_lacks_go_bit_by_bit(make_runner, dtype):
    spec = StaticInput((None,), dtype, fill=1, host=True)
    runner = make_runner(lambda x: x.to(torch.float32), {"x": spec})
    assert runner.capture().failed == {}
    x = torch.tensor([0.0, 1.0, 2.0]).to(spec.dtype)
    same(runner(x), x.to(torch.float32))
    same(runner(x, ceiling=0), x.to(torch.float32))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros(3, np.int32), r"host=True.*array of int32"),
        (torch.zeros(3), r"host=True.*torch\.float32"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "a tensor on meta"),
        (np.zeros((3, 2), np.int64), r"shape \(rows\)"),
        ([1.5, 2.0, 3.0], "list of torch.int64"),
        ([[1], [2, 3]], "list of torch.int64"),
        ("abc", "numpy array, a CPU tensor"),
        (None, "numpy array, a CPU tensor"),
        (np.zeros(3, ">i8"), "array of >i8"),
    ],
)
def test_what_does_not_fit_is_refused(make_runner, given, message):
    runner = make_runner(lambda tokens: tokens, {"tokens": HOST["tokens"]})
    runner.capture()
    with pytest.raises(InputError, match=message):
        runner(given)


def test_an_array_for_a_type_that_numpy_lacks_is_refused(make_runner):
    runner = make_runner(lambda x: x, {"x": StaticInput((None,), "bfloat16", host=True)})
    with pytest.raises(InputError, match="must be a CPU tensor of"):
        runner(np.zeros(3, np.int16))


def test_a_list_that_its_type_cannot_hold_is_refused(make_runner):
    runner = make_runner(lambda x: x, {"x": StaticInput((None,), "int8", host=True)})
    with pytest.raises(InputError, match="list of torch"):
        runner([1, 300])


def test_a_host_tensor_that_requires_a_gradient_is_refused(make_runner):
    runner = make_runner(lambda x: x, {"x": StaticInput((None,), "float32", host=True)})
    with pytest.raises(InputError, match="gradient"):
        runner(torch.zeros(3, requires_grad=True))


# -- values read by a graph -----------------------------------------------------------------


@pytest.mark.parametrize("is_whole", [True, False], ids=["one block", "by input"])
def test_rows_behind_a_call_are_fill(make_runner, monkeypatch, is_whole):
    if not is_whole:
        monkeypatch.setattr("dispatchkit.execute.io.staging.WHOLE_BLOCK_BYTES", 0)
    runner = make_runner(step, HOST, proves=False)
    runner.capture()
    for number, rows in enumerate((8, 3, 5, 1, 7, 2, 4, 8, 3)):
        if number == 6:
            runner.lanes[0].lane.buffers.poison()
        tokens, scale = call(rows, number)
        got = runner(tokens, scale)
        want = expected(tokens, scale, BUCKETS[rows])
        same(got[:3], want[:3])
        torch.testing.assert_close(got[3], want[3])


# -- in place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ceiling", [2, 0])
def test_pinned_memory_can_be_written_in_place(make_runner, quiet, ceiling):
    runner = make_runner(step, HOST, proves=False)
    runner.capture()
    for rows in (8, 3, 5):
        tokens, scale = call(rows, rows)
        runner.buffers.wait()
        runner.buffers["tokens"].numpy()[:rows] = tokens
        runner.buffers["scale"][:rows] = torch.from_numpy(scale)
        got = runner.run_in_place(rows, ceiling=ceiling)
        want = expected(tokens, scale, BUCKETS[rows] if ceiling else rows)
        same(got[:3], want[:3])
        torch.testing.assert_close(got[3], want[3])


# -- rewritten memory -----------------------------------------------------------------------


def results_on_a_late_device(make_runner, seed, mode, step_in_place):
    """Return actual and expected results of steps on a stream that lags behind the host."""
    backend = TapeBackend(scheduler=seed)
    body = lambda tokens: tokens + 1  # noqa: E731
    runner = make_runner(
        [graph_piece(body)] if mode == 1 else body,
        {"tokens": StaticInput((None,), "int64", host=True)},
        backend=backend,
        mode="PIECEWISE" if mode == 1 else "FULL",
    )
    runner.capture()
    stream = backend.new_stream()
    kept, wanted = [], []
    with backend.use_stream(stream):
        for number in range(6):
            tokens = np.full(4, number)
            if step_in_place:
                runner.buffers.wait()
                runner.buffers["tokens"].numpy()[:4] = tokens
                kept.append(runner.run_in_place(4))
            else:
                kept.append(runner(tokens))
            wanted.append(torch.from_numpy(tokens) + 1)
    backend.synchronize()
    return kept, wanted


@pytest.mark.slow_except("FULL-call", "PIECEWISE-in place")
@pytest.mark.parametrize("step_in_place", [False, True], ids=["call", "in place"])
@pytest.mark.parametrize("mode", [2, 1], ids=["FULL", "PIECEWISE"])
def test_memory_is_not_written_before_its_copy_has_run(make_runner, mode, step_in_place):
    """Each step keeps its rows, for any lag of the device."""
    for seed in range(5):
        same(*results_on_a_late_device(make_runner, seed, mode, step_in_place))


@pytest.mark.parametrize("mode", [2, 1], ids=["FULL", "PIECEWISE"])
def test_without_the_guard_steps_on_a_late_device_are_wrong(make_runner, monkeypatch, mode):
    monkeypatch.setattr(StagingBuffers, "wait", lambda self: None)
    kept, wanted = results_on_a_late_device(make_runner, 0, mode, step_in_place=False)
    assert any(not torch.equal(got, want) for got, want in zip(kept, wanted, strict=True))


def test_host_inputs_of_measured_steps_are_in_host_memory():
    specs = {**HOST, "slot": StaticInput((None,), "int64")}
    made = sample_inputs(specs, 3, torch.device("meta"))
    assert {name: one.device.type for name, one in made.items()} == {
        "tokens": "cpu",
        "scale": "cpu",
        "slot": "meta",
    }
