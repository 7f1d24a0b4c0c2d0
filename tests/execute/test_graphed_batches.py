"""graphed: the batch dimension of recurrent states, and other kinds of modules."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dispatchkit import graphed  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.[a-z_]+. is deprecated:DeprecationWarning"
)


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_except("False-True-GRU", "True-False-LSTM")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_recurrent_states_have_their_batch_behind_the_layers(kind, batch_first, with_state):
    """Includes sequences with time first; one form serves all batches."""
    torch.manual_seed(0)
    module = kind(4, 5, 2, batch_first=batch_first).eval()
    run = graphed(module, backend="tape")
    with torch.no_grad():
        for rows in (3, 4, 5, 6):
            x = torch.randn((rows, 7, 4) if batch_first else (7, rows, 4))
            state = torch.randn(2, rows, 5)
            args = (x, (state, -state) if kind is nn.LSTM else state) if with_state else (x,)
            assert_close(run(*args), module(*args))
    assert run.graphed.stats().steps_by_mode["FULL"] == 4
    assert len(run.graphed.runners) == 1


def test_states_are_fed_back_from_call_to_call():
    """If the batch equals the number of layers, the next call corrects the guess."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, 2, batch_first=True)

        def forward(self, x, h=None):
            y, h = self.rnn(x, h)
            return y[:, -1], h

    torch.manual_seed(0)
    cell = Cell().eval()
    run = graphed(cell, backend="tape")
    with torch.no_grad():
        for rows in (3, 5):
            ours = theirs = None
            for _ in range(3):
                x = torch.randn(rows, 2, 3)
                got, ours = run(x, ours)
                want, theirs = cell(x, theirs)
                assert_close((got, ours), (want, theirs))
    assert run.graphed.stats().steps_by_mode["NONE"] == 0


def test_a_table_whose_second_dimension_is_the_batch_by_chance():
    run = graphed(lambda x, table: x @ table[0], backend="tape")
    table = torch.randn(2, 4, 3)
    for rows in (4, 3, 5):
        x = torch.randn(rows, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            assert_close(run(x, table), x @ table[0])
    assert run.graphed.stats().steps_by_mode["FULL"] == 2


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).relu()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = torch.zeros(3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.state = self.state + x.sum(0)
        return x + self.state * self.calls


MAKERS = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.ones(2, 4)),
    "freeze": lambda module: torch.jit.freeze(torch.jit.script(module)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_script_modules_have_graphs_and_stay_modules(name):
    module = MAKERS[name](Scripted().eval())
    run = graphed(module, backend="tape")
    assert isinstance(run, nn.Module)
    assert list(run.state_dict()) == list(module.state_dict())
    with torch.no_grad():
        for rows in (3, 4, 7):
            x = torch.randn(rows, 4)
            assert_close(run(x), module(x))
    assert run.graphed.stats().steps_by_mode["FULL"] == 3


class Padded(nn.Module):
    """Its convolution has a list, which a script module copies on each read."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.weights = {"a": [torch.ones(3, 1)], "b": [torch.zeros(3, 1)]}

    def forward(self, x):
        return self.conv(x) * self.weights["a"][0]


class Appending(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = [0]

    def forward(self, x):
        self.seen.append(x.size(0))
        return x * len(self.seen)


def test_a_script_module_with_lists_has_graphs_unless_it_changes_them():
    module = torch.jit.script(Padded().eval())
    run = graphed(module, backend="tape")
    with torch.no_grad():
        for rows in (3, 4, 7):
            x = torch.randn(rows, 2, 5)
            assert_close(run(x), module(x))
    assert run.graphed.stats().steps_by_mode["FULL"] == 3
    base = Appending().eval()
    module, other = (torch.jit.script(copy.deepcopy(base)) for _ in range(2))
    run = graphed(other, backend="tape")
    for rows in (3, 4, 3):
        x = torch.randn(rows, 2)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            assert_close(run(x), module(x))
    assert run.graphed.stats().steps_by_mode.get("FULL", 0) == 0


@pytest.mark.parametrize("name", ["script", "freeze"])
def test_a_script_module_with_state_runs_eager(name):
    """Its attributes are not Python attributes."""
    base = Counting().eval()
    module, other = (MAKERS[name](copy.deepcopy(base)) for _ in range(2))
    run = graphed(other, backend="tape")
    for rows in (3, 4, 3):
        x = torch.randn(rows, 3)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            assert_close(run(x), module(x))
    (stats,) = run.graphed.stats().runners.values()
    assert stats.eager_by_reason == {"python_state": 3}


def test_a_module_that_takes_whatever_it_is_given():
    class Any(nn.Module):
        def forward(self, *args, **kwargs):
            return {"y": sum(args) * kwargs.get("scale", 1) + kwargs["bias"]}

    run = graphed(Any().eval(), backend="tape")
    for rows in (3, 4):
        x = torch.randn(rows, 2)
        assert_close(run(x, x, bias=x, scale=3), {"y": 7 * x})
    assert run.graphed.stats().steps_by_mode["FULL"] == 2
