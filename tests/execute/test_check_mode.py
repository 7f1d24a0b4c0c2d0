"""Check mode detects replays that differ from eager, and accepts the others."""

from __future__ import annotations

import warnings
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from dispatchkit import (  # noqa: E402
    CaptureOptions,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    StepState,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.execute import CheckWarning  # noqa: E402
from dispatchkit.execute.capture import effects  # noqa: E402
from dispatchkit.execute.replay import check_state  # noqa: E402
from dispatchkit.execute.step.state import Snapshot  # noqa: E402
from dispatchkit.execute.step.values import ValueWatch  # noqa: E402
from dispatchkit.keys import CaptureSizeWarning  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

INPUT = {"x": StaticInput((None, 4), "float32")}


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


class Planted(torch.nn.Module):
    """A step whose environment can change after the capture."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.register_buffer("shift", torch.zeros(4))
        self.table = torch.arange(4.0)
        self.factor = 2.0
        self.negate = False
        self.inner = torch.nn.Dropout(0.0)

    def forward(self, x, rate):
        mixed = (x @ self.weight) * self.factor + self.shift + self.table * rate
        if self.inner.training:
            mixed = mixed + 1
        return -mixed if self.negate else mixed


class Counting(Planted):
    """Changes only its state, not its results."""

    def __init__(self):
        super().__init__()
        self.totals = torch.zeros(2, 4, dtype=torch.float64)
        self.steps = torch.zeros((), dtype=torch.int64)

    def forward(self, x, rate):
        self.steps.add_(3 if self.negate else 1)
        self.totals[1].add_(x.sum(0) * self.factor + self.table)
        return x * rate


def live(runner):
    return runner.lanes[0].lifecycle.live().values()


def replaced_weight(step, runner):
    step.weight = torch.nn.Parameter(torch.full((4, 4), 3.0))


def replaced_buffer(step, runner):
    step.shift = torch.ones(4)


def replaced_table(step, runner):
    step.table = step.table + 1


def baked_scalar(step, runner):
    step.factor = 5.0


def baked_branch(step, runner):
    step.negate = True


def switched_submodule(step, runner):
    step.inner.eval()


def freed_memory(step, runner):
    """Replace memory that the graph reads, as if it were reused."""
    old, step.table = step.table, step.table.clone()
    old.fill_(1e6)


def number_for_table(step, runner):
    step.table = 5.0


def reinterpreted_table(step, runner):
    step.table = step.table.view(torch.int32)


def moved_input(step, runner):
    for captured in live(runner):
        buffers = captured.input_path.buffers
        buffers.tensors = [tensor.clone() for tensor in buffers.tensors]


def overwritten_output(step, runner):
    for captured in live(runner):
        captured.leaves = tuple(leaf.clone() for leaf in captured.leaves)


def rows_in_another_order(step, runner):
    for captured in live(runner):
        captured.leaves = tuple(leaf.flip(0) for leaf in captured.leaves)


def graph_of_another_key(step, runner):
    """The graph writes its own rows to memory outside this graph's results."""
    steps = sorted(live(runner), key=lambda one: one.key.num_tokens)
    steps[2].graphs, steps[2].leaves = (
        steps[0].graphs,
        tuple(torch.zeros_like(leaf) for leaf in steps[2].leaves),
    )


PLANTED = {
    replaced_weight: "weight moved",
    replaced_buffer: "shift moved",
    replaced_table: "table moved",
    baked_scalar: "factor changed from 2.0 to 5.0",
    baked_branch: "negate changed from False to True",
    switched_submodule: "inner.training changed from True to False",
    freed_memory: "table moved",
    number_for_table: "table changed from a tensor to 5.0",
    reinterpreted_table: r"table changed from torch.float32 \(.*\) to torch.int32 \(",
    moved_input: "input 'x' moved",
    overwritten_output: "not close",
    rows_in_another_order: "not close",
    graph_of_another_key: "not close",
}


@pytest.fixture
def unwatched(monkeypatch):
    """Leave the detection of replaced values to check mode."""
    monkeypatch.setattr(effects, "ValueWatch", lambda *_: ValueWatch())


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_corruption_is_found_and_its_key_put_out_of_use(make_runner, keys, quiet, plant):
    """The caller gets eager's result once; the message names the difference."""
    step = Planted()
    inputs = {**INPUT, "rate": StaticInput((1,), "float32")}
    runner = make_runner(step, inputs, options=RunnerOptions(check=1))
    runner.capture()
    x, rate = torch.arange(12.0).view(3, 4) + 1, torch.ones(1)
    plant(step, runner)
    with torch.no_grad():
        with pytest.warns(CheckWarning, match=PLANTED[plant]):
            result = runner(x, rate)
        same(result, step(x, rate))
        entry = runner.registry.get(keys.full(4))
        assert entry.state is KeyState.FAILED
        assert entry.reason.startswith("check_failed: ")
        assert runner.stats().eager_by_reason == {"check_failed": 1}
        same(runner(x, rate), step(x, rate))  # eager from here on
        assert str(runner.stats().eager_by_reason) == "{'check_failed': 2}"


@pytest.mark.usefixtures("unwatched")
def test_memory_that_has_moved_is_found_before_results_differ(make_runner, quiet):
    """A changed address is reported, and the step runs eager."""
    step, runner = moving_step(make_runner)
    step.linear.weight.data = step.linear.weight.data.clone()
    x = torch.ones(3, 4)
    says = "A check of a step of 3 tokens failed.* still equal, but .*linear.weight moved"
    with pytest.warns(CheckWarning, match=says):
        runner(x)
    assert runner.stats().eager_by_reason == {"check_failed": 1}


def moving_step(make_runner):
    """A module within an object, whose weights only check mode checks."""

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(torch.ones(4))
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x * self.first)

    step = Holder()
    runner = make_runner(step, INPUT, options=RunnerOptions(check=1))
    runner.capture()
    return step, runner


