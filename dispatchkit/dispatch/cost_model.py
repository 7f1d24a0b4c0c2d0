"""The protocol of cost models, and the cost of a decision.

A cost model is any object that implements ``CostModel``. dispatchkit-plan creates cost models from
measurements (``dispatchkit calibrate``), stores them in files, and includes models that were
measured on an H100.
"""

from __future__ import annotations

from typing import Protocol

import attrs

from dispatchkit.dispatch.decision import Decision
from dispatchkit.distributions import load_attribute
from dispatchkit.keys.checks import check_instance
from dispatchkit.keys.modes import RuntimeMode

_ALLOWED = (
    "a string with the name or path of a cost model, or an object with name, step_us and covers "
    "(see dispatchkit.dispatch.CostModel)"
)


class CostModel(Protocol):
    """A model of the time that a step takes, eager or replayed at a captured size."""

    @property
    def name(self) -> str:
        """The name shown in tables and messages."""
        ...

    def step_us(self, num_tokens: int, captured: int | None, *, piecewise: bool = False) -> float:
        """Return the time of a step in microseconds.

        Args:
            num_tokens: Number of tokens in the step, at least 1.
            captured: Size of the graph that serves the step; None for an eager step.
            piecewise: Whether the graph consists of pieces with eager work between them.
        """
        ...

    def covers(self, num_tokens: int) -> bool:
        """Return whether a number of tokens is within the measured range of the model."""
        ...


@attrs.frozen(kw_only=True)
class StepCost:
    """The cost of a step according to a cost model.

    Attributes:
        model: Name of the cost model.
        step_us: Time of the step as decided, in microseconds.
        eager_us: Time of the same step run eager, in microseconds.
        lost_us: Time in microseconds that a graph of exactly the step's size would save; at least
            0.
        measured: Whether the size of the largest graph, or of the eager step, is within the
            measured range of the model; if not, the times are extrapolated.
    """

    model: str
    step_us: float
    eager_us: float
    lost_us: float
    measured: bool

    @classmethod
    def of(cls, model: CostModel, decision: Decision, num_tokens: int) -> StepCost:
        """Return the cost of a step: as decided, eager, and with a graph of its exact size.

        Args:
            model: Cost model that returns the times.
            decision: The decision for the step.
            num_tokens: Number of tokens in the step; a step of 0 tokens costs nothing.
        """
        is_pieces = decision.mode is RuntimeMode.PIECEWISE
        sizes = [key.num_tokens for key in decision.keys]
        us = eager = exact = 0.0
        if num_tokens:
            us = decision_us(model, decision, num_tokens)
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
        if round(self.lost_us):
            text += f"; a graph of the exact size would save {self.lost_us:,.0f} µs"
        outside = "" if self.measured else "; extrapolated beyond its measurements"
        return f"{text} (cost model {self.model}{outside})"


def decision_us(model: CostModel, decision: Decision, num_tokens: int) -> float:
    """Return the time of a step in microseconds; for a split batch, the sum over its parts."""
    is_pieces = decision.mode is RuntimeMode.PIECEWISE
    if decision.parts:
        return sum(
            model.step_us(part.num_tokens, part.key.num_tokens, piecewise=is_pieces)
            for part in decision.parts
        )
    captured = None if decision.key is None else decision.key.num_tokens
    return model.step_us(num_tokens, captured, piecewise=is_pieces)


def find_cost_model(model: CostModel | str) -> CostModel:
    """Return the cost model given as an object, a name or the path of a file.

    Raises:
        ConfigError: The value is neither a cost model nor a string, or the file does not contain a
            cost model.
        MissingDistributionError: The value is a string, and dispatchkit-plan is not installed.
        UnknownNameError: There is no cost model or file of that name.
    """
    if isinstance(model, str):
        load = load_attribute("load_cost_model", f"Looking up cost model {model!r}")
        found: CostModel = load(model)
        return found
    return check_instance(model, CostModel, "cost_model", allowed=_ALLOWED)
