"""Items packed into steps get the results of each item alone, in their order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit import Axis, GraphRunner, StaticInput
from dispatchkit.dispatch import PackingLimits
from dispatchkit.errors import ConfigError, InputError, PolicyError
from dispatchkit.execute import PackedRunner

WIDTH = 4
ITEMS = (1, 2, 4)


def first_fit(lengths, limits: PackingLimits):
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        for one in bins:
            held = sum(lengths[other] for other in one)
            if held + length <= limits.max_tokens and len(one) < limits.max_items:
                one.append(item)
                break
        else:
            bins.append([item])
    return bins


def step(x, scale, offsets, lengths, item_of_token, positions):
    """Return a weighted sum per item over its length, and each token with its position."""
    rows = x * (1 + positions)[:, None]
    sums = x.new_zeros(lengths.shape[0] + 1, WIDTH).index_add(0, item_of_token, rows)[:-1]
    means = sums / lengths.clamp(min=1)[:, None] + scale[:, None]
    begins = offsets[item_of_token.clamp(max=lengths.shape[0] - 1)]
    return rows, (means, begins)


def inputs(*, host=False):
    return {
        "x": StaticInput((None, WIDTH), "float32"),
        "scale": StaticInput(("items",), "float32"),
        "offsets": StaticInput(("items + 1",), "int64", fill="last", host=host),
        "lengths": StaticInput(("items",), "int64", host=host),
        "item_of_token": StaticInput((None,), "int64", fill=ITEMS[-1]),
        "positions": StaticInput((None,), "int32"),
    }


def alone(item, scale):
    n = item.shape[0]
    rows, (means, begins) = step(
        item,
        scale[None],
        torch.tensor([0, n]),
        torch.tensor([n]),
        torch.zeros(n, dtype=torch.int64),
        torch.arange(n),
    )
    return rows, means[0], begins


def make(**settings):
    options = {"axes": [Axis("items", ITEMS)], "sizes": (4, 8, 16), "mode": "FULL"}
    return GraphRunner(
        summed, settings.pop("inputs", inputs()), backend="tape", **{**options, **settings}
    )


def summed(x, scale, offsets, lengths, item_of_token, positions):
    """The step, with padding of the axis assigned to the sink after the items."""
    item = item_of_token.clamp(max=lengths.shape[0])
    return step(x, scale, offsets, lengths, item, positions)


KINDS = ("token", "item", "token")


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.step.reasons.EagerStepWarning")
@pytest.mark.slow_except("settings_1")
@pytest.mark.parametrize("settings_", [{}, {"lanes": 2}, {"inputs": inputs(host=True)}])
def test_items_get_what_each_alone_would(settings_):
    runner = make(**settings_)
    runner.capture()
    packed = PackedRunner(runner, first_fit, results=KINDS)
    torch.manual_seed(0)
    for lengths in ([3, 5, 1, 16, 2, 2, 2, 2, 7], [1], [16], [4] * 9, [20, 3]):
        items = [torch.randn(length, WIDTH) for length in lengths]
        scales = torch.randn(len(lengths))
        found = packed(x=items, scale=list(scales))
        assert len(found) == len(items)
        for item, scale, (rows, (mean, begins)) in zip(items, scales, found, strict=True):
            own_rows, own_mean, _ = alone(item, scale)
            torch.testing.assert_close(rows, own_rows)
            torch.testing.assert_close(mean, own_mean)
            assert begins.unique().numel() == 1
    assert packed(x=[], scale=[]) == []


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.step.reasons.EagerStepWarning")
@given(lengths=st.lists(st.integers(1, 18), min_size=1, max_size=10))
def test_any_lengths_come_back_whole_and_in_order(lengths):
    """Tokens are numbered; each item gets its own tokens back."""
    packed = PackedRunner(NUMBERED, first_fit, items="items")
    start, items = 0, []
    for length in lengths:
        items.append(torch.arange(start, start + length, dtype=torch.float32)[:, None])
        start += length
    found = packed(x=items)
    assert [part.tolist() for part in found] == [(item + 1).tolist() for item in items]


NUMBERED = GraphRunner(
    lambda x, lengths: x + 1 + 0 * lengths.sum(),
    {
        "x": StaticInput((None, 1), "float32"),
        "lengths": StaticInput(("items",), "int64"),
    },
    axes=[Axis("items", ITEMS)],
    sizes=(4, 8, 16),
    mode="FULL",
    backend="tape",
    lazy=True,
)


def test_bins_replay_and_are_counted_as_steps():
    runner = make()
    runner.capture()
    packed = PackedRunner(runner, first_fit, results=KINDS)
    packed(x=[torch.randn(8, WIDTH)] * 4, scale=[torch.zeros(())] * 4)
    assert runner.stats().steps_by_mode == {"NONE": 0, "PIECEWISE": 0, "FULL": 2}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ({"x": [torch.randn(2, WIDTH)]}, "each as a sequence with one value per item"),
        (
            {"x": [torch.randn(2, WIDTH)], "scale": [], "y": []},
            "each as a sequence with one value per item",
        ),
        ({"x": [torch.randn(2, WIDTH)], "scale": []}, "same number of items"),
        ({"x": [torch.randn(0, WIDTH)], "scale": [torch.zeros(())]}, "Item 0 has no tokens in 'x'"),
        ({"x": [[1.0]], "scale": [1.0]}, r"Item 0 of input 'x' must be a tensor .* got \[1\.0\]"),
        ({"x": iter(()), "scale": []}, "Input 'x' must be a sequence with one value per item"),
        ({"x": [], "scale": [], "offsets": []}, "Input 'offsets' is computed from the items"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, problem):
    packed = PackedRunner(make(), first_fit, results=KINDS)
    with pytest.raises(InputError, match=problem):
        packed(**call)


def test_rows_that_are_not_what_was_said_are_refused():
    packed = PackedRunner(make(lazy=True), first_fit, results="token")
    with pytest.raises(ConfigError, match="for each output, matching the size of its dimension 0"):
        packed(x=[torch.randn(3, WIDTH)], scale=[torch.zeros(())])


def test_a_packers_fault_is_named():
    packed = PackedRunner(make(), lambda lengths, limits: [], results=KINDS)
    with pytest.raises(PolicyError, match="must contain index 0 exactly once"):
        packed(x=[torch.randn(3, WIDTH)], scale=[torch.zeros(())])


@pytest.mark.parametrize(
    ("change", "options", "problem"),
    [
        ({"outputs": "view"}, {}, "'owned' for packed items"),
        (
            {},
            {"items": "others"},
            "the name of the runner's only axis, got 'others'. Pass items='items'",
        ),
        ({}, {"results": "row"}, "'token' or 'item'"),
        ({}, {"results": ()}, "'token' or 'item'"),
        ({}, {"results": 3}, "'token' or 'item', or a sequence .* got 3"),
        (
            {"inputs": inputs() | {"scale": StaticInput((3,), "float32")}},
            {},
            r"named offsets, .*, got \['scale'\]. Declare token inputs as",
        ),
        (
            {"inputs": inputs() | {"x": StaticInput(("items", WIDTH), "float32")}},
            {},
            r"^At least one input must be a token input \(offsets, .*, got \['item_of_token', ",
        ),
    ],
)
def test_runners_that_cannot_be_packed_are_refused(change, options, problem):
    with pytest.raises(ConfigError, match=problem):
        PackedRunner(make(**change), first_fit, **options)