@pytest.mark.parametrize("check", [0, 1])
def test_sparse_weights_are_in_no_one_place(make_runner, check):
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = torch.nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight

    runner = make_runner(Sparse(), INPUT, options=RunnerOptions(check=check))
    assert not runner.capture().failed
    same(runner(torch.ones(3, 4)), torch.ones(3, 4))
    assert runner.stats().steps_by_mode["FULL"] == 1


def clean_steps(make_runner, number):
    """Run steps of every size that change state in place; return the runner's counts."""
    step = Planted()
    total = torch.zeros(())

    def counting(x, rate):
        total.add_(1)
        return step(x, rate), total + 0

    inputs = {**INPUT, "rate": StaticInput((1,), "float32")}
    runner = make_runner(counting, inputs, state=[total], options=RunnerOptions(check=1))
    runner.capture()
    for index in range(number):
        with torch.no_grad():
            step.weight.mul_(-1)
        x = torch.full((1 + index % 8, 4), float(index % 5))
        got, count = runner(x, torch.full((1,), float(index % 3)))
        assert count == index + 1
        assert got.shape == x.shape
    return runner.stats()


def test_clean_steps_pass(make_runner):
    stats = clean_steps(make_runner, 200)
    assert stats.steps_by_mode["FULL"] == stats.steps == 200


@pytest.mark.slow
def test_three_thousand_clean_steps_pass(make_runner):
    stats = clean_steps(make_runner, 3_000)
    assert stats.steps_by_mode["FULL"] == stats.steps == 3_000


def test_stale_tail_is_found(make_runner):
    options = RunnerOptions(check=1, capture=CaptureOptions(prove_rows=False))
    runner = make_runner(lambda x: x.sum(0), INPUT, options=options)
    runner.capture()
    runner(torch.ones(8, 4))
    for captured in runner.lanes[0].lifecycle.live().values():
        captured.input_path.buffers.clean_from = 0  # wrong: eight rows hold ones
    with pytest.warns(CheckWarning):
        same(runner(torch.ones(5, 4)), torch.full((4,), 5.0))


