"""Calls that run plainly cost little more than the model; they are counted and retried."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from dispatchkit import graphed
from dispatchkit.execute import EagerStepWarning

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning")


class Reads(torch.nn.Module):
    """Reads a value on the host while a flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.reads = True

    def forward(self, x: torch.Tensor, *others: torch.Tensor, more: float = 0.0) -> torch.Tensor:
        if self.reads:
            x.sum().item()
        return x * self.weight + more


def frames_of(call: Any, *args: Any) -> int:
    """Return the number of Python functions that a call runs."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        call(*args)
    finally:
        sys.setprofile(None)
    return count


def plain_calls() -> dict[str, tuple[Any, Any, list[torch.Tensor], bool]]:
    """Yield graphed and plain callables with three tensors, with and without gradients."""
    rows = [torch.ones(3, 2) for _ in range(3)]
    held = torch.ones(2, requires_grad=True)

    def function(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x * held

    function_fast = graphed(function, backend="tape")
    reads, training = Reads().eval(), Reads().train()
    return {
        "cannot be captured": (graphed(reads, backend="tape"), reads, rows, False),
        "training": (graphed(training, backend="tape"), training, rows, True),
        "no batch": (
            graphed(Reads().eval(), backend="tape"),
            reads,
            [torch.tensor(1.0) for _ in range(3)],
            False,
        ),
        "gradients": (
            graphed(Reads().eval(), backend="tape"),
            reads,
            [torch.ones(3, 2, requires_grad=True) for _ in range(3)],
            True,
        ),
        "held weights": (function_fast, function, rows, True),
    }


@pytest.mark.parametrize("name", plain_calls())
def test_a_plain_call_is_a_look_up_and_the_call(name: str) -> None:
    fast, plain, tensors, grad = plain_calls()[name]
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            fast(*tensors)
        more = frames_of(fast, *tensors) - frames_of(plain, *tensors)
    assert more <= 8
    assert fast.graphed.stats().steps_by_mode["NONE"] == 5


def test_each_plain_call_is_counted_and_a_mended_step_is_captured_in_the_end() -> None:
    module = Reads().eval()
    fast = graphed(module, backend="tape")
    x = torch.ones(3, 2)
    with torch.no_grad():
        for _ in range(50):
            fast(x)
        stats = fast.graphed.stats()
        assert stats.runners.popitem()[1].eager_by_reason["capture_failed"] == 50
        module.reads = False
        for _ in range(20):
            assert fast(x).tolist() == (x * 2).tolist()
    (stats_of_runner,) = fast.graphed.stats().runners.values()
    # A failed key waits for 64 steps.
    assert stats_of_runner.steps_by_mode == {"NONE": 64, "PIECEWISE": 0, "FULL": 6}


def test_plain_steps_are_recorded_and_listened_to() -> None:
    fast = graphed(Reads().eval(), backend="tape")
    x = torch.ones(3, 2)
    heard = []
    with torch.no_grad():
        for _ in range(5):
            fast(x)
        runner = fast.graphed.runners[0]
        runner.taps.on_decision(lambda decision: heard.append(decision.reason))
        recorder = runner.taps.start_recording()
        for _ in range(5):
            fast(x)
    assert heard == ["capture_failed"] * 5
    assert len(recorder.trace()) == 5


def test_a_call_that_looks_otherwise_is_another_call() -> None:
    """Training mode, gradients, values, keywords and sizes distinguish calls."""
    module = Reads()
    module.reads = False
    fast = graphed(module, backend="tape")
    x = torch.ones(3, 2)
    module.train()
    for _ in range(3):
        assert fast(x).requires_grad
    module.eval()
    for _ in range(3):
        assert not fast(x).requires_grad
    assert fast(torch.ones(3, 2, requires_grad=True)).requires_grad
    assert not fast(x).requires_grad
    with torch.no_grad():
        module.train()
        fast(x)
    stats = fast.graphed.stats()
    assert stats.plain == {"gradients": 4}
    assert stats.steps_by_mode["FULL"] >= 3


def test_an_eager_step_has_no_gradients_and_an_error_puts_them_back() -> None:
    module = Reads().eval()
    fast = graphed(module, backend="tape")
    x = torch.ones(3, 2)
    assert not any(fast(x).requires_grad for _ in range(4))
    del module.weight
    module.weight = "none"
    with pytest.raises(TypeError):
        fast(x)
    assert torch.is_grad_enabled()
    assert fast.graphed.runners[0].stats().failed_steps == 1


def test_a_function_has_graphs_once_its_weights_are_frozen() -> None:
    weight = torch.ones(2, requires_grad=True)
    fast = graphed(lambda x: x * weight, backend="tape")
    x = torch.ones(3, 2)
    for _ in range(3):
        assert fast(x).requires_grad
    weight.requires_grad_(False)
    for _ in range(4):
        assert not fast(x).requires_grad
    assert fast.graphed.stats().steps_by_mode["FULL"] == 3


def test_a_form_that_grows_has_a_new_runner_for_plain_calls_too() -> None:
    fast = graphed(Reads().eval(), backend="tape")
    with torch.no_grad():
        for rows in (3, 3, 3, 20, 20, 3, 3):
            assert fast(torch.ones(rows, 2)).shape == (rows, 2)
    counts = [one.steps_by_mode["NONE"] for one in fast.graphed.stats().runners.values()]
    assert counts == [3, 4]


def test_threads_lose_no_plain_call() -> None:
    """Threads make more calls than run in a row, with captures retried in between."""
    fast = graphed(Reads().eval(), backend="tape")
    errors = []

    def call() -> None:
        try:
            with torch.no_grad():
                for _ in range(200):
                    fast(torch.ones(3, 2))
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    (stats,) = fast.graphed.stats().runners.values()
    assert stats.eager_by_reason == {"capture_failed": 600}


def test_the_warning_and_what_is_printed_say_why_nothing_is_captured() -> None:
    fast = graphed(Reads().eval(), backend="tape")
    with torch.no_grad(), pytest.warns(EagerStepWarning, match=r"Tensor\.item .* at .*:\d+"):
        fast(torch.ones(3, 2))
    (line,) = [line for line in str(fast.graphed).splitlines() if "host_sync" in line]
    assert f"{__file__}:" in line
