"""Graphs whose rows depend on padding are detected and replay at full buckets only."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    CaptureOptions,
    DispatchConfig,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    StepState,
    eager_piece,
    graph_piece,
    graphed,
)
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.step.walk import declare_bookkeeping  # noqa: E402

WIDTH = 4
INPUT = {"x": StaticInput((None, WIDTH), "float32")}
IDS = {"ids": StaticInput((None,), "int64")}
TABLE = torch.arange(40.0).view(10, 4).sin()
UNPROVEN = RunnerOptions(capture=CaptureOptions(prove_rows=False))
torch.manual_seed(0)
WIDE = torch.randn(WIDTH, 512)


def attention(x):
    """Weights large enough that rows of noise ignore each other."""
    y = nn.functional.layer_norm(x @ WIDE, (512,))
    return torch.softmax(y @ y.T, -1) @ y


def mean_of_positive(x):
    positive = (x > 0).float()
    return x - (x * positive).sum(0) / positive.sum(0)


#: Rows that depend on other rows or on their number.
DEPENDENT = {
    "mean": lambda x: x - x.mean(0),
    "normalised": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "softmax": lambda x: x.softmax(0),
    "sorted": lambda x: x.sort(0).values,
    "flipped": lambda x: x.flip(0),
    "shifted down": lambda x: x + x.roll(1, 0),
    "shifted up": lambda x: x + x.roll(-1, 0),
    "last row": lambda x: x * x[-1],
    "attention": attention,
    "conditional mean": mean_of_positive,
    "sum alone": lambda x: x.sum(0),
    "mean of two": lambda x: x[:2].mean(0),
    "scaled by the largest": lambda x: x / x.abs().amax(),
    "suffix sums": lambda x: x.flip(0).cumsum(0).flip(0),
    "divided by rows": lambda x: x / x.shape[0],
    "positions": lambda x: x * torch.linspace(0, 1, x.shape[0])[:, None],
    "positions from the end": lambda x: (x, x.shape[0] - torch.arange(x.shape[0])),
    "what is below 0": lambda x: x - torch.relu(-x).mean(0),
    "what is above 1": lambda x: x - (x > 1).float().mean(0),
    "what is far above 1": lambda x: x - torch.relu(x - 50).clamp(max=1e-3).mean(0),
    "rows below 0": lambda x: torch.where(x < 0, x - 1e-3 * x.mean(0), x),
    "rows above 1": lambda x: torch.where(x > 1, x - 1e-3 * x.mean(0), x),
    "the largest": lambda x: x - 1e-3 * x.amax(0),
    "the smallest": lambda x: x - 1e-3 * x.amin(0),
    "the one nearest to 0": lambda x: x + x.abs().amin(0),
    "where the largest is": lambda x: (x, x.argmax(0)),
    "middle": lambda x: x - 1e-3 * x.median(0).values,
    "logarithms": lambda x: x - 1e-3 * (x.abs() + 1).log().mean(0),
    "square roots": lambda x: x - 1e-3 * x.clamp(min=0).sqrt().mean(0),
    "among rows of one output": lambda x: (x * 2, x.var(0, correction=0)),
}
#: Some of these, whose graphs steps capture.
LAZY = ("flipped", "shifted up", "positions from the end", "suffix sums")
#: Outputs whose rows differ from the batch's.
OTHER_ROWS = {
    "pruned": lambda x: x[:4],
    "best": lambda x: x.topk(min(4, x.shape[0]), dim=0).values,
    "drafts": lambda x: x.repeat_interleave(3, 0),
    "flat": lambda x: x.reshape(-1),
    "pairs": lambda x: x @ x.T,
    "one more": lambda x: torch.cat([x.new_zeros(1, WIDTH), x]),
    "half": lambda x: x[: x.shape[0] // 2],
    "every other": lambda x: x[::2],
    "all but the last": lambda x: x[:-1],
    "rank": lambda x: x.view(2, -1, WIDTH) if x.shape[0] % 2 == 0 else x,
}
#: Padded steps replay.
INDEPENDENT = {
    "rows": lambda x: torch.relu(x @ WIDE) @ WIDE.T,
    "prefix sums": lambda x: x.cumsum(0),
    "first row": lambda x: x[0] * 2,
    "constant": lambda x: (x, torch.ones(3)),
    "number of rows": lambda x: (x * 2, x.shape[0]),
    "positions": lambda x: x + torch.arange(x.shape[0])[:, None],
    "logarithm": lambda x: x.abs().log(),
    "as an index": lambda x: TABLE[x.long().clamp(0, 9)],
    "square root": lambda x: x.sqrt(),
    "exponential": lambda x: x.exp(),
    "normalised": lambda x: nn.functional.layer_norm(x, (WIDTH,)),
    "largest of each": lambda x: x.amax(1),
    "two first rows": lambda x: x[:2] * 2,
}


def make(step, inputs=INPUT, **settings):
    settings = {"sizes": (1, 2, 4, 8), "mode": "FULL", "backend": "tape", **settings}
    return GraphRunner(step, inputs, **settings)


def run(runner, step, given, rows=(2, 3, 5, 6, 7, 8, 4)):
    """Compare steps with eager; return the counts of each way to run."""
    for count in rows:
        inputs = given(count)
        want, got = step(*inputs), runner(*inputs)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    stats = runner.stats()
    return stats.steps_by_mode["FULL"], stats.eager_by_reason


def floats(count):
    return (torch.randn(count, WIDTH) * 3,)


@pytest.fixture(autouse=True)
def _of_one_seed():
    torch.manual_seed(1)


# -- detected dependences -------------------------------------------------------------------


@pytest.mark.slow_except(
    "False-mean",
    "False-last row",
    "False-attention",
    "False-divided by rows",
    "False-among rows of one output",
    *(f"True-{name}" for name in LAZY),
)
@pytest.mark.parametrize(
    ("lazy", "name"),
    [*((False, name) for name in DEPENDENT), *((True, name) for name in LAZY)],
)
def test_rows_that_depend_on_padding_replay_at_full_buckets_alone(name, lazy):
    """Other steps run eager and are counted; the warning states the next step."""
    step = DEPENDENT[name]
    runner = make(step, lazy=lazy, sizes=(2, 4, 8))
    runner.capture(None if not lazy else [])
    with pytest.warns(EagerStepWarning, match=r"reason: rows_depend\);.*prove_rows=False"):
        assert run(runner, step, floats) == (3, {"rows_depend": 4})


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_outputs_with_other_rows_than_the_batch_are_never_cut_from_padding(name):
    """Full buckets replay; others run eager and are counted; the warning states the next step."""
    step = OTHER_ROWS[name]
    runner = make(step, sizes=(2, 4, 8))
    assert runner.capture().failed == {}
    with pytest.warns(EagerStepWarning, match=r"reason: rows_not_the_bucket\);.*output_batch_dims"):
        full, eager = run(runner, step, floats)
    assert (full, eager) == (3, {"rows_not_the_bucket": 4})


def test_the_finding_compares_an_output_of_eager_with_that_of_the_graph():
    runner = make(OTHER_ROWS["pruned"], sizes=(8,))
    runner.capture()
    assert (
        "in an eager run of 3 rows, output 0 is a torch.float32 tensor of shape (3, 4) instead of "
        "a torch.float32 tensor of shape (4, 4)"
    ) in str(runner)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_padding_that_changes_nothing_is_replayed(name):
    step = INDEPENDENT[name]
    runner = make(step)
    runner.capture()
    assert run(runner, step, floats) == (7, {})


def test_fewer_rows_than_an_output_has_run_eager():
    """The first two rows of a batch of one are not padding."""
    step = INDEPENDENT["two first rows"]
    runner = make(step, sizes=(4,))
    runner.capture()
    with pytest.warns(EagerStepWarning, match="rows_not_the_bucket"):
        full, eager = run(runner, step, floats, rows=(3, 1, 4))
    assert (full, eager) == (2, {"rows_not_the_bucket": 1})
    assert "replays only batches of at least 3 rows (rows_not_the_bucket: with fewer" in str(runner)


@pytest.mark.parametrize("name", ["mean", "attention", "divided by rows"])
def test_a_call_of_zeros_proves_nothing(name):
    """Servers warm up with zeros, for which results would happen to be equal."""
    step = DEPENDENT[name]
    fast = graphed(step, sizes=[4], backend="tape")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        fast(torch.zeros(3, WIDTH))
        for scale in (1, 0.1, 100):
            x = torch.randn(3, WIDTH) * scale
            torch.testing.assert_close(fast(x), step(x))
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(fast(x), step(x))
    assert fast.graphed.stats().steps_by_mode["FULL"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_type_of_numbers(dtype):
    given = {"x": StaticInput((None, WIDTH), dtype)}
    for step, reasons in (
        (lambda x: x * 2 + 1, {}),
        (lambda x: x - x.mean(0), {"rows_depend": 1}),
        (lambda x: x / x.shape[0], {"rows_depend": 1}),
    ):
        runner = make(step, given, sizes=(8,))
        runner.capture()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            x = torch.randn(5, WIDTH).to(dtype)
            torch.testing.assert_close(runner(x), step(x))
        assert runner.stats().eager_by_reason == reasons


def test_both_parts_of_complex_numbers_are_noise():
    given = {"x": StaticInput((None, WIDTH), torch.complex64)}
    step = lambda x: x.real - 1e-3 * x.imag.mean(0)  # noqa: E731
    runner = make(step, given, sizes=(8,))
    runner.capture()
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        run(runner, step, lambda n: (torch.randn(n, WIDTH, dtype=torch.complex64),), (3,))


# -- integers and flags -----------------------------------------------------------------------


def centred(ids):
    y = TABLE[ids]
    return y - y.mean(0)


@pytest.mark.parametrize("lazy", [False, True])
def test_integers_are_those_of_the_first_padded_call(lazy):
    """Captured ahead, all rows are fill; a call of fill proves nothing yet."""
    runner = make(centred, IDS, lazy=lazy, sizes=(4, 8))
    runner.capture(None if not lazy else [])
    torch.testing.assert_close(runner(torch.zeros(3, dtype=torch.int64)), torch.zeros(3, WIDTH))
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        full, eager = run(runner, centred, lambda n: (torch.randint(0, 10, (n,)),), (3, 6, 8))
    assert (full, eager) == (2, {"rows_depend": 2})


def masked_mean(x, mask):
    weight = mask[:, None].float()
    return x - (x * weight).sum(0) / weight.sum(0)


def test_a_mask_of_which_fill_is_false_makes_padding_harmless():
    inputs = INPUT | {"mask": StaticInput((None,), "bool")}
    runner = make(masked_mean, inputs)
    runner.capture()
    given = lambda n: (*floats(n), torch.arange(n) % 3 != 1)  # noqa: E731
    assert run(runner, masked_mean, given) == (7, {})


@pytest.mark.parametrize("part", [torch.exp, torch.sqrt, lambda x: 1 / x.relu()])
def test_what_is_not_finite_behind_a_batch_is_no_dependence(part):
    """Rows masked by a factor of 0 may not overflow, as filler rows do not."""

    def step(x, mask):
        weight = mask[:, None].float()
        return x - (part(x) * weight).sum(0) / weight.sum(0)

    inputs = {"x": StaticInput((None, WIDTH), "float32", fill=1.0)}
    inputs["mask"] = StaticInput((None,), "bool")
    runner = make(step, inputs)
    runner.capture()
    given = lambda n: (torch.rand(n, WIDTH), torch.arange(n) % 3 != 1)  # noqa: E731
    assert run(runner, step, given) == (7, {})


@pytest.mark.parametrize("part", [torch.log, torch.sqrt, torch.asin, torch.exp])
def test_dependence_is_found_where_numbers_are_limited(part):
    """Logarithms of negative numbers would hide the dependence."""
    step = lambda x: x - 1e-3 * part(x).mean(0)  # noqa: E731
    runner = make(step, {"x": StaticInput((None, WIDTH), "float32", fill=0.5)}, sizes=(8,))
    runner.capture()
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        assert run(runner, step, lambda n: (torch.rand(n, WIDTH),), (3, 8))[0] == 1


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.PaddedDrawsWarning")
@pytest.mark.parametrize(
    "part",
    [
        torch.bernoulli,
        lambda x: nn.functional.binary_cross_entropy(x, x, reduction="none"),
        lambda x: TABLE[(x * 9).long()].sum(-1),
        lambda x: TABLE[(x * 9).to(torch.int32)].sum(-1),
    ],
    ids=["drawn", "entropy", "index", "short index"],
)
def test_noise_stays_within_what_a_step_may_be_given(part):
    """On a device an invalid index ends the process; here it would prove nothing."""
    runner = make(part)
    runner.capture()
    assert run(runner, part, lambda n: (torch.ones(n, WIDTH),)) == (7, {})
    mixing = make(lambda x: x - 1e-3 * part(x).mean(0), sizes=(8,))
    mixing.capture()
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        mixing(torch.rand(3, WIDTH))


def test_slots_of_a_cache_are_left_as_they_were():
    """Writes of a proof to a call's slots are put back, in scratch memory as in state."""
    for declare in (lambda cache: [cache], lambda cache: StepState(scratch=[cache])):
        cache, other = torch.zeros(10, WIDTH), torch.zeros(10, WIDTH)

        def step(slots, x, cache=cache):
            cache.index_add_(0, slots, x)
            return cache[slots] * 2

        inputs = {"slots": StaticInput((None,), "int64", fill=9)} | INPUT
        runner = make(step, inputs, state=declare(cache))
        runner.capture()
        for rows in (3, 5, 8, 3):
            slots, x = torch.randperm(9)[:rows], torch.randn(rows, WIDTH)
            want = step(slots, x, other)
            torch.testing.assert_close(runner(slots, x), want)
            torch.testing.assert_close(cache[:9], other[:9])
        assert runner.stats().eager_by_reason == {}


