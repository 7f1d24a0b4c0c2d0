"""Reading what a report is made of, and writing files whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dispatchkit.errors import ConfigError

__all__ = ["check_writable", "read_json", "write_whole"]

_MAX_JSON_BYTES = 64 * 1024 * 1024


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise now what ``write_whole`` would raise after long work.

    Raises:
        ConfigError: The folder is missing or cannot be written, or the path is a folder.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise ConfigError("output", str(path), "a file, and it is a folder")
    if not folder.is_dir():
        raise ConfigError("output", str(path), "in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise ConfigError("output", str(path), "in a folder that can be written")


def write_whole(path: str | os.PathLike[str], content: str) -> None:
    """Write a text file beside its name, and give it the name once it is whole.

    Raises:
        ConfigError: It cannot be written; what had the name before is kept.
    """
    check_writable(path)
    target = Path(path)
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_text(content, encoding="utf-8", newline="\n")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            "output", str(path), f"a file that can be written ({error.strerror})"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_json(path: str | os.PathLike[str]) -> Any | None:
    """Return the JSON document of a file; None if it is not one, but perhaps a trace."""
    try:
        with Path(path).open("rb") as stream:
            head = stream.read(1)
            while head.isspace():
                head = stream.read(1)
            if head not in (b"{", b"["):
                return None
            raw = head + stream.read(_MAX_JSON_BYTES + 1)
    except OSError:
        return None  # the trace reader says what is wrong with the path
    if len(raw) > _MAX_JSON_BYTES:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
