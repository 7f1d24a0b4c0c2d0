"""A model compiled with the backend computes what the model computes, for any call."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import (  # noqa: E402
    CaptureOptions,
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.errors import ConfigError, InputError, NoGraphError, UnknownNameError  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.step.support import ModeDowngradeWarning, declare_support  # noqa: E402

from dispatchkit_compile import batch_facts, torch_compile  # noqa: E402
from dispatchkit_compile.facts import current_facts  # noqa: E402
from dispatchkit_compile.torch_compile import PlainReason  # noqa: E402

SIZES = [1, 2, 4, 8, 16, 32, 64]
AROUND_SIZES = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64]
TAPE = {"device_backend": "tape", "sizes": SIZES}
ATTENTION = {**TAPE, "fill": {"slots": 0}}
SLOTS, WIDTH = 4, 8


@torch.library.custom_op("compile_test::attend", mutates_args=("memory", "out"))
def attend(
    query: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    memory: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add each row to its slot's memory, then weight the whole memory by the query."""
    memory.index_add_(0, slots, value)
    weights = torch.softmax(query @ memory[:SLOTS].T, dim=-1)
    torch.mm(weights, memory[:SLOTS], out=out)


@attend.register_fake
def _(query, value, slots, memory, out):
    return None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.zeros(SLOTS + 1, WIDTH))

    def forward(self, hidden, slots):
        normed = self.norm(hidden)
        query, value = self.query(normed), self.value(normed)
        out = torch.empty_like(query)
        attend(query, value, slots, self.memory, out)
        hidden = hidden + out
        return hidden + torch.relu(self.mlp(hidden))


