"""Capture and replay of steps, and the runner.

Importing this package requires torch.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    from dispatchkit.errors import BackendUnavailableError

    if _error.name != "torch":
        raise BackendUnavailableError(
            f"dispatchkit needs torch to run steps, but importing torch raised an error: {_error}. "
            "Fix the installation so that `import torch` works."
        ) from _error
    raise BackendUnavailableError(
        "dispatchkit needs torch to run steps, but torch is not installed. Run: pip install "
        "'dispatchkit[torch]' (on Linux without a GPU, add --index-url "
        "https://download.pytorch.org/whl/cpu)."
    ) from _error

from dispatchkit.backends.watching.dispatch_mode import DispatchMode
from dispatchkit.execute.capture.budget import ChurnWarning
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.capture.graph import UncompiledCodeWarning
from dispatchkit.execute.capture.report import CaptureReport
from dispatchkit.execute.config_watcher import ConfigWatcher, SwapWarning
from dispatchkit.execute.io.axes import AxisCut, pad_input
from dispatchkit.execute.io.inputs import RESERVED_NAMES, InputSet
from dispatchkit.execute.io.sample_inputs import sample_inputs
from dispatchkit.execute.io.static_input import StaticInput, inputs_from_example
from dispatchkit.execute.io.structure import flatten
from dispatchkit.execute.io.weak_tensor import weak_tensor
from dispatchkit.execute.lanes.lane_set import LaneCost, LanePolicyWarning, LaneStats, StepFuture
from dispatchkit.execute.live.swap import SwapReport
from dispatchkit.execute.memory import GraphMemory, MemoryAccount, MemoryGroup, PoolAccount
from dispatchkit.execute.packed import PackedRunner
from dispatchkit.execute.preserve import preserved_state
from dispatchkit.execute.replay.check import CheckWarning
from dispatchkit.execute.runner import GraphRunner
from dispatchkit.execute.setup import make_backend
from dispatchkit.execute.slots import RawBank, SlotMove, SlotRows, SlotState
from dispatchkit.execute.step.breaks import eager_region, graph_break
from dispatchkit.execute.step.guard import Guard, Watched
from dispatchkit.execute.step.pieces import Piece, eager_piece, graph_piece
from dispatchkit.execute.step.ranges import NvtxRanges
from dispatchkit.execute.step.reasons import EagerStepWarning, PaddedDrawsWarning
from dispatchkit.execute.step.state import StepState, storage_of
from dispatchkit.execute.step.support import ModeDowngradeWarning, declare_support, limited_support
from dispatchkit.execute.step.walk import declare_bookkeeping
from dispatchkit.observe.counters import RunnerStats

__all__ = [
    "RESERVED_NAMES",
    "AxisCut",
    "CaptureReport",
    "CapturedKey",
    "CheckWarning",
    "ChurnWarning",
    "ConfigWatcher",
    "DispatchMode",
    "EagerStepWarning",
    "GraphMemory",
    "GraphRunner",
    "Guard",
    "InputSet",
    "LaneCost",
    "LanePolicyWarning",
    "LaneStats",
    "MemoryAccount",
    "MemoryGroup",
    "ModeDowngradeWarning",
    "NvtxRanges",
    "PackedRunner",
    "PaddedDrawsWarning",
    "Piece",
    "PoolAccount",
    "RawBank",
    "RunnerStats",
    "SlotMove",
    "SlotRows",
    "SlotState",
    "StaticInput",
    "StepFuture",
    "StepState",
    "SwapReport",
    "SwapWarning",
    "UncompiledCodeWarning",
    "Watched",
    "declare_bookkeeping",
    "declare_support",
    "eager_piece",
    "eager_region",
    "flatten",
    "graph_break",
    "graph_piece",
    "inputs_from_example",
    "limited_support",
    "make_backend",
    "pad_input",
    "preserved_state",
    "sample_inputs",
    "storage_of",
    "weak_tensor",
]
