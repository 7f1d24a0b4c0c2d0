"""graphed: settings derived from calls, results, and behaviour as the module."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import dispatchkit  # noqa: E402
from dispatchkit import (  # noqa: E402
    RunnerOptions,
    graphed,
)
from dispatchkit.errors import ConfigError, InputError  # noqa: E402
from dispatchkit.execute import (  # noqa: E402
    EagerStepWarning,
)
from dispatchkit.execute.graphed import forms as graphed_forms  # noqa: E402
from dispatchkit.execute.graphed.forms import geometric_sizes  # noqa: E402
from dispatchkit.execute.graphed.front import GraphedFunction  # noqa: E402


class Net(nn.Module):
    """A module with a buffer, an attribute, a property that raises, and a mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("offset", torch.ones(3))
        self.scale = 2.0

    @property
    def broken(self):
        raise ValueError("a real attribute's own error")

    def forward(self, x, *, bias=None):
        y = self.drop(self.linear(x)) * self.scale + self.offset
        return y if bias is None else y + bias


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def steps(made):
    """Return (graph steps, eager steps) of all runners."""
    modes = made.graphed.stats().steps_by_mode
    return modes.get("FULL", 0), modes["NONE"]


# -- results --------------------------------------------------------------------------------


def test_without_an_option_every_batch_gets_what_the_module_gives(net):
    fast = graphed(net)
    for rows in (3, 1, 8, 5, 20, 7, 33, 2):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x), net(x))
    assert steps(fast)[1] == 0
    assert fast.graphed.stats().calls == 8


def test_as_a_decorator_with_and_without_options():
    @graphed
    def double(x):
        return x * 2

    @graphed(sizes=[4], outputs="view")
    def triple(x):
        return x * 3

    x = torch.arange(3.0)
    assert double(x).tolist() == [0, 2, 4]
    assert triple(x).tolist() == [0, 3, 6]
    assert isinstance(double, GraphedFunction)
    assert double.__name__ == "double"
    (runner,) = triple.graphed.runners
    assert runner.config.sizes == (4,)
    assert runner.spec.outputs == "view"


def test_keywords_nested_inputs_and_nested_outputs():
    @graphed
    def step(batch, *, mask, extra=None):
        total = batch["a"] + batch["b"][0]
        return {"sum": total * mask, "both": (total, [mask]), "rows": total.shape[0], "none": extra}

    for rows in (3, 6):
        a, b, mask = torch.randn(rows, 2), torch.randn(rows, 2), torch.ones(rows, 1)
        got = step({"a": a, "b": [b]}, mask=mask)
        torch.testing.assert_close(got["sum"], a + b)
        torch.testing.assert_close(got["both"][0], a + b)
        assert got["both"][1][0].shape == (rows, 1)
        assert got["rows"] == rows
        assert got["none"] is None
    assert steps(step) == (2, 0)
    (words,) = step.graphed.stats().runners
    assert "batch_0: float32[n, 2]" in words
    assert "mask: float32[n, 1]" in words


def test_the_order_keywords_are_written_in_makes_no_other_graphs():
    step = graphed(lambda *, a, b: a - b)
    x, y = torch.ones(2), torch.zeros(2)
    assert step(a=x, b=y).tolist() == step(b=y, a=x).tolist() == [1, 1]
    assert len(step.graphed.runners) == 1


def test_other_values_types_and_shapes_get_graphs_of_their_own():
    step = graphed(lambda x, scale=1: x * scale)
    x = torch.ones(2, 3)
    assert step(x, 2).sum() == 12
    assert step(x, 3).sum() == 18
    assert step(x, scale=3).sum() == 18
    assert step(x.int(), 2).dtype is torch.int32
    assert step(torch.ones(2, 5), 2).sum() == 20
    assert steps(step) == (5, 0)
    assert len(step.graphed.runners) == 5


def test_numbers_of_one_form_are_the_same_bit_by_bit():
    divide = graphed(lambda x, by: x / by, backend="tape")
    x = torch.ones(2)
    for by in (0.0, -0.0, float("nan"), float("nan"), float("-inf")):
        torch.testing.assert_close(divide(x, by), x / by, equal_nan=True)
    assert len(divide.graphed.runners) == 4


