"""The step trace: what each model step had to run, written once and planned from many times.

One row per step, in the order the steps ran::

    step,t_s,num_tokens,num_reqs,max_query_len,uniform_decode,num_active_loras
    0,0.0000,57,57,1,1,0

``num_tokens`` is counted before any padding. A file is CSV or JSON lines, plain or gzip; which
of them is told by its content. Only ``num_tokens`` must be there: a column that a recorder
could not know is left out, and what needs it says so. Where graphs are made for further facts
of a batch, each of these axes has a column of its own, such as ``axis.length``.

Nothing here needs numpy: columns are arrays of the standard library, which numpy reads without
a copy (``numpy.frombuffer``).
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, ClassVar, Literal, overload

from dispatchkit.errors import ConfigError, TraceError, nearest_names
from dispatchkit.observe.trace_columns import (
    AXIS_PREFIX,
    MAX_COUNT,
    REQUIRED_COLUMN,
    TRACE_COLUMNS,
    ColumnBuilder,
    TraceStep,
    axis_names,
    check_header,
    check_value,
    cross_faults,
    csv_cells,
    ordered_columns,
)
from dispatchkit.observe.trace_files import (
    DEFAULT_MAX_BYTES,
    iter_line_blocks,
    replace_when_done,
    trace_name,
)

__all__ = [
    "AXIS_PREFIX",
    "MAX_COUNT",
    "TRACE_COLUMNS",
    "StepTrace",
    "TraceStep",
    "TraceWriter",
    "read_trace",
    "write_trace",
]


class StepTrace(Sequence[TraceStep]):
    """A step trace by columns; a sequence of TraceStep for who wants rows.

    Args:
        columns: Column name to values; all of one length, ``num_tokens`` among them.
        source: Where it came from, for messages.
        ignored_columns: Columns that the file had and that mean nothing here.

    Raises:
        TraceError: A column is missing, unknown or of another length, or a value is not
            possible.
    """

    def __init__(
        self,
        columns: Mapping[str, Iterable[Any]],
        *,
        source: str = "<memory>",
        ignored_columns: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.ignored_columns: tuple[str, ...] = tuple(ignored_columns)
        check_header(source, None, tuple(columns), strict=True)
        parsed = {name: list(values) for name, values in columns.items()}
        lengths = {name: len(values) for name, values in parsed.items()}
        if len(set(lengths.values())) > 1:
            raise TraceError(source, None, f"columns differ in length: {lengths}.")
        builder = ColumnBuilder(source, tuple(parsed))
        builder.add_rows(None, list(zip(*parsed.values(), strict=True)))
        self._columns = builder.columns

    @classmethod
    def _of(
        cls, columns: dict[str, array[Any]], source: str, ignored: tuple[str, ...] = ()
    ) -> StepTrace:
        trace = cls.__new__(cls)
        trace.source, trace.ignored_columns = source, ignored
        trace._columns = columns  # noqa: SLF001 - a constructor for columns already checked
        return trace

    @classmethod
    def from_steps(cls, steps: Iterable[TraceStep], *, source: str = "<memory>") -> StepTrace:
        """Return a trace of steps; a fact that no step knows becomes no column."""
        rows = list(steps)
        columns = {
            name: [getattr(row, name) for row in rows]
            for name in TRACE_COLUMNS
            if any(getattr(row, name) is not None for row in rows)
        }
        for axis in dict.fromkeys(name for row in rows for name in row.axes):
            columns[AXIS_PREFIX + axis] = [row.axes.get(axis) for row in rows]
        return cls(columns or {REQUIRED_COLUMN: []}, source=source)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns there are."""
        return tuple(self._columns)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes there are; the column of each is ``axis.NAME``."""
        return axis_names(self._columns)

    def column(self, name: str) -> array[Any]:
        """Return one column: ``array('q')`` of whole numbers, ``array('d')`` for ``t_s``.

        Raises:
            TraceError: The trace does not have that column.
        """
        try:
            return self._columns[name]
        except KeyError:
            near = nearest_names(name, self._columns)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise TraceError(
                self.source,
                None,
                f"has no column {name!r}; it has {', '.join(self._columns)}.{guess}",
            ) from None

    def __len__(self) -> int:
        return len(self._columns[REQUIRED_COLUMN])

    @overload
    def __getitem__(self, index: int) -> TraceStep: ...
    @overload
    def __getitem__(self, index: slice) -> StepTrace: ...
    def __getitem__(self, index: int | slice) -> TraceStep | StepTrace:
        if isinstance(index, slice):
            cut = {name: values[index] for name, values in self._columns.items()}
            return StepTrace._of(cut, self.source, self.ignored_columns)
        row = {name: values[index] for name, values in self._columns.items()}
        if "uniform_decode" in row:
            row["uniform_decode"] = bool(row["uniform_decode"])
        axes = {axis: row.pop(AXIS_PREFIX + axis) for axis in self.axes}
        return TraceStep(**row, axes=axes)

    def __iter__(self) -> Iterator[TraceStep]:
        for index in range(len(self)):
            yield self[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepTrace) and self._columns == other._columns

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StepTrace({self.source!r}, {len(self)} steps, columns {', '.join(self.columns)})"

    def halves(self) -> tuple[StepTrace, StepTrace]:
        """Return the first and the second half of the steps, in order."""
        middle = len(self) // 2
        return self[:middle], self[middle:]


# -- reading ------------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES) -> StepTrace:
    """Read a step trace: CSV or JSON lines, plain or gzip.

    Args:
        path: The file.
        max_bytes: Most bytes of text to read, after unpacking; guards against a packed file
            that unpacks without end.

    Raises:
        TraceError: The file cannot be read, has no ``num_tokens``, has no steps, or a value
            is not possible; the message names the line.
    """
    name = trace_name(path)
    builder: ColumnBuilder | None = None
    ignored: tuple[str, ...] = ()
    is_json = False
    for line, lines in iter_line_blocks(path, max_bytes=max_bytes):
        if builder is None:
            while lines and not lines[0].strip():
                lines, line = lines[1:], line + 1
            if not lines:
                continue
            is_json = lines[0].lstrip().startswith("{")
            if is_json:
                header = _json_header(name, line, lines[0])
            else:
                header = tuple(cell.strip() for cell in csv_cells(lines[0]))
                lines, line = lines[1:], line + 1
            ignored = check_header(name, line - (not is_json), header)
            builder = ColumnBuilder(name, header)
        if is_json:
            builder.add_json(line, lines)
        else:
            builder.add_csv(line, lines)
    if builder is None:
        raise TraceError(name, None, "is empty. A step trace starts with a line of column names.")
    if not builder.num_rows:
        raise TraceError(name, None, "has a header but no steps.")
    return StepTrace._of(builder.columns, name, ignored)  # noqa: SLF001 - same module


def _json_header(name: str, line: int, text: str) -> tuple[str, ...]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(name, line, f"is not a JSON object: {error}.") from error
    return tuple(record)


# -- writing ------------------------------------------------------------------------------


class TraceWriter:
    """Writes steps one at a time; the file has its name only once it is whole.

    Use it in a ``with`` statement. Until the end the steps are in ``PATH.part``; an exception
    inside the block leaves nothing behind.

    Args:
        path: File to write; ``.jsonl`` in the name gives JSON lines, anything else CSV, and
            ``.gz`` at its end packs either.
        columns: Columns to write; by default all, and those of the axes of the first step.

    Raises:
        TraceError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> None:
        self.path: str = trace_name(path)
        self._takes_axes = columns is None
        columns = TRACE_COLUMNS if columns is None else columns
        check_header(self.path, None, tuple(columns), strict=True)
        self._header = ordered_columns(columns)
        self.format: Literal["csv", "jsonl"] = (
            "jsonl" if self.path.removesuffix(".gz").endswith(".jsonl") else "csv"
        )
        self._file = replace_when_done(path)
        self._out: IO[str] | None = None
        self.num_steps: int = 0

    def __enter__(self) -> TraceWriter:
        self._out = self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if self._out is not None and not self.num_steps and not any(error):
            self._begin(self._out, ())
        self._out = None
        return self._file.__exit__(*error)

    def write(self, step: TraceStep) -> None:
        """Append one step; a missing step number becomes the running one.

        Raises:
            TraceError: The step lacks a column that is written, or is not possible.
            ConfigError: The writer is not open.
        """
        if self._out is None:
            raise ConfigError("TraceWriter", "closed", "open", "Use it in a `with` statement.")
        header = self._header
        if self._takes_axes and not self.num_steps:
            header = (*header, *(AXIS_PREFIX + axis for axis in step.axes))
            check_header(self.path, None, header, strict=True)
        row = {
            column: getattr(step, column)
            if column in TRACE_COLUMNS
            else step.axes.get(column.removeprefix(AXIS_PREFIX))
            for column in header
        }
        if "step" in row and row["step"] is None:
            row["step"] = self.num_steps
        for column, value in row.items():
            row[column] = check_value(self.path, None, column, value)
        for problem in cross_faults(row):
            raise TraceError(self.path, None, problem)
        if self._takes_axes and len(header) - len(TRACE_COLUMNS) != len(step.axes):
            raise _other_axes(self.path, step)
        if not self.num_steps:
            self._begin(self._out, header)
        if self.format == "jsonl":
            self._out.write(json.dumps(row, separators=(",", ":")) + "\n")
        else:
            self._out.write(",".join(map(repr, row.values())) + "\n")
        self.num_steps += 1

    def _begin(self, out: IO[str], header: tuple[str, ...]) -> None:
        """Write the first line; which axes there are is known by then."""
        self._header = header or self._header
        if self.format == "csv":
            out.write(",".join(self._header) + "\n")


def _other_axes(path: str, step: TraceStep) -> TraceError:
    differ = ", ".join(sorted(step.axes))
    return TraceError(path, None, f"a step has axes that the first had not: {differ}.")


def write_trace(path: str | os.PathLike[str], steps: Iterable[TraceStep]) -> int:
    """Write steps as CSV, or as JSON lines where the name has ``.jsonl``; return how many.

    ``.gz`` at the end of the name packs the file. Nothing of it is there until it is whole.

    Args:
        path: File to write; replaced if it exists.
        steps: A StepTrace, or any steps; columns that the first step does not know are left
            out.

    Raises:
        TraceError: The file cannot be written, or a step lacks what the first one had, or
            has axes that it had not.
    """
    iterator = iter(steps)
    first = next(iterator, None)
    columns: Sequence[str] | None = None
    if first is not None:
        known = [c for c in TRACE_COLUMNS if c == "step" or getattr(first, c) is not None]
        columns = (*known, *(AXIS_PREFIX + axis for axis in first.axes))
    with TraceWriter(path, columns) as writer:
        if first is not None:
            writer.write(first)
            for step in iterator:
                if not step.axes.keys() <= first.axes.keys():
                    raise _other_axes(writer.path, step)
                writer.write(step)
    return writer.num_steps
