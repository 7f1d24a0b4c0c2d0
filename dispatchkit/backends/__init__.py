"""Backend protocols and the built-in backends.

Importing this package does not import torch; ``resolve_backend`` imports a backend on request.
"""

from __future__ import annotations

from dispatchkit.backends.base import (
    BackendCapabilities,
    CapturedGraph,
    Event,
    GraphBackend,
    Stream,
)
from dispatchkit.backends.optional import (
    BackendFeatures,
    CopyNode,
    CopyNodeBackend,
    CopyRegion,
    DeviceMemory,
    DirectLaunchBackend,
    LaunchCall,
    MeteringBackend,
    PriorityBackend,
    RehearsingBackend,
    SegmentedCapture,
    SegmentGraph,
    SegmentingBackend,
    SleepingBackend,
    UnwatchedCaptureBackend,
    UploadingBackend,
    WarmupNotes,
    WatchedGraph,
    features_of,
)
from dispatchkit.backends.resolve import BUILT_IN_BACKENDS, resolve_backend

__all__ = [
    "BUILT_IN_BACKENDS",
    "BackendCapabilities",
    "BackendFeatures",
    "CapturedGraph",
    "CopyNode",
    "CopyNodeBackend",
    "CopyRegion",
    "DeviceMemory",
    "DirectLaunchBackend",
    "Event",
    "GraphBackend",
    "LaunchCall",
    "MeteringBackend",
    "PriorityBackend",
    "RehearsingBackend",
    "SegmentGraph",
    "SegmentedCapture",
    "SegmentingBackend",
    "SleepingBackend",
    "Stream",
    "UnwatchedCaptureBackend",
    "UploadingBackend",
    "WarmupNotes",
    "WatchedGraph",
    "features_of",
    "resolve_backend",
]
