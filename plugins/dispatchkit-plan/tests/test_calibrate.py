"""Calibration: measured times, their steps, and leftovers."""

from __future__ import annotations

import sys
from collections import Counter
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    Axis,
    BufferOptions,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import CaptureError, ConfigError, DispatchkitError  # noqa: E402

from dispatchkit_plan.calibration.calibrate import calibrate, load_runner  # noqa: E402
from dispatchkit_plan.calibration.capture_memory import forecast  # noqa: E402
from dispatchkit_plan.calibration.graph_memory import forecast_graph_memory  # noqa: E402
from dispatchkit_plan.costs import load_cost_model, save_cost_model  # noqa: E402

INPUTS = {"rows": StaticInput((None, 4), "float32")}
# Explicit, because a GPU would be used if present.
ON_TAPE = {"mode": "FULL", "backend": "tape", "samples": 1}


class ClockEvent:
    """Reads the backend's clock when it is recorded."""

    def __init__(self, backend):
        self._backend = backend
        self.at = 0.0

    def record(self, stream=None):
        self.at = self._backend.now_us

    def wait(self, stream=None):
        """All streams here are in order."""

    def query(self):
        return True

    def synchronize(self):
        """Nothing is in flight."""

    def elapsed_us(self, end):
        return end.at - self.at


class ClockedGraph:
    def __init__(self, graph, backend, rows):
        self._graph, self._backend, self._rows = graph, backend, rows

    def __getattr__(self, name):
        return getattr(self._graph, name)

    def replay(self):
        self._graph.replay()
        self._backend.now_us += 10.0 + self._rows


class ClockedTape(TapeBackend):
    """A tape with its own clock: a replay takes 10 us plus 1 us per row."""

    def __init__(self):
        super().__init__()
        self.now_us = 0.0
        self.rows_seen = 0
        self.captured = []

    def new_event(self, *, timing=False):
        return ClockEvent(self)

    def capture(self, run, **options):
        before = self.now_us
        graph = super().capture(run, **options)
        self.now_us = before  # a capture takes no time
        self.captured.append(self.rows_seen)
        return ClockedGraph(graph, self, self.rows_seen)


@pytest.fixture
def tape():
    return ClockedTape()


@pytest.fixture
def step(tape):
    """Eager takes 100 us plus 2 us per row."""

    def run(rows):
        tape.rows_seen = len(rows)
        tape.now_us += 100.0 + 2.0 * len(rows)
        return rows * 2

    return run


def test_eager_is_timed_at_its_size_and_a_replay_at_the_captured_one(tape, step):
    model = calibrate(
        step, inputs=INPUTS, sizes=[1, 4, 8], eager_sizes=[3, 8, 20], mode="FULL", backend=tape
    )
    assert model.eager_us.points == ((3, 106.0), (8, 116.0), (20, 140.0))
    assert model.graph_us.points == ((1, 11.0), (4, 14.0), (8, 18.0))
    assert model.piecewise_us is None
    assert [size for size, _ in model.capture_us.points] == [1, 4, 8]


@pytest.mark.parametrize(
    ("growth", "says"),
    [
        (0.0, "samples is at most 0.0% of their median"),
        (0.002, "The samples vary: the interquartile range of a step's samples is up to "),
        (0.02, "The machine was busy"),
    ],
)
def test_times_of_a_busy_machine_are_not_called_exact(tape, growth, says):
    """Eager gets slower by a fraction of the elapsed time."""

    def step(rows):
        tape.now_us += 100.0 + growth * tape.now_us
        return rows * 2

    model = calibrate(step, inputs=INPUTS, sizes=[1], mode="FULL", backend=tape, samples=8)
    assert says in model.source


def test_whole_graphs_and_pieces_are_told_apart(tape):
    def attention(rows):
        tape.now_us += 1000.0
        return rows

    def embed(rows):
        tape.rows_seen = len(rows)
        return rows * 2

    pieces = [graph_piece(embed), eager_piece(attention), graph_piece(lambda rows: rows + 1)]
    model = calibrate(pieces, inputs=INPUTS, sizes=[1, 8], backend=tape)
    assert model.graph_us.points == ((1, 11.0), (8, 18.0))
    assert model.piecewise_us.points == ((1, 1022.0), (8, 1036.0))
    assert model.step_us(5, 8, piecewise=True) == 1036.0
    only = calibrate(pieces, inputs=INPUTS, sizes=[1, 8], backend=tape, mode="PIECEWISE")
    assert only.graph_us.points == ((1, 1022.0), (8, 1036.0))
    assert only.piecewise_us is None


