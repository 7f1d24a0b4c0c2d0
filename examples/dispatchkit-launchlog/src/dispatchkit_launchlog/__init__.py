"""The backend ``launchlog`` of dispatchkit."""

from __future__ import annotations

from dispatchkit_launchlog.backend import Launch, LaunchLogBackend

__all__ = ["Launch", "LaunchLogBackend"]
