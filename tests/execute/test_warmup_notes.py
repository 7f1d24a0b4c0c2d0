"""A first capture uses what its warmup recorded, if the backend supports it."""

from __future__ import annotations

import attrs
import pytest

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from dispatchkit import (  # noqa: E402
    BufferOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.backends.watching.dispatch_mode import tensors_in  # noqa: E402
from dispatchkit.execute import PaddedDrawsWarning  # noqa: E402

INPUT = {"x": StaticInput((None, 4), "float32")}


class Notes:
    def __init__(self, *, is_plain):
        self.is_plain, self.given = is_plain, {}

    def record(self, func, args, kwargs):
        for tensor in tensors_in((*args, *kwargs.values())):
            storage = tensor.untyped_storage()
            self.given.setdefault(storage._cdata, StorageWeakRef(storage))

    def alive(self):
        found = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.given.values())
        return [one for one in found if one is not None]


class Holding:
    def __init__(self, graph, holds):
        self._graph, self.holds, self.host_tensors = graph, holds, []

    def __getattr__(self, name):
        return getattr(self._graph, name)


class NotingTape(TapeBackend):
    """A tape that records how each capture was requested: watched, with notes, or neither."""

    is_plain = True

    def __init__(self):
        super().__init__()
        self.ways, self.graphs, self.may_draw = [], [], []

    @property
    def capabilities(self):
        return attrs.evolve(super().capabilities, unwatched_captures=True)

    def new_notes(self):
        return Notes(is_plain=self.is_plain)

    def capture(self, run, *, watched=True, notes=None, compiled=False, draws=True, **settings):
        self.ways.append("by notes" if notes is not None else "watched" if watched else "plainly")
        self.may_draw.append(draws)
        graph = super().capture(run, **settings)
        self.graphs.append(Holding(graph, notes.alive() if notes is not None else []))
        return self.graphs[-1]


@pytest.fixture
def tape():
    return NotingTape()


def test_first_capture_goes_by_its_warmup_and_holds_what_that_was_given(make_runner, tape):
    """A cache that the warmup fills is kept and read by the graph."""
    weight, made = torch.eye(4), []

    def step(x):
        if not made:
            made.append(torch.ones(4))
        y = torch.tanh(x @ weight)
        return (y * made[0]).relu(), y[:1] * 2

    runner = make_runner(
        step,
        INPUT,
        backend=tape,
        options=RunnerOptions(buffers=BufferOptions(output_batch_dims=(0, None))),
    )
    assert runner.capture().failed == {}
    assert tape.ways == ["by notes", "plainly", "plainly", "plainly"]
    kept = {weight.untyped_storage()._cdata, made[0].untyped_storage()._cdata}
    buffers = {one.untyped_storage()._cdata for one in runner.lanes[0].lane.buffers.tensors}
    for graph in tape.graphs:
        # No intermediates or results of the warmup, which would waste memory.
        assert {storage._cdata for storage in graph.holds} == kept | buffers
    x = torch.arange(12.0).view(3, 4)
    torch.testing.assert_close(runner(x), step(x))


def test_what_only_a_watch_can_tell_is_watched(make_runner, tape):
    tape.is_plain = False
    runner = make_runner(lambda x: x + 1, INPUT, backend=tape)
    runner.capture()
    assert tape.ways == ["watched", "plainly", "plainly", "plainly"]


def test_notes_are_of_the_warmup_just_before(make_runner, tape, keys):
    """Weights may differ by the time of a later capture."""
    runner = make_runner(lambda x: x + 1, INPUT, backend=tape)
    runner.controls.warm_up()
    runner.capture([keys.full(4)])
    assert tape.ways == ["watched"]
    runner.invalidate()  # so that the next warmup is watched again and has notes
    runner.capture([keys.full(4)])
    assert tape.ways == ["watched", "by notes"]


def test_pieces_are_watched_each(make_runner, tape):
    pieces = [graph_piece(lambda x: x * 2), eager_piece(lambda x: x + 1), graph_piece(torch.abs)]
    runner = make_runner(pieces, INPUT, backend=tape, mode="PIECEWISE", sizes=(2, 4))
    runner.capture()
    assert tape.ways == ["watched", "watched", "plainly", "plainly"]


def test_inputs_of_the_host_are_watched(make_runner, tape):
    """Only the graph contains their copy."""
    inputs = {"x": attrs.evolve(INPUT["x"], host=True)}
    runner = make_runner(lambda x: x + 1, inputs, backend=tape)
    runner.capture()
    assert tape.ways[0] == "watched"


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("does_draw", [False, True])
def test_a_step_draws_if_its_warmup_moved_a_generator(make_runner, tape, is_plain, does_draw):
    """Attention may draw according to its operations, but does not without dropout."""
    tape.is_plain = is_plain

    def step(x):
        heads = x[:, None, None]
        y = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0, 0]
        # The generator is at its old offset at the end. A step that names fork_rng would run eager.
        (name,) = (one for one in dir(torch.random) if one.startswith("fork"))
        with getattr(torch.random, name)(devices=()):
            return y + torch.rand(1) if does_draw else y

    runner = make_runner(step, INPUT, backend=tape, sizes=(4,))
    assert runner.capture().failed == {}
    assert tape.may_draw == [does_draw]
    assert bool(runner.explain(3).note) is does_draw
    if does_draw:
        with pytest.warns(PaddedDrawsWarning):
            runner(torch.ones(3, 4))
    else:
        runner(torch.ones(3, 4))
