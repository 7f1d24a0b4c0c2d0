"""What this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_smallest.policy import SmallestPolicy


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Register the one policy."""
    return [PolicySpec("smallest", SmallestPolicy, summary="Smallest graph that covers the batch")]