class Decoder(nn.Module):
    """Writes a memory in each layer, as a decoder writes its cache."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens, slots):
        # Slot 0 means no slot, because rows without a token hold zeros.
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, (slots + SLOTS) % (SLOTS + 1))
        return self.head(hidden), tokens.shape[0]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Give each test its own count of compilations and its own caches."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_decoder(layers=1):
    """Return a decoder in double precision.

    Other kernels compute other numbers of rows, and rounding errors accumulate in the memory; in
    double precision these stay far below the tolerance.
    """
    torch.manual_seed(3)
    return Decoder(layers).double().requires_grad_(False)


def make_batch(rows):
    return torch.randint(32, (rows,)), torch.arange(rows) % SLOTS + 1


def memory_of(model):
    return [buffer[:SLOTS] for _, buffer in model.named_buffers()]


def x_of(rows, width=3):
    return torch.randn(rows, width)


# -- equal results --------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_decoder_equals_eager_for_all_sizes_with_one_compile(largest):
    """One compilation serves all numbers of rows in PIECEWISE and FULL; the memory is equal too.

    Graph pieces surround each call of the operator and are named after their graph.
    """
    model = make_decoder(layers=2)
    reference = copy.deepcopy(model)
    settings = {**ATTENTION, "sizes": [size for size in SIZES if size <= largest]}
    compiled = torch_compile.compile(model, at=["compile_test::attend"], fullgraph=True, **settings)
    numbers = [rows for rows in AROUND_SIZES if rows <= largest]
    for rows in numbers:
        batch = make_batch(rows)
        got, count = compiled(*batch)
        torch.testing.assert_close(got, reference(*batch)[0])
        assert count == rows
        batch = make_batch(rows)
        with batch_facts(num_reqs=rows, uniform=True):
            got, count = compiled(*batch)
        torch.testing.assert_close(got, reference(*batch)[0])
    torch.testing.assert_close(memory_of(model), memory_of(reference))
    assert compiled.num_compiles == 1
    (stats,) = compiled.stats()
    assert stats.plain_steps == {}
    steps = len(numbers)
    assert stats.runner.steps_by_mode == {"NONE": 0, "PIECEWISE": steps, "FULL": steps}
    assert stats.steps == 2 * steps
    assert stats.to_dict()["runner"]["captures"] == 2 * len(settings["sizes"])
    (graph,) = compiled.graphs
    assert [piece.is_graph for piece in graph.pieces] == [True, False, True, False, True]
    assert all(piece.name.startswith(f"{graph.name}.piece_") for piece in graph.pieces)
    assert "piece_1 eager" in str(compiled)
    assert "PIECEWISE tokens=8" in str(compiled)


def test_backend_is_found_by_name_with_options():
    """torch.compile needs only the entry point; unmarked batches are correct too."""
    model = make_decoder()
    reference = copy.deepcopy(model)
    before = len(torch_compile.compiled_graphs())
    compiled = torch.compile(
        model, backend="dispatchkit", options={"at": ["compile_test::attend"], **ATTENTION}
    )
    for rows in (16, 7, 1, 16, 33):
        batch = make_batch(rows)
        torch.testing.assert_close(compiled(*batch), reference(*batch))
    torch.testing.assert_close(memory_of(model), memory_of(reference))
    graphs = torch_compile.compiled_graphs()[before:]
    assert sum(graph.stats().steps for graph in graphs) == 5
    assert all(graph.stats().plain_steps == {} for graph in graphs)


@pytest.mark.slow
def test_batch_marked_by_the_user_is_compiled_once():
    """A user who marks only the batch gets the same from plain torch.compile."""
    from torch._dynamo.decorators import mark_unbacked

    counts = []

    def backend(graph, inputs):
        counts.append(graph)
        return torch_compile.backend(graph, inputs, options=TAPE)

    def step(x):
        return (x.sin() + 1).relu()

    compiled = torch.compile(step, backend=backend)
    for rows in (9, 1, 64, 2):
        x = x_of(rows)
        mark_unbacked(x, 0)
        assert torch.equal(compiled(x), step(x))
    assert len(counts) == 1


def test_graph_breaks_make_several_graphs_each_right():
    """Data-dependent control flow ends a graph; both parts have their own names."""

    def step(x):
        y = x.cumsum(-1)
        if y.sum() > 0:
            return y * 2
        return y * 3

    compiled = torch_compile.compile(step, **TAPE)
    for rows in (3, 9, 3):
        for sign in (1, -1):
            x = sign * x_of(rows).abs()
            assert torch.equal(compiled(x), step(x))
    names = [graph.name for graph in compiled.graphs]
    assert len(names) == len(set(names)) >= 3
    assert all(not stats.plain_steps for stats in compiled.stats())


def test_fullgraph_refuses_data_dependent_control_flow():
    """With fullgraph, Dynamo's error names the line."""

    def step(x):
        return x * 2 if x.sum() > 0 else x * 3

    compiled = torch_compile.compile(step, fullgraph=True, **TAPE)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent"):
        compiled(x_of(4))


def test_arguments_with_and_without_batch():
    """A batch along another dimension, a table for all rows, and a number."""

    def step(left, table, right, factor):
        return (left.T @ table + right) * factor

    compiled = torch_compile.compile(
        step, batch={"left": 1, "right": 0, "table": None}, fullgraph=True, **TAPE
    )
    for rows in (5, 1, 8):
        left, table, right = torch.randn(3, rows), torch.randn(3, 3), torch.randn(rows, 3)
        torch.testing.assert_close(
            compiled(left, table, right, 2), step(left, table, right, 2), rtol=1e-6, atol=1e-6
        )
    assert compiled.num_compiles == 1
    assert compiled.stats()[0].plain_steps == {}


def test_results_are_the_callers_own():
    """A result keeps its values over later steps."""
    compiled = torch_compile.compile(lambda x: x + 1, **TAPE)
    first = compiled(torch.zeros(4, 2))
    compiled(torch.full((4, 2), 5.0))
    assert torch.equal(first, torch.ones(4, 2))


