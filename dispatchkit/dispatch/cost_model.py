"""What a step costs: the contract with a cost model, and the price of a decision by one.

A model may be any object that has what ``CostModel`` asks for. dispatchkit-plan measures such
models (``dispatchkit calibrate``), keeps them in files, and has some that are ready.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs

from dispatchkit.dispatch.decision import Decision
from dispatchkit.distributions import load_attribute
from dispatchkit.errors import ConfigError
from dispatchkit.keys.modes import RuntimeMode

_ALLOWED = "an object with name, step_us and covers (see dispatchkit.dispatch.CostModel)"


@runtime_checkable
class CostModel(Protocol):
    """How long a step takes, eager at its own size or replayed at a captured one."""

    @property
    def name(self) -> str:
        """Name for tables and messages."""
        ...

    def step_us(self, num_tokens: int, captured: int | None, *, piecewise: bool = False) -> float:
        """Return the microseconds of a step.

        Args:
            num_tokens: Tokens of the step, at least 1.
            captured: Size of the graph that serves it; None runs eager.
            piecewise: The graph is pieces with eager work between them.
        """
        ...

    def covers(self, num_tokens: int) -> bool:
        """Return whether the model was measured up to that size, rather than extended to it."""
        ...


@attrs.frozen(kw_only=True)
class StepCost:
    """What a step costs by a cost model.

    Attributes:
        model: Name of the model.
        step_us: Microseconds of the step as decided.
        eager_us: Of the same step run eager.
        lost_us: How much more the step takes than a graph of exactly its size; not below 0.
        measured: The model was measured up to that size, rather than extended to it.
    """

    model: str
    step_us: float
    eager_us: float
    lost_us: float
    measured: bool

    @classmethod
    def of(cls, model: CostModel, decision: Decision, num_tokens: int) -> StepCost:
        """Return what a decided step costs, against eager and a graph of exactly its size.

        Args:
            model: Where the times come from.
            decision: Which graph serves the step, or eager.
            num_tokens: Tokens of the step; one without any costs nothing.
        """
        is_pieces = decision.mode is RuntimeMode.PIECEWISE
        sizes = [key.num_tokens for key in decision.keys]
        us = eager = exact = 0.0
        if num_tokens:
            us = decided_us(model, decision, num_tokens)
            eager = model.step_us(num_tokens, None)
            exact = model.step_us(num_tokens, num_tokens, piecewise=is_pieces)
        return cls(
            model=model.name,
            step_us=us,
            eager_us=eager,
            lost_us=max(0.0, us - exact),
            measured=model.covers(max(sizes, default=num_tokens)),
        )

    def __str__(self) -> str:
        text = f"{self.step_us:,.0f} µs; eager {self.eager_us:,.0f} µs"
        if self.lost_us:
            text += f"; {self.lost_us:,.0f} µs more than a graph of its size"
        return f"{text} ({self.model}{'' if self.measured else ', beyond what it measured'})"


def decided_us(model: CostModel, decision: Decision, num_tokens: int) -> float:
    """Return the microseconds of a decided step; of a split one, those of its parts together."""
    is_pieces = decision.mode is RuntimeMode.PIECEWISE
    if decision.parts:
        return sum(
            model.step_us(part.num_tokens, part.key.num_tokens, piecewise=is_pieces)
            for part in decision.parts
        )
    captured = None if decision.key is None else decision.key.num_tokens
    return model.step_us(num_tokens, captured, piecewise=is_pieces)


def find_cost_model(model: CostModel | str) -> CostModel:
    """Return a cost model; dispatchkit-plan looks up a name or reads a file.

    Raises:
        ConfigError: It is neither a cost model nor text, or the file is not a cost model.
        MissingDistributionError: It is text, and dispatchkit-plan is not installed.
        UnknownNameError: No model and no file has that name.
    """
    if isinstance(model, str):
        load = load_attribute("load_cost_model", f"Looking up cost model {model!r}")
        found: CostModel = load(model)
        return found
    if not isinstance(model, CostModel):
        raise ConfigError("cost_model", model, _ALLOWED)
    return model
