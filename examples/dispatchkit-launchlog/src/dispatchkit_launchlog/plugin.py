"""Register the backend ``launchlog``."""

from __future__ import annotations

from collections.abc import Sequence

from dispatchkit.hookspecs import BackendSpec, hookimpl

from dispatchkit_launchlog.backend import LaunchLogBackend


@hookimpl
def dispatchkit_register_backends() -> Sequence[BackendSpec]:
    """Return the backend ``launchlog``."""
    summary = "Logs and delays the launches of another backend"
    return [BackendSpec("launchlog", LaunchLogBackend, summary=summary)]
