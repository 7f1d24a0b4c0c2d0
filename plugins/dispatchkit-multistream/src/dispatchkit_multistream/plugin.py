"""Register the lane policies."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import LanePolicySpec, hookimpl

from dispatchkit_multistream.policies import ByKey, LeastLoaded, Priority, RoundRobin


@hookimpl
def dispatchkit_register_lane_policies() -> Sequence[LanePolicySpec]:
    """Return the four lane policies."""
    return [
        LanePolicySpec("round-robin", RoundRobin, summary="Uses all lanes in turn"),
        LanePolicySpec(
            "least-loaded", LeastLoaded, summary="Uses the lane with the least unfinished work"
        ),
        LanePolicySpec("by-key", ByKey, summary="Runs each graph on fixed lanes, to save memory"),
        LanePolicySpec("priority", Priority, summary="Reserves lanes for urgent steps"),
    ]
