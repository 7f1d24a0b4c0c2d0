"""The plugin that registers the policy ``smallest``."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import PolicySpec, hookimpl

from dispatchkit_smallest.policy import SmallestPolicy


@hookimpl
def dispatchkit_register_policies() -> Sequence[PolicySpec]:
    """Return the policies of this distribution."""
    return [PolicySpec("smallest", SmallestPolicy, summary="Smallest graph that covers the batch")]