@pytest.mark.parametrize("compiler", [pytest.param("aot_eager", marks=pytest.mark.slow), "eager"])
def test_pieces_may_be_compiled_by_another_backend(compiler):
    """The backend compiles each graph piece once, for all sizes."""
    model = make_decoder()
    reference = copy.deepcopy(model)
    compiled = torch_compile.compile(
        model, at=["compile_test::attend"], piece_compiler=compiler, **ATTENTION
    )
    for rows in (6, 1, 33):
        batch = make_batch(rows)
        torch.testing.assert_close(compiled(*batch), reference(*batch))
    assert compiled.num_compiles == 1
    assert compiled.stats()[0].runner.steps_by_mode["PIECEWISE"] == 3


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="inductor cannot link in a path with a space")
def test_pieces_may_be_compiled_by_inductor():
    """The tape cannot record its kernels, so they run eager here; values are equal."""
    model = make_decoder()
    reference = copy.deepcopy(model)
    compiled = torch_compile.compile(
        model, at=["compile_test::attend"], piece_compiler="inductor", mode="NONE", **ATTENTION
    )
    for rows in (6, 1, 33):
        batch = make_batch(rows)
        torch.testing.assert_close(compiled(*batch), reference(*batch))
    assert compiled.num_compiles == 1


def test_kernels_of_inductor_are_refused_on_the_tape():
    """The tape records torch operators and would omit other kernels."""
    compiled = torch_compile.compile(lambda x: x + 1, piece_compiler="inductor", **TAPE)
    failure = torch._dynamo.exc.BackendCompilerFailed
    with pytest.raises(failure, match="piece_compiler must be") as caught:
        compiled(x_of(4))
    assert "tape" in str(caught.value)


# -- plain runs -----------------------------------------------------------------------------


def run_and_see_reason(compiled, *args):
    """Return a call's result and the reason why it ran plainly."""
    with pytest.warns(EagerStepWarning) as told:
        result = compiled(*args)
    text = str(told[0].message)
    return result, text


