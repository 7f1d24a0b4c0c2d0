"""Policies that measure steps to learn whether eager or one of the graphs is fastest."""

from __future__ import annotations

from dispatchkit_adaptive.latency import LatencyPolicy
from dispatchkit_adaptive.policy import AdaptivePolicy
from dispatchkit_adaptive.report import ArmReport, BucketReport
from dispatchkit_adaptive.state import StateError, device_fingerprint

__version__ = "0.1.0"

__all__ = [
    "AdaptivePolicy",
    "ArmReport",
    "BucketReport",
    "LatencyPolicy",
    "StateError",
    "device_fingerprint",
]