def test_the_tape_says_that_it_is_no_device(tmp_path):
    model = calibrate(lambda rows: rows * 2, inputs=INPUTS, sizes=[1, 2], name="mine", **ON_TAPE)
    assert model.clock == "host"
    assert "host clock, because the backend has no timing events" in model.source
    assert "tape" in model.source
    save_cost_model(model, tmp_path / "model.json")
    assert load_cost_model(tmp_path / "model.json") == model


def test_a_runner_keeps_its_graphs_counters_and_state():
    cache = torch.zeros(4)

    def step(rows):
        cache.add_(1)
        return rows + cache[0]

    runner = GraphRunner(step, INPUTS, sizes=[1, 2, 4], mode="FULL", backend="tape", state=[cache])
    runner.capture()
    runner(torch.zeros(2, 4))
    before, graphs = runner.stats(), runner.lanes[0].lifecycle.live()
    assert cache[0] == 1
    calibrate(runner, samples=1)
    forecast_graph_memory(runner)
    assert runner.stats() == before
    assert runner.lanes[0].lifecycle.live() == graphs
    assert cache.tolist() == [1.0] * 4
    assert runner(torch.zeros(1, 4))[0, 0] == 2


def test_undeclared_state_and_generators_are_put_back():
    hidden = torch.zeros(4)

    def step(rows):
        hidden.add_(1)
        return rows * torch.rand(()) + hidden[0]

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    calibrate(step, inputs=INPUTS, sizes=[1, 2], **ON_TAPE)
    assert hidden.tolist() == [0.0] * 4
    assert torch.equal(torch.rand(3), expected)


def test_the_pace_that_waits_waits_for_every_step(tape, step):
    waits = Counter()
    synchronize = tape.synchronize

    def counted():
        waits["here"] += 1
        synchronize()

    tape.synchronize = counted
    settings = {"inputs": INPUTS, "sizes": [2], "mode": "FULL", "backend": tape, "samples": 1}
    calibrate(step, **settings, pace="queued")
    queued = waits["here"]
    calibrate(step, **settings, pace="waited")
    assert waits["here"] - queued > 5 * queued


def test_inputs_of_ones_own_are_what_is_run(tape):
    seen = Mock()

    def step(rows):
        seen(rows)
        return rows * 2

    calibrate(
        step,
        inputs=INPUTS,
        sizes=[2],
        eager_sizes=[2],
        mode="FULL",
        samples=1,
        backend=tape,
        make_inputs=lambda size: {"rows": torch.full((size, 4), 7.0)},
    )
    assert torch.equal(seen.call_args.args[0], torch.full((2, 4), 7.0))


def test_fractions_are_random_and_whole_numbers_are_fill():
    seen = Mock()

    def step(values, slots):
        seen(values.clone(), slots.clone())
        return values * 2

    inputs = {
        "values": StaticInput((None,), "float32"),
        "slots": StaticInput((None,), "int64", fill=9),
    }
    calibrate(step, inputs=inputs, sizes=[4], eager_sizes=[4], **ON_TAPE)
    values, slots = seen.call_args.args
    assert len(set(values.tolist())) == 4
    assert slots.tolist() == [9] * 4


def test_a_size_that_cannot_be_captured_is_left_out_and_named():
    def step(rows):
        if len(rows) == 2:
            rows.sum().item()
        return rows * 2

    model = calibrate(step, inputs=INPUTS, sizes=[1, 2, 4], **ON_TAPE)
    assert [size for size, _ in model.graph_us.points] == [1, 4]
    assert 2 in [size for size, _ in model.eager_us.points]
    assert "Not captured: 1 key (FULL tokens=2" in model.source