def test_clean_steps_pass_and_change_state_once(make_runner):
    """With state, an eager piece in between, and every kind of call."""
    cache = torch.zeros(4)

    def write(x):
        cache.add_(1)
        return x.cumsum(0)

    pieces = [
        graph_piece(lambda x: x * 2),
        eager_piece(write),
        graph_piece(lambda x: (x + cache, x.shape[0])),
    ]
    runner = make_runner(pieces, INPUT, state=[cache], options=RunnerOptions(check=1))
    runner.capture()
    for number in range(20):
        x = torch.randn(1 + number % 8, 4)
        mixed, rows = runner(x, ceiling=1 + number % 2)
        same(mixed, (x * 2).cumsum(0) + number + 1)
        assert rows == x.shape[0]
    assert cache.tolist() == [20.0] * 4
    stats = runner.stats()
    assert stats.eager_by_reason == {}
    assert stats.steps == 20


@pytest.mark.filterwarnings("ignore:The step draws random numbers")
def test_random_steps_are_compared_where_they_can_be(make_runner):
    """At the bucket's size both draw equal numbers; below it they are not compared."""
    runner = make_runner(lambda x: x + torch.rand_like(x), INPUT, options=RunnerOptions(check=1))
    runner.capture()
    for rows in (8, 5, 8):
        runner(torch.zeros(rows, 4))
    assert runner.stats().steps_by_mode["FULL"] == 3


def test_samples_only(make_runner):
    """``check=5`` compares every fifth replay."""
    ran = Mock()

    def step(x):
        ran()
        return x

    runner = make_runner(step, INPUT, options=RunnerOptions(check=5))
    runner.capture()
    ran.reset_mock()
    for _ in range(20):
        runner(torch.ones(3, 4))
    assert ran.call_count == 4


def test_late_use_of_a_view_shows(make_runner):
    """The view shows NaN instead of plausible values of another call."""
    runner = make_runner(
        lambda x: (x * 2, x.long()), INPUT, outputs="view", options=RunnerOptions(check=1_000_000)
    )
    runner.capture()
    first, whole = runner(torch.ones(3, 4))
    same(first, torch.full((3, 4), 2.0))
    runner(torch.ones(5, 4))
    assert first.isnan().all()
    assert (whole == torch.iinfo(torch.int64).max).all()


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_bad_setting(make_runner, value):
    with pytest.raises(ConfigError, match="check"):
        make_runner(lambda x: x, INPUT, options=RunnerOptions(check=value))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (baked_scalar, "4 of 8 elements of .*state .* factor changed from 2.0 to 5.0"),
        (baked_branch, "1 of 1 element of .*state .*: 4 in the replay, 6 in the eager run"),
        (freed_memory, "4 of 8 elements of .*state .* table moved"),
    ],
)
def test_state_that_a_replay_changes_otherwise_is_found(make_runner, quiet, declared, plant, says):
    """The results are right and only the changed state is wrong; eager's state remains."""
    step, twin = Counting(), Counting()
    state = [step.totals, step.steps] if declared else []
    runner = make_runner(
        step,
        {**INPUT, "rate": StaticInput((1,), "float32")},
        state=state,
        options=RunnerOptions(check=1),
    )
    runner.capture()
    x, rate = torch.arange(12.0).view(3, 4) + 1, torch.ones(1)
    for rows in (3, 4, 1):  # equal so far, padded or not
        same(runner(x[:rows], rate), twin(x[:rows], rate))
    plant(step, runner)
    if plant is not freed_memory:
        plant(twin, runner)
    with pytest.warns(CheckWarning, match=says):
        same(runner(x, rate), twin(x, rate))
    same((step.totals, step.steps), (twin.totals, twin.steps))
    assert runner.stats().eager_by_reason == {"check_failed": 1}


@pytest.mark.parametrize("rows", [3, 4])
def test_state_that_was_replaced_is_found(make_runner, quiet, rows):
    """A graph continues with the old memory, eager with the new; padding may be to blame."""
    step = Counting()
    runner = make_runner(
        step,
        {**INPUT, "rate": StaticInput((1,), "float32")},
        state=[step.steps],
        options=RunnerOptions(check=1),
    )
    runner.capture()
    runner(torch.ones(rows, 4), torch.ones(1))
    step.steps = step.steps.clone()
    says = r"1 of 1 element of state 0 differs, at index 0: .* steps moved"
    with pytest.warns(CheckWarning, match=says) as caught:
        runner(torch.ones(rows, 4), torch.ones(1))
    assert ("padding rows probably" in str(caught[0].message)) == (rows < 4)
    assert step.steps == 2


