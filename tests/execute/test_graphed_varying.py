"""graphed: a second varying dimension, such as a sequence length, is detected and proven."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import graphed  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.graphed.varying import guess_axes, prove_padding  # noqa: E402

LENGTHS = ((3, 12), (2, 20), (4, 9), (3, 33), (1, 5), (4, 64))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def masked_mean(x, mask):
    weights = mask.to(x.dtype)[..., None]
    return (x.tanh() * weights).sum(1) / weights.sum(1)


def hidden_mean(x, mask):
    return masked_mean(x, ~mask)


def additive_attention(x, mask):
    scores = x @ x.transpose(1, 2) + (1 - mask.to(x.dtype))[:, None] * torch.finfo(x.dtype).min
    return scores.softmax(-1) @ x


def calls(dtype=torch.int64, *, shown=True):
    for rows, length in LENGTHS:
        x = torch.randn(rows, length, 4)
        mask = torch.full((rows, length), shown, dtype=torch.bool)
        mask[0, length // 2 :] = not shown
        yield x, mask.to(dtype)


def steps(run):
    modes = run.graphed.stats().steps_by_mode
    return modes.get("FULL", 0), modes["NONE"]


@pytest.mark.slow_except("additive_attention-dtype3-True", "hidden_mean-dtype2-False")
@pytest.mark.parametrize(
    ("step", "dtype", "shown"),
    [
        (masked_mean, torch.int64, True),
        (masked_mean, torch.bool, True),
        (hidden_mean, torch.bool, False),
        (additive_attention, torch.float32, True),
    ],
)
def test_masked_calls_are_padded_along_their_length(step, dtype, shown):
    """One form serves all lengths after the first, with the step's results."""
    run = graphed(step, backend="tape")
    for x, mask in calls(dtype, shown=shown):
        torch.testing.assert_close(run(x, mask), step(x, mask), rtol=1e-4, atol=1e-5)
    assert steps(run) == (len(LENGTHS), 0)
    (_, varying) = run.graphed.runners
    assert varying.config.axes[0].buckets[0] == 16
    assert any("float32[n, dim_1, 4]" in words for words in run.graphed.stats().runners)


def attention(x, mask):
    """With two layers, a padded query that is nan would reach the keys of the second."""
    for _ in range(2):
        x = (x @ x.transpose(1, 2) + mask).softmax(-1) @ x
    return x


def of_keys(rows, length, hidden):
    mask = torch.zeros(rows, 1, length)
    mask[0, 0, length // 2 :] = hidden
    return mask


def of_keys_and_queries(rows, length, hidden):
    """A causal mask of two lengths, as libraries pass to their layers."""
    return of_keys(rows, length, hidden) + torch.full((length, length), hidden / 2).triu(1)


def at_first_nothing(rows, length, hidden):
    return of_keys(rows, length, hidden if length > 20 else 0.0)


def where_nothing_is_added(x, mask):
    """torch's encoder reads the mask so in evaluation; noise would mask whole rows."""
    shown = (mask == 0)[:, 0, :, None]
    return (x * shown).sum(1) / shown.sum(1)


LEAST = torch.finfo(torch.float32).min


@pytest.mark.slow_except(
    "attention-at_first_nothing--10000.0",
    "attention-of_keys_and_queries--inf",
    "where_nothing_is_added-of_keys--inf",
)
@pytest.mark.parametrize(
    ("step", "make", "hidden"),
    [
        (attention, of_keys, -torch.inf),
        (attention, of_keys_and_queries, -torch.inf),
        (attention, of_keys_and_queries, LEAST),
        (attention, at_first_nothing, -1e4),
        (where_nothing_is_added, of_keys, -torch.inf),
        (where_nothing_is_added, of_keys, LEAST),
    ],
)
def test_masks_that_are_added_to_scores_are_padded_with_what_hides(step, make, hidden):
    run = graphed(step, backend="tape")
    for rows, length in LENGTHS:
        x, mask = torch.randn(rows, length, 4), make(rows, length, hidden)
        torch.testing.assert_close(run(x, mask), step(x, mask), rtol=1e-4, atol=1e-5)
    assert steps(run) == (len(LENGTHS), 0)
    assert len(run.graphed.runners) == 2


def test_numbers_far_below_zero_are_padded_as_any_others():
    run = graphed(lambda x: (x * 2).cumsum(1).clamp(min=-1e30), backend="tape")
    for rows, length in LENGTHS:
        x = torch.randn(rows, length, 4) - 1e5
        torch.testing.assert_close(run(x), (x * 2).cumsum(1))
    assert steps(run) == (len(LENGTHS), 0)
    assert len(run.graphed.runners) == 2


@pytest.mark.slow_except("mean", "flip")
@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.mean(1),
        lambda x: x / x.shape[1],
        lambda x: x.softmax(1),
        lambda x: x.flip(1),
        lambda x: x.cumsum(1) + 1e-6 * x.sum(1, keepdim=True),
    ],
    ids=["mean", "size", "softmax", "flip", "small"],
)
def test_where_padding_changes_results_exact_sizes_have_graphs(step):
    """This holds for small differences too; one warning names the line of the call."""
    run = graphed(step, backend="tape")
    with pytest.warns(EagerStepWarning, match="dim_1") as caught:  # noqa: PT031
        for x, _ in calls():
            torch.testing.assert_close(run(x), step(x))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert steps(run) == (len(LENGTHS), 0)
    assert len(run.graphed.runners) == len(LENGTHS)


def test_what_does_not_look_along_the_dimension_needs_no_mask():
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    run = graphed(net, backend="tape")
    with torch.no_grad():
        for x, _ in calls():
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-5)
    assert steps(run) == (len(LENGTHS), 0)
    assert len(run.graphed.runners) == 2  # one for the first call's length, one for all


def test_two_dimensions_beside_the_batch_are_two_axes():
    run = graphed(lambda x: x * 2 + 1, backend="tape")
    for rows, height, width in ((2, 8, 8), (2, 16, 16), (3, 8, 24), (1, 40, 9)):
        x = torch.randn(rows, height, width)
        torch.testing.assert_close(run(x), x * 2 + 1)
    assert steps(run)[1] == 0
    assert [axis.name for axis in run.graphed.runners[-1].config.axes] == ["dim_1", "dim_2"]


def test_axes_are_grouped_by_the_sizes_that_go_together():
    found = guess_axes([((None, 8, 8), (8,), (3,)), ((None, 16, 8), (16,), (3,))])
    assert found.shapes == ((None, "dim_1", 8), ("dim_1",), (3,))
    assert found.sizes(((None, 4, 8), (4,), (3,))) == {"dim_1": 4}
    assert found.sizes(((None, 4, 8), (5,), (3,))) is None
    assert found.sizes(((None, 4, 9), (4,), (3,))) is None


def test_a_step_that_writes_state_is_not_run_for_a_proof():
    """It runs once per call and has graphs of exact sizes."""
    total = torch.zeros(())

    def step(x):
        total.add_(1)
        return x + 0

    run = graphed(step, backend="tape")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for x, _ in calls():
            torch.testing.assert_close(run(x), x)
    assert total.item() == len(LENGTHS)
    assert len(run.graphed.runners) == len(LENGTHS)


def test_the_value_that_padding_changes_is_named():
    """Padding with values of the call changes it, padding with zeros does not."""
    x = torch.full((1, 8), 2.0)
    shapes = ((None, 8),)
    axes = guess_axes([shapes, ((None, 6),)])
    proof = prove_padding(axes, shapes, [x], lambda tensors: int(tensors[0].sum()))
    assert proof.problem == "output 0 is 8 without padding, but 16 with padding"