def test_a_step_that_cannot_be_captured_is_refused_with_the_reason():
    def step(rows):
        return rows * rows.sum().item()

    with pytest.raises(CaptureError, match="No size of the step could be captured"):
        calibrate(step, inputs=INPUTS, sizes=[1, 2], **ON_TAPE)
    with pytest.raises(CaptureError, match="so its memory cannot be measured"):
        forecast_graph_memory(step, inputs=INPUTS, sizes=[1, 2], mode="FULL", backend="tape")


def test_settings_that_cannot_be_used(tape, step):
    runner = GraphRunner(step, INPUTS, sizes=[1, 2], mode="FULL", backend=tape)
    with pytest.raises(ConfigError, match="pace"):
        calibrate(runner, pace="fast")
    for wrong in ({"samples": 0}, {"name": 3}, {"progress": 3}, {"make_inputs": 3}):
        with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be"):
            calibrate(runner, **wrong)
    with pytest.raises(ConfigError, match="a mode that uses graphs"):
        calibrate(step, inputs=INPUTS, sizes=[1, 2], mode="NONE", backend=tape)
    with pytest.raises(ConfigError, match="inputs"):
        calibrate(runner, inputs=INPUTS)
    with pytest.raises(ConfigError, match="eager_sizes"):
        calibrate(runner, eager_sizes=[0])
    with pytest.raises(ConfigError, match="at least two"):
        forecast_graph_memory(runner, sizes=[4])
    with pytest.raises(ConfigError, match=r"example must be omitted .* Pass example when you"):
        forecast_graph_memory(runner, example={"x": torch.ones(1, 4)})


def test_progress_counts_every_sample(tape, step):
    told = []
    calibrate(
        step,
        inputs=INPUTS,
        sizes=[1, 2],
        eager_sizes=[1],
        mode="FULL",
        backend=tape,
        samples=2,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 6) for done in range(7)]


# -- memory -------------------------------------------------------------------------------


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("share_outputs", [True, False])
def test_a_forecast_holds_what_all_graphs_take(share_outputs):
    """This holds if each graph keeps its own outputs too."""
    sizes = list(range(1, 65))
    runner = GraphRunner(
        lambda rows: (rows @ rows.T).relu() @ rows,
        INPUTS,
        sizes=sizes,
        mode="FULL",
        backend="tape",
        options=RunnerOptions(buffers=BufferOptions(share_outputs=share_outputs)),
    )
    forecast = forecast_graph_memory(runner, samples=6)
    assert runner.num_bytes == 0
    runner.capture()
    assert forecast.low_bytes <= runner.num_bytes <= forecast.high_bytes
    assert forecast.high_bytes <= 1.1 * runner.num_bytes


def tape_graphs(tape):
    """Return a function that captures the graph of a size on a tape, in one pool."""
    stream, pool = tape.new_stream(), tape.new_pool()
    weight = torch.randn(16, 16)

    def capture(size):
        x = torch.zeros(size, 16)
        return tape.capture(lambda: (x @ weight).relu() @ weight + x, stream=stream, pool=pool)

    return capture, pool


def test_a_forecast_needs_no_runner():
    """It serves code that captures by hand, before a cache uses the other memory."""
    tape, sizes = TapeBackend(), list(range(1, 49))
    seen = []
    told = forecast(tape_graphs(tape)[0], sizes, samples=6, backend=tape, warm_up=seen.append)
    assert tape.device_memory().used_bytes == 0, "something of the samples is still there"
    assert seen == sorted(seen, reverse=True)
    assert {1, 48} < set(seen)
    capture, pool = tape_graphs(tape)
    before = tape.device_memory()
    graphs = [capture(size) for size in reversed(sizes)]
    taken = tape.device_memory()
    assert told.low_bytes <= tape.pool_bytes(pool) <= told.high_bytes
    assert told.high_bytes <= 1.2 * tape.pool_bytes(pool)
    driver = (taken.used_bytes - taken.reserved_bytes) - (before.used_bytes - before.reserved_bytes)
    assert told.driver_bytes <= driver <= told.driver_high_bytes
    assert len(graphs) == 48


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sizes": [4]}, "at least two"),
        ({"samples": 1}, "samples"),
        ({"capture": 3}, "captures a graph for a given size"),
        ({"backend": "nowhere"}, "nowhere"),
    ],
)
def test_a_forecast_refuses_what_cannot_be(wrong, message):
    given = {"capture": lambda size: size, "sizes": [1, 2], "backend": "tape", **wrong}
    with pytest.raises(DispatchkitError, match=message):
        forecast(given.pop("capture"), given.pop("sizes"), **given)


