"""Step traces: the batch of each model step, recorded for planning and simulation.

A trace has one row per step, in execution order::

    step,t_s,num_tokens,num_reqs,max_query_len,uniform_decode,num_active_loras
    0,0.0000,57,57,1,1,0

``num_tokens`` is the number of tokens before padding, and the only required column.
``StepRecorder`` omits a column if any step has no value for it. Code that needs a missing column
raises TraceError. Each axis of the configuration has a column, such as ``axis.length``. A file
contains CSV or JSON lines, plain or gzip; the format is detected from the content.

This module does not need numpy: columns are ``array.array`` objects, which numpy reads without
copying (``numpy.frombuffer``).
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, overload

from dispatchkit.errors import ConfigError, TraceError, counted, did_you_mean
from dispatchkit.keys.checks import check_instance
from dispatchkit.observe.trace_columns import (
    AXIS_PREFIX,
    MAX_COUNT,
    REQUIRED_COLUMN,
    TRACE_COLUMNS,
    ColumnBuilder,
    TraceStep,
    axis_names,
    check_header,
    csv_cells,
)
from dispatchkit.observe.trace_files import (
    DEFAULT_MAX_BYTES,
    Blocks,
    iter_line_blocks,
    trace_name,
)

__all__ = [
    "AXIS_PREFIX",
    "MAX_COUNT",
    "MAX_STEPS",
    "TRACE_COLUMNS",
    "StepTrace",
    "TraceStep",
    "parse_trace",
    "read_trace",
]

MAX_STEPS = 5_000_000
"""Maximum number of steps to read; protects against files that would exhaust the memory."""
_RECORD = "Record a trace with `dispatchkit record`."


class StepTrace(Sequence[TraceStep]):
    """A sequence of TraceStep rows, stored by column.

    Args:
        columns: Values by column name. ``num_tokens`` is required, and all columns must have the
            same length.
        source: Path or other origin of the trace, for messages.
        ignored_columns: Columns in the file that are not trace columns.
        has_order: Whether the steps are in execution order; False for steps derived from a
            histogram of batch sizes.

    Raises:
        ConfigError: ``columns`` is not a dictionary, or a column is not a list of values.
        TraceError: ``num_tokens`` is missing, a column is unknown, the columns differ in length, or
            a value is impossible.
    """

    def __init__(
        self,
        columns: Mapping[str, Iterable[Any]],
        *,
        source: str = "<memory>",
        ignored_columns: Sequence[str] = (),
        has_order: bool = True,
    ) -> None:
        if not isinstance(columns, Mapping):
            raise ConfigError("columns", columns, "a dictionary of values by column name")
        self.source, self.has_order = source, has_order
        self.ignored_columns: tuple[str, ...] = tuple(ignored_columns)
        check_header(source, None, tuple(columns), strict=True)
        for name, values in columns.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise ConfigError(f"columns[{name!r}]", values, "a list of values")
        parsed = {name: list(values) for name, values in columns.items()}
        lengths = {name: len(values) for name, values in parsed.items()}
        if len(set(lengths.values())) > 1:
            raise TraceError(source, None, f"columns must have the same length, got {lengths}.")
        builder = ColumnBuilder(source, tuple(parsed))
        builder.add_rows(None, list(zip(*parsed.values(), strict=True)))
        self._columns = builder.columns

    @classmethod
    def _of(
        cls,
        columns: dict[str, array[Any]],
        source: str,
        ignored: tuple[str, ...] = (),
        *,
        has_order: bool = True,
    ) -> StepTrace:
        trace = cls.__new__(cls)
        trace.source, trace.ignored_columns, trace.has_order = source, ignored, has_order
        trace._columns = columns  # noqa: SLF001 - a constructor for validated columns
        return trace

    @classmethod
    def from_steps(cls, steps: Iterable[TraceStep], *, source: str = "<memory>") -> StepTrace:
        """Return a trace of the given steps, without columns that have no values."""
        rows = [
            check_instance(step, TraceStep, f"steps[{index}]") for index, step in enumerate(steps)
        ]
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
        """Names of the columns."""
        return tuple(self._columns)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes; the column of an axis is ``axis.NAME``."""
        return axis_names(self._columns)

    def column(self, name: str) -> array[Any]:
        """Return a column as ``array('q')``, or ``array('d')`` for ``t_s``.

        Raises:
            TraceError: The trace does not have the column.
        """
        try:
            return self._columns[name]
        except KeyError:
            if name in TRACE_COLUMNS:
                hint = " Record a trace with this column."
            else:
                hint = did_you_mean(name, self._columns)
            raise TraceError(
                self.source,
                None,
                f"the trace has no column {name!r} (columns: {', '.join(self._columns)}).{hint}",
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
            return StepTrace._of(cut, self.source, self.ignored_columns, has_order=self.has_order)
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
        names = ", ".join(self.columns)
        return f"StepTrace({self.source!r}, {counted(len(self), 'step')}, columns {names})"

    def halves(self) -> tuple[StepTrace, StepTrace]:
        """Return the first and second half of the trace."""
        middle = len(self) // 2
        return self[:middle], self[middle:]


# -- reading ------------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES) -> StepTrace:
    """Read a step trace from CSV or JSON lines, plain or gzip.

    Args:
        path: Path to the trace.
        max_bytes: Maximum number of uncompressed bytes to read; protects against decompression
            bombs.

    Raises:
        TraceError: The file cannot be read, lacks the column ``num_tokens``, has no steps or more
            than 5 million steps, or has an impossible value. If a line is at fault, the message
            gives its number.
    """
    return parse_trace(trace_name(path), iter_line_blocks(path, max_bytes=max_bytes))


def parse_trace(name: str, blocks: Blocks) -> StepTrace:
    """Parse a step trace from text; see ``read_trace``."""
    builder: ColumnBuilder | None = None
    ignored: tuple[str, ...] = ()
    is_json = False
    for line, lines in blocks:
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
        if builder.num_rows > MAX_STEPS:
            raise TraceError(
                name,
                None,
                f"the trace has more than {MAX_STEPS:,} steps. Shorten it, or keep only "
                "every tenth step.",
            )
    if builder is None:
        raise TraceError(name, None, f"the file is empty. {_RECORD}")
    if not builder.num_rows:
        raise TraceError(name, None, f"the trace has a header but no steps. {_RECORD}")
    return StepTrace._of(builder.columns, name, ignored)  # noqa: SLF001 - same module


def _json_header(name: str, line: int, text: str) -> tuple[str, ...]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            name,
            line,
            f"the line is not a JSON object: {error}. Write each object on a single line.",
        ) from error
    return tuple(record)
