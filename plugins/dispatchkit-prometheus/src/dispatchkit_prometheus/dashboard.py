"""The Grafana dashboard of the plugin."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """Return the dashboard as JSON text, to be imported or provisioned in Grafana."""
    return (files("dispatchkit_prometheus") / "grafana.json").read_text(encoding="utf-8")
