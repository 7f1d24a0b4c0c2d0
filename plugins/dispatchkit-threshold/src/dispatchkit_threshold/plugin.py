"""Register the policy ``threshold``."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_threshold.policy import ThresholdPolicy


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Return the policy ``threshold``."""
    return [
        PolicySpec(
            "threshold",
            ThresholdPolicy,
            summary="Replays graphs only within fixed limits on tokens and padding",
        )
    ]
