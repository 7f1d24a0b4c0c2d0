"""What this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import ObserverSpec, hookimpl

from dispatchkit_predictive.assistant import Predictive


@hookimpl
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:
    """Register the assistant as an observer, since it also receives evictions."""
    return [
        ObserverSpec(
            "predictive",
            Predictive,
            summary="Captures, in idle time, graphs that are expected next, and keeps them",
        )
    ]
