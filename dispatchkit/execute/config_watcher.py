"""A configuration file that a serving runner follows: edit it, and the runner is swapped.

There is no port and no thread of its own. The owner of the loop polls, which costs one look at
the file's time stamp, or gives ``run`` a thread.
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

# What a swap changes, beside the configuration.
_SWAPPED = (*names_of(MemoryOptions), "policy", "policy_options")


class SwapWarning(RuntimeWarning):
    """A change of the watched file was refused; the runner goes on as it was."""


class ConfigWatcher:
    """Keeps a runner as a settings file says.

    The file is as ``pyproject.toml``: a table ``[tool.dispatchkit]`` with settings by their
    usual names. What it does not name stays as it is; the environment has no say. Replace the
    file by a rename, so that no half of it is read.

    Args:
        runner: What is swapped.
        path: The file.

    Attributes:
        error: Why the file as it stands was refused; None where it is in force.
    """

    def __init__(self, runner: GraphRunner, path: str | os.PathLike[str]) -> None:
        self._runner, self._path = runner, Path(path)
        self._seen: tuple[int, ...] | None = None
        self.error: DispatchkitError | None = None

    def poll(self) -> SwapReport | None:
        """Swap what the file says otherwise, if it was written since the last time.

        A file that cannot be read, says what cannot be used, or asks for a swap that fails
        changes nothing. That is warned of once, and kept in ``error``.

        Returns:
            What a swap did; None where there was none.
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
                f"{self._path} is not followed, and the runner goes on as it was: {error}",
                SwapWarning,
                stacklevel=2,
            )
            return None
        self.error = None
        return report

    def run(self, stop: threading.Event, interval_s: float = 1.0) -> None:
        """Poll until told to stop; for a thread that the caller makes.

        Args:
            stop: Ends it when set.
            interval_s: Seconds between two looks.
        """
        while not stop.wait(interval_s):
            self.poll()

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()  # reading it says why
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _changes(self) -> dict[str, Any]:
        """Return the arguments of the swap that makes the runner as the file says."""
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
            name, value, "as it was when the runner was made", "Only a new runner can change it."
        )