# -- a model by name ----------------------------------------------------------------------


def test_a_model_is_found_by_name_in_a_folder(tmp_path):
    (tmp_path / "own_step.py").write_text(
        "from dispatchkit import GraphRunner, StaticInput\n"
        "class Made:\n"
        "    @staticmethod\n"
        "    def runner():\n"
        "        inputs = {'rows': StaticInput((None, 4), 'float32')}\n"
        "        asked = {'sizes': [1, 2], 'mode': 'FULL', 'backend': 'tape'}\n"
        "        return GraphRunner(lambda rows: rows * 2, inputs, **asked)\n"
    )
    before = list(sys.path)
    try:
        runner = load_runner("own_step:Made.runner", folder=tmp_path)
        runner.capture()
        assert runner(torch.ones(1, 4)).tolist() == [[2.0] * 4]
        assert sys.path == before
    finally:
        sys.modules.pop("own_step", None)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torch", "module:function"),
        (":decoder", "module:function"),
        ("no_such_module_here:decoder", "cannot find the module 'no_such_module_here'"),
        ("dispatchkit.demo.models:no_such", "no_such"),
        ("math:tau", "'tau' is an object of type float"),
        ("time:time", "The function returned an object of type float"),
    ],
)
def test_a_model_that_is_none_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        load_runner(model)


def test_what_a_module_itself_lacks_is_its_own_error(tmp_path):
    (tmp_path / "lacking.py").write_text("import no_such_module_here\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):
        load_runner("lacking:runner", folder=tmp_path)


@pytest.mark.slow_except("mlp")
@pytest.mark.parametrize("name", ["decoder", "mlp"])
def test_the_models_of_the_demo_can_be_measured(name, monkeypatch):
    from dispatchkit.demo import models
    from dispatchkit.demo.decoder import DecoderShape

    monkeypatch.setattr(models, "_TAPE_SIZES", (1, 2))
    monkeypatch.setattr(models, "TAPE_SHAPE", DecoderShape(num_slots=2, cache_len=8))
    monkeypatch.setattr(models, "resolve_device", lambda name: torch.device("cpu"))
    model = calibrate(load_runner(f"dispatchkit.demo.models:{name}"), samples=1)
    assert [size for size, _ in model.graph_us.points] == [1, 2]
    assert (model.piecewise_us is not None) == (name == "decoder")


def test_with_an_axis_every_size_is_measured_at_every_bucket():
    """Each bucket of the axis has its own curves; the outer curves are the largest bucket's."""
    weight = torch.randn(4, 2)
    model = calibrate(
        lambda rows: torch.tanh(rows @ weight),
        inputs={"rows": StaticInput((None, "length", 4), "float32")},
        axes=[Axis("length", (8, 16))],
        sizes=(1, 2),
        eager_sizes=[2, 3],
        **ON_TAPE,
    )
    assert (model.axis, [value for value, _ in model.along]) == ("length", [8, 16])
    for _, one in model.along:
        assert [size for size, _ in one.graph_us.points] == [1, 2]
        assert [size for size, _ in one.eager_us.points] == [2, 3]
    assert model.graph_us == model.along[-1][1].graph_us


def test_inputs_of_the_callers_own_get_the_value_of_the_axis():
    seen = []

    def make(size, value):
        seen.append((size, value))
        return {"rows": torch.ones(size, value, 4)}

    calibrate(
        lambda rows: rows + 1,
        inputs={"rows": StaticInput((None, "length", 4), "float32")},
        axes=[Axis("length", (8, 16))],
        sizes=(2,),
        eager_sizes=[2],
        make_inputs=make,
        **ON_TAPE,
    )
    assert set(seen) == {(2, 8), (2, 16)}


def test_several_axes_cannot_be_measured_along():
    with pytest.raises(ConfigError, match="at most one axis, because costs"):
        calibrate(
            lambda rows, one, two: rows + one + two,
            inputs=INPUTS,
            axes=[Axis("one", (8,), exact=True), Axis("two", (8,), exact=True)],
            sizes=(2,),
            **ON_TAPE,
        )