def writing(make_runner, fill, **more):
    """A cache written by slot, to which filler rows write too."""
    cache = torch.zeros(17, 4)

    def write(x, slots):
        cache.index_copy_(0, slots, x)
        return x + 1

    inputs = {**INPUT, "slots": StaticInput((None,), "int64", fill=fill)}
    runner = make_runner(write, inputs, state=[cache], options=RunnerOptions(check=1), **more)
    runner.capture()
    return runner, cache


def test_rows_of_fill_may_write_to_a_sink(make_runner):
    """No row of a batch uses the slot, so nothing is reported."""
    runner, cache = writing(make_runner, fill=16)
    for number in range(40):
        rows = 1 + number % 8
        slots = torch.arange(number, number + rows) % 16
        runner(torch.full((rows, 4), 1.0 + number), slots)
    assert runner.stats().eager_by_reason == {}
    assert not cache[16].any()  # eager's state remains


def test_rows_of_fill_that_write_where_batches_do_are_found(make_runner, quiet):
    """Slot 0 belongs to a row, which padding overwrites."""
    runner, cache = writing(make_runner, fill=0)
    runner(torch.ones(4, 4), torch.arange(4))
    with pytest.warns(CheckWarning, match=r"4 of 68 .*so padding rows probably changed them"):
        runner(torch.full((3, 4), 2.0), torch.arange(4, 7))
    assert cache[0].tolist() == [1.0] * 4


def test_rows_of_fill_that_write_where_an_eager_step_did_are_found(make_runner, quiet):
    """For example a prefill above the largest size, whose first slot padding overwrites later."""
    with pytest.warns(CaptureSizeWarning):
        runner, cache = writing(make_runner, fill=0, sizes=(1, 2, 4), max_num_tokens=12)
    runner(torch.ones(12, 4), torch.arange(12))
    assert runner.stats().eager_by_reason == {"above_largest_size": 1}
    with pytest.warns(CheckWarning, match=r"4 of 68 .*so padding rows probably changed them"):
        runner(torch.full((3, 4), 2.0), torch.arange(12, 15))
    assert cache[0].tolist() == [1.0] * 4


def test_scratch_is_not_compared(make_runner):
    noise = torch.zeros(8, 4)

    def step(x):
        noise[: x.shape[0]] = x
        return x + 1

    runner = make_runner(
        step, INPUT, state=StepState(scratch=[noise]), options=RunnerOptions(check=1)
    )
    runner.capture()
    for rows in (8, 3, 5, 3):
        runner(torch.full((rows, 4), float(rows)))
    assert runner.stats().eager_by_reason == {}


@pytest.mark.usefixtures("unwatched")
def test_state_of_every_type_is_compared(make_runner, quiet):
    """Includes types that torch cannot compare, and NaN, which counts as equal."""
    types = [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.uint8]
    state = [torch.zeros(3, dtype=one) for one in types]
    state.append(torch.full((3,), float("nan")))
    odd = [False]

    def step(x):
        for tensor in state:
            tensor.copy_(torch.ones(3).to(tensor.dtype))
        state[-1].fill_(float("nan"))
        if odd[0]:
            state[0].copy_(torch.zeros(3).to(torch.float8_e4m3fn))
        return x + 1

    runner = make_runner(step, INPUT, state=state, options=RunnerOptions(check=1))
    runner.capture()
    for rows in (8, 3):
        runner(torch.ones(rows, 4))
    assert runner.stats().eager_by_reason == {}
    odd[0] = True
    with pytest.warns(CheckWarning, match="3 of 3 elements of state 0"):
        runner(torch.ones(8, 4))


class Largest(TorchDispatchMode):
    """Records the size of the largest result that is not in the given memory."""

    def __init__(self, known):
        super().__init__()
        self.known = {one.data_ptr() for one in known}
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.num_bytes = max(self.num_bytes, storage.nbytes())
        return result


