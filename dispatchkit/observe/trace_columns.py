"""Parse and validate the rows of a step trace, and store them by column.

A block of lines is converted column by column, at C speed. If that fails, the block is parsed line
by line. This slower way accepts quoted cells, and reports the line of an invalid value.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import operator
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from dispatchkit.errors import TraceError, counted, format_value
from dispatchkit.keys.checks import is_flag, whole_number

__all__ = [
    "AXIS_PREFIX",
    "MAX_COUNT",
    "REQUIRED_COLUMN",
    "TRACE_COLUMNS",
    "ColumnBuilder",
    "TraceStep",
    "axis_names",
    "check_header",
    "check_value",
    "contradictions",
    "csv_cells",
    "ordered_columns",
]

TRACE_COLUMNS = (
    "step",
    "t_s",
    "num_tokens",
    "num_reqs",
    "max_query_len",
    "uniform_decode",
    "num_active_loras",
)
"""Columns of a step trace, in file order."""

AXIS_PREFIX = "axis."
"""Prefix of axis columns: ``axis.length`` contains the values of the axis ``length``."""

MAX_COUNT = 2**31 - 1
"""Maximum value in an integer column; larger values indicate a damaged file."""

REQUIRED_COLUMN = "num_tokens"
_JSON_TYPES: Mapping[str, set[type]] = {"t_s": {int, float}, "uniform_decode": {int, bool}}
_COUNT_COMMAS = operator.methodcaller("count", ",")
_RESEMBLES_AXIS = re.compile(r"ax[ei]s\W|ax[ei]s_", re.IGNORECASE)


@attrs.frozen
class TraceStep:
    """The batch of one model step.

    Attributes:
        num_tokens: Number of scheduled tokens, before padding.
        num_reqs: Number of requests with at least one token; None if not recorded.
        max_query_len: Largest number of tokens in one request; None if not recorded.
        uniform_decode: Whether all requests are past their prompts and have the same number of
            tokens; None if not recorded.
        num_active_loras: Number of distinct adapters in the step, excluding the base model.
        step: Number of the step; None if not recorded.
        t_s: Start time of the step in seconds, from an arbitrary origin; None if not recorded.
        axes: Value of each axis before padding, by name.
    """

    num_tokens: int
    num_reqs: int | None = None
    max_query_len: int | None = None
    uniform_decode: bool | None = None
    num_active_loras: int = 0
    step: int | None = None
    t_s: float | None = None
    axes: Mapping[str, int] = attrs.field(factory=dict, hash=False)


def axis_names(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the axes that have a column, in order."""
    return tuple(
        column.removeprefix(AXIS_PREFIX)
        for column in columns
        if column.startswith(AXIS_PREFIX) and column.removeprefix(AXIS_PREFIX).isidentifier()
    )