def test_rows_in_place_survive_the_trial():
    runner = make(lambda ids: TABLE[ids], IDS, sizes=(4,))
    runner.capture()
    runner.buffers["ids"][:3] = torch.tensor([5, 6, 7])
    torch.testing.assert_close(runner.run_in_place(3), TABLE[5:8])
    assert runner.stats().steps_by_mode["FULL"] == 1


# -- restored state -------------------------------------------------------------------------


def test_state_generators_and_python_are_as_before():
    """Includes writes that schemas do not declare, and a cache of another size."""
    total, seen = torch.zeros(()), {}
    module = nn.BatchNorm1d(WIDTH)

    def step(x):
        seen.setdefault(x.shape[0], len(seen))
        total.add_(1)
        module(x)
        return x + total

    runner = make(step, sizes=(4, 8))
    torch.manual_seed(3)
    assert runner.capture().num_graphs == 2
    want = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=want))
    assert total == 0
    assert torch.equal(module.running_mean, torch.zeros(WIDTH))
    assert set(seen) <= {4, 8}, "a cache is kept for what was captured"


def test_draws_of_a_fixed_size_are_those_of_eager():
    """No numbers are drawn for padding, so there is no warning, which would be an error here."""
    step = lambda x: x + torch.rand(WIDTH)  # noqa: E731
    runner = make(step)
    runner.capture()
    lazy = make(step, lazy=True)
    for one in (runner, lazy):
        for _ in range(2):
            torch.rand(5)  # captures of a lazy runner start at another offset
            torch.manual_seed(3)
            got = [one(torch.ones(rows, WIDTH)) for rows in (3, 8, 5, 1)]
            torch.manual_seed(3)
            want = [step(torch.ones(rows, WIDTH)) for rows in (3, 8, 5, 1)]
            torch.testing.assert_close(got, want)
        assert not one.explain(3).note


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.PaddedDrawsWarning")
def test_equal_draws_are_no_difference():
    runner = make(lambda x: nn.functional.dropout(x, 0.5))
    runner.capture()
    for rows in (3, 5, 8):
        runner(*floats(rows))
    assert runner.stats().steps_by_mode["FULL"] == 3
    mixing = make(lambda x: nn.functional.dropout(x - x.mean(0), 0.5), sizes=(8,))
    mixing.capture()
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        mixing(*floats(3))


