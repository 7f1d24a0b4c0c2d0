"""What a batch is, what a graph is named by, and the sizes graphs are captured at."""

from dispatchkit.keys.batch import Batch, BatchDescriptor, GraphKey
from dispatchkit.keys.capture_sizes import (
    CaptureSizeWarning,
    check_capture_sizes,
    default_capture_sizes,
    derive_capture_sizes,
    padded_size,
    padding_table,
    round_sizes_for_query_len,
)
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import (
    ALLOWED_MODES,
    AttentionSupport,
    CUDAGraphMode,
    ModeResolution,
    RuntimeMode,
    allowed_modes_code,
    resolve_mode,
)

__all__ = [
    "ALLOWED_MODES",
    "AttentionSupport",
    "Batch",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CaptureSizeWarning",
    "DispatchConfig",
    "GraphKey",
    "ModeResolution",
    "RuntimeMode",
    "allowed_modes_code",
    "check_capture_sizes",
    "default_capture_sizes",
    "derive_capture_sizes",
    "padded_size",
    "padding_table",
    "resolve_mode",
    "round_sizes_for_query_len",
]
