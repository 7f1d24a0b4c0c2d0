"""How the graph of a captured step is launched: by the runtime itself, or by its own replay."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from dispatchkit.backends.base import GraphBackend
from dispatchkit.errors import ReplayError
from dispatchkit.execute.capture.captured import CapturedStep, FullStep, LaunchError

# Takes a graph and a stream; anything but 0 and None is an error code.
LaunchCall = Callable[[Any, Any], int | None]


def direct_call(backend: GraphBackend, step: CapturedStep) -> tuple[LaunchCall, Any] | str:
    """Return the call and the graph to launch it directly, or why its replay must do it.

    A graph that draws random numbers needs torch, which tells it where the generator is. One
    whose operations nobody watched counts as such until its first replay has told.
    """
    if not isinstance(step, FullStep):
        return "made of pieces"
    graph = step.graphs[0]
    if graph.has_random_state:
        return "may draw random numbers"
    find = getattr(backend, "direct_launch", None)
    handle = getattr(graph, "raw_exec_handle", None)
    if find is None or handle is None:
        return "no direct launch on this backend, or of this graph"
    call = find()
    if call is None:
        return "the CUDA runtime was not found"
    return call, ctypes.c_void_p(handle)


def launch_path(backend: GraphBackend, step: CapturedStep) -> str:
    """Return how a step is launched, as text: ``direct``, or ``replay`` and why."""
    direct = direct_call(backend, step)
    return f"replay: {direct}" if isinstance(direct, str) else "direct"


def refused(code: int, step: CapturedStep) -> LaunchError:
    """Return the error of a direct launch that gave an error code."""
    cause = ReplayError(f"The launch of {step.key} failed with CUDA error {code}.")
    return LaunchError(cause, has_effect=step.has_effect)