def test_training_runs_plainly_with_right_gradients():
    """Graphs carry no gradients, so a step that needs them runs without graphs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    reference = copy.deepcopy(model)
    compiled = torch_compile.compile(model, **TAPE)
    x = x_of(6)
    result, text = run_and_see_reason(compiled, x)
    result.sum().backward()
    reference(x).sum().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert PlainReason.GRADIENTS in text
    assert "torch.no_grad()" in text
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), reference(x))
    assert compiled.stats()[-1].plain_steps == {}


def test_input_that_is_written_is_written():
    """The caller's tensor changes, which a graph's private copy would hide."""

    def step(x):
        x.add_(1)
        return x * 2

    compiled = torch_compile.compile(step, **TAPE)
    for _ in range(2):
        x = torch.zeros(3, 2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            result = compiled(x)
        assert torch.equal(x, torch.ones(3, 2))
        assert torch.equal(result, torch.full((3, 2), 2.0))
    assert not told
    assert compiled.stats()[0].plain_steps == {PlainReason.INPUT_WRITTEN: 2}


def test_result_that_is_part_of_an_input_stays_part_of_it():
    """Writing to the result changes the input, as in eager."""
    compiled = torch_compile.compile(lambda x: (x[:, 1:], x + 1), **TAPE)
    x = torch.zeros(3, 2)
    (part, _), text = run_and_see_reason(compiled, x)
    part.fill_(7.0)
    assert x[0].tolist() == [0.0, 7.0]
    assert PlainReason.OUTPUT_IS_INPUT in text
    assert ".clone()" in text


@pytest.mark.slow
def test_two_unknown_sizes_in_one_tensor_run_plainly():
    """One dimension is the batch; graphs for every pair of sizes would be too many."""
    from torch._dynamo.decorators import mark_unbacked

    def step(x):
        return x.cumsum(0) + 1

    compiled = torch.compile(step, backend="dispatchkit", options=TAPE)
    x = torch.randn(4, 5)
    mark_unbacked(x, [0, 1])
    result, text = run_and_see_reason(compiled, x)
    assert torch.equal(result, step(x))
    assert PlainReason.SEVERAL_DIMS in text


def test_model_that_is_all_eager_runs_plainly():
    """Nothing to capture is one of the reasons."""

    def step(x):
        return torch.relu(x)

    compiled = torch_compile.compile(step, at=["relu"], **TAPE)
    x = x_of(3)
    result, text = run_and_see_reason(compiled, x)
    assert torch.equal(result, torch.relu(x))
    assert PlainReason.NOTHING_TO_CAPTURE in text


def test_batch_above_the_limit_runs_plainly():
    """Above the largest size there is no padding and no error."""
    compiled = torch_compile.compile(lambda x: x + 1, **TAPE)
    compiled(x_of(4))
    x = x_of(65)
    result, text = run_and_see_reason(compiled, x)
    assert torch.equal(result, x + 1)
    assert "the batch has 65 rows; the limit is 64. Pass a size of at least 65" in text


def test_empty_batch_gives_an_empty_result():
    """Without rows there is no step to capture."""
    compiled = torch_compile.compile(lambda x: x + 1, **TAPE)
    compiled(x_of(4))
    assert compiled(x_of(0)).shape == (0, 3)


def test_strict_raises_in_place_of_running_plainly():
    """The strict option raises an error instead."""
    compiled = torch_compile.compile(lambda x: x[:, 1:], options=RunnerOptions(strict=True), **TAPE)
    with pytest.raises(
        NoGraphError, match=r"has no graph to run \(reason: output_aliases_input\).*strict=False"
    ) as caught:
        compiled(x_of(4))
    assert caught.value.reason == PlainReason.OUTPUT_IS_INPUT


def test_failure_in_the_code_of_a_piece_compiler_names_no_operation():
    def fail(*args):
        raise ValueError("broken kernel")

    compiled = torch_compile.compile(
        lambda x: x + 1, piece_compiler=lambda graph, fakes: fail, mode="NONE", **TAPE
    )
    with pytest.raises(ValueError, match="broken kernel"):
        compiled(x_of(4))
    assert "failed in the compiled code; to see the operation, omit" in str(compiled)


def test_step_that_cannot_be_captured_runs_eager_and_says_where():
    """The reason names the operation; with a split there, the other parts have graphs."""

    @torch.library.custom_op("compile_test::read_on_host", mutates_args=())
    def read_on_host(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    @read_on_host.register_fake
    def _(x):
        return torch.empty_like(x)

    def step(x):
        return torch.ops.compile_test.read_on_host(x * 2) * 3

    compiled = torch_compile.compile(step, **TAPE)
    x = x_of(4)
    with pytest.warns(EagerStepWarning, match="capture_failed"):
        torch.testing.assert_close(compiled(x), step(x))
    assert "host_sync" in str(compiled)
    assert "compile_test::read_on_host" in str(compiled)
    assert "option `at`" in str(compiled)
    split = torch_compile.compile(step, at=["compile_test::read_on_host"], **TAPE)
    torch.testing.assert_close(split(x), step(x))
    assert split.stats()[0].runner.steps_by_mode["PIECEWISE"] == 1


@pytest.mark.slow
def test_writing_state_for_rows_without_a_token_is_not_guessed_at():
    """Padding might write slot 0, so nothing is padded until the user declares a fill."""
    model = make_decoder()
    reference = copy.deepcopy(model)
    compiled = torch_compile.compile(model, at=["compile_test::attend"], **TAPE)
    batch = make_batch(5)
    result, text = run_and_see_reason(compiled, *batch)
    torch.testing.assert_close(result, reference(*batch))
    assert PlainReason.FILL_UNKNOWN in text
    assert "fill={'slots': sink}" in text


@pytest.mark.slow_except("mean")
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x: x - x.mean(0), "rows_depend"),
        (lambda x: torch.softmax(x @ x.T, -1) @ x, "rows_depend"),
        (lambda x: x / x.shape[0], "rows_depend"),
        (lambda x: x.sort(0).values, "rows_depend"),
        (lambda x: x.flatten() * 1, "rows_not_the_bucket"),
    ],
    ids=["mean", "attention", "number of rows", "sorted", "flat"],
)
def test_rows_that_depend_on_padding_run_eager(step, reason):
    compiled = torch_compile.compile(step, **TAPE)
    with pytest.warns(EagerStepWarning, match=reason):
        assert torch.equal(compiled(torch.zeros(3, 3)), step(torch.zeros(3, 3)))
    for rows in (5, 8, 3):
        x = x_of(rows) * 0.1
        torch.testing.assert_close(compiled(x), step(x))
    (stats,) = compiled.stats()
    assert stats.runner.eager_by_reason == {reason: 3}
    assert stats.runner.steps_by_mode["FULL"] == 1


def test_rows_without_a_token_hold_the_fill():
    """A mean over all rows shows their values."""

    def step(x):
        return x + x.sum(0)

    options = RunnerOptions(capture=CaptureOptions(prove_rows=False))
    compiled = torch_compile.compile(step, fill={"x": 1.0}, options=options, **TAPE)
    assert torch.equal(compiled(torch.zeros(5, 2)), torch.full((5, 2), 3.0))
    with pytest.raises(
        ConfigError, match=r"fill contains 'y', but .* no such parameter. Its parameters are: x"
    ):
        torch_compile.compile(step, fill={"y": 1.0}, **TAPE)
    with pytest.raises(ConfigError, match="fill must be a dict"):
        torch_compile.compile(step, fill=1.0, **TAPE)


# -- changes --------------------------------------------------------------------------------


def test_weights_changed_in_place_show_and_replaced_ones_are_captured_anew():
    """No step uses old values."""
    model = nn.Linear(3, 3).requires_grad_(False)
    compiled = torch_compile.compile(model, **TAPE)
    x = x_of(4)
    compiled(x)
    model.weight.mul_(2)
    assert torch.equal(compiled(x), model(x))
    model.weight = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(x), model(x))
    assert compiled.num_compiles == 1
    assert compiled.graphs[0].num_rebinds == 1


def test_tensors_that_keep_being_replaced_end_in_plain_steps():
    """A new capture at every step would be slower than no graph."""

    class Cache(nn.Module):
        def forward(self, x):
            return x + self.table

    model = Cache()
    model.table = torch.zeros(3)
    compiled = torch_compile.compile(model, **TAPE)

    def call(step):
        model.table = torch.full((3,), float(step))
        x = x_of(4)
        assert torch.equal(compiled(x), x + step)

    for step in range(9):
        call(step)
    with pytest.warns(EagerStepWarning, match=PlainReason.HELD_MOVED):
        call(9)
    call(10)
    assert compiled.stats()[0].plain_steps == {PlainReason.HELD_MOVED: 2}


@pytest.mark.slow
def test_buffers_that_a_step_writes_count_each_step_once():
    """Warmups and captures leave them unchanged."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps.add_(1)
            return x + self.steps

    model = Counts()
    compiled = torch_compile.compile(model, fill={}, **TAPE)
    for step in range(1, 8):
        x = x_of(step % 3 + 1)
        assert torch.equal(compiled(x), x + step)
    assert model.steps.item() == 7


