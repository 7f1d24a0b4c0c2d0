"""Cost models: any object with the contract's methods, or one from dispatchkit-plan."""

from __future__ import annotations

import sys

import attrs
import pytest

from dispatchkit.dispatch import CostModel, Decision, Reason, StepCost, find_cost_model
from dispatchkit.errors import ConfigError, DispatchkitError, MissingDistributionError
from dispatchkit.keys import BatchDescriptor, GraphKey, RuntimeMode

FULL = GraphKey(RuntimeMode.FULL, BatchDescriptor(8))
PIECEWISE = GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(8))


@attrs.frozen
class Linear:
    """Eager costs 10 µs per token; FULL 1, PIECEWISE 3."""

    name: str = "linear"

    def step_us(self, num_tokens: int, captured: int | None, *, piecewise: bool = False) -> float:
        """Return the microseconds of a step."""
        if captured is None:
            return 10.0 * num_tokens
        return captured * (3.0 if piecewise else 1.0)

    def covers(self, num_tokens: int) -> bool:
        """Covers batches up to 8 tokens."""
        return num_tokens <= 8


@pytest.mark.parametrize(
    ("decision", "num_tokens", "step_us", "lost_us", "measured"),
    [
        (Decision.replay(FULL), 5, 8.0, 3.0, True),
        (Decision.replay(PIECEWISE), 5, 24.0, 9.0, True),
        (Decision.eager(Reason.NO_KEY), 5, 50.0, 45.0, True),
        (Decision.eager(Reason.ABOVE_LARGEST), 9, 90.0, 81.0, False),
        (Decision.eager(Reason.EMPTY_BATCH), 0, 0.0, 0.0, True),
    ],
)
def test_any_object_with_these_methods_prices_a_decision(
    decision: Decision, num_tokens: int, step_us: float, lost_us: float, measured: bool
) -> None:
    """The model need not come from dispatchkit-plan."""
    model: CostModel = find_cost_model(Linear())
    cost = StepCost.of(model, decision, num_tokens)
    eager_us = 10.0 * num_tokens
    assert cost == StepCost(
        model="linear", step_us=step_us, eager_us=eager_us, lost_us=lost_us, measured=measured
    )


@pytest.mark.parametrize("wrong", [3, None, object(), {"name": "linear"}])
def test_what_is_not_a_model_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="step_us and covers"):
        find_cost_model(wrong)  # type: ignore[arg-type]


def test_a_name_is_looked_up_by_dispatchkit_plan_or_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("dispatchkit_plan")
    assert find_cost_model("mlp-h100").name == "mlp-h100"
    monkeypatch.setitem(sys.modules, "dispatchkit_plan", None)  # as if not installed
    with pytest.raises(MissingDistributionError, match="pip install dispatchkit-plan") as missing:
        find_cost_model("mlp-h100")
    assert isinstance(missing.value, DispatchkitError)
