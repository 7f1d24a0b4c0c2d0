"""The Grafana dashboard that ships with the plugin."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """Return the dashboard as JSON text, to import into Grafana or to provision."""
    return (files("dispatchkit_prometheus") / "grafana.json").read_text(encoding="utf-8")