def test_other_type_is_compiled_anew():
    """Dynamo guards the type, and each type has its own graphs."""
    compiled = torch_compile.compile(lambda x: x + 1, **TAPE)
    assert compiled(x_of(4)).dtype is torch.float32
    assert compiled(x_of(4).double()).dtype is torch.float64
    assert compiled.num_compiles == 2


def test_skipped_guards_are_stood_in_for():
    """Other sizes, types and Python arguments still get the model's results."""

    def step(x, negate=False):
        return -x if negate else x + 1

    compiled = torch_compile.compile(step, skip_guards=True, **TAPE)
    for rows in (4, 1, 17):
        x = x_of(rows)
        assert torch.equal(compiled(x), step(x))
    x = x_of(4)
    assert torch.equal(compiled(x, negate=True), -x)
    assert torch.equal(compiled(x.double()), x.double() + 1)
    assert compiled.num_uncompiled == 2
    assert compiled.num_compiles == 1
    assert compiled.stats()[0].runner.steps == 3


# -- decisions ------------------------------------------------------------------------------


def test_the_facts_of_a_batch_limit_the_mode():
    """A step limited to eager or PIECEWISE obeys the limit."""
    compiled = torch_compile.compile(make_decoder(), at=["compile_test::attend"], **ATTENTION)
    with batch_facts(ceiling="NONE"):
        compiled(*make_batch(4))
    with batch_facts(num_reqs=4, uniform=True, ceiling="PIECEWISE"):
        compiled(*make_batch(4))
    modes = compiled.stats()[0].runner.steps_by_mode
    assert modes == {"NONE": 1, "PIECEWISE": 1, "FULL": 0}


