"""ConfigWatcher: reload a runner's settings file while serving.

A watcher opens no port and starts no thread. Call ``poll`` in the serving loop, or ``run`` in a
separate thread. Both detect changes via the file's modification time, size and inode.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from dispatchkit.errors import ConfigError, DispatchkitError
from dispatchkit.execute.live.swap import SwapReport
from dispatchkit.execute.runner import GraphRunner
from dispatchkit.files import check_path
from dispatchkit.keys.checks import check_instance
from dispatchkit.options import MemoryOptions, names_of
from dispatchkit.settings import SETTINGS, load_settings

# Settings that a swap can change, besides the configuration.
_SWAPPED = (*names_of(MemoryOptions), "policy", "policy_options")


class SwapWarning(RuntimeWarning):
    """A change to the watched file was rejected; the runner is unchanged."""


class ConfigWatcher:
    """A watcher that updates a runner when a settings file changes.

    As in ``pyproject.toml``, the settings are in the table ``[tool.dispatchkit]``. Settings missing
    from the file keep their values, and environment variables are ignored. Replace the file
    atomically, with ``os.replace``, so that the watcher never reads a half-written file.

    Args:
        runner: Runner whose settings follow the file.
        path: Path to the settings file.

    Attributes:
        error: Error that caused the latest version of the file to be rejected, or None.
    """

    def __init__(self, runner: GraphRunner, path: str | os.PathLike[str]) -> None:
        self._runner = check_instance(runner, GraphRunner, "runner")
        self._path = Path(check_path(path, "path"))
        self._seen: tuple[int, ...] | None = None
        self.error: DispatchkitError | None = None

    def poll(self) -> SwapReport | None:
        """Apply the file if it changed since the last call; the first call always applies it.

        If the file cannot be read, a setting is invalid, or the swap fails, the runner keeps its
        settings. In these cases, ``error`` is set, and a ``SwapWarning`` is issued once per version
        of the file.

        Returns:
            The report of the swap; None if the file is unchanged, changes no setting, or was
            rejected.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            changes = self._changes()
            report = self._runner.swap(**changes) if changes else None
        except DispatchkitError as error:
            self.error = error
            warnings.warn(
                f"The settings in {self._path} were rejected, and the runner is unchanged: {error}",
                SwapWarning,
                stacklevel=2,
            )
            return None
        self.error = None
        return report

    def run(self, stop: threading.Event, interval_s: float = 1.0) -> None:
        """Poll until ``stop`` is set; meant for a separate thread.

        Args:
            stop: Event that ends the loop.
            interval_s: Seconds between polls.
        """
        while not stop.wait(interval_s):
            self.poll()

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()  # poll() reads the file and reports the error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _changes(self) -> dict[str, Any]:
        """Return the arguments of ``swap`` that apply the file."""
        settings = load_settings(environ={}, file=self._path)
        in_force = self._runner.swapper.settings_in_force()
        changed = {
            name: settings[name]
            for name in SETTINGS
            if settings.is_given(name) and name in in_force and settings[name] != in_force[name]
        }
        config = {name: changed.pop(name) for name in tuple(changed) if _is_dispatch(name)}
        _reject_fixed({name: changed[name] for name in changed if name not in _SWAPPED}, in_force)
        if config:
            changed["config"] = attrs.evolve(self._runner.swapper.requested_config, **config)
        if "policy" in changed and settings.is_given("policy_options"):
            changed["policy_options"] = settings["policy_options"]
        return changed


def _is_dispatch(name: str) -> bool:
    return SETTINGS[name].group == "dispatch"


def _reject_fixed(changed: Mapping[str, Any], in_force: Mapping[str, Any]) -> None:
    for name, value in changed.items():
        raise ConfigError(
            name,
            value,
            "the value with which the runner was created",
            "Restore the value in the file, or create a new runner.",
            message=f"{name} cannot be changed after the runner is created; it is "
            f"{in_force[name]!r}, got {value!r}.",
        )
