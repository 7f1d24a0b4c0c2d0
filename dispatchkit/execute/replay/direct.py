"""Launch the graph of a captured step directly instead of calling ``replay``."""

from __future__ import annotations

from typing import Any

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.optional import LaunchCall, features_of
from dispatchkit.errors import ReplayError
from dispatchkit.execute.capture.captured import CapturedKey, LaunchError
from dispatchkit.execute.io.staging import StagingBuffers
from dispatchkit.execute.lane import Chain, Lane


def direct_call(backend: GraphBackend, step: CapturedKey) -> tuple[LaunchCall, Any] | str:
    """Return the launch function and graph handle, or why ``replay`` is needed.

    A graph that draws random numbers must be replayed by torch, which sets the generator's state. A
    graph whose operations were not watched counts as drawing random numbers until its first replay.
    """
    if step.pieces is not None:
        return "the step is made of pieces or segments"
    graph = step.graphs[0]
    if graph.has_random_state:
        return "the graph may draw random numbers"
    launches = features_of(backend).direct_launches
    if launches is None:
        return "the backend does not support direct launches"
    return launches.direct_launch(graph) or "the backend cannot launch this graph directly"


def launch_path(backend: GraphBackend, step: CapturedKey) -> str:
    """Describe how a step is launched: ``direct``, or ``replay`` with the reason."""
    direct = direct_call(backend, step)
    return f"replay: {direct}" if isinstance(direct, str) else "direct"


def refused(code: int, step: CapturedKey) -> LaunchError:
    """Return the exception for the error code of a direct launch."""
    cause = ReplayError(f"The launch of {step.key} failed with CUDA error {code}.")
    return LaunchError(cause, has_effect=step.has_effect)


def noting(launch: LaunchCall, staging: StagingBuffers, lane: Lane) -> LaunchCall:
    """Return a launch function that also records that the launch reads staging memory."""

    def launch_and_note(graph: Any, stream: Any) -> int | None:
        code = launch(graph, stream)
        if lane.last_stream is not None:
            staging.record_launch(lane.last_stream)
        return code

    return launch_and_note


def in_turn(launch: LaunchCall, chain: Chain, lane: Lane) -> LaunchCall:
    """Return a launch function that first makes the stream wait for the chain's last step."""

    def launch_in_turn(graph: Any, stream: Any) -> int | None:
        own = chain.begin(lane)
        try:
            return launch(graph, stream)
        finally:  # a failed launch may have queued some of the work
            chain.end(own)

    return launch_in_turn
