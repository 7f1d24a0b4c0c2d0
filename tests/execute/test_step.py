"""The path of a step: copies with tails, launches, ready results, steps in place."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")


from dispatchkit import (  # noqa: E402
    DispatchConfig,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import InputError, ReplayError, UnknownNameError  # noqa: E402
from dispatchkit.execute.io.buffers import InputBuffers  # noqa: E402
from dispatchkit.execute.io.inputs import InputSet  # noqa: E402
from dispatchkit.execute.io.transports import CopyTransport  # noqa: E402

TWO_TYPES = {
    "tokens": StaticInput((None,), "int64", fill=-1),
    "scale": StaticInput((None, 2), "float32", fill=0.5),
    "slots": StaticInput((None,), "int64", fill=7),
    "mask": StaticInput((3, None), "bool"),
    "table": StaticInput((4,), "float32"),
}


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def rows_of(inputs, rows, seed):
    """Return a call with ``number`` rows, none of them fill."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, spec in inputs.items():
        values = torch.randint(100, 200, spec.sized(rows), generator=generator)
        made[name] = values.to(spec.dtype)
    return made


# -- inputs -----------------------------------------------------------------------------------


def test_inputs_of_one_type_and_their_tails_go_in_one_copy(monkeypatch):
    made = []
    plain = torch._foreach_copy_

    def counted(targets, sources):
        made.append(len(targets))
        return plain(targets, sources)

    monkeypatch.setattr("dispatchkit.execute.io.transports._copy", counted)
    buffers = InputBuffers(InputSet(TWO_TYPES, torch.device("cpu")), 16)
    for rows, copies in ((16, [2, 2, 1]), (16, [2, 2, 1]), (5, [4, 3, 2]), (5, [2, 2, 1])):
        made.clear()
        bucket = 16 if rows == 16 else 8
        CopyTransport(buffers, rows, bucket).load(list(rows_of(TWO_TYPES, rows, 0).values()), False)
        assert made == copies


def test_a_copy_that_fails_leaves_nothing_marked_clean(monkeypatch):
    buffers = InputBuffers(InputSet(TWO_TYPES, torch.device("cpu")), 16)

    def broken(targets, sources):
        raise RuntimeError("no copy")

    call = list(rows_of(TWO_TYPES, 12, 0).values())
    CopyTransport(buffers, 16, 16).load(list(rows_of(TWO_TYPES, 16, 1).values()), False)
    with monkeypatch.context() as patched:
        patched.setattr("dispatchkit.execute.io.transports._copy", broken)
        with pytest.raises(RuntimeError, match="no copy"):
            CopyTransport(buffers, 12, 16).load(call, False)
    CopyTransport(buffers, 3, 16).load(list(rows_of(TWO_TYPES, 3, 2).values()), False)
    tail = buffers.tensors[0][3:]
    same(tail, torch.full_like(tail, -1))


# -- results ----------------------------------------------------------------------------------


def test_views_are_made_once(make_runner):
    runner = make_runner(lambda tokens: (tokens + 1, tokens.sum()), outputs="view")
    runner.capture()
    first = runner(torch.arange(3))
    assert runner(torch.arange(3)) is first
    same(first[0], torch.arange(3) + 1)


def test_containers_that_a_caller_could_change_are_fresh(make_runner):
    runner = make_runner(lambda tokens: {"out": tokens + 1}, outputs="view")
    runner.capture()
    first = runner(torch.arange(3))
    first["out"] = None
    same(runner(torch.arange(3)), {"out": torch.arange(3) + 1})


@pytest.mark.parametrize("result", ["leaf", "tuple", "nested"])
def test_owned_results_keep_their_values(make_runner, result):
    """A result kept over later calls belongs to the caller."""
    make = {
        "leaf": lambda x: x + 1,
        "tuple": lambda x: (x + 1, x.sum()),
        "nested": lambda x: {"a": [x + 1], "b": (x.sum(), x.shape[0])},
    }[result]
    runner = make_runner(make, {"x": StaticInput((None,), "int64")})
    runner.capture()
    kept = [runner(torch.arange(rows)) for rows in (3, 5, 3, 8)]
    for rows, got in zip((3, 5, 3, 8), kept, strict=True):
        want = make(torch.arange(rows))
        same(got, want)


