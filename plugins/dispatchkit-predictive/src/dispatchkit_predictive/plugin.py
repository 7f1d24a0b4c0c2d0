"""What this distribution registers with dispatchkit."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import ObserverSpec, hookimpl

from dispatchkit_predictive.assistant import Predictive


@hookimpl
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:
    """Register the assistant: an observer, since it also hears of evictions."""
    return [
        ObserverSpec(
            "predictive",
            Predictive,
            summary="Captures graphs that are expected next in idle time, and protects them",
        )
    ]