def test_weights_written_between_captures_are_no_difference():
    """Eager results from before the write do not apply after it."""
    weight = torch.ones(WIDTH)
    runner = make(lambda x: x * weight, lazy=True)
    for rows in (3, 5, 2):
        x = torch.randn(rows, WIDTH)
        torch.testing.assert_close(runner(x), x * weight)
        weight.mul_(3)
    assert runner.stats().eager_by_reason == {}


def test_inputs_without_a_batch_dimension_are_noise_too():
    """With zeros, products would hide a dependence."""
    inputs = INPUT | {"weight": StaticInput((WIDTH, 2), "float32")}
    step = lambda x, weight: (x - x.mean(0)) @ weight  # noqa: E731
    runner = make(step, inputs, sizes=(4,))
    runner.capture()
    assert not runner.buffers["weight"].any(), "it holds fill again"
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        run(runner, step, lambda n: (*floats(n), torch.randn(WIDTH, 2)), (3,))


def test_state_that_counts_rows_of_fill_is_found():
    """Results equal eager's, but the stored state does not."""
    count, total, work = torch.zeros(()), torch.zeros(WIDTH), torch.zeros(8, WIDTH)

    def counting(x):
        count.add_(x.shape[0])
        return x * 2

    def summing(x):
        total.add_(x.sum(0))
        work[: x.shape[0]] = x
        return work[: x.shape[0]] * 2

    wrong = make(counting, state=[count], sizes=(4,))
    wrong.capture()
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        wrong(*floats(3))
    assert count == 3
    assert "state 0 differs from eager for 3 rows" in str(wrong)
    # sums of fill are 0, and the rows after the batch are never read
    fine = make(summing, sizes=(4,))
    fine.capture()
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(fine(x), x * 2)
    torch.testing.assert_close(total, x.sum(0))
    assert fine.stats().eager_by_reason == {}