def test_plans_beyond_the_bound_are_made_again(make_runner, monkeypatch):
    monkeypatch.setattr("dispatchkit.execute.lane.MAX_CACHING_PLANS", 2)
    runner = make_runner(lambda tokens: tokens + 1)
    runner.capture()
    for rows in (1, 2, 3, 4, 5, 6, 1, 2, 3):
        same(runner(torch.arange(rows)), torch.arange(rows) + 1)
    assert len(runner.lanes[0].lane._ready) == 2


# -- in place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ceiling", [2, 1, 0])
@pytest.mark.parametrize("outputs", ["owned", "view"])
def test_a_step_in_place_is_a_call_on_what_the_buffers_hold(make_runner, quiet, ceiling, outputs):
    def pieces():
        return [
            graph_piece(lambda tokens: tokens * 2),
            eager_piece(lambda x: x.cumsum(0)),
            graph_piece(lambda x: x + 1),
        ]

    runner = make_runner(pieces(), outputs=outputs)
    runner.capture()
    for rows in (8, 3, 5, 1, 5, 5, 2):
        given = torch.randint(1, 100, (rows,))
        runner.buffers["tokens"][:rows] = given
        same(runner.run_in_place(rows, ceiling=ceiling), (given * 2).cumsum(0) + 1)
    assert sum(runner.stats().steps_by_mode.values()) == 7


def test_eager_in_place_gives_results_of_their_own(make_runner, quiet):
    runner = make_runner(lambda tokens: tokens)
    runner.buffers["tokens"][:3] = torch.arange(3)
    result = runner.run_in_place(3, ceiling=0)
    runner.buffers["tokens"].zero_()
    same(result, torch.arange(3))


@pytest.mark.filterwarnings("ignore::dispatchkit.keys.capture_sizes.CaptureSizeWarning")
def test_a_step_in_place_beyond_the_buffers_says_what_to_do(make_runner, quiet):
    runner = make_runner(lambda tokens: tokens, max_num_tokens=20)
    runner.capture()
    with pytest.raises(InputError, match=r"at most 8 rows.*Call the runner with tensors"):
        runner.run_in_place(9)
    assert runner.stats().failed_steps == 1


def test_buffers_are_found_by_name(make_runner):
    runner = make_runner(lambda tokens: tokens)
    assert list(runner.buffers) == ["tokens"]
    assert "tokens" in runner.buffers
    assert runner.buffers.num_rows == 8
    runner.buffers.wait()  # no host inputs, so nothing to wait for
    with pytest.raises(UnknownNameError, match="'tokens'"):
        runner.buffers["token"]


# -- recording --------------------------------------------------------------------------------


def test_a_recording_holds_the_steps_while_it_runs(make_runner, quiet):
    runner = make_runner(
        lambda tokens: tokens, options=RunnerOptions(config=DispatchConfig(max_num_seqs=8))
    )
    runner.capture()
    runner(torch.arange(1))
    recorder = runner.start_recording()
    runner(torch.arange(3), num_reqs=2)
    runner(torch.arange(5), num_reqs=5, uniform=1)
    with pytest.raises(InputError):
        runner(torch.arange(3.0))
    runner.run_in_place(2, 1)
    runner.stop_recording()
    runner(torch.arange(4))
    steps = [(s.num_tokens, s.num_reqs, s.uniform_decode) for s in recorder.trace()]
    assert steps == [(3, 2, False), (5, 5, True), (2, 1, False)]


def test_a_step_that_captures_first_is_recorded_once(make_runner):
    runner = make_runner(lambda tokens: tokens, lazy=True)
    recorder = runner.start_recording()
    runner(torch.arange(3))
    assert recorder.num_steps == 1
    assert runner.stats().captures == 1


# -- launching directly -----------------------------------------------------------------------


class DirectGraph:
    """A graph of the tape with a handle."""

    def __init__(self, graph, backend):
        self._graph, self._backend = graph, backend
        self.raw_exec_handle = id(self)
        backend.by_handle[id(self)] = graph
        self.is_unsettled = backend.starts_unsettled

    @property
    def outputs(self):
        return self._graph.outputs

    @property
    def has_random_state(self):
        return self.is_unsettled or self._graph.has_random_state

    def replay(self):
        self.is_unsettled = False
        self._backend.replays += 1
        self._graph.replay()

    def release(self):
        self._graph.release()


