"""Register the observer ``predictive``."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import ObserverSpec, hookimpl

from dispatchkit_predictive.assistant import Predictive


@hookimpl
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:
    """Return the observer ``predictive``, which is notified of evictions."""
    return [
        ObserverSpec(
            "predictive",
            Predictive,
            summary="Captures graphs in idle time before steps need them",
        )
    ]
