"""What a device must do, and the devices there are, chosen by name.

Importing this loads no torch; a backend is imported when it is asked for.
"""

from __future__ import annotations

from dispatchkit.backends.base import (
    BackendCapabilities,
    CapturedGraph,
    Event,
    GraphBackend,
    RehearsingBackend,
    Stream,
)
from dispatchkit.backends.resolve import BUILT_IN_BACKENDS, resolve_backend

__all__ = [
    "BUILT_IN_BACKENDS",
    "BackendCapabilities",
    "CapturedGraph",
    "Event",
    "GraphBackend",
    "RehearsingBackend",
    "Stream",
    "resolve_backend",
]