class DirectTape(TapeBackend):
    """A tape whose graphs have direct launches, as on a device."""

    def __init__(self):
        super().__init__()
        self.by_handle, self.code = {}, 0
        self.replays = self.direct = 0
        self.starts_unsettled = False
        self.streams = []

    def direct_launch(self, graph):
        def launch(graph, stream):
            self.direct += 1
            self.streams.append(stream.value or 0)
            if not self.code:
                self.by_handle[graph.value].replay()
            return self.code

        return launch, ctypes.c_void_p(graph.raw_exec_handle)

    def capture(self, run, **options):
        return DirectGraph(super().capture(run, **options), self)


def test_a_graph_without_random_numbers_is_launched_directly(make_runner, keys):
    backend = DirectTape()
    runner = make_runner(lambda tokens: tokens + 1, backend=backend, proves=False)
    runner.capture()
    for rows in (3, 3, 5):
        same(runner(torch.arange(rows)), torch.arange(rows) + 1)
    assert (backend.direct, backend.replays) == (3, 0)
    assert runner.controls.launch_path(keys.full(4)) == "direct"
    other = backend.new_stream()
    with backend.use_stream(other):
        runner(torch.arange(3))
    assert backend.streams[-1] == other.handle


@pytest.mark.filterwarnings("ignore:The step draws random numbers")
def test_a_graph_that_draws_is_replayed_by_torch(make_runner, keys):
    backend = DirectTape()
    runner = make_runner(
        lambda tokens: tokens + torch.rand(tokens.shape), backend=backend, proves=False
    )
    runner.capture()
    for _ in range(3):
        runner(torch.arange(3))
    assert (backend.direct, backend.replays) == (0, 3)
    assert "random numbers" in runner.controls.launch_path(keys.full(4))


@pytest.mark.filterwarnings("ignore:The step draws random numbers")
def test_a_graph_that_turns_out_to_draw_nothing_is_launched_directly_from_then_on(make_runner):
    backend = DirectTape()
    backend.starts_unsettled = True
    runner = make_runner(lambda tokens: tokens + 1, backend=backend, proves=False)
    runner.capture()
    for _ in range(3):
        same(runner(torch.arange(3)), torch.arange(3) + 1)
    assert (backend.direct, backend.replays) == (2, 1)


def test_pieces_say_why_they_are_not_launched_directly(make_runner, keys):
    runner = make_runner(
        [graph_piece(lambda tokens: tokens), eager_piece(lambda x: x + 1)], backend=DirectTape()
    )
    runner.capture()
    assert "pieces" in runner.controls.launch_path(keys.piecewise(4))


def test_a_refused_direct_launch_is_a_failed_replay(make_runner, quiet):
    backend = DirectTape()
    runner = make_runner(lambda tokens: tokens + 1, backend=backend)
    runner.capture()
    runner(torch.arange(3))
    backend.code = 700
    same(runner(torch.arange(3)), torch.arange(3) + 1)  # eager, because nothing had run
    assert runner.stats().replay_failures == 1
    assert runner.stats().eager_by_reason == {"replay_failed": 1}


def test_a_refused_direct_launch_of_a_step_with_state_raises(make_runner, quiet):
    backend = DirectTape()
    total = torch.zeros((), dtype=torch.int64)

    def step(tokens):
        total.add_(tokens.sum())
        return tokens + total

    runner = make_runner(step, backend=backend, state=[total])
    runner.capture()
    backend.code = 700
    with pytest.raises(ReplayError, match="CUDA error 700"):
        runner(torch.arange(3))


def test_check_mode_compares_what_was_launched_directly(make_runner):
    backend = DirectTape()
    runner = make_runner(
        lambda tokens: tokens + 1,
        backend=backend,
        outputs="view",
        options=RunnerOptions(check=1),
        proves=False,
    )
    runner.capture()
    for rows in (3, 5, 3, 8):
        same(runner(torch.arange(rows)), torch.arange(rows) + 1)
    assert (backend.direct, backend.replays) == (4, 0)
    runner.buffers["tokens"][:3] = torch.arange(3)
    same(runner.run_in_place(3), torch.arange(3) + 1)
    assert backend.direct == 5
    assert runner.stats().steps_by_mode["FULL"] == 5
