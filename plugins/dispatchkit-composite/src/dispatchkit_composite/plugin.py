"""Register the policy ``composite``."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_composite.policy import CompositePolicy


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Return the policy ``composite``."""
    return [
        PolicySpec(
            "composite",
            CompositePolicy,
            summary="Asks several policies in order of priority; the first answer decides",
        )
    ]