def test_comparing_large_state_takes_little_memory(monkeypatch):
    """It needs a mask of one byte per element and some small tensors."""
    monkeypatch.setattr(check_state, "_CHUNK", 1 << 10)
    size = 1 << 16
    kept = torch.zeros(size, dtype=torch.bfloat16)
    check = check_state.StateCheck(lambda: {"kept": (kept.untyped_storage(), kept.dtype)}, 0.0, 0.0)
    for is_padded in (True, False):
        before = Snapshot(kept.device)
        before.save(kept.untyped_storage())
        kept[5000:] += 1
        replayed = check.now()
        replayed["kept"][6000:6010] = 7
        saved = before.saved(kept.untyped_storage(), kept.dtype)
        with Largest([kept, replayed["kept"], saved]) as largest:
            found = check.difference(before, replayed, is_padded=is_padded)
        assert found.startswith(
            "10 of 65,536 elements of kept differ, the first at index 6000: 7.0"
        )
        assert "Padding rows" not in found
        assert largest.num_bytes <= size


@pytest.mark.usefixtures("unwatched")
def test_state_that_is_resized_is_found(make_runner, quiet):
    """Earlier comparisons no longer apply; the next one starts again."""
    kept = torch.zeros(8)

    def step(x):
        kept[:4].add_(x.sum(0))
        return x + 1

    runner = make_runner(step, INPUT, state=[kept], options=RunnerOptions(check=1))
    runner.capture()
    runner(torch.ones(3, 4))
    kept.resize_(16)
    with pytest.warns(
        CheckWarning, match="state 0 was resized. It had 8 elements when .* compared, 16"
    ):
        same(runner(torch.ones(3, 4)), torch.full((3, 4), 2.0))
    same(kept[:4], torch.full((4,), 6.0))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_state_of_a_type_that_is_not_compared_is_left_out(make_runner):
    halves = torch.zeros(3, dtype=torch.complex32)
    bits = torch.zeros(3, dtype=torch.uint8).view(torch.bits8)

    def step(x):
        halves.copy_(torch.full((3,), 2.0 + 1j))
        return x + 1

    runner = make_runner(step, INPUT, state=[halves, bits], options=RunnerOptions(check=1))
    runner.capture()
    for rows in (8, 3):
        runner(torch.ones(rows, 4))
    assert runner.stats().eager_by_reason == {}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_results_and_state_of_one_byte_are_compared_as_coarsely_as_they_are(dtype):
    """A bucket has another shape, and rounding may give the next value, an eighth larger."""
    kept = torch.zeros(8).to(dtype)

    def step(x):
        out = (x * (1.0 + 1e-3 * len(x))).to(dtype)
        kept[: len(x)].copy_(out)
        return out

    eps = torch.finfo(dtype).eps
    between = (1.0 + eps / 2) / (1.0 + 3.5e-3)  # rounded down in three rows, up in four
    runner = GraphRunner(
        step,
        {"x": StaticInput((None,), "float32")},
        sizes=(4,),
        state=[kept],
        policy="vllm",
        mode="FULL",
        backend="tape",
        options=RunnerOptions(check=1, capture=CaptureOptions(prove_rows=False)),
    )
    runner.capture()
    for rows in (3, 4):
        runner(torch.full((rows,), between))
    assert runner.stats().steps_by_mode["FULL"] == 2


@pytest.mark.usefixtures("unwatched")
def test_one_byte_that_is_really_another_is_found():
    scale = torch.ones(())
    held = [scale]

    def step(x):
        return (x * held[0]).to(torch.float8_e5m2)

    runner = GraphRunner(
        step,
        {"x": StaticInput((None,), "float32")},
        sizes=(4,),
        policy="vllm",
        mode="FULL",
        backend="tape",
        options=RunnerOptions(check=1),
    )
    runner.capture()
    held[0] = scale * 2  # the graph reads the previous one
    with pytest.warns(CheckWarning):
        runner(torch.full((4,), 8.0))
    assert runner.stats().eager_by_reason == {"check_failed": 1}


def test_a_replaced_weight_that_a_replay_finds_is_counted_once(make_runner, quiet):
    """The step ran eager, so there is nothing to compare."""
    step, runner = moving_step(make_runner)
    x = torch.ones(3, 4)
    runner(x)
    step.first = torch.nn.Parameter(torch.full((4,), 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckWarning)
        same(runner(x), step(x))
    assert runner.stats().eager_by_reason == {"weights_replaced": 1}