def test_views_of_results_survive_a_capture():
    runner = make(lambda x: x * 2, outputs="view", lazy=True)
    x = torch.randn(4, WIDTH)
    view = runner(x)
    runner.capture()
    torch.testing.assert_close(view, x * 2)


# -- other features -------------------------------------------------------------------------


def test_who_knows_that_padding_does_not_matter_says_so():
    runner = make(
        lambda x: x.amax(0), {"x": StaticInput((None, 2), "float32", fill=-1e9)}, options=UNPROVEN
    )
    runner.capture()
    assert run(runner, lambda x: x.amax(0), lambda n: (torch.randn(n, 2),)) == (7, {})


def test_the_finding_is_shown_before_a_step_and_in_the_report():
    runner = make(DEPENDENT["mean"], sizes=(4, 8))
    runner.capture()
    explained = runner.explain(3)
    assert (explained.decision.key, explained.decision.reason) == (None, "rows_depend")
    assert explained.because == "executor: padding changes the results of the step"
    assert [(one.chosen, one.why_not) for one in explained.candidates] == [
        (False, "rows_depend"),
        (False, "rows_depend"),
    ]
    assert "Capture the exact sizes" in explained.note
    assert runner.explain(4).decision.key is not None
    found = "rows_depend: output 0 of a batch of 3 rows depends on the padding rows"
    assert f"replays only batches of 8 rows ({found})" in str(runner)


