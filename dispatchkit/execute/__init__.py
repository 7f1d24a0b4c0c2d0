"""Runs steps: static inputs and outputs, capture, replay, and the runner that ties them.

Importing this room needs torch.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from dispatchkit.errors import BackendUnavailableError

    raise BackendUnavailableError(
        "GraphRunner needs torch, which is not installed here. Run: pip install "
        "'dispatchkit[torch]' (on Linux without a GPU add --index-url "
        "https://download.pytorch.org/whl/cpu)."
    ) from error

from dispatchkit.execute.budget import ChurnWarning
from dispatchkit.execute.captured import CapturedStep
from dispatchkit.execute.inputs import StaticInput
from dispatchkit.execute.lifecycle import CaptureReport
from dispatchkit.execute.pieces import Piece, eager_piece, graph_piece
from dispatchkit.execute.reasons import EagerStepWarning
from dispatchkit.execute.runner import GraphRunner
from dispatchkit.observe.counters import RunnerStats

__all__ = [
    "CaptureReport",
    "CapturedStep",
    "ChurnWarning",
    "EagerStepWarning",
    "GraphRunner",
    "Piece",
    "RunnerStats",
    "StaticInput",
    "eager_piece",
    "graph_piece",
]
