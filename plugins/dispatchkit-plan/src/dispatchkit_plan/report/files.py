"""Read the source file of a report."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, cast

from dispatchkit.files import check_path
from dispatchkit.observe import StepTrace

from dispatchkit_plan.traffic import read_steps

__all__ = ["read_source"]

_MAX_JSON_BYTES = 64 * 1024 * 1024


def read_source(path: str | os.PathLike[str]) -> StepTrace | dict[str, Any] | list[Any]:
    """Return the steps or the JSON document in a file.

    The file is read once, so it may be a pipe. A file of JSON lines is read as steps, even if it
    has only one line.

    Raises:
        TraceError: The file cannot be read, or contains neither steps nor JSON.
    """
    name = check_path(path, "source")
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 - closed below
    except (OSError, ValueError):
        return read_steps(path)  # raises an error that describes the problem with the path
    with stream:
        try:
            head = stream.peek(1)
        except OSError:
            return read_steps(stream, name=name)
        if head.lstrip()[:1] not in (b"{", b"["):
            return read_steps(stream, name=name)
        text = stream.read(_MAX_JSON_BYTES + 1)
        try:
            document = None if len(text) > _MAX_JSON_BYTES else json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if document is not None and not (isinstance(document, dict) and "num_tokens" in document):
            return cast("dict[str, Any] | list[Any]", document)
        rest = io.BufferedReader(cast("io.RawIOBase", _PrefixedStream(text, stream)))
        return read_steps(rest, name=name)


class _PrefixedStream(io.RawIOBase):
    """Stream of given bytes, followed by the rest of another stream."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head, self._rest = io.BytesIO(head), rest

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self._head.readinto(into) or self._rest.readinto(into)
