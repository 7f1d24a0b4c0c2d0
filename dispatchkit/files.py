"""Write output files completely or not at all, and never overwrite input files.

A file is written under a temporary name in the same folder and renamed when it is complete. If
writing is interrupted, for example by Ctrl-C or a full disk, an existing output file is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from dispatchkit.errors import ConfigError, DispatchkitError, format_value

__all__ = [
    "check_output",
    "check_path",
    "create_part",
    "is_special",
    "real_target",
    "rename_over",
    "whole_file",
    "write_whole",
]

StrPath = str | os.PathLike[str]
_LONGEST_STEM = 240


def check_path(path: Any, setting: str) -> str:
    """Validate the path given for a setting, and return it as text.

    Raises:
        ConfigError: The value is neither text nor a path object.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(setting, path, "the path of a file, as text or a Path")
    return os.fsdecode(path)


def real_target(path: StrPath) -> Path:
    """Return the absolute path of a file, following symbolic links.

    Writing to this path does not replace a link, and a later change of the working directory has no
    effect.

    Raises:
        ConfigError: The value is not a path.
        OSError: The path is relative and the working directory does not exist.
    """
    return Path(os.path.realpath(check_path(path, "output")))


def check_output(
    path: StrPath,
    *,
    inputs: Iterable[StrPath | None] = (),
    overwrite: bool = True,
    hint: str = "",
) -> None:
    """Validate an output path before long work begins.

    Args:
        path: The file to write.
        inputs: Files from which the output is computed; None entries are ignored.
        overwrite: Whether an existing file may be replaced.
        hint: Sentence to add to the error message if the file exists.

    Raises:
        ConfigError: The path is invalid, a folder, a read-only file, an input, or in a missing or
            read-only folder. Also raised for an existing file if ``overwrite`` is False.
    """
    name = check_path(path, "output")
    try:
        target = real_target(path)
        for source in inputs:
            if source is not None and _is_same(target, source):
                raise ConfigError(
                    "output", name, f"a file other than the input {os.fspath(source)!r}"
                )
        try:
            mode = target.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None:
            if stat.S_ISDIR(mode):
                raise ConfigError("output", name, "a file, not a folder")
            if not os.access(target, os.W_OK):
                raise ConfigError("output", name, "a file with write permission")
            if not stat.S_ISREG(mode):
                return  # devices and pipes are opened, not replaced
            if not overwrite:
                raise ConfigError(
                    "output",
                    name,
                    "a file that does not exist yet",
                    hint,
                    message=f"Output {name!r} already exists.",
                )
        if not target.parent.is_dir():
            raise ConfigError(
                "output", name, "in an existing folder", f"Create the folder {target.parent}."
            )
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise ConfigError("output", name, "in a folder with write permission")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def is_special(target: Path) -> bool:
    """Return whether a path is a device or pipe, which must not be replaced.

    Raises:
        OSError: The path cannot be inspected.
    """
    return target.exists() and not target.is_dir() and not target.is_file()


def _is_same(target: Path, source: StrPath) -> bool:
    try:
        return target.samefile(source)
    except (OSError, ValueError):  # one of the files does not exist
        return False


def _unwritable(path: StrPath, error: OSError | ValueError) -> ConfigError:
    why = getattr(error, "strerror", None) or str(error)
    name = format_value(os.fsdecode(path))
    message = f"Output {name} cannot be written: {why}. Fix the cause, or choose a different path."
    return ConfigError("output", os.fspath(path), "a file that can be written", message=message)


def _part_name(target: Path, number: int) -> str:
    # Shorten names close to the file system's limit.
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_STEM])
    return f"{name}.part" if not number else f"{name}.{number}.part"


def create_part(target: Path) -> tuple[int, Path]:
    """Create an empty file next to a target, and return its descriptor and path.

    The file is named ``TARGET.part`` or, if this file exists, ``TARGET.1.part`` and so on.
    Partial files of other processes are kept, even if the processes were killed.

    Raises:
        OSError: The file cannot be created.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
    for number in itertools.count():
        part = target.with_name(_part_name(target, number))
        with contextlib.suppress(FileExistsError):
            return os.open(part, flags, 0o666), part
    raise AssertionError("unreachable")


def rename_over(part: Path, target: Path) -> None:
    """Rename a finished file to its target, keeping the target's permissions.

    Raises:
        OSError: The file cannot be renamed.
    """
    with contextlib.suppress(FileNotFoundError):
        part.chmod(stat.S_IMODE(target.stat().st_mode))
    part.replace(target)


@contextlib.contextmanager
def whole_file(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a binary file for writing; it replaces the target if the block succeeds.

    Args:
        path: The target, which is replaced if it exists. A device or pipe is written directly.

    Raises:
        ConfigError: The file cannot be written. An existing file is kept.
    """
    check_output(path)
    try:
        target = real_target(path)
        descriptor, part = (
            (os.open(target, os.O_WRONLY), None) if is_special(target) else create_part(target)
        )
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
        if part is not None:
            rename_over(part, target)
    except BaseException as error:
        if part is not None:
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, DispatchkitError):
            raise _unwritable(path, error) from error
        raise


def write_whole(path: StrPath, content: str) -> None:
    """Write a text file in UTF-8, completely or not at all.

    Raises:
        ConfigError: The file cannot be written. An existing file is kept.
    """
    with whole_file(path) as stream:
        # Escape the invalid bytes of file names that are not UTF-8.
        stream.write(content.encode("utf-8", errors="backslashreplace"))
