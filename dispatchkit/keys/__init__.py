"""Batches, graph keys, modes, capture sizes and the configuration."""

from dispatchkit.keys.axes import Axis, AxisBuckets
from dispatchkit.keys.batch import Batch, BatchDescriptor, GraphKey
from dispatchkit.keys.capture_sizes import (
    SIZE_RULES,
    CaptureSizes,
    CaptureSizeWarning,
    check_capture_sizes,
    default_capture_sizes,
    derive_capture_sizes,
    padded_size,
    padding_table,
    round_sizes_for_query_len,
    rounds_for_query_len,
)
from dispatchkit.keys.checks import (
    check_count,
    check_counts,
    check_flag,
    check_instance,
    has_members,
    read_flag,
    whole_number,
)
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import (
    ALLOWED_MODES,
    AttentionSupport,
    CUDAGraphMode,
    CUDAGraphSupport,
    ModeError,
    ModeResolution,
    RuntimeMode,
    allowed_modes_code,
    resolve_mode,
)

__all__ = [
    "ALLOWED_MODES",
    "SIZE_RULES",
    "AttentionSupport",
    "Axis",
    "AxisBuckets",
    "Batch",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CUDAGraphSupport",
    "CaptureSizeWarning",
    "CaptureSizes",
    "DispatchConfig",
    "GraphKey",
    "ModeError",
    "ModeResolution",
    "RuntimeMode",
    "allowed_modes_code",
    "check_capture_sizes",
    "check_count",
    "check_counts",
    "check_flag",
    "check_instance",
    "default_capture_sizes",
    "derive_capture_sizes",
    "has_members",
    "padded_size",
    "padding_table",
    "read_flag",
    "resolve_mode",
    "round_sizes_for_query_len",
    "rounds_for_query_len",
    "whole_number",
]