def test_facts_of_a_batch_end_with_their_block_and_are_a_thread_s_own():
    seen = []
    with batch_facts(num_reqs=3) as outer:
        with batch_facts(ceiling="PIECEWISE"):
            thread = threading.Thread(target=lambda: seen.append(current_facts()))
            thread.start()
            thread.join()
            assert current_facts().ceiling.name == "PIECEWISE"
        assert current_facts() is outer
        assert outer.for_graph(num_rows=2)["num_reqs"] == 2
    with pytest.raises(ZeroDivisionError), batch_facts(num_reqs=3):
        _ = 1 / 0
    assert current_facts() is None
    assert seen == [None]
    with pytest.raises(UnknownNameError, match=r"^ceiling must be"), batch_facts(ceiling="FUL"):
        pass


def test_all_sizes_are_captured_in_the_first_call_if_asked():
    """Captures run largest first, before a server starts."""
    compiled = torch_compile.compile(lambda x: x + 1, lazy=False, **TAPE)
    compiled(x_of(3))
    (stats,) = compiled.stats()
    assert stats.runner.captures == 2 * len(SIZES) or stats.runner.captures == len(SIZES)
    assert "replay FULL" in compiled.graphs[0].explain(5)


def test_support_lowers_the_mode_visibly():
    """An operator that cannot be captured for mixed batches splits the step with a warning."""
    declare_support("compile_test::attend", "UNIFORM_BATCH")
    try:
        compiled = torch_compile.compile(make_decoder(), mode="FULL", **ATTENTION)
        with pytest.warns(ModeDowngradeWarning, match="FULL -> FULL_AND_PIECEWISE"):
            compiled(*make_batch(4))
    finally:
        declare_support("compile_test::attend", "ALWAYS")
    assert "mode FULL -> FULL_AND_PIECEWISE" in str(compiled)
    assert compiled.stats()[0].runner.steps_by_mode["PIECEWISE"] == 1


@pytest.mark.slow
def test_support_can_be_told_for_the_whole():
    """The user may declare what the operators do not."""
    compiled = torch_compile.compile(
        make_decoder(), support="UNIFORM_BATCH", mode="FULL", **ATTENTION
    )
    with pytest.warns((ModeDowngradeWarning, EagerStepWarning)) as told:
        compiled(*make_batch(4))
    assert any("FULL -> FULL_DECODE_ONLY" in str(one.message) for one in told)


