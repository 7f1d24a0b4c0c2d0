"""The plugin that this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_adaptive.policy import AdaptivePolicy


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Register the policy ``adaptive``."""
    return [
        PolicySpec(
            "adaptive",
            AdaptivePolicy,
            summary="Chooses eager or the fastest graph by measured step times",
        )
    ]
