"""Read and write trace files: plain or gzip text, with a size limit and line numbers for errors.

The content of a trace is not trusted: it may be a truncated log, an incomplete download, or a file
from an unknown source. A gzip file is decompressed in blocks, up to a limit. Text must be UTF-8.
Errors are TraceErrors that name the file and, if possible, the line.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.files import check_path, whole_file
from dispatchkit.keys.checks import check_count

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Blocks",
    "iter_line_blocks",
    "trace_name",
    "whole_text",
    "write_error",
]

DEFAULT_MAX_BYTES = 512 * 1024 * 1024
"""Default maximum number of uncompressed bytes to read from a trace."""

_BLOCK = 1 << 16  # small enough for a block and its cells to stay in the CPU cache
_MAX_LINE = 1 << 16  # lines of traces are shorter than 200 bytes, but log lines may be long
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


StrPath = str | os.PathLike[str]
Blocks = Iterable[tuple[int, list[str]]]
"""Blocks of lines, each as a pair (number of its first line, lines)."""


def trace_name(path: StrPath | IO[bytes]) -> str:
    """Return the name of a path or an open file, for messages."""
    if hasattr(path, "read"):
        return str(getattr(path, "name", "<stream>"))
    return check_path(path, "trace")


def _open(path: StrPath | IO[bytes], name: str, closing: contextlib.ExitStack) -> IO[bytes]:
    """Open a file for reading; ``closing`` closes what this function opened."""
    try:
        if hasattr(path, "read"):
            raw: Any = path
        else:
            raw = closing.enter_context(Path(path).open("rb"))  # noqa: SIM115 - on the stack
        if not hasattr(raw, "peek"):
            raw = io.BufferedReader(raw)
        # Detect gzip from the first bytes, because the file may have been renamed.
        if not raw.peek(2).startswith(_GZIP_MAGIC):
            return cast("IO[bytes]", raw)
    except FileNotFoundError:
        raise TraceError(name, None, "the file does not exist. Check the path.") from None
    except IsADirectoryError:
        raise TraceError(name, None, "the path is a folder. Pass the path of a file.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TraceError(name, None, f"the file cannot be read: {why}. Check the path.") from error
    packed = closing.enter_context(gzip.GzipFile(fileobj=raw))
    return cast("IO[bytes]", io.BufferedReader(packed))


def _blocks(path: StrPath | IO[bytes], name: str, max_bytes: int) -> Iterator[bytes]:
    total = 0
    with contextlib.ExitStack() as closing:
        stream = _open(path, name, closing)
        while True:
            try:
                block = stream.read(_BLOCK)
            except EOFError:
                raise TraceError(
                    name,
                    None,
                    f"the gzip file is truncated after {counted(total, 'uncompressed byte')}. "
                    "Copy it again, or recover its first part with `gzip -dc` and remove the last "
                    "line.",
                ) from None
            except (zlib.error, gzip.BadGzipFile) as error:
                raise TraceError(
                    name,
                    None,
                    (
                        f"the gzip file is damaged after {counted(total, 'uncompressed byte')}: "
                        f"{error}. Copy it again."
                    ),
                ) from error
            except OSError as error:
                why = error.strerror or str(error)
                raise TraceError(
                    name, None, f"the file cannot be read: {why}. Check the path."
                ) from error
            if not block:
                return
            total += len(block)
            if total > max_bytes:
                raise TraceError(
                    name,
                    None,
                    "the file is larger than the limit of "
                    f"{counted(max_bytes, 'uncompressed byte')} (`max_bytes`). If it is really "
                    "that large, pass a larger max_bytes in Python, or split the file.",
                )
            yield block


def iter_line_blocks(
    path: StrPath | IO[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES, name: str | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield blocks of lines of a text file, each as (number of its first line, lines).

    Line endings (LF, CRLF or CR) and a leading byte order mark are removed. The last line may lack
    a line break.

    Args:
        path: A path or an open binary file, plain or gzip.
        max_bytes: Maximum number of uncompressed bytes to read.
        name: Name of the file in messages; by default the path.

    Raises:
        TraceError: The file cannot be read, is truncated, damaged or too large, is not UTF-8 text,
            or has a line of more than 65,536 bytes.
        ConfigError: ``max_bytes`` is not a whole number of at least 1.
    """
    max_bytes = check_count(max_bytes, "max_bytes")
    name = trace_name(path) if name is None else name
    line, rest, first, line_end = 1, b"", True, b"\n"
    for block in _blocks(path, name, max_bytes):
        if first:
            first = False
            if block[:2] in _OTHER_BOMS:
                encoding = _OTHER_BOMS[block[:2]]
                raise TraceError(name, 1, f"the file is {encoding} text. Save it as UTF-8.")
            block = block.removeprefix(b"\xef\xbb\xbf")
            line_end = b"\r" if b"\r" in block and b"\n" not in block else b"\n"
        data = rest + block
        end = data.rfind(line_end)
        if end < 0:
            rest = data
        else:
            rest = data[end + 1 :]
            lines = _decode(name, line, data[:end], line_end)
            yield line, lines
            line += len(lines)
        if len(rest) > _MAX_LINE:
            if b"\0" in rest:
                _decode(name, line, rest, line_end)
            raise TraceError(
                name,
                line,
                (
                    f"no line break within {_MAX_LINE:,} bytes, so the file is neither a trace nor "
                    "a log. Check the path."
                ),
            )
    if rest:
        yield line, _decode(name, line, rest, line_end)


def _decode(name: str, line: int, data: bytes, line_end: bytes) -> list[str]:
    try:
        text = data.decode("utf-8")
        bad = data.find(b"\0")
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        at = line + data[:bad].count(line_end)
        raise TraceError(
            name,
            at,
            f"the line contains byte {data[bad]:#04x}, so the file is not UTF-8 text. Check "
            "the path, or save the text as UTF-8.",
        )
    if line_end == b"\r":
        return text.split("\r")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
        text = text.removesuffix("\r")  # the block ends between CR and LF
    return text.split("\n")


def write_error(path: str, error: OSError | ValueError) -> TraceError:
    """Return a TraceError for a trace that cannot be written."""
    cause = error.__cause__ if isinstance(error, ConfigError) else error
    if cause is None and isinstance(error, ConfigError):
        folder = Path(os.path.realpath(path)).parent
        hint = "" if folder.is_dir() else f" Create the folder {folder}."
        return TraceError(
            path, None, f"the file cannot be written: it must be {error.allowed}.{hint}"
        )
    why = getattr(cause, "strerror", None) or str(cause)
    return TraceError(path, None, f"the file cannot be written: {why}.")


@contextlib.contextmanager
def whole_text(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Open a text file for writing, and replace ``path`` with it if the ``with`` block succeeds.

    Raises:
        TraceError: The file cannot be written. An existing file is kept.
    """
    try:
        with contextlib.ExitStack() as closing:
            out: IO[bytes] = closing.enter_context(whole_file(path))
            if Path(path).suffix == ".gz":
                # No timestamp, so that equal content results in equal bytes.
                packed: Any = gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0)
                out = closing.enter_context(packed)
            text = io.TextIOWrapper(out, encoding="utf-8", newline="\n")
            yield closing.enter_context(text)
    except ConfigError as error:
        if error.setting != "output":
            raise
        raise write_error(trace_name(path), error) from error
