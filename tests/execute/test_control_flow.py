"""Operators with function arguments in a step: ``torch.cond`` and loops."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput, graphed  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

pytestmark = pytest.mark.slow  # imports Dynamo


def double_or_triple(x):
    return torch.cond(x.sum() > 0, lambda z: z * 2, lambda z: z * 3, (x,))


def nested(x):
    return torch.cond(x.sum() > 0, double_or_triple, torch.neg, (x,)) + 1


class Chooses(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.amax() > 0, torch.sin, torch.cos, (x,))


def loop(x):
    from torch._higher_order_ops.while_loop import while_loop

    count = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (count, x))[1]


@pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning")
@pytest.mark.parametrize("step", [double_or_triple, nested, Chooses(), loop])
def test_a_step_that_chooses_by_data_runs_eager_and_says_why(step):
    """The function runs as before elsewhere and is not watched."""
    run = GraphRunner(
        step, {"x": StaticInput((None, 2), "float32")}, sizes=[4], mode="FULL", backend="tape"
    )
    (problem,) = run.capture().failed.values()
    assert "host_sync" in problem
    is_loop = step is loop
    assert ("torch.while_loop" if is_loop else "torch.cond") in problem
    assert ("Use a loop of fixed length" if is_loop else "Use torch.where") in problem
    for x in (torch.ones(3, 2), -torch.ones(4, 2)):
        want = step(x)
        assert torch.equal(run(x=x), want)
        assert torch.equal(step(x), want)
    assert run.stats().eager_by_reason == {"capture_failed": 2}


def test_graphed_runs_it_too():
    run = graphed(double_or_triple, backend="tape")
    with pytest.warns(EagerStepWarning, match="capture_failed"):
        assert run(torch.ones(3, 2)).tolist() == [[2, 2]] * 3
    assert run(-torch.ones(3, 2)).tolist() == [[-3, -3]] * 3


def test_a_choice_by_a_number_is_captured():
    run = graphed(lambda x: torch.cond(x.dim() > 1, torch.sin, torch.cos, (x,)), backend="tape")
    x = torch.ones(3, 2)
    assert torch.equal(run(x), torch.sin(x))
    assert run.graphed.stats().steps_by_mode["FULL"] == 1


def test_an_operator_whose_functions_run_in_any_case_is_captured():
    """The graph contains its operations."""
    from functorch.experimental.control_flow import map as mapped

    run = graphed(lambda x: mapped(lambda row: row * 2 + 1, x), backend="tape")
    for rows in (4, 3):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(run(x), x * 2 + 1)


@pytest.mark.parametrize("first", ["torch.cond", "torch.compile"])
def test_dynamo_loaded_in_mid_warmup_compiles_afterwards(first):
    """In a fresh process, the first capture loads it."""
    script = f"""
        import sys
        import torch
        from dispatchkit import GraphRunner, StaticInput

        def choose(x):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

        def compile_inside(x):
            return torch.compile(torch.sin, backend="eager", fullgraph=True)(x)

        step = choose if {first!r} == "torch.cond" else compile_inside
        inputs = {{"x": StaticInput((None, 2), "float32")}}
        runner = GraphRunner(step, inputs, sizes=[4], mode="FULL", backend="tape")
        assert "torch._dynamo" not in sys.modules
        report = runner.capture()
        assert report.num_graphs == (step is compile_inside), report
        x = torch.ones(4, 2)
        assert torch.equal(choose(x), torch.sin(x))
        assert torch.equal(runner(x=x), torch.sin(x))
        counter = torch._dynamo.testing.CompileCounter()
        torch.compile(lambda x: x + 1, backend=counter)(x)
        assert counter.frame_count == 1
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
