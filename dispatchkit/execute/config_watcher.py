"""Follow a configuration file while serving: when it is edited, the runner is swapped.

It has no port or thread. The owner of the serving loop polls, which checks the file's modification
time, or runs ``run`` in a thread.
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
from dispatchkit.options import MemoryOptions, names_of
from dispatchkit.settings import SETTINGS, load_settings

# What a swap can change besides the configuration.
_SWAPPED = (*names_of(MemoryOptions), "policy", "policy_options")


class SwapWarning(RuntimeWarning):
    """A change of the watched file was refused; the runner does not change."""


class ConfigWatcher:
    """Keeps a runner up to date with a settings file.

    The file is like ``pyproject.toml``: a table ``[tool.dispatchkit]`` with the usual names of
    settings. Settings it does not contain do not change; the environment is ignored. Replace the
    file by renaming, so that it is never read half-written.

    Args:
        runner: The runner.
        path: The file.

    Attributes:
        error: Why the current file was refused; None if it is in effect.
    """

    def __init__(self, runner: GraphRunner, path: str | os.PathLike[str]) -> None:
        self._runner, self._path = runner, Path(path)
        self._seen: tuple[int, ...] | None = None
        self.error: DispatchkitError | None = None

    def poll(self) -> SwapReport | None:
        """Apply changes of the file if it was written since the last call.

        If the file cannot be read, has an invalid setting, or the swap fails, nothing changes. That
        is warned about once, and stored in ``error``.

        Returns:
            The report of the swap, or None if there was none.
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
                f"The change of {self._path} was refused, and the runner does not change: {error}",
                SwapWarning,
                stacklevel=2,
            )
            return None
        self.error = None
        return report

    def run(self, stop: threading.Event, interval_s: float = 1.0) -> None:
        """Poll until stopped; for a thread created by the caller.

        Args:
            stop: Set it to stop polling.
            interval_s: Seconds between polls.
        """
        while not stop.wait(interval_s):
            self.poll()

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()  # reading it raises the reason
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _changes(self) -> dict[str, Any]:
        """Return the arguments of the swap that applies the file to the runner."""
        settings = load_settings(environ={}, file=self._path)
        in_force = self._runner.swapper.settings_in_force()
        changed = {
            name: settings[name]
            for name in SETTINGS
            if settings.is_given(name) and name in in_force and settings[name] != in_force[name]
        }
        config = {name: changed.pop(name) for name in tuple(changed) if _is_dispatch(name)}
        _refuse_fixed({name: changed[name] for name in changed if name not in _SWAPPED})
        if config:
            changed["config"] = attrs.evolve(self._runner.swapper.asked_config, **config)
        if "policy" in changed and settings.is_given("policy_options"):
            changed["policy_options"] = settings["policy_options"]
        return changed


def _is_dispatch(name: str) -> bool:
    return SETTINGS[name].group == "dispatch"


def _refuse_fixed(changed: Mapping[str, Any]) -> None:
    for name, value in changed.items():
        raise ConfigError(
            name,
            value,
            "the value that the runner was created with",
            "Only a new runner can have another value.",
        )
