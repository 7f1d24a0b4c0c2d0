"""The Grafana dashboard that comes along."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["dashboard"]


def dashboard() -> str:
    """Return the dashboard as JSON text, for Grafana's import or a provisioning folder."""
    return (files("dispatchkit_prometheus") / "grafana.json").read_text(encoding="utf-8")
