"""What this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import LanePolicySpec, hookimpl

from dispatchkit_multistream.policies import ByKey, LeastLoaded, Priority, RoundRobin


@hookimpl
def dispatchkit_register_lane_policies() -> Sequence[LanePolicySpec]:
    """Register the four lane policies."""
    return [
        LanePolicySpec("round-robin", RoundRobin, summary="All lanes in turn"),
        LanePolicySpec(
            "least-loaded", LeastLoaded, summary="The lane with the least unfinished work"
        ),
        LanePolicySpec("by-key", ByKey, summary="Each graph on its own lane, to save memory"),
        LanePolicySpec("priority", Priority, summary="Lanes reserved for urgent steps"),
    ]
