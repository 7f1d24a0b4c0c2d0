"""Inputs brought in by one kernel, whose launch is played by reading the same memory."""

from __future__ import annotations

import ctypes
import logging

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit import StaticInput  # noqa: E402
from dispatchkit.backends.cuda_copy import KernelCopy, LaunchConfig, Pieces  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.execute import buffers as module  # noqa: E402
from dispatchkit.execute.buffers import InputBuffers, Loader  # noqa: E402
from dispatchkit.execute.inputs import InputSet  # noqa: E402

SPECS = {
    "x": StaticInput((None, 3), "float32", fill=-1),
    "y": StaticInput((None,), "int64", fill=7),
    "scale": StaticInput((2,), "float32"),
}
CPU = torch.device("cpu")


class Played(TapeBackend):
    """A tape with the kernel's launch."""

    def __init__(self):
        super().__init__()
        self.code, self.launches = 0, []

    def launch(self, config, function, params, extra):
        found = LaunchConfig.from_address(config.value)
        pieces = Pieces.from_address(ctypes.c_void_p.from_address(params.value).value)
        if self.code:
            return self.code
        self.launches.append((found.grid[1], found.stream or 0))
        assert found.grid[0] >= 1
        assert list(found.block) == [256, 1, 1]
        for index in range(found.grid[1]):
            num_bytes = pieces.words[index] * 4
            ctypes.memmove(pieces.targets[index], pieces.sources[index], num_bytes)
        return 0

    def piece_copy(self):
        return KernelCopy(self.launch, ctypes.c_void_p(1))


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch):
    monkeypatch.setattr(module, "COPY_BY_KERNEL", True)


def rows_of(rows, number):
    return [
        torch.full((rows, 3), float(number)),
        torch.full((rows,), number),
        torch.full((2,), float(number)),
    ]


def holds(buffers, call, rows, bucket):
    for (_, spec), seen, value in zip(SPECS.items(), buffers.views(bucket), call, strict=True):
        if spec.batch_dim is None:
            assert torch.equal(seen, value)
        else:
            assert torch.equal(seen[:rows], value)
            assert torch.equal(seen[rows:], torch.full_like(seen[rows:], spec.fill))


@given(st.lists(st.tuples(st.sampled_from(["call", "strided", "reset"]), st.integers(1, 16))))
def test_a_graph_sees_the_rows_of_its_call_and_fill_behind(steps):
    backend = Played()
    buffers = InputBuffers(InputSet(SPECS, CPU), 16, backend=backend)
    loaders = {}
    for number, (what, rows) in enumerate(steps, 1):
        if what == "reset":
            buffers.reset()
            continue
        bucket = next(size for size in (1, 2, 4, 8, 16) if size >= rows)
        loader = loaders.setdefault(rows, Loader(buffers, rows, bucket))
        call = rows_of(rows, number)
        if what == "strided":
            call[0] = torch.arange(3.0 * rows).view(3, rows).T
        before = len(backend.launches)
        loader.load(call, 5)
        holds(buffers, call, rows, bucket)
        if all(value.is_contiguous() for value in call):
            assert backend.launches[before:] in ([(3, 5)], [(5, 5)])
        else:
            assert len(backend.launches) == before


@pytest.mark.parametrize("code", [1, 201])
def test_a_launch_that_is_refused_is_made_up_for(caplog, code):
    backend = Played()
    buffers = InputBuffers(InputSet(SPECS, CPU), 16, backend=backend)
    loader = Loader(buffers, 5, 8)
    loader.load(rows_of(5, 1))
    backend.code = code
    with caplog.at_level(logging.WARNING, "dispatchkit"):
        loader.load(rows_of(5, 2))
    holds(buffers, rows_of(5, 2), 5, 8)
    backend.code = 0
    loader.load(rows_of(5, 3))
    holds(buffers, rows_of(5, 3), 5, 8)
    # Without a context the next thread may have one; what fails otherwise is not tried again.
    assert len(backend.launches) == (2 if code == 201 else 1)
    assert ("torch copies now" in caplog.text) is (code != 201)


@pytest.mark.parametrize(
    "special",
    [
        lambda: torch._neg_view(torch.ones(4)),
        lambda: torch._efficientzerotensor((4,)),
        lambda: torch.nn.Parameter(torch.ones(4), requires_grad=False),
    ],
    ids=["negated", "zeros without memory", "parameter"],
)
def test_tensors_whose_memory_is_not_what_they_are_go_by_torch(special):
    backend = Played()
    buffers = InputBuffers(InputSet({"x": StaticInput((None,), "float32")}, CPU), 4, None, backend)
    Loader(buffers, 4, 4).load([special()])
    assert torch.equal(buffers.tensors[0], special() + 0)
    assert not backend.launches


@pytest.mark.parametrize(
    "spec",
    [
        StaticInput((None,), "bfloat16"),
        StaticInput((3, None), "float32"),
        StaticInput((None, 1 << 14), "int64"),
    ],
    ids=["small words", "other batch dimension", "large"],
)
def test_inputs_that_are_not_for_the_kernel_go_by_torch(spec):
    backend = Played()
    buffers = InputBuffers(InputSet({"x": spec}, CPU), 4, None, backend)
    given = torch.ones(spec.sized(3), dtype=spec.dtype)
    Loader(buffers, 3, 4).load([given])
    assert torch.equal(buffers.views(3)[0], given)
    assert not backend.launches


def test_a_runner_computes_the_same(make_runner):
    backend = Played()
    runner = make_runner(
        lambda x, y: x * 2 + y[:, None], dict(list(SPECS.items())[:2]), backend=backend
    )
    runner.capture()
    for number, rows in enumerate((7, 3, 8, 2, 2, 5)):
        x, y, _ = rows_of(rows, number)
        assert torch.equal(runner(x, y), x * 2 + y[:, None])
    assert len(backend.launches) == 6


def test_without_the_constant_nobody_asks_for_the_kernel(monkeypatch):
    monkeypatch.setattr(module, "COPY_BY_KERNEL", False)
    backend = Played()
    buffers = InputBuffers(InputSet(SPECS, CPU), 16, backend=backend)
    Loader(buffers, 5, 8).load(rows_of(5, 1))
    assert not backend.launches