def ordered_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a header that are known: TRACE_COLUMNS first, then the axes."""
    axes = (AXIS_PREFIX + name for name in axis_names(columns))
    return (*(column for column in TRACE_COLUMNS if column in columns), *axes)


def csv_cells(line: str) -> list[str]:
    """Return the cells of a CSV line; cells may be quoted."""
    return next(csv.reader([line])) if '"' in line else line.split(",")


def check_header(
    name: str, line: int | None, header: tuple[str, ...], *, strict: bool = False
) -> tuple[str, ...]:
    """Validate a header, and return its unknown columns.

    Raises:
        TraceError: The required column is missing, a column is given twice, or an unknown column is
            probably misspelled. If ``strict``, every unknown column is an error.
    """
    missing = [column for column in TRACE_COLUMNS if column not in header]
    known = ordered_columns(header)
    unknown = tuple(column for column in header if column not in known)
    doubled = sorted({column for column in header if header.count(column) > 1})
    listed = (
        f"Columns of a step trace: {', '.join(TRACE_COLUMNS)}, and {AXIS_PREFIX}NAME for each axis."
    )
    for column in unknown:
        if _RESEMBLES_AXIS.match(column):
            raise TraceError(
                name,
                line,
                f"unknown column {column!r}. The column of an axis is {AXIS_PREFIX}NAME, such as "
                f"{AXIS_PREFIX}length; NAME must be an identifier.",
            )
        # A name similar to a missing column is treated as a misspelling, because an unknown column
        # is otherwise ignored.
        near = difflib.get_close_matches(column, missing, n=1, cutoff=0.7)
        if near or strict:
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise TraceError(name, line, f"unknown column {column!r}.{guess} {listed}")
    if REQUIRED_COLUMN not in header:
        shown = ", ".join(map(repr, header[:8])) + ", ..." * (len(header) > 8)
        where = "got" if line is None else "the first line has"
        is_joined = any(REQUIRED_COLUMN in column for column in header)  # for example, by ";"
        hint = " Separate the columns with commas." if is_joined else ""
        raise TraceError(
            name,
            line,
            f"no column {REQUIRED_COLUMN!r}, which is required; {where} {shown or 'no columns'}."
            f"{hint} {listed}",
        )
    if doubled:
        raise TraceError(name, line, f"column {doubled[0]!r} is given twice. Remove one of them.")
    return unknown


class ColumnBuilder:
    """The columns of a trace, to which validated rows are appended."""

    name: str
    header: tuple[str, ...]

    def __init__(self, name: str, header: tuple[str, ...]) -> None:
        self.name, self.header = name, header
        self.columns: dict[str, array[Any]] = {
            column: array("d" if column == "t_s" else "q") for column in ordered_columns(header)
        }
        self._index = {column: header.index(column) for column in self.columns}

    @property
    def num_rows(self) -> int:
        """Number of appended rows."""
        return len(self.columns[REQUIRED_COLUMN])

    def add_csv(self, line: int, lines: list[str]) -> None:
        """Append CSV lines; ``line`` is the number of the first line."""
        try:
            fast = self._converted(lines)
        except (ValueError, OverflowError, RecursionError):
            fast = None  # the loop below reports the line and the error
        if fast is not None and _is_valid(fast):
            self._extend(fast)
            return
        for at, row in enumerate(lines, start=line):
            if row.strip():
                self._add_checked(at, self._csv_row(at, row))

    def _converted(self, lines: list[str]) -> dict[str, array[Any]] | None:
        """Convert a block to columns; return None if it must be parsed line by line.

        Raises:
            ValueError, OverflowError, RecursionError: A cell is not a number, or is too large.
        """
        text = ",".join(lines)
        width = len(self.header)
        # A quoted cell may contain a comma, and int() accepts "_" and non-ASCII digits.
        if '"' in text or "_" in text or not text.isascii():
            return None
        if set(map(_COUNT_COMMAS, lines)) != {width - 1}:
            return None
        if len(self.columns) < width:  # ignored columns may contain text
            cells = text.split(",")
            return {
                column: array("d", map(float, cells[at::width]))
                if column == "t_s"
                else array("q", map(int, cells[at::width]))
                for column, at in self._index.items()
            }
        # Comma-separated numbers are valid JSON, and the JSON parser is twice as fast as int().
        values = json.loads(f"[{text}]")
        columns = {column: values[at::width] for column, at in self._index.items()}
        if len(values) != width * len(lines):
            return None
        for column, column_values in columns.items():
            if not set(map(type, column_values)) <= ({int, float} if column == "t_s" else {int}):
                return None
        return {
            column: array("d" if column == "t_s" else "q", column_values)
            for column, column_values in columns.items()
        }

    def _csv_row(self, line: int, row: str) -> dict[str, Any]:
        cells = csv_cells(row)
        if len(cells) != len(self.header):
            cut = " If the file is cut off here, remove the line."
            if len(cells) > len(self.header):
                cut = " Quote values that contain commas."
            raise TraceError(
                self.name,
                line,
                f"the line has {counted(len(cells), 'column')}, but the header has "
                f"{len(self.header)}.{cut}",
            )
        return {
            column: _number_of(self.name, line, column, cells[at].strip())
            for column, at in self._index.items()
        }

    def add_json(self, line: int, lines: list[str]) -> None:
        """Append lines of JSON; ``line`` is the number of the first line."""
        try:
            rows = json.loads("[" + ",".join(lines) + "]") if lines else []
            values = {column: [row[column] for row in rows] for column in self.columns}
            fast = {
                column: array("d" if column == "t_s" else "q", column_values)
                for column, column_values in values.items()
                if set(map(type, column_values)) <= _JSON_TYPES.get(column, {int})
            }
            same = len(fast) == len(values) and {len(row) for row in rows} == {len(self.header)}
            if same and len(rows) == len(lines) and _is_valid(fast):
                self._extend(fast)
                return
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            pass  # the loop below reports the line and the error
        for at, row in enumerate(lines, start=line):
            if row.strip():
                self._add_checked(at, self._json_row(at, row))

    def _json_row(self, line: int, text: str) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(
                self.name,
                line,
                f"the line is not a JSON object: {error}. If the file is cut off here, remove the "
                "line.",
            ) from error
        if not isinstance(record, dict):
            raise TraceError(
                self.name, line, f"each line must be a JSON object, got {format_value(record)}."
            )
        if set(record) != set(self.header):
            differ = ", ".join(map(repr, sorted(set(record) ^ set(self.header))))
            raise TraceError(
                self.name,
                line,
                f"each line must have the same fields as the first line; differing fields: "
                f"{differ}.",
            )
        return {column: record[column] for column in self.columns}

    def add_rows(self, line: int | None, rows: Sequence[Sequence[Any]]) -> None:
        """Append rows, each with Python values in the order of the header."""
        for row in rows:
            self._add_checked(line, {column: row[at] for column, at in self._index.items()})

    def _add_checked(self, line: int | None, row: dict[str, Any]) -> None:
        for column, value in row.items():
            row[column] = check_value(self.name, line, column, value)
        for problem in contradictions(row):
            raise TraceError(self.name, line, problem)
        for column, value in row.items():
            self.columns[column].append(value)

    def _extend(self, fast: dict[str, array[Any]]) -> None:
        for column, values in fast.items():
            self.columns[column].extend(values)


def _number_of(name: str, line: int, column: str, text: str) -> Any:
    kind: Callable[[str], Any] = float if column == "t_s" else int
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        return kind(text)
    except ValueError:  # also raised for a number with thousands of digits
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise _value_error(name, line, column, repr(shown)) from None


def _value_error(name: str, line: int | None, column: str, shown: object) -> TraceError:
    allowed = f"a whole number from 0 to {MAX_COUNT}"
    if column == "t_s":
        allowed = "a finite, non-negative number of seconds"
    elif column == "uniform_decode":
        allowed = "0 or 1"
    return TraceError(name, line, f"{column} must be {allowed}, got {shown}.")


def check_value(name: str, line: int | None, column: str, value: Any) -> Any:
    """Convert a value to the type of its column.

    Raises:
        TraceError: The value has the wrong type, or is negative, too large or not finite.
    """
    if column == "t_s":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _value_error(name, line, column, repr(value))
        try:
            seconds = float(value)
        except OverflowError:  # an integer with hundreds of digits
            seconds = math.inf
        if not math.isfinite(seconds) or seconds < 0:
            raise _value_error(name, line, column, seconds)
        return seconds
    if column == "uniform_decode" and is_flag(value):
        value = int(value)
    number = whole_number(value)
    if number is None:
        raise _value_error(name, line, column, repr(value))
    most = 1 if column == "uniform_decode" else MAX_COUNT
    if not 0 <= number <= most:
        shown = number if abs(number) < 10**30 else "a number of more than 30 digits"
        raise _value_error(name, line, column, shown)
    return number


def contradictions(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each contradiction between columns of a step."""
    tokens = row[REQUIRED_COLUMN]
    for column, rule in (
        ("num_reqs", "Each request has at least one token."),
        ("max_query_len", "max_query_len is the largest number of tokens of one request."),
    ):
        if column in row and row[column] > tokens:
            yield (
                f"{column} is {row[column]}, but the step has only {counted(tokens, 'token')}. "
                f"{rule}"
            )
    if row.get("uniform_decode") and "num_reqs" in row and "max_query_len" in row:
        if row["num_reqs"] * row["max_query_len"] != tokens:
            yield (
                f"uniform_decode is 1, so num_tokens must be num_reqs x max_query_len = "
                f"{row['num_reqs']} x {row['max_query_len']}, got {tokens}. num_tokens is "
                "counted before padding."
            )


def _is_valid(columns: Mapping[str, array[Any]]) -> bool:
    """Return whether all values of a block are valid."""
    tokens = columns[REQUIRED_COLUMN]
    if not tokens:
        return True
    for column, values in columns.items():
        if column == "t_s":
            if not all(map(math.isfinite, values)) or min(values) < 0:
                return False
        elif min(values) < 0 or max(values) > (1 if column == "uniform_decode" else MAX_COUNT):
            return False
    for column in ("num_reqs", "max_query_len"):
        if column in columns and any(map(operator.gt, columns[column], tokens)):
            return False
    if "uniform_decode" in columns and "num_reqs" in columns and "max_query_len" in columns:
        product = map(operator.mul, columns["num_reqs"], columns["max_query_len"])
        wrong = map(operator.ne, product, tokens)
        return not any(map(operator.and_, columns["uniform_decode"], wrong))
    return True
