"""Opening trace files: plain or gzip, text only, bounded, with line numbers for complaints.

A trace comes from anywhere: a log that was cut, a download that broke off, a file someone
else made. So nothing here trusts it: a gzip file is unpacked piece by piece up to a limit,
text must be UTF-8, and each fault is a TraceError that names the file and, where it can, the
line.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dispatchkit.errors import ConfigError, TraceError

__all__ = ["DEFAULT_MAX_BYTES", "iter_line_blocks", "replace_when_done", "trace_name"]

DEFAULT_MAX_BYTES = 512 * 1024 * 1024
"""Most bytes of text read from one trace, after unpacking: some 15 million steps."""

_BLOCK = 1 << 16  # small enough that a block and its cells stay in the cache
_MAX_LINE = 1 << 16  # our longest line is under 200 bytes; a log line may be long
_GZIP_MAGIC = b"\x1f\x8b"
_FOREIGN_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def trace_name(path: str | os.PathLike[str]) -> str:
    """Return a path as it is named in messages."""
    return os.fspath(path)


def _open(path: str | os.PathLike[str], name: str, closing: contextlib.ExitStack) -> IO[bytes]:
    """Open a file; what is opened is closed with the stack."""
    try:
        raw = closing.enter_context(Path(path).open("rb"))  # noqa: SIM115 - on the stack
    except FileNotFoundError:
        raise TraceError(name, None, "no such file. Check the path of the trace.") from None
    except IsADirectoryError:
        raise TraceError(name, None, "is a folder; a trace is one file.") from None
    except OSError as error:
        raise TraceError(name, None, f"cannot be opened: {error.strerror}.") from error
    # By its first bytes and not by its name: a renamed file is still what it is.
    packed = raw.peek(2).startswith(_GZIP_MAGIC)
    if not packed:
        return raw
    stream: IO[bytes] = io.BufferedReader(closing.enter_context(gzip.GzipFile(fileobj=raw)))
    return stream


def _blocks(path: str | os.PathLike[str], name: str, max_bytes: int) -> Iterator[bytes]:
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
                    f"the gzip file is torn: it ends after {total} unpacked bytes without its "
                    "end mark. Copy it again, or unpack what is there with `gzip -dc` and "
                    "remove the last line.",
                ) from None
            except (zlib.error, gzip.BadGzipFile) as error:
                raise TraceError(
                    name, None, f"the gzip file is damaged after {total} unpacked bytes: {error}."
                ) from error
            except OSError as error:
                raise TraceError(name, None, f"cannot be read: {error.strerror}.") from error
            if not block:
                return
            total += len(block)
            if total > max_bytes:
                raise TraceError(
                    name,
                    None,
                    f"holds more than {max_bytes} bytes after unpacking, the limit "
                    "`max_bytes`. Raise it if the trace is really that large.",
                )
            yield block


def iter_line_blocks(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, lines) of a text file, block by block.

    Lines come without their end; line ends may be LF or CRLF. A leading byte order mark is
    dropped. The last line is yielded whether or not it ends with a line break, and an empty
    one after the last break is not.

    Args:
        path: File, plain or gzip (told by its content).
        max_bytes: Most unpacked bytes to read.

    Raises:
        TraceError: The file is missing, torn, damaged, too large, or not UTF-8 text.
        ConfigError: max_bytes is not positive.
    """
    if max_bytes < 1:
        raise ConfigError("max_bytes", max_bytes, "at least 1")
    name = trace_name(path)
    line, rest, first = 1, b"", True
    for block in _blocks(path, name, max_bytes):
        if first:
            first = False
            if block[:2] in _FOREIGN_BOMS:
                encoding = _FOREIGN_BOMS[block[:2]]
                raise TraceError(name, 1, f"is {encoding} text. Save it as UTF-8.")
            block = block.removeprefix(b"\xef\xbb\xbf")
        data = rest + block
        end = data.rfind(b"\n")
        if end < 0:
            rest = data
        else:
            rest = data[end + 1 :]
            lines = _decode(name, line, data[:end])
            yield line, lines
            line += len(lines)
        if len(rest) > _MAX_LINE:
            raise TraceError(
                name, line, f"no line break within {_MAX_LINE} bytes; this is not a trace."
            )
    if rest:
        yield line, _decode(name, line, rest)


def _decode(name: str, line: int, data: bytes) -> list[str]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = line + data[: error.start].count(b"\n")
        raise TraceError(
            name, at, f"byte {data[error.start]:#04x} is not UTF-8 text. Is this a trace?"
        ) from error
    if "\r" in text:
        text = text.replace("\r\n", "\n")
        text = text.removesuffix("\r")  # the block ends before the LF of its last CRLF
    return text.split("\n")


@contextlib.contextmanager
def replace_when_done(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Write a text file beside its name, and give it the name only when it is whole.

    Args:
        path: Name of the finished file; ``.gz`` at its end packs it.

    Raises:
        TraceError: The file cannot be written. What had the name before is kept.
    """
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        with contextlib.ExitStack() as stack:
            if target.suffix == ".gz":
                raw = stack.enter_context(part.open("wb"))
                # No time stamp: the same steps give the same bytes.
                packed = stack.enter_context(
                    gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
                )
                yield stack.enter_context(io.TextIOWrapper(packed, encoding="utf-8", newline="\n"))
            else:
                yield stack.enter_context(part.open("w", encoding="utf-8", newline="\n"))
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TraceError(trace_name(path), None, f"cannot be written: {error}.") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
