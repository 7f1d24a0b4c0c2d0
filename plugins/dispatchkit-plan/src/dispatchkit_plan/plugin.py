"""Register the policy ``grid``, and the planning and reporting commands.

The commands are imported on use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from dispatchkit.hookspecs import CommandSpec, PolicySpec, hookimpl

from dispatchkit_plan.grid_policy import GridPolicy


def _loader(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"dispatchkit_plan.commands.{module}"), name)


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Return the policy ``grid``."""
    return [
        PolicySpec("grid", GridPolicy, summary="Separate capture sizes for each bucket of an axis")
    ]


@hookimpl
def dispatchkit_register_commands() -> Sequence[CommandSpec]:
    """Return the planning and reporting commands."""
    return [
        CommandSpec(
            "calibrate",
            _loader("calibrating", "calibrate"),
            summary="Measure step times on this device and write a cost model file.",
        ),
        CommandSpec(
            "plan",
            _loader("planning", "plan"),
            summary="Find the best capture sizes for a trace.",
        ),
        CommandSpec(
            "report",
            _loader("reporting", "report"),
            summary="Write an HTML report of a trace, simulations or live statistics.",
        ),
        CommandSpec(
            "simulate",
            _loader("simulating", "simulate"),
            summary="Predict how a trace would run under a policy.",
        ),
    ]
