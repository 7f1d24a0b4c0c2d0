"""An error of a failed capture names the file and line that stopped it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatchkit import GraphRunner, StaticInput, graphed
from dispatchkit.execute import EagerStepWarning


class Reads(torch.nn.Module):
    """Reads a value on the host in a nested call."""

    def inner(self, x: torch.Tensor) -> float:
        return x.sum().item()  # Reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner(x)


class Raises(Reads):
    """Raises at some batch sizes only."""

    def inner(self, x: torch.Tensor) -> float:
        if x.shape[0] == 4:
            raise ValueError("not four")  # Raises
        return 1.0


class Catches(Reads):
    """Catches the exception that stops the capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return x * self.inner(x)
        except RuntimeError:
            return x


def told(module: Callable[..., Any]) -> str:
    """Return the runner's report on a step that failed to capture."""
    runner = GraphRunner(
        module, {"x": StaticInput((None, 2), "float32")}, sizes=[4], backend="tape"
    )
    runner.capture()
    return str(runner)


@pytest.mark.parametrize(
    ("kind", "mark"), [(Reads, "# Reads"), (Raises, "# Raises"), (Catches, "# Reads")]
)
def test_the_line_of_the_model_is_named(kind: type[Reads], mark: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [at for at, text in enumerate(lines, 1) if text.endswith(f"  {mark}")]
    assert f"{__file__}:{number} (inner)" in told(kind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_module_of_torch_is_named_by_its_own_line() -> None:
    """The module contains no user code, and the line of the call alone does not help."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()
    inputs = {
        "src": StaticInput((None, 4, 8), "float32"),
        "src_key_padding_mask": StaticInput((None, 4), "bool"),
    }
    runner = GraphRunner(encoder, inputs, sizes=[4], backend="tape")
    runner.capture()
    assert "transformer.py:" in str(runner)
    assert __file__ not in str(runner)


def test_a_state_behind_layers_is_contiguous_in_graphs_too() -> None:
    """Its batch is dimension 1, of which a graph reads a part of its buffer."""

    def step(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        if not h.is_contiguous():
            raise RuntimeError("rnn: hx is not contiguous")
        return x + h.sum(0)

    fast = graphed(step, backend="tape")
    for rows in (3, 5, 8, 3):
        x, h = torch.randn(rows, 4), torch.randn(2, rows, 4)
        assert torch.equal(fast(x, h), step(x, h))
    assert fast.graphed.stats().steps_by_mode["FULL"] == 4


def test_a_state_behind_layers_that_is_written_is_refused() -> None:
    """As for any input, eager changes the caller's tensor and a graph does not."""

    def step(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h += 1
        return x + h.sum(0)

    fast = graphed(step, backend="tape")
    h = torch.zeros(2, 3, 4)
    with pytest.warns(EagerStepWarning):
        fast(torch.randn(3, 4), h)
    assert float(h.mean()) == 1
    assert "input_written" in str(fast.graphed.runners[0])