def test_a_tensor_that_does_not_follow_the_batch_is_none_of_it():
    """The table happens to have as many rows as the first batch."""
    table = torch.randn(4, 4)
    step = graphed(lambda x, table: x @ table)
    first = torch.randn(4, 4)
    with pytest.warns(EagerStepWarning, match="capture_failed"):
        torch.testing.assert_close(step(first, table), first @ table)
    for rows in (3, 7, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(x, table), x @ table)
    assert steps(step) == (3, 1)


def test_the_batch_may_be_another_dimension():
    step = graphed(lambda x, w: (x.transpose(0, 1) @ w).T, batch_dims={"x": 1})
    w = torch.randn(4, 3)
    for rows in (3, 4, 6):
        x = torch.randn(4, rows)
        torch.testing.assert_close(step(x, w), (x.T @ w).T)
    assert steps(step) == (3, 0)
    with pytest.raises(ConfigError, match="batch_dims"):
        graphed(lambda x: x, batch_dims={"y": 0})(torch.ones(2))
    with pytest.raises(ConfigError, match=r"^batch_dims must be 0 or None for tensor 'x' of shape"):
        graphed(lambda x: x, batch_dims=3)(torch.ones(2))
    with pytest.raises(
        ConfigError, match=r"^batch_dims\['x'\] must be a number from 0 to 1, or None"
    ):
        graphed(lambda x: x, batch_dims={"x": 3})(torch.ones(2, 2))
    for odd in ([0], "0", {"x": "0"}, True):
        with pytest.raises(ConfigError, match=r"batch_dims must be the index of a dimension"):
            graphed(lambda x: x, batch_dims=odd)(torch.ones(2))


def test_settings_are_refused_before_a_call():
    with pytest.raises(ConfigError, match=r"graphed\(\) has no setting .*mean 'sizes'"):
        graphed(lambda x: x, size=[1])
    with pytest.raises(ConfigError, match="inputs must be omitted"):
        graphed(lambda x: x, inputs={})
    for example in (3, torch.ones(2)):
        with pytest.raises(ConfigError, match=r"example must be a tuple or list .*\(x,\)"):
            graphed(lambda x: x, example=example)
    with pytest.raises(ConfigError, match=r"list of whole numbers, such as \[8, 16\], got 4"):
        graphed(lambda x: x, sizes=4)(torch.ones(2))


def test_rows_that_depend_on_each_other_are_found_out_and_run_eager():
    step = graphed(lambda x: x - x.mean(0))
    step(torch.zeros(3, 2))
    with pytest.warns(EagerStepWarning, match="rows_depend.*prove_rows"):  # noqa: PT031
        for rows in (3, 5, 8):
            x = torch.randn(rows, 2)
            torch.testing.assert_close(step(x), x - x.mean(0))
    assert steps(step) == (3, 1), "sizes without padding still have graphs"


def test_a_function_that_changes_state_runs_once_a_call():
    total = torch.zeros(())

    @graphed
    def step(x):
        total.add_(1)
        return x + total

    for number, rows in enumerate((3, 3, 5, 20, 5), start=1):
        assert step(torch.zeros(rows)).tolist() == [number] * rows


def test_a_method_may_be_graphed_in_its_class():
    class Scaler:
        def __init__(self, by):
            self.by = by

        @graphed
        def scale(self, x):
            return x * self.by

    assert Scaler(2).scale(torch.ones(3)).tolist() == [2, 2, 2]
    assert Scaler(5).scale(torch.ones(3)).tolist() == [5, 5, 5]


def test_an_example_captures_all_sizes_at_once(net):
    fast = graphed(net, sizes=[1, 2, 4], example=(torch.zeros(4, 4),))
    (stats,) = fast.graphed.stats().runners.values()
    assert stats.captures == 3
    fast(torch.randn(3, 4))
    assert fast.graphed.runners[0].stats().captures == 3
    named = graphed(net, sizes=[2], example={"x": torch.zeros(2, 4)})
    assert named.graphed.runners[0].stats().captures == 1


def test_a_capture_of_nothing_warns():
    fast = graphed(lambda x: x * float(x[0]), sizes=[2], backend="tape")
    with pytest.warns(EagerStepWarning, match="No graph was captured") as caught:
        assert fast.graphed.capture(torch.ones(2)) == 0
    assert caught[-1].filename == __file__