def test_compiled_model_inside_a_runner_is_passed_through():
    """Only one layer captures: inside a capture the inner model computes plainly."""
    compiled = torch_compile.compile(lambda x: x * 2, **TAPE)
    x = x_of(5)
    compiled(x)
    example = {"x": torch.zeros(8, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where Dynamo refuses the capture, steps run eager
        runner = GraphRunner(lambda x: compiled(x) + 1, example=example, backend="tape", lazy=True)
        for rows in (5, 8, 2):
            x = x_of(rows)
            assert torch.equal(runner(x=x), x * 2 + 1)


# -- bad options -----------------------------------------------------------------------------


def test_unknown_option_names_the_nearest():
    """A misspelt option would otherwise have no effect."""
    with pytest.raises(UnknownNameError) as caught:
        torch_compile.compile(lambda x: x, siezs=[1])
    assert "sizes" in caught.value.nearest
    compiled = torch.compile(lambda x: x + 1, backend="dispatchkit", options={"polcy": "vllm"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="policy"):
        compiled(x_of(2))


@pytest.mark.parametrize("name", ["fullgraph", "dynamic", "skip_guards", "backend"])
def test_option_that_has_another_place_says_where(name):
    """Users often put torch.compile's own options among the backend's."""
    with pytest.raises(UnknownNameError, match=r"torch\.compile|device_backend"):
        torch_compile.CompileOptions.parse({name: True})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "reduce-overhead"}, "piece_compiler='inductor'"),
        ({"mode": "FULLL"}, "FULL"),
        ({"at": "compile_test::attend"}, "a list"),
        ({"lazy": "yes"}, "True or False"),
        ({"options": {"strict": True}}, "options must be a RunnerOptions"),
        ({"strict": True}, "Write: options=RunnerOptions(strict=True)"),
        ({"support": "SOMETIMES"}, "UNIFORM_BATCH"),
        ({"piece_compiler": "inducter"}, "inductor"),
        ({"sizes": 8}, "sizes must be a list of whole numbers, such as [8, 16], got 8"),
        ({"sizes": [4, "x"]}, "sizes[1] must be a whole number of at least 1, got 'x'"),
        ({"max_num_tokens": 0}, "max_num_tokens must be a whole number of at least 1, got 0"),
        ({"outputs": "copy"}, "outputs must be 'owned' or 'view', got 'copy'"),
        ({"name": 3}, "name must be a str, got 3"),
    ],
)
def test_option_with_a_wrong_value_is_refused(options, words):
    """The error names the option and its allowed values."""
    with pytest.raises(ConfigError) as caught:
        torch_compile.CompileOptions.parse(options)
    assert words in str(caught.value)


def test_mode_may_be_given_once():
    """It is an argument of torch.compile or one of the options."""
    assert str(torch_compile.CompileOptions.parse({}, "full").mode) == "FULL"
    with pytest.raises(ConfigError, match=r"mode is passed as mode=.* and in the options"):
        torch_compile.CompileOptions.parse({"mode": "FULL"}, "PIECEWISE")
    with pytest.raises(ConfigError, match="a dict"):
        torch_compile.CompileOptions.parse([("mode", "FULL")])


@pytest.mark.parametrize("wrong", [{"batch": 3}, {"fullgraph": "x"}, {"skip_guards": 1}])
def test_argument_of_the_wrong_type_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be"):
        torch_compile.compile(torch.nn.Linear(2, 2), **wrong)


def test_batch_of_an_unknown_parameter_is_refused():
    """A batch dimension of an unknown parameter would have no effect."""
    with pytest.raises(ConfigError, match="tokens, slots"):
        torch_compile.compile(make_decoder(), batch={"token": 0})
    compiled = torch_compile.compile(lambda x: x + 1, batch={"x": 2}, **TAPE)
    with pytest.raises(InputError, match=r"no dimension 2.*got shape"):
        compiled(x_of(4))
    with pytest.raises(ConfigError, match=r"batch\['x'\] must be a whole number, got 'rows'"):
        torch_compile.compile(lambda x: x + 1, batch={"x": "rows"}, **TAPE)
    with pytest.raises(ConfigError, match="a module or a function"):
        torch_compile.compile(3)


def test_nothing_compiled_yet_is_said():
    """Queries before the first call are no error."""
    compiled = torch_compile.compile(lambda x: x + 1, **TAPE)
    assert str(compiled) == "not compiled yet"
    assert compiled.stats() == []


@pytest.mark.slow
def test_a_compiled_model_inside_a_runner_is_captured_and_its_weights_are_watched():
    """The backend's counters are no state of the step, but its compiled code is followed."""
    model = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    compiled = torch_compile.compile(model, **TAPE)
    x = torch.randn(5, WIDTH)
    compiled(x)
    inputs = {"x": StaticInput((None, WIDTH), "float32")}
    runner = GraphRunner(lambda x: compiled(x) + 1, inputs, sizes=[8], mode="FULL", backend="tape")
    assert runner.capture().failed == {}
    torch.testing.assert_close(runner(x=x), model(x) + 1)
    model.bias = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    with pytest.warns(EagerStepWarning, match="weights_replaced"):
        torch.testing.assert_close(runner(x=x), model(x) + 1)
    assert runner.stats().steps_by_mode["FULL"] == 1
