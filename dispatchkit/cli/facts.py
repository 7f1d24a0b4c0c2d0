"""Information for bug reports: system, versions, driver and settings."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dispatchkit.settings import SETTINGS, Settings, shown

__all__ = ["driver", "given_settings", "hide_home", "libraries", "python", "version_of"]

_LIBRARIES = ("attrs", "pluggy", "numpy", "typer", "rich", "hypothesis", "pytest", "transformers")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")


def python() -> str:
    """Describe the Python version, the path of its executable, and the platform."""
    name, number = platform.python_implementation(), platform.python_version()
    where = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"{name.replace('CPython', 'Python')} {number} ({sys.executable}) on {where}"


def libraries() -> str:
    """Return the versions of installed dependencies."""
    found = {name: version_of(name) for name in _LIBRARIES}
    return ", ".join(f"{name} {number}" for name, number in found.items() if number)


def version_of(*names: str) -> str | None:
    """Return the version of the first named distribution that is installed, or None."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def driver(path: Path = _DRIVER_FILE) -> str:
    """Return the version of NVIDIA's kernel module, or ""."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = _DRIVER.search(text)
    return found[0] if found else text.splitlines()[0] if text else ""


def given_settings(settings: Settings) -> str:
    """Return the given settings with their sources, as text; may be empty."""
    given = [(name, settings.lookup(name)) for name in SETTINGS if settings.is_given(name)]
    return "; ".join(f"{name} = {shown(one.value)} ({one.source})" for name, one in given)


def hide_home(text: str) -> str:
    """Replace the path of the user's home folder with ``~``, because reports are shared."""
    return text.replace(str(Path.home()) + os.sep, f"~{os.sep}")
