"""Write step traces: a complete trace, or step by step while a program runs."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.files import check_output, create_part, is_special, real_target, rename_over
from dispatchkit.observe.trace_columns import (
    AXIS_PREFIX,
    REQUIRED_COLUMN,
    TRACE_COLUMNS,
    TraceStep,
    check_header,
    check_value,
    contradictions,
    ordered_columns,
)
from dispatchkit.observe.trace_files import trace_name, whole_text, write_error

__all__ = ["TraceWarning", "TraceWriter", "write_trace"]


class TraceWarning(UserWarning):
    """A step could not be written to a trace; this step and later ones are only counted."""


class TraceWriter:
    """A writer that appends steps to a trace while a program runs.

    Use it in a ``with`` statement. ``write`` appends the step as plain text to ``PATH.part``, or to
    ``PATH.1.part`` and so on if ``PATH.part`` exists. When the block ends, even with an exception
    or ``sys.exit``, this file is renamed to PATH, or compressed into PATH if PATH ends in ``.gz``.
    If the process is killed, the file remains and can be read as a trace.

    A full disk does not stop the program: ``write`` warns once, and ``num_lost`` counts the steps
    that cannot be written. At the end of the block, PATH contains the earlier steps, and TraceError
    is raised.

    Example::

        with TraceWriter("trace.csv.gz") as trace:
            for batch in batches:
                trace.write(len(batch))

    Args:
        path: Path of the trace. A name ending in ``.jsonl`` selects JSON lines, any other name CSV;
            an additional ``.gz`` compresses the file. An existing file is replaced at the end.
        columns: Columns to write; by default ``step`` and the columns for which the first step has
            values.

    Attributes:
        num_steps: Number of written steps.
        num_lost: Number of steps that could not be written.

    Raises:
        TraceError: The file cannot be written, or ``columns`` lacks ``num_tokens`` or has an
            unknown or repeated name.
        ConfigError: ``path`` is not a path, or ``columns`` is not a list of names.

    Thread safety: only one thread at a time may use a writer. A forked process cannot write to its
    parent's trace.
    """

    path: str
    num_steps: int
    num_lost: int

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        self.path = trace_name(path)
        self._rows = _Rows(self.path, columns)
        self.format: Literal["csv", "jsonl"] = self._rows.format
        try:
            self._target = real_target(path)  # absolute, because the working directory may change
        except (OSError, ValueError) as error:
            raise write_error(self.path, error) from error
        self._part: _PartFile | None = None
        self.num_steps = self.num_lost = 0

    def __enter__(self) -> TraceWriter:
        try:
            check_output(self._target)
            self._part = _PartFile(self._target)
        except (OSError, ConfigError) as error:
            raise write_error(self.path, error) from error
        # Finish an unclosed trace when its writer is garbage-collected, or at exit.
        self._closing = weakref.finalize(self, self._part.finish)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.num_steps and not self.num_lost and not any(error) and self._part is not None:
            self._part.append(self._rows.header_line())
        self.close()

    def close(self) -> None:
        """Complete the trace at PATH, as the end of the ``with`` block does.

        A second call has no effect.

        Raises:
            TraceError: Steps were lost, or the file cannot be renamed or compressed. The message
                states which file contains the steps.
        """
        part, self._part = self._part, None
        if part is None:
            return
        self._closing.detach()
        try:
            part.finish()
        except (OSError, TraceError) as error:
            if isinstance(error, TraceError):
                problem = str(error).removeprefix(f"{error.path}: ")
            else:
                problem = f"the file cannot be written: {error.strerror}."
            raise TraceError(
                self.path,
                None,
                f"{problem} The file {part.path} contains {counted(self.num_steps, 'step')}.",
            ) from error
        if self.num_lost:
            raise TraceError(
                self.path,
                None,
                f"the trace is incomplete: {part.failure}. It has "
                f"{counted(self.num_steps, 'step')}; {counted(self.num_lost, 'later step')} could "
                "not be written. Correct the cause, then record again.",
            )

    def discard(self) -> None:
        """Close the writer and remove the unfinished file; an existing file at PATH is kept."""
        part, self._part = self._part, None
        if part is not None:
            self._closing.detach()
            part.remove()

    def write(self, step: TraceStep | int) -> None:
        """Append one step.

        Args:
            step: A step, or its number of tokens. If ``TraceStep.step`` is None, the number of
                earlier steps is written instead.

        Raises:
            TraceError: The step is impossible, lacks a value for a column, or has different axes
                than the first step.
            ConfigError: The writer is closed, or was opened by the parent process.

        Warns:
            TraceWarning: The step could not be written. Later steps are lost without a warning.
        """
        part = self._part
        if part is None or not part.is_open:
            raise ConfigError(
                "TraceWriter",
                "closed",
                "open",
                message=f"The TraceWriter of {self.path!r} is not open. Write inside its `with` "
                "block.",
            )
        if not part.is_own:
            raise ConfigError(
                "TraceWriter",
                f"opened by process {part.process}",
                "opened by the process that writes",
                message=f"The TraceWriter of {self.path!r} was opened by process {part.process}; "
                f"process {os.getpid()} cannot write to it. Open one writer per process, each with "
                "its own path.",
            )
        line = self._rows.line(step, self.num_steps + self.num_lost)
        if part.failure is not None:
            self.num_lost += 1
            return
        try:
            part.append(line)
        except OSError as error:
            self.num_lost += 1
            warnings.warn(
                f"Writing to {self.path} failed ({error.strerror}). The trace has "
                f"{counted(self.num_steps, 'step')}; this step and later ones are lost and counted "
                "in num_lost. The program continues.",
                TraceWarning,
                stacklevel=2,
            )
        else:
            self.num_steps += 1


class _PartFile:
    """The temporary file next to the target; it contains only complete lines.

    Attributes:
        path: Path of the temporary file.
        is_open: Whether lines can be appended; False after ``finish`` or ``remove``. At exit,
            ``finish`` runs automatically.
        process: ID of the process that opened the file.
        failure: The first error of ``append``, as text; None before an error. After an error,
            nothing may be appended.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._descriptor, self.path = create_part(target)
        self._size = 0
        self.is_open: bool = True
        self.process: int = os.getpid()
        self.failure: str | None = None

    @property
    def is_own(self) -> bool:
        return self.process == os.getpid()

    def append(self, text: str) -> None:
        """Append lines completely or not at all.

        Raises:
            OSError: The lines cannot be written; ``failure`` is set.
        """
        data = memoryview(text.encode())
        done = 0
        try:
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            self.failure = error.strerror
            if done:
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += done

    def remove(self) -> None:
        """Close and remove the file."""
        if self.is_open and self.is_own:
            self.is_open = False
            os.close(self._descriptor)
            self.path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Move the lines to the target, compressed if its name ends in ``.gz``.

        An empty temporary file is removed instead.

        Raises:
            OSError: The target cannot be replaced. The lines remain in ``path``.
            TraceError: The compressed target cannot be written. The lines remain in ``path``.
        """
        if not self.is_open or not self.is_own:
            return
        self.is_open = False
        os.close(self._descriptor)
        if not self._size:
            self.path.unlink(missing_ok=True)
        elif self._target.suffix == ".gz" or is_special(self._target):
            lines = self.path.open(encoding="utf-8", newline="")
            with lines, whole_text(self._target) as out:
                shutil.copyfileobj(lines, out, 1 << 16)
            self.path.unlink(missing_ok=True)
        else:
            rename_over(self.path, self._target)


class _Rows:
    """The format of a trace's lines. By default, the first step determines the columns."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self._path = path
        self.format: Literal["csv", "jsonl"] = (
            "jsonl" if path.removesuffix(".gz").endswith(".jsonl") else "csv"
        )
        self._header: tuple[str, ...] | None = None
        self._num_axes: int | None = None  # of the first step; None if columns were given
        self._has_begun = False
        if columns is not None:
            if isinstance(columns, str) or not isinstance(columns, Iterable):
                raise ConfigError("columns", columns, "a list of column names, or None")
            check_header(path, None, tuple(columns), strict=True)
            self._header = ordered_columns(columns)

    def header_line(self) -> str:
        """Return the header of a trace without steps."""
        return self._first_line(self._header or TRACE_COLUMNS)

    def line(self, step: TraceStep | int, number: int) -> str:
        """Return the line of a step; in CSV, the header precedes the first step.

        Raises:
            TraceError: The step is impossible, lacks a value, or has different axes than the first.
        """
        if not isinstance(step, TraceStep):
            step = TraceStep(num_tokens=step)
        header, num_axes = self._header, self._num_axes
        if header is None:
            known = (c for c in TRACE_COLUMNS if c == "step" or getattr(step, c) is not None)
            header = (*known, *(AXIS_PREFIX + axis for axis in step.axes))
            num_axes = len(step.axes)
            check_header(self._path, None, header, strict=True)
        row = {
            column: getattr(step, column)
            if column in TRACE_COLUMNS
            else step.axes.get(column.removeprefix(AXIS_PREFIX))
            for column in header
        }
        if "step" in row and row["step"] is None:
            row["step"] = number
        for column, value in row.items():
            if value is None and column != REQUIRED_COLUMN and header is self._header:
                omit = "omit it from `columns`" if num_axes is None else "in none"
                raise TraceError(
                    self._path,
                    None,
                    f"step {number} has no {column}, but the trace has this column. Set it in "
                    f"every step, or {omit}.",
                )
            row[column] = check_value(self._path, None, column, value)
        for problem in contradictions(row):
            raise TraceError(self._path, None, problem)
        if num_axes is not None and num_axes != len(step.axes):
            first = (c.removeprefix(AXIS_PREFIX) for c in header if c.startswith(AXIS_PREFIX))
            problem = (
                f"all steps must have the same axes. Axes of the first step: "
                f"{', '.join(first) or 'none'}; of step {number}: "
                f"{', '.join(sorted(step.axes)) or 'none'}. Write this step to another trace."
            )
            raise TraceError(self._path, None, problem)
        self._header, self._num_axes = header, num_axes
        begin = "" if self._has_begun else self._first_line(header)
        self._has_begun = True
        if self.format == "jsonl":
            return begin + json.dumps(row, separators=(",", ":")) + "\n"
        return begin + ",".join(map(repr, row.values())) + "\n"

    def _first_line(self, header: tuple[str, ...]) -> str:
        return ",".join(header) + "\n" if self.format == "csv" else ""


def write_trace(path: str | os.PathLike[str], steps: Iterable[TraceStep | int]) -> int:
    """Write steps to a trace file and return their number.

    A name ending in ``.jsonl`` selects JSON lines, any other name CSV; an additional ``.gz``
    compresses the file. The file appears only when it is complete.

    Args:
        path: Path of the trace. An existing file is replaced.
        steps: A StepTrace, or an iterable of steps or numbers of tokens. The column ``step`` is
            always written; other columns are omitted if the first step has no value for them.

    Raises:
        TraceError: The file cannot be written, or a step is impossible, lacks a value for a column,
            or has different axes than the first step.
    """
    name = trace_name(path)
    rows, count = _Rows(name, None), 0
    with whole_text(path) as out:
        for step in steps:
            out.write(rows.line(step, count))
            count += 1
        if not count:
            out.write(rows.header_line())
    return count