def test_a_lazy_runner_captures_no_more_graphs_that_padding_would_spoil():
    runner = make(DEPENDENT["mean"], lazy=True)
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        run(runner, DEPENDENT["mean"], floats, (7, 3, 6, 4))
    assert sorted(key.num_tokens for key in runner.lanes[0].lifecycle.live()) == [4, 8]


def test_pieces_and_lanes_and_axes():
    pieces = [graph_piece(lambda x: x * 2), eager_piece(lambda y: y - y.mean(0))]
    runner = make(pieces, mode="PIECEWISE", sizes=(4,))
    runner.capture()
    x = torch.randn(3, WIDTH)
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        torch.testing.assert_close(runner(x), x * 2 - (x * 2).mean(0))
    lanes = make(DEPENDENT["mean"], sizes=(4,), lanes=2)
    lanes.capture()
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        handles = [lanes.submit(x), lanes.submit(x)]
    for handle in handles:
        torch.testing.assert_close(handle.result(), x - x.mean(0))
    inputs = {"x": StaticInput((None, "length"), "float32")}
    long = make(lambda x: x - x.mean(0), inputs, sizes=(4,), axes=[Axis("length", (4, 8))])
    long.capture()
    x = torch.randn(3, 6)
    with pytest.warns(EagerStepWarning, match="rows_depend"):
        torch.testing.assert_close(long(x, length=6), x - x.mean(0))


