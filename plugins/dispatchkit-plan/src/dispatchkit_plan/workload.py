"""Workloads: the arrays of steps that the planner works on."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import numpy as np

from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.keys import check_instance
from dispatchkit.observe import StepTrace

from dispatchkit_plan.optimal import BoolArray, FloatArray, IntArray
from dispatchkit_plan.traffic import SizeHistogram

__all__ = ["FitOn", "Workload", "as_workload"]

FitOn = Literal["all", "first-half"]


@attrs.frozen(eq=False)
class Workload:
    """Steps as arrays, with one entry for each step or for each kind of step.

    Attributes:
        num_tokens: Number of real tokens. Shape (entries,).
        counts: Number of steps of each entry. Shape (entries,).
        uniform: 1 for uniform decode, 0 for mixed; None if not recorded. Shape (entries,).
        num_active_loras: Number of active adapters. Shape (entries,).
        ordered: Whether entries are single steps in the order in which they ran.
        source: Name of the source in messages.
        axes: Names of axes for which the steps have values; the values do not affect planned sizes.
    """

    num_tokens: IntArray
    counts: IntArray
    uniform: IntArray | None
    num_active_loras: IntArray
    ordered: bool
    source: str
    axes: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Total number of steps of all entries."""
        return int(self.counts.sum())

    def chosen(self, mask: IntArray | BoolArray | slice) -> Workload:
        """Return the entries selected by a mask or slice."""
        return attrs.evolve(
            self,
            num_tokens=self.num_tokens[mask],
            counts=self.counts[mask],
            uniform=None if self.uniform is None else self.uniform[mask],
            num_active_loras=self.num_active_loras[mask],
        )

    def demand(self, max_size: int) -> FloatArray:
        """Return the number of steps of each size, ignoring steps above ``max_size``.

        The array has shape (max_size + 1,).
        """
        small = self.num_tokens <= max_size
        return np.bincount(
            self.num_tokens[small],
            weights=self.counts[small].astype(np.float64),
            minlength=max_size + 1,
        ).astype(np.float64)

    def split(self, fit_on: FitOn) -> tuple[Workload, Workload, str]:
        """Return the planning steps, the judged steps, and a description of the judged steps.

        A plan is made from the planning steps and evaluated on the judged steps.

        Raises:
            ConfigError: ``fit_on`` is invalid, or is ``"first-half"`` for steps without an order.
            TraceError: ``fit_on`` is ``"first-half"``, but there is only one step.
        """
        if fit_on == "all":
            return self, self, "the planning steps"
        if fit_on != "first-half":
            raise ConfigError("fit_on", fit_on, "'all' or 'first-half'")
        if not self.ordered:
            raise ConfigError(
                "fit_on",
                fit_on,
                "'all' for a file of counts, which does not record the order of steps",
                "Use a step trace to plan on its first half.",
            )
        middle = len(self.num_tokens) // 2
        if not middle:
            raise TraceError(
                self.source,
                None,
                "the trace has only one step, so it cannot be split. Use fit_on='all'.",
            )
        return self.chosen(slice(None, middle)), self.chosen(slice(middle, None)), "the second half"


def check_trace(trace: Any) -> StepTrace:
    """Check that a value is a ``StepTrace``, and return it.

    Raises:
        ConfigError: The value has the wrong type; for example, it is a path.
    """
    hint = "Read a file with dispatchkit_plan.read_steps(path)."
    return check_instance(trace, StepTrace, "trace", hint)


def as_workload(data: StepTrace | SizeHistogram | Workload) -> Workload:
    """Return the workload of a trace or histogram, excluding steps without tokens.

    A ``Workload`` is returned unchanged.

    Raises:
        ConfigError: The value has the wrong type; for example, it is a path.
        TraceError: No step has tokens.
    """
    if isinstance(data, Workload):
        return data
    if not isinstance(data, StepTrace | SizeHistogram):
        hint = "Read a file with dispatchkit_plan.read_workload(path)."
        raise ConfigError("data", data, "a StepTrace, a SizeHistogram or a Workload", hint)
    if isinstance(data, StepTrace):
        size = len(data)
        names = data.columns
        tokens = (
            np.frombuffer(data.column("num_tokens"), dtype=np.int64)
            if size
            else np.zeros(0, np.int64)
        )
        work = Workload(
            num_tokens=tokens,
            counts=np.ones(size, dtype=np.int64),
            uniform=np.array(data.column("uniform_decode"), dtype=np.int64)
            if "uniform_decode" in names
            else None,
            num_active_loras=np.array(data.column("num_active_loras"), dtype=np.int64)
            if "num_active_loras" in names
            else np.zeros(size, dtype=np.int64),
            ordered=data.has_order,
            source=data.source,
            axes=data.axes,
        )
    else:
        kinds = sorted(
            data.counts,
            key=lambda kind: (kind.num_tokens, str(kind.uniform), kind.num_active_loras),
        )
        work = Workload(
            num_tokens=np.array([kind.num_tokens for kind in kinds], dtype=np.int64),
            counts=np.array([data.counts[kind] for kind in kinds], dtype=np.int64),
            uniform=np.array([kind.uniform for kind in kinds], dtype=np.int64)
            if data.has_uniform
            else None,
            num_active_loras=np.array([k.num_active_loras for k in kinds], dtype=np.int64),
            ordered=False,
            source=data.source,
        )
    work = work.chosen((work.num_tokens > 0) & (work.counts > 0))
    if not len(work.num_tokens):
        raise TraceError(work.source, None, "no step has tokens. Use another trace or histogram.")
    return work