def test_what_was_done_reads_as_text(net):
    fast = graphed(net, backend="tape", sizes=[4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for rows in (4, 3, 5):
            fast(torch.randn(rows, 4))
        fast(torch.randn(2, 4, requires_grad=True))
    assert str(fast.graphed).splitlines() == [
        "Graphs of Net",
        "4 calls, 2 replayed",
        "eager without a runner, gradients: 1",
        "(x: float32[n, 4]): 1 captured, 2 replayed, eager above_largest_size 1",
    ]


def test_the_policy_is_passed_on(net):
    fast = graphed(
        net, sizes=[8], policy="threshold", options=RunnerOptions(policy_options={"max_waste": 1.0})
    )
    fast(torch.randn(7, 4))
    assert fast.graphed.runners[0].dispatcher.policy_name == "threshold"


def test_calls_are_spread_over_lanes(net):
    fast = graphed(net, sizes=[4], lanes=2)
    xs = [torch.randn(3, 4) for _ in range(4)]
    handles = [fast.graphed.submit(x) for x in xs]
    for x, handle in zip(xs, handles, strict=True):
        torch.testing.assert_close(handle.result(), net(x))
    (runner,) = fast.graphed.runners
    assert len(runner.lanes) == 2
    assert fast.graphed.stats().calls == 4


# -- plain calls with reasons ---------------------------------------------------------------


def test_calls_that_need_gradients_run_plainly(net):
    fast = graphed(net)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.warns(EagerStepWarning, match=r"require gradients \(x\)") as caught:
        fast(x).sum().backward()
    assert caught[0].filename == __file__
    assert x.grad is not None
    fast.train()
    with pytest.warns(EagerStepWarning, match=r"training mode.*model.eval\(\)"):
        fast(torch.randn(2, 4)).sum().backward()
    assert net.linear.weight.grad is not None
    assert repr(fast.graphed.stats().plain) == repr({"gradients": 2})


@pytest.mark.parametrize(
    ("args", "batch_dims", "reason", "next_step"),
    [
        ((torch.tensor(1.0),), "derived", "no_batch", "Pass a tensor with a batch dimension"),
        ((3,), "derived", "no_batch", "Pass a tensor with a batch dimension"),
        ((torch.ones(2),), None, "no_batch", r"graphed\(batch_dims=\{'x': 0\}\)"),
        (
            (torch.ones(2), bytearray(b"x")),
            "derived",
            "unhashable_value",
            r"not hashable \(bytearray\)",
        ),
    ],
)
def test_a_call_without_graphs_is_told_and_counted(args, batch_dims, reason, next_step):
    step = graphed(lambda x, other=None: x * 2, batch_dims=batch_dims)
    told = rf"\(reason: {reason}\)\. .*{next_step}"
    with pytest.warns(EagerStepWarning, match=told):
        assert torch.equal(torch.as_tensor(step(*args)), torch.as_tensor(args[0] * 2))
    step(*args)
    assert step.graphed.stats().plain == {reason: 2}
    with pytest.raises(InputError, match=told):
        step.graphed.capture(*args)


def test_a_refused_capture_states_what_to_change(net):
    with pytest.raises(InputError, match=r"empty_batch.* Pass at least one row\."):
        graphed(net.eval()).graphed.capture(torch.ones(0, 4))
    with pytest.raises(
        InputError, match=r"call model\.eval\(\)\. To run .*call the module directly"
    ):
        graphed(net.train()).graphed.submit(torch.ones(2, 4))
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(InputError, match=r"holds weights .* under torch\.no_grad"):
        graphed(lambda x: x * weight).graphed.submit(torch.ones(3, 2))


def test_no_rows_give_what_the_function_gives():
    assert graphed(lambda x: x + 1)(torch.ones(0, 3)).shape == (0, 3)


def test_endless_new_values_end_in_plain_calls(monkeypatch):
    monkeypatch.setattr("dispatchkit.execute.graphed.calls.MAX_FORMS", 2)
    step = graphed(lambda x, by: x * by, sizes=[2])
    told = r"too_many_forms.*: argument 'by' differs .*\. If this argument is a number, pass it as"
    with pytest.warns(EagerStepWarning, match=told):  # noqa: PT031
        for by in range(5):
            assert step(torch.ones(2), by).tolist() == [by, by]
    assert step.graphed.stats().plain == {"too_many_forms": 3}


def test_calls_that_differ_only_in_nesting_are_described(monkeypatch):
    monkeypatch.setattr("dispatchkit.execute.graphed.calls.MAX_FORMS", 1)
    step = graphed(lambda x: x[0] if isinstance(x, tuple) else x, sizes=[2])
    step(torch.ones(2))
    with pytest.warns(EagerStepWarning, match="reached: .* nesting of their arguments"):
        step((torch.ones(2),))


def test_batches_above_declared_sizes_run_eager():
    step = graphed(lambda x: x + 1, sizes=[2], max_num_tokens=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert step(torch.zeros(5)).tolist() == [1] * 5
    assert step.graphed.runners[0].stats().eager_by_reason == {"above_largest_size": 1}


# -- behaviour as the module ----------------------------------------------------------------


def test_it_is_the_module_in_all_but_its_calls(net):
    """Saved state has the same names as the plain module's, in both directions."""
    fast = graphed(net)
    assert isinstance(fast, Net)
    assert list(fast.state_dict()) == list(net.state_dict())
    assert list(dict(fast.named_modules())) == list(dict(net.named_modules()))
    assert fast.linear is net.linear
    fast.scale = 3.0
    assert net.scale == 3.0
    net.scale = 4.0
    assert fast.scale == 4.0
    del fast.scale
    assert not hasattr(net, "scale")
    fast.scale = 2.0
    assert fast.eval() is fast
    assert fast.float() is fast
    other = Net()
    assert fast.load_state_dict(other.state_dict()).missing_keys == []
    other.load_state_dict(fast.state_dict())
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        fast.absent  # noqa: B018
    with pytest.raises(ValueError, match="own error"):
        fast.broken  # noqa: B018


def test_it_may_be_part_of_another_module(net):
    """Saved state has the plain module's names."""
    whole = nn.Sequential(graphed(net), nn.ReLU())
    assert list(whole.state_dict()) == [f"0.{name}" for name in net.state_dict()]
    whole.train()
    assert net.training
    whole.eval()
    x = torch.randn(3, 4)
    torch.testing.assert_close(whole(x), torch.relu(net(x)))


def test_switching_the_mode_never_replays_a_graph_made_before(net):
    """Training and evaluation are switched through the graphed or the plain module."""
    fast = graphed(net, sizes=[4])
    x = torch.randn(4, 4)
    want = fast(x)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        fast.train()
        assert not torch.equal(fast(x), want), "dropout is on"
        net.eval()
        assert torch.equal(fast(x), want)


@pytest.mark.parametrize("through", ["graphed", "plain"])
def test_moving_or_converting_never_replays_a_graph_made_before(net, through):
    """The module is moved through either; earlier graphs read the weights' old addresses."""
    fast = graphed(net, sizes=[4])
    x = torch.randn(4, 4)
    fast(x)
    (fast if through == "graphed" else net).double()
    with torch.no_grad():
        net.linear.weight.mul_(2)
    torch.testing.assert_close(fast(x.double()), net(x.double()))
    net.float()
    torch.testing.assert_close(fast(x), net(x))


def test_weights_loaded_in_place_or_put_in_place_are_seen(net):
    fast = graphed(net, sizes=[4])
    x = torch.randn(4, 4)
    fast(x)
    fast.load_state_dict(Net().state_dict())
    torch.testing.assert_close(fast(x), net(x))
    fast.load_state_dict(Net().state_dict(), assign=True)
    torch.testing.assert_close(fast(x), net(x))


def test_hooks_of_the_module_run(net):
    seen = Mock(return_value=None)
    handle = net.register_forward_hook(seen)
    fast = graphed(net, sizes=[2])
    fast(torch.randn(2, 4))
    seen.assert_called()  # in warmup and capture, like all Python code of a step
    handle.remove()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_weights_and_graphs_of_its_own(net, how):
    """Copies and objects in other processes have no graphs and their own buffers."""
    fast = graphed(net, sizes=[4])
    x = torch.randn(3, 4)
    want = fast(x)
    other = copy.deepcopy(fast) if how == "deepcopy" else pickle.loads(pickle.dumps(fast))  # noqa: S301
    assert isinstance(other, Net)
    assert other.graphed.stats().calls == 0
    assert other.linear.weight is not net.linear.weight
    torch.testing.assert_close(other(x), want)
    with torch.no_grad():
        net.linear.weight.zero_()
    torch.testing.assert_close(other(x), want)
    assert other.graphed.runners[0] is not fast.graphed.runners[0]


def test_a_copy_that_is_not_filled_in_yet_does_not_recurse(net):
    """An object created without ``__init__`` fails fast on any attribute."""
    blank = object.__new__(type(graphed(net)))
    with pytest.raises(AttributeError):
        blank.linear  # noqa: B018
    with pytest.raises(AttributeError):
        blank.graphed  # noqa: B018


@pytest.mark.parametrize("what", [None, 3, "net"])
def test_what_cannot_be_called_is_refused(what):
    if what is None:
        assert callable(graphed(None))  # a decorator
        return
    with pytest.raises(ConfigError, match="a module or a function"):
        graphed(what)


def test_graphing_twice_and_taken_names_are_refused(net):
    with pytest.raises(ConfigError, match="The module is already graphed"):
        graphed(graphed(net))
    net.graphed = 1
    with pytest.raises(ConfigError, match="already has an attribute 'graphed'"):
        graphed(net)


def test_sizes_have_at_most_a_third_of_padding():
    assert geometric_sizes(16) == (1, 2, 3, 4, 6, 8, 12, 16)
    for largest in (1, 2, 3, 100, 512):
        sizes = geometric_sizes(largest)
        assert sizes[0] == 1
        assert sizes[-1] == largest
        assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
        assert all(3 * before + 3 >= 2 * after for before, after in itertools.pairwise(sizes))


def test_the_name_is_exported():
    assert "graphed" in dispatchkit.__all__


def test_a_form_that_could_not_grow_grows_at_the_next_call(monkeypatch):
    """After a temporary lack of memory, the runner of small batches must not get the large ones."""
    times_two = graphed(lambda x: x * 2, backend="tape")
    times_two(torch.ones(4))
    made = graphed_forms.GraphRunner

    def short(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphed_forms, "GraphRunner", short)
    with pytest.raises(RuntimeError, match="out of memory"):
        times_two(torch.ones(20))
    monkeypatch.setattr(graphed_forms, "GraphRunner", made)
    assert torch.equal(times_two(torch.ones(20)), torch.full((20,), 2.0))


def test_what_this_package_reads_for_a_call_is_no_state_of_the_step():
    """Libraries register classes with torch's pytree late, transformers at a first call."""
    run = graphed(lambda x, scale: x["a"] * scale, backend="tape")
    for number in range(40):
        kind = type(f"Late{number}", (), {})
        torch.utils._pytree.register_pytree_node(kind, lambda one: ([], None), lambda _, __: None)
        x = torch.randn(3, 2)
        torch.testing.assert_close(run({"a": x}, 2.0), x * 2)
        torch.utils._pytree._deregister_pytree_node(kind)
    (stats,) = run.graphed.stats().runners.values()
    assert stats.eager_by_reason == {}
    assert stats.captures == 1


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning")
@pytest.mark.parametrize(
    ("kind", "reason"), [("a tensor", "capture_failed"), ("a list", "container_written")]
)
def test_a_function_that_writes_an_input_that_is_not_contiguous_runs_eager(kind, reason):
    """Its eager calls receive the caller's own arguments, not a contiguous copy."""

    def advance(x, state):
        (state[0] if kind == "a list" else state).add_(x.sum(1))
        if kind == "a list":
            state.append(x)
        return x + 1

    run = graphed(advance, backend="tape", batch_dims={"state": 1, "x": 0})
    for rows in (3, 4, 3):
        x = torch.randn(rows, 2, 5)
        found, wanted = (torch.zeros(2, 8, 5)[:, :rows] for _ in range(2))
        mine, own = ([found], [wanted]) if kind == "a list" else (found, wanted)
        assert torch.equal(run(x, mine), advance(x, own))
        assert torch.equal(found, wanted)
        assert len(mine) == len(own)
    reasons = [one.eager_by_reason for one in run.graphed.stats().runners.values()]
    assert [{*one} for one in reasons] == [{reason}] * len(reasons)