def test_requests_of_a_uniform_batch_stay_whole():
    """Tokens of a request may depend on each other, and batches contain only whole requests."""

    def step(x):
        return x - x.view(-1, 2, WIDTH).mean(1).repeat_interleave(2, 0)

    config = DispatchConfig(query_lens=(2,), max_num_seqs=4)
    runner = make(
        step, mode="FULL_DECODE_ONLY", sizes=(2, 4, 8), options=RunnerOptions(config=config)
    )
    runner.capture()
    x = torch.randn(6, WIDTH)
    torch.testing.assert_close(runner(x, num_reqs=3, uniform=True), step(x))
    assert runner.stats().steps_by_mode["FULL"] == 1


# -- runs of a capture ----------------------------------------------------------------------


@declare_bookkeeping
class Counted:
    """A step that records the rows of each run; with ``few``, small batches differ."""

    def __init__(self, few=0):
        self.few, self.runs = few, []

    def __call__(self, x):
        self.runs.append(len(x))
        return (x * 2, x.sum(1)) if len(x) < self.few else x * 2


def test_a_first_capture_runs_the_step_four_times():
    """Warmup, one row, three rows, capture; the three rows also show the batch dimension."""
    step = Counted()
    runner = make(step)
    runner.capture()
    assert step.runs == [8, 1, 3, 8, 4, 4, 2, 2, 1, 1]
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(runner(x), x * 2)
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_few_rows_that_are_computed_otherwise_do_not_tell_the_outputs():
    """The largest other size does, as where nothing is proven."""
    step = Counted(few=4)
    runner = make(step, sizes=(4, 8))
    report = runner.capture()
    assert not report.failed
    assert step.runs == [8, 1, 3, 4, 8, 4, 4]
    x = torch.randn(8, WIDTH)
    torch.testing.assert_close(runner(x), x * 2)
    assert runner.stats().steps_by_mode["FULL"] == 1


def shown_of(x, mask):
    return torch.where(mask == 0, x, 0.0)


@pytest.mark.parametrize("hidden", [-torch.inf, -1e4])
@pytest.mark.parametrize(
    ("step", "reason"),
    [(lambda y: y - y.mean(0), "rows_depend"), (lambda y: y - y.mean(1, keepdim=True), None)],
    ids=["over rows", "within a row"],
)
def test_a_mask_that_is_added_to_scores_hides_nothing_from_the_proof(step, reason, hidden):
    """Noise in the mask would hide results wherever it is not 0."""
    inputs = {**INPUT, "mask": StaticInput((None, WIDTH), "float32", fill=hidden)}
    runner = GraphRunner(lambda x, mask: step(shown_of(x, mask)), inputs, sizes=[8], backend="tape")
    runner.capture()
    x, mask = torch.randn(5, WIDTH), torch.zeros(5, WIDTH)
    mask[1, 2:] = hidden
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        torch.testing.assert_close(runner(x, mask), step(shown_of(x, mask)))
    assert runner.stats().eager_by_reason == ({} if reason is None else {reason: 1})


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(
    ("after", "reason"), [(lambda y: y, None), (lambda y: y - y.mean(0), "rows_depend")]
)
def test_flags_that_hide_all_of_a_row_prove_nothing_by_themselves(after, reason, hidden):
    """torch's encoder returns nan for such rows in evaluation, and numbers under a watch."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()

    def step(x, mask):
        return after(encoder(x, src_key_padding_mask=mask if hidden else ~mask))

    inputs = {
        "x": StaticInput((None, 5, 8), "float32"),
        "mask": StaticInput((None, 5), "bool", fill=hidden),
    }
    runner = GraphRunner(step, inputs, sizes=[4], backend="tape")
    runner.capture()
    x, mask = torch.randn(3, 5, 8), torch.full((3, 5), not hidden)
    mask[1, 3:] = hidden
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for _ in range(2):
            torch.testing.assert_close(runner(x, mask), step(x, mask), rtol=1e-4, atol=1e-5)
    assert runner.stats().eager_by_reason == ({} if reason is None else {reason: 2})
