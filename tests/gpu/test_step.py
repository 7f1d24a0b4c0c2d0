"""The step's path on a device: host memory, direct launches, merged copies."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from device_steps import SIZES, in_threads, key_of, runner_of  # noqa: E402

from dispatchkit import (  # noqa: E402
    BufferOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.execute.io.staging import StagingBuffers  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# -- host memory that graphs copy; test_host_inputs.py tests inputs of the first node -------

BLOCKS = pytest.mark.parametrize("is_whole", [True, False], ids=["one block", "by input"])
HOST = {
    "tokens": StaticInput((None,), "int64", host=True),
    "scale": StaticInput((None, 3), "float32", fill=0.5, host=True),
}
STEPS = 60


def staged(**settings):
    return runner_of(doubled, HOST, backend=CudaBackend(0, copy_node=False), **settings)


def late_steps(runner, ceiling=2, in_place=False, sizes=(32,)):
    """Run steps on a device that sleeps before each; return the wrong results."""
    kept = []
    for number in range(STEPS):
        rows = sizes[number % len(sizes)]
        torch.cuda._sleep(200_000)
        tokens = np.full(rows, number)
        scale = np.full((rows, 3), number, dtype=np.float32)
        if in_place:
            runner.buffers.wait()
            runner.buffers["tokens"].numpy()[:rows] = tokens
            runner.buffers["scale"].numpy()[:rows] = scale
            result = runner.run_in_place(rows, ceiling=ceiling)
        else:
            result = runner(tokens, scale, ceiling=ceiling)
        kept.append([one.clone() for one in result])
    torch.cuda.synchronize()
    return [
        number
        for number, (tokens, scale) in enumerate(kept)
        if set(tokens.tolist()) != {number + 1} or set(scale.flatten().tolist()) != {2.0 * number}
    ]


def doubled(tokens, scale):
    return tokens + 1, scale * 2


@BLOCKS
@pytest.mark.parametrize("in_place", [False, True], ids=["call", "in place"])
@pytest.mark.parametrize("sizes", [(32,), (32, 3, 16, 1)], ids=["one size", "many sizes"])
def test_host_memory_is_not_written_before_its_copy(monkeypatch, is_whole, in_place, sizes):
    """Each step keeps its rows, for any lag of the device."""
    if not is_whole:
        monkeypatch.setattr("dispatchkit.execute.io.staging.WHOLE_BLOCK_BYTES", 0)
    runner = staged()
    assert runner.controls.launch_path(key_of(32)) == "direct"
    assert late_steps(runner, in_place=in_place, sizes=sizes) == []


def test_without_the_guard_steps_on_a_late_device_are_wrong(monkeypatch):
    runner = staged()
    monkeypatch.setattr(StagingBuffers, "wait", lambda self: None)
    assert len(late_steps(runner)) > STEPS // 2


def test_host_memory_of_pieces_is_not_written_before_its_copy():
    runner = runner_of(
        [graph_piece(doubled), eager_piece(lambda pair: pair)],
        HOST,
        mode="FULL_AND_PIECEWISE",
    )
    assert late_steps(runner, ceiling=1) == []
    assert late_steps(runner, ceiling=2, sizes=(32, 5)) == []
    assert runner.stats().steps_by_mode["PIECEWISE"] == STEPS


@BLOCKS
@pytest.mark.parametrize("ceiling", [2, 0])
def test_host_inputs_in_every_form(monkeypatch, is_whole, ceiling):
    if not is_whole:
        monkeypatch.setattr("dispatchkit.execute.io.staging.WHOLE_BLOCK_BYTES", 0)
    inputs = {
        **HOST,
        "half": StaticInput((None,), "bfloat16", host=True),
        "hidden": StaticInput((None,), "int64", fill=2),
        "wide": StaticInput((2, None), "int32", host=True),
    }

    def mixed(tokens, scale, half, hidden, wide):
        return tokens * hidden, scale.sum(-1), half.float(), wide.sum(0), hidden.sum()

    runner = runner_of(mixed, inputs)
    for rows in (32, 3, 17, 1, 8, 2, 32):
        generator = torch.Generator().manual_seed(rows)
        tokens = torch.randint(0, 99, (rows,), generator=generator)
        scale = torch.rand(rows, 3, generator=generator)
        half = torch.rand(rows, generator=generator).to(torch.bfloat16)
        wide = torch.randint(0, 99, (2, rows), generator=generator, dtype=torch.int32)
        hidden = (tokens + 1).to(DEVICE)
        got = runner(
            tokens.tolist(), scale.pin_memory(), half, hidden, wide.numpy(), ceiling=ceiling
        )
        want = mixed(tokens, scale, half, hidden.cpu(), wide)
        for one, other in zip(got[:4], want[:4], strict=True):
            torch.testing.assert_close(one.cpu(), other)
        bucket = next(size for size in SIZES if size >= rows) if ceiling else rows
        same(got[4].cpu(), want[4] + 2 * (bucket - rows))


# -- launches ---------------------------------------------------------------------------------


def test_direct_launches_on_other_streams_and_threads():
    runner = runner_of(lambda x: x * 2 + 1, {"x": StaticInput((None,), "int64")})
    results = {}

    def work(name):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for number in range(40):
                x = torch.full((1 + number % 32,), number, device=DEVICE)
                results[name, number] = runner(x)
        stream.synchronize()

    in_threads(3, work)
    torch.cuda.synchronize()
    for (_, number), got in results.items():
        same(got.cpu(), torch.full((1 + number % 32,), number * 2 + 1))
    assert runner.controls.launch_path(key_of(32)) == "direct"


def test_a_step_in_place_from_a_thread_that_did_nothing_else():
    runner = runner_of(lambda x: x * 2, {"x": StaticInput((None,), "int64")}, outputs="view")
    runner.buffers["x"][:3] = torch.arange(3, device=DEVICE)
    torch.cuda.synchronize()
    found = []
    thread = threading.Thread(target=lambda: found.append(runner.run_in_place(3)))
    thread.start()
    thread.join()
    same(found[0].cpu(), torch.arange(3) * 2)


def test_graphs_that_draw_go_through_torch():
    runner = runner_of(lambda x: x + torch.rand_like(x), {"x": StaticInput((None,), "float32")})
    assert "random numbers" in runner.controls.launch_path(key_of(32))
    x = torch.zeros(32, device=DEVICE)
    first, second = runner(x), runner(x)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(5)
    got = runner(x)
    torch.cuda.manual_seed(5)
    same(got, torch.rand_like(x))


def test_a_step_inside_a_capture_of_the_caller_is_part_of_it():
    runner = runner_of(lambda x: x * 3, {"x": StaticInput((None,), "int64")})
    x = torch.arange(4, device=DEVICE)
    runner(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = runner(x)
    x.fill_(5)
    graph.replay()
    same(out.cpu(), torch.full((4,), 15))
    assert runner.stats().eager_by_reason == {"inside_capture": 1}


# -- copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step_in_place", [False, True], ids=["call", "in place"])
def test_inputs_of_several_types_and_layouts(step_in_place):
    inputs = {
        "tokens": StaticInput((None,), "int64", fill=-1),
        "short": StaticInput((None,), "int32", fill=4),
        "hidden": StaticInput((None, 8), "bfloat16", fill=0.25),
        "mask": StaticInput((3, None), "bool", fill=True),
        "table": StaticInput((5,), "int64"),
    }

    def step(tokens, short, hidden, mask, table):
        total = tokens.sum() + short.sum() + mask.sum() + table.sum()
        return tokens + short, hidden.float().sum(-1), mask.sum(0), total

    runner = runner_of(step, inputs)
    for rows in (32, 5, 17, 16, 3, 4, 1, 32, 31):
        generator = torch.Generator(DEVICE).manual_seed(rows)

        def draw(*shape, generator=generator):
            return torch.randint(0, 99, shape, generator=generator, device=DEVICE)

        given = {
            "tokens": draw(2 * rows)[::2],
            "short": draw(rows).int(),
            "hidden": draw(8, rows).t().to(torch.bfloat16),
            "mask": draw(3, rows) > 50,
            "table": draw(5),
        }
        want = step(**given)
        if step_in_place:
            for name, value in given.items():
                target = runner.buffers[name]
                if name == "mask":
                    target[:, :rows] = value
                elif name == "table":
                    target.copy_(value)
                else:
                    target[:rows] = value
            got = runner.run_in_place(rows)
        else:
            got = runner(**given)
        for one, other in zip(got[:3], want[:3], strict=True):
            torch.testing.assert_close(one, other)
        missing = next(size for size in SIZES if size >= rows) - rows
        same(got[3], want[3] + missing * (-1 + 4 + 3))


# -- copies at the start of a graph ---------------------------------------------------------

MANY = tuple(range(1, 40, 2))
TYPES = ("int64", "int32", "bfloat16", "float16", "float32", "float64", "uint8", "bool")


def sums(**inputs):
    return [value.float().sum() for value in inputs.values()]


def named(count, run=sums):
    scope = {"run": run}
    listing = ", ".join(f"x{index}" for index in range(count))
    exec(f"def named({listing}): return run(**locals())", scope)  # noqa: S102
    return scope["named"]


def check_calls(runner, specs, calls, bucket_of):
    """Compare sums over whole buckets with those of the expected rows and fill."""
    for rows, values in calls:
        got = runner(*values)
        for one, value, spec in zip(got, values, specs.values(), strict=True):
            missing = 0 if spec.batch_dim is None else bucket_of(rows) - rows
            row = value.numel() // rows
            torch.testing.assert_close(one, value.float().sum() + missing * row * float(spec.fill))


def small(rows, spec, number, offset=0):
    """Return small integers, at an unaligned address if requested."""
    shape = spec.sized(rows)
    flat = torch.arange(shape.numel() + offset, device=DEVICE).add(number) % 5
    return flat.to(spec.dtype)[offset:].view(shape)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 12, 20])
def test_the_copy_node_for_every_number_and_type_of_inputs(count):
    specs = {
        f"x{index}": StaticInput(
            (None, 3) if index % 3 else (None,), TYPES[index % len(TYPES)], fill=index % 2
        )
        for index in range(count)
    }
    runner = runner_of(
        named(count),
        specs,
        sizes=MANY,
        options=RunnerOptions(buffers=BufferOptions(output_batch_dims=None)),
    )
    assert runner.controls.input_path(key_of(39)) == "node"
    calls = [
        (rows, [small(rows, spec, number, number % 4) for spec in specs.values()])
        for number, rows in enumerate([39, 2, 17, 38, 1, *range(1, 40), 39])
    ]
    check_calls(runner, specs, calls, lambda rows: rows + (rows + 1) % 2)
    assert runner.controls.input_path(key_of(39)) == "node"


def test_the_copy_node_on_several_streams_and_threads():
    """Each step reads its own tensors, even if they are dropped before the device reads them."""
    inputs = {
        "x": StaticInput((None, 3), "float32", fill=-1),
        "y": StaticInput((None,), "int64", fill=7),
    }
    runner = runner_of(lambda x, y: x * 2 + y[:, None], inputs)
    results, failures = [], []

    def work(first):
        try:
            with torch.cuda.stream(torch.cuda.Stream() if first else torch.cuda.default_stream()):
                for number in range(first, first + 60):
                    rows = number * 7 % 32 + 1
                    # Dropped immediately: the device reads it later, in stream order.
                    x = torch.full((rows, 3), float(number), device=DEVICE)
                    y = torch.arange(rows, device=DEVICE) + number
                    torch.cuda._sleep(20_000)
                    results.append((number, rows, runner(x, y)))
                    del x, y
                    torch.full((rows, 3), -5.0, device=DEVICE)
        except Exception as error:  # noqa: BLE001 - reported below
            failures.append(error)

    in_threads(3, lambda index: work(100 * index))
    torch.cuda.synchronize()
    assert failures == []
    assert len(results) == 180
    for number, rows, got in results:
        wanted = 2.0 * number + torch.arange(rows) + number
        same(got.cpu(), wanted[:, None].expand(rows, 3).float().contiguous())
    assert runner.controls.input_path(key_of(32)) == "node"
