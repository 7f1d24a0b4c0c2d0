"""A split step computes what the whole step computes, for any split."""

from __future__ import annotations

import copy
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import fx, nn  # noqa: E402
from torch.utils._pytree import tree_structure  # noqa: E402

from dispatchkit import (  # noqa: E402
    DispatchConfig,
    GraphRunner,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    eager_piece,
    eager_region,
    graph_break,
    graph_piece,
)
from dispatchkit.errors import CaptureError, ConfigError, UnknownNameError  # noqa: E402
from dispatchkit.execute.capture.captured import GraphPart  # noqa: E402
from dispatchkit.execute.step import support  # noqa: E402
from dispatchkit.execute.step.pieces import Step  # noqa: E402

from dispatchkit_compile import split as splitting  # noqa: E402
from dispatchkit_compile import tracing  # noqa: E402

SIZES = [1, 2, 4, 8, 16, 32, 64]
AROUND_SIZES = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64]
SLOTS, WIDTH = 4, 8


@torch.library.custom_op("splitting_test::attend", mutates_args=("memory", "out"))
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


@torch.library.custom_op("splitting_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("splitting_test::remember", mutates_args=("memory",))
def remember(x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    memory.add_(x.shape[-1])
    return x + memory


@remember.register_fake
def _(x, memory):
    return torch.empty_like(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.zeros(SLOTS + 1, WIDTH))

    def forward(self, hidden, slots):
        query, value = self.query(hidden), self.value(hidden)
        out = torch.empty_like(query)
        attend(query, value, slots, self.memory, out)
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, slots):
        hidden = hidden + self.attention(self.norm(hidden), slots)
        return hidden + torch.relu(self.mlp(hidden))


class Decoder(nn.Module):
    """Writes a memory in each layer, as a decoder writes its cache; slot SLOTS is a sink."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens, slots):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, slots)
        return {"logits": self.head(hidden), "rows": tokens.shape[0], "kind": "decoder"}


INPUTS = {
    "tokens": StaticInput((None,), "int64"),
    "slots": StaticInput((None,), "int64", fill=SLOTS),
}


def make_decoder(layers=1):
    """Return a decoder in double precision.

    Other kernels compute other numbers of rows, and rounding errors accumulate in the memory; in
    double precision these stay far below the tolerance.
    """
    torch.manual_seed(3)
    return Decoder(layers).double().requires_grad_(False)


def make_batch(rows):
    return {"tokens": torch.randint(32, (rows,)), "slots": torch.arange(rows) % SLOTS}


def memory_of(model):
    return [buffer[:SLOTS] for _, buffer in model.named_buffers()]


def make_runner(pieces, inputs=INPUTS, **options):
    defaults = {"sizes": SIZES, "backend": "tape"}
    return GraphRunner(pieces, inputs, **{**defaults, **options})


@pytest.fixture(scope="module")
def traced():
    example = {name: spec.full(4, torch.device("cpu")) for name, spec in INPUTS.items()}
    return tracing.trace(make_decoder(layers=2), example, {"tokens": 0, "slots": 0})


# -- equal results --------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_pieces_and_full_equal_eager_for_all_sizes_with_one_trace(largest):
    """One trace serves every size; PIECEWISE, FULL and eager agree, state included."""
    model = make_decoder(layers=2)
    reference = copy.deepcopy(model)
    compiles_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pieces = splitting.split_module(model, INPUTS, at=["splitting_test::attend"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles_before + 1
    sizes = [size for size in SIZES if size <= largest]
    runner = make_runner(pieces, sizes=sizes, state=list(model.buffers()))
    report = runner.capture()
    assert not report.failed
    numbers = [rows for rows in AROUND_SIZES if rows <= largest]
    for rows in numbers:
        for uniform in (False, True):
            batch = make_batch(rows)
            got = runner(**batch, num_reqs=rows, uniform=uniform)
            want = reference(**batch)
            torch.testing.assert_close(got["logits"], want["logits"])
            assert (got["rows"], got["kind"]) == (rows, "decoder")
    torch.testing.assert_close(memory_of(model), memory_of(reference))
    modes = runner.stats().steps_by_mode
    assert modes["PIECEWISE"] == modes["FULL"] == len(numbers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles_before + 1


@pytest.mark.slow
def test_plain_run_of_pieces_equals_the_model():
    """Eager steps run the pieces at the exact size, which the code reads."""
    model = make_decoder()
    reference = copy.deepcopy(model)
    pieces = splitting.split_module(model, INPUTS, at=[Attention])
    runner = make_runner(pieces, mode="NONE")
    for rows in (5, 1, 64):
        batch = make_batch(rows)
        got, want = runner(**batch), reference(**batch)
        torch.testing.assert_close(got.pop("logits"), want.pop("logits"))
        assert got == want


def test_weights_are_read_at_every_step():
    """Changes of weights in place reach graphs, because pieces do not copy weights."""
    model = make_decoder()
    pieces = splitting.split_module(model, INPUTS, at=[attend])
    runner = make_runner(pieces, lazy=True, state=list(model.buffers()))
    batch = make_batch(4)
    runner(**batch)
    model.head.weight.zero_()
    model.head.bias.fill_(7.0)
    assert torch.equal(runner(**batch)["logits"], torch.full((4, 32), 7.0).double())


def test_tracing_runs_nothing_and_leaves_the_example_as_it_was():
    """A split changes neither state nor the caller's tensors."""
    model = make_decoder()
    batch = make_batch(4)
    before = [dict(vars(tensor)) for tensor in batch.values()]
    splitting.split_module(model, batch, at=[attend])
    assert all(not memory.any() for memory in memory_of(model))
    assert [dict(vars(tensor)) for tensor in batch.values()] == before


# -- copies between pieces ------------------------------------------------------------------


def _copies(runner, mode=RuntimeMode.PIECEWISE):
    (step,) = [step for key, step in runner.lanes[0].lifecycle.live().items() if key.mode is mode]
    links = [part.link for part in step.pieces.parts if isinstance(part, GraphPart) and part.link]
    return sum(len(link.copies) for link in links)


def test_operator_that_writes_into_given_memory_costs_no_copy(traced):
    """Its result keeps the address that the preceding graph allocated."""
    pieces = splitting.split_graph(traced, splitting.SplitRules(["layers.*.attention"]))
    eager = [piece for piece in pieces if not piece.is_graph]
    assert len(eager) == 2
    pieces = splitting.split_graph(traced, splitting.SplitRules(["splitting_test::attend"]))
    runner = make_runner(pieces, sizes=[8], mode="PIECEWISE", state=traced.held)
    runner.capture()
    assert _copies(runner) == 0


def test_operator_that_returns_fresh_memory_costs_one_copy_for_each_result():
    """Results that moved are copied to the next graph's address; others are not."""

    def step(x):
        left = x + 1
        return double(left) + left

    pieces = splitting.split_module(step, {"x": torch.zeros(4, 3)}, at=[double])
    runner = make_runner(
        pieces, {"x": StaticInput((None, 3), "float32")}, sizes=[8], mode="PIECEWISE"
    )
    runner.capture()
    assert _copies(runner) == 1
    x = torch.randn(5, 3)
    assert torch.equal(runner(x=x), step(x))


# -- split points ---------------------------------------------------------------------------


def eager_nodes(pieces):
    return [
        [node.name for node in piece.fn.module.graph.nodes if node.op.startswith("call")]
        for piece in pieces
        if not piece.is_graph
    ]


@pytest.mark.parametrize(
    "rule",
    [
        "splitting_test::attend",
        "splitting_test::attend.default",
        attend,
        torch.ops.splitting_test.attend,
        torch.ops.splitting_test.attend.default,
    ],
)
def test_operator_is_found_by_any_of_its_names(traced, rule):
    """A name, a packet, an overload and a definition denote the same operator."""
    pieces = splitting.split_graph(traced, splitting.SplitRules([rule]))
    assert [piece.is_graph for piece in pieces] == [True, False, True, False, True]
    assert eager_nodes(pieces) == [["attend_default"], ["attend_default_1"]]


@pytest.mark.parametrize(
    "rule", ["layers.*.attention", "attention", "Attention", Attention, "layers.[01].attention"]
)
def test_module_is_found_by_path_pattern_or_class(traced, rule):
    """All operations of the module run eager, except its last allocation."""
    pieces = splitting.split_graph(traced, splitting.SplitRules([rule]))
    assert [piece.is_graph for piece in pieces] == [True, False, True, False, True]
    assert all(len(names) == 4 for names in eager_nodes(pieces))


def test_one_module_of_several_is_found_by_its_path(traced):
    """A path without a pattern names one module."""
    pieces = splitting.split_graph(traced, splitting.SplitRules(["layers.1.attention"]))
    assert [piece.is_graph for piece in pieces] == [True, False, True]


@pytest.mark.parametrize("rule", [torch.relu, "relu"])
def test_function_is_found_by_object_or_name(traced, rule):
    """Functions are possible split points too."""
    pieces = splitting.split_graph(traced, splitting.SplitRules([rule]))
    assert len(eager_nodes(pieces)) == 2


def marked(x):
    y = x + 1
    graph_break()
    z = y * 2
    with eager_region():
        z = z.cumsum(-1)
    return z - 1


def test_marks_in_plain_code_split_and_do_nothing_elsewhere():
    """A break separates graphs, and a region runs eager; both do nothing in plain calls."""
    x = torch.randn(4, 3)
    plain = ((x + 1) * 2).cumsum(-1) - 1
    assert torch.equal(marked(x), plain)
    pieces = splitting.split_module(marked, {"x": x})
    assert [piece.is_graph for piece in pieces] == [True, True, False, True]
    runner = make_runner(pieces, {"x": StaticInput((None, 3), "float32")}, sizes=[4, 8])
    assert not runner.capture().failed
    for rows in (1, 4, 7):
        x = torch.randn(rows, 3)
        for uniform in (0, 1):
            torch.testing.assert_close(runner(x=x, num_reqs=rows, uniform=uniform), marked(x))


def test_part_that_launches_nothing_is_not_a_graph():
    """The host unpacks results between two eager operators."""

    def step(x):
        first, _ = torch.ops.splitting_test.double(x).chunk(2, dim=-1)
        return torch.ops.splitting_test.double(first) + 1

    pieces = splitting.split_module(step, {"x": torch.zeros(4, 6)}, at=["splitting_test::double"])
    assert [piece.is_graph for piece in pieces] == [False, True]


# -- any split -------------------------------------------------------------------------------

OPERATIONS = {
    "relu": lambda values, held: torch.relu(values[-1]),
    "add input": lambda values, held: values[-1] + values[0],
    "add old": lambda values, held: values[-1] + values[len(values) // 2],
    "weight": lambda values, held: values[-1] * held,
    "in place": lambda values, held: (values[-1] * 1).add_(values[0]),
    "double": lambda values, held: torch.ops.splitting_test.double(values[-1]),
    "state": lambda values, held: torch.ops.splitting_test.remember(values[-1], held),
    "view": lambda values, held: values[-1].view(-1, 6),
    "part": lambda values, held: torch.cat(values[-1].chunk(2, dim=-1)[::-1], dim=-1),
    "random-free scan": lambda values, held: values[-1].cumsum(-1),
}


def make_program(names, held):
    def program(x):
        values = [x]
        for name in names:
            values.append(OPERATIONS[name](values, held))
        return values[-1], values[len(values) // 2]

    return program


class _Holder(nn.Module):
    def __init__(self, names, held):
        super().__init__()
        self.held = nn.Buffer(held)
        self._names = names

    def forward(self, x):
        return make_program(self._names, self.held)(x)


PROGRAMS = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=9)


@settings(max_examples=15)
@given(names=PROGRAMS, data=st.data())
def test_any_split_of_any_program_equals_the_whole(names, data):
    """For any eager parts, results and state are equal in FULL, PIECEWISE and NONE."""
    check_any_split(names, data)


@pytest.mark.slow
@given(names=PROGRAMS, data=st.data())
def test_any_split_of_many_programs_equals_the_whole(names, data):
    """The same property, with the profile's number of examples."""
    check_any_split(names, data)


def check_any_split(names, data):
    held = torch.ones(6)
    holder = _Holder(names, held)
    graph = fx.symbolic_trace(holder)
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    eager = set(data.draw(st.lists(st.sampled_from(calls), unique=True)))
    breaks = data.draw(st.lists(st.sampled_from(calls), unique=True, max_size=2))
    for node in breaks:
        with graph.graph.inserting_before(node):
            graph.graph.call_function(torch.ops.dispatchkit.graph_break.default)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    traced = tracing.TracedStep(
        graph,
        ("x",),
        (tracing.Input("x"),),
        (),
        tuple(map(tracing.Result, range(len(output.args[0])))),
        tree_structure((0, 0)),
    )

    class Rules(splitting.SplitRules):
        def match(self, node):
            return node in eager

    try:
        pieces = splitting.split_graph(traced, Rules())
    except ConfigError:
        assert all(node in eager or not splitting._launches(node) for node in calls)
        return
    reference_held = held.clone()
    reference = make_program(names, reference_held)
    runner = make_runner(pieces, {"x": StaticInput((None, 6), "float32")}, sizes=[2, 4], lazy=True)
    for rows, uniform in ((3, 0), (2, 1), (4, 1), (1, 0), (3, 1), (4, 0)):
        x = torch.randn(rows, 6)
        got = runner(x=x.clone(), num_reqs=rows, uniform=uniform, ceiling=2)
        torch.testing.assert_close(got, reference(x.clone()))
        torch.testing.assert_close(holder.held.data, reference_held)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(3, 6)
        torch.testing.assert_close(runner(x=x.clone(), ceiling=0), reference(x.clone()))
    stats = runner.stats()
    assert stats.capture_failures == 0, runner


# -- bad input -------------------------------------------------------------------------------


def test_unknown_split_point_names_the_nearest(traced):
    """A misspelt operator or module is refused with the similar names."""
    for name, nearest in (
        ("splitting_test::atend", "splitting_test::attend"),
        ("layers.*.atention", "attention"),
    ):
        rules = splitting.SplitRules([name])
        splitting.split_graph(traced, rules)
        with pytest.raises(UnknownNameError) as caught:
            rules.require_all_used(traced.graph)
        assert any(nearest in found for found in caught.value.nearest)


def test_operator_that_the_step_does_not_call_is_refused():
    """An operator that the step does not call cannot split it."""
    with pytest.raises(
        ConfigError,
        match=r"No operation of the step matches .* The step contains .*splitting_test::attend",
    ):
        splitting.split_module(make_decoder(), INPUTS, at=["splitting_test::double"])


@pytest.mark.parametrize("at", ["splitting_test::attend", 3, [3], [make_decoder()]])
def test_rules_of_another_kind_are_refused(at):
    """A string instead of a list, or an instance of a module, is refused."""
    with pytest.raises(ConfigError, match=r"at(\[0\])? must be"):
        splitting.SplitRules(at)


@pytest.mark.parametrize("example", [3, torch.zeros(4, 2), [torch.zeros(4, 2)]])
def test_example_without_names_is_refused(example):
    allowed = "a dict of tensors or StaticInputs by input name"
    with pytest.raises(ConfigError, match=f"example must be {allowed}"):
        splitting.split_module(double, example)


def test_device_that_torch_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"device must be a torch device, .* got 'nope'"):
        splitting.split_module(double, {"x": torch.zeros(4, 2)}, device="nope")


def test_step_that_is_all_eager_is_refused():
    """There must be a graph piece."""
    with pytest.raises(ConfigError, match=r"all operations of .* would run eager"):
        splitting.split_module(double, {"x": torch.zeros(4, 2)}, at=[double])
    with pytest.raises(ConfigError, match="has no operation that can be captured in a piece"):
        splitting.split_module(lambda x: x.view(-1), {"x": torch.zeros(4, 2)})
    with pytest.raises(ConfigError, match="example contains no inputs"):
        splitting.split_module(double, {})


def test_branch_on_data_is_refused_with_its_line():
    """A graph contains one branch, but the data select the correct one."""

    def step(x):
        return x * 2 if x.sum() > 0 else x * 3

    with pytest.raises(
        CaptureError, match=r"(?s)test_splitting\.py:\d+.*custom operator"
    ) as caught:
        splitting.split_module(step, {"x": torch.zeros(4, 2)})
    assert caught.value.reason == "not_traceable"


def test_branch_on_the_size_is_refused():
    """A graph specialized for the example's size would be wrong for another."""

    def step(x):
        return x * 2 if x.shape[0] > 8 else x * 3

    with pytest.raises(CaptureError, match="for all sizes"):
        splitting.split_module(step, {"x": torch.zeros(4, 2)})


def test_python_effects_are_refused_and_undone():
    """A Python effect would happen only once, at the split."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, x):
            self.last = x + 1
            return x * 2

    model = Counts()
    with pytest.raises(CaptureError, match=r"Counts\.last") as caught:
        splitting.split_module(model, {"x": torch.zeros(4, 2)})
    assert caught.value.reason == "python_effects"
    assert model.last is None


def test_result_of_unknown_structure_is_refused():
    """A structure that torch cannot unpack cannot be cut to the real rows."""

    class Box:
        def __init__(self, value):
            self.value = value

    def step(x):
        return Box(x + 1)

    with pytest.raises(CaptureError, match="Box, which torch cannot flatten"):
        splitting.split_module(step, {"x": torch.zeros(4, 2)})


def test_error_in_a_piece_says_which_operation_it_was():
    """In generated code, a note names the user's line."""

    def step(x):
        return torch.gather(x, 1, x.long())

    pieces = splitting.split_module(step, {"x": torch.zeros(4, 2)})
    with pytest.raises(RuntimeError) as caught:
        pieces[0].fn(x=torch.full((4, 2), 9.0))
    assert "test_splitting.py" in "".join(caught.value.__notes__)


def test_inputs_that_the_step_does_not_use_are_accepted():
    """They are declared but not read."""

    def step(x, unused):
        return x + 1

    example = {"x": torch.zeros(4, 2), "unused": torch.zeros(4)}
    runner = GraphRunner(
        splitting.split_module(step, example),
        example=example,
        backend="tape",
        sizes=[4],
        lazy=True,
    )
    assert torch.equal(runner(x=torch.ones(3, 2), unused=torch.ones(3)), torch.full((3, 2), 2.0))


def test_results_that_are_inputs_or_constants_come_back():
    """A returned input, a weight and a Python value are results too."""
    weight = torch.ones(2)

    def step(x):
        return {"x": x, "y": [x + weight, 5], "weight": weight}

    pieces = splitting.split_module(step, {"x": torch.zeros(4, 2)})
    got = pieces[0].fn(x=torch.full((3, 2), 2.0))
    assert torch.equal(got["x"], torch.full((3, 2), 2.0))
    assert torch.equal(got["y"][0], torch.full((3, 2), 3.0))
    assert got["y"][1] == 5
    assert got["weight"] is weight


# -- support by operators -------------------------------------------------------------------


@pytest.fixture
def declared():
    """Restore the table of declared levels after the test."""
    before = dict(support._declared)
    yield
    support._declared.clear()
    support._declared.update(before)


@pytest.mark.usefixtures("declared")
def test_operator_that_cannot_always_be_captured_is_split_at_by_itself(traced):
    """Its declaration suffices; users need not name it."""
    support.declare_support(attend, "UNIFORM_BATCH")
    pieces = splitting.split_graph(traced, splitting.SplitRules())
    assert [piece.is_graph for piece in pieces] == [True, False, True, False, True]
    assert {piece.limited_by for piece in pieces if not piece.is_graph} == {
        "splitting_test::attend"
    }


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize(
    ("level", "asked", "query_len", "resolved"),
    [
        ("ALWAYS", "FULL", 1, "FULL"),
        ("UNIFORM_BATCH", "FULL", 1, "FULL_AND_PIECEWISE"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "FULL_DECODE_ONLY", 2, "PIECEWISE"),
        ("NEVER", "FULL_AND_PIECEWISE", 1, "PIECEWISE"),
    ],
)
def test_mode_is_lowered_visibly_to_what_the_operator_supports(
    traced, level, asked, query_len, resolved
):
    """The runner chooses the closest mode, warns, and prints the reason."""
    support.declare_support("splitting_test::attend", level)
    pieces = splitting.split_graph(traced, splitting.SplitRules([attend]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runner = make_runner(
            pieces,
            mode=asked,
            sizes=[4, 8],
            options=RunnerOptions(config=DispatchConfig(query_lens=query_len)),
        )
    assert str(runner.config.mode) == resolved
    downgrades = [one for one in told if issubclass(one.category, support.ModeDowngradeWarning)]
    assert len(downgrades) == (asked != resolved)
    assert (f"mode {asked} -> {resolved}" in str(runner)) == (asked != resolved)


@pytest.mark.usefixtures("declared")
def test_full_for_what_is_never_captured_is_refused_by_name(traced):
    """No mixed batch can run FULL, so the request is wrong; the error suggests a mode."""
    support.declare_support(attend, "NEVER")
    pieces = splitting.split_graph(traced, splitting.SplitRules())
    with pytest.raises(
        ConfigError, match="Mode FULL is not possible, because splitting_test::attend"
    ):
        make_runner(pieces, mode="FULL", sizes=[4])


def test_pieces_by_hand_state_their_support_too():
    """Eager pieces made by hand are considered too."""
    pieces = [
        graph_piece(lambda x: x + 1),
        eager_piece(lambda x: x * 2, support="UNIFORM_BATCH"),
        graph_piece(lambda x: x - 1),
    ]
    found = support.mode_for_pieces(pieces, "FULL")
    assert str(found.mode) == "FULL_AND_PIECEWISE"
    assert Step(pieces, ["x"]).pieces[1].limited_by == "<lambda>"


def test_backend_without_graphs_runs_nothing_but_eager():
    """A backend that cannot capture lowers every mode to NONE."""
    found = support.mode_for_pieces([graph_piece(len)], "FULL", captures=False)
    assert str(found.mode) == "NONE"
    assert "does not capture graphs" in found.reasons[0]


@pytest.mark.parametrize("op", ["attend", 3, None])
def test_support_is_declared_for_operators_alone(op):
    """A name without a namespace is ambiguous."""
    with pytest.raises(ConfigError, match="op must be an operator"):
        support.declare_support(op, "NEVER")


def test_unknown_level_of_support_names_the_nearest():
    """Levels are words; misspelt ones are refused with the similar names."""
    with pytest.raises(UnknownNameError, match="UNIFORM_BATCH"):
        support.declare_support("a::b", "UNIFORM_BACH")
