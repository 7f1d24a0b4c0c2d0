"""Compare the facades with golden vectors: results recorded from vLLM's published dispatchers.

``python -m dispatchkit_vllm.conformance FILE...`` reads JSON Lines, optionally gzipped. Each line
is a record, usually of a configuration and its results. The command prints how many records of each
file agree with the facades. The contents of a record, usually its id, determine its kind; the file
name does not matter.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from dispatchkit_vllm.conformance._configuration import check_mode, check_resolution, check_sizes
from dispatchkit_vllm.conformance._dispatchers import KINDS, check_dispatcher
from dispatchkit_vllm.conformance._records import (
    Findings,
    FormatError,
    Mismatch,
    describe,
    kind_of,
    parse,
)
from dispatchkit_vllm.conformance._variants import check_drafter, check_manager

__all__ = ["CHECKS", "FileReport", "FormatError", "Mismatch", "RecordReport", "check_file"]


def _check_wrapper(record: Mapping[str, Any], found: Findings) -> None:
    from dispatchkit_vllm.conformance._wrappers import check_wrapper  # loads torch

    check_wrapper(record, found)


#: Functions that compare a record with the facades, by kind of record (see ``kind_of``).
CHECKS: Mapping[str, Callable[[Mapping[str, Any], Findings], None]] = MappingProxyType(
    {
        **dict.fromkeys(KINDS, check_dispatcher),
        "manager": check_manager,
        "seed-002-drafter": check_drafter,
        "sizes": check_sizes,
        "resolve": check_resolution,
        "mode-enum": check_mode,
        "wrapper": _check_wrapper,
    }
)


@attrs.frozen
class RecordReport:
    """The result of comparing one record.

    Attributes:
        line: 1-based line number of the record.
        name: Id of the record; ``mode-enum/MODE`` for the record of a mode's properties, which has
            no id; ``line N`` for any other line without a valid id.
        num_compared: Number of comparisons.
        problems: Descriptions of failed comparisons, and of errors; empty if the record agrees.
    """

    line: int
    name: str
    num_compared: int
    problems: tuple[str, ...]


@attrs.frozen
class FileReport:
    """The result of comparing one file.

    Attributes:
        path: Path of the compared file.
        records: The report of each record.
    """

    path: str
    records: tuple[RecordReport, ...]

    @property
    def failed(self) -> tuple[RecordReport, ...]:
        """The records that do not agree."""
        return tuple(record for record in self.records if record.problems)

    @property
    def num_passed(self) -> int:
        """Number of records that agree."""
        return len(self.records) - len(self.failed)

    @property
    def num_compared(self) -> int:
        """Number of individual comparisons."""
        return sum(record.num_compared for record in self.records)


def check_file(path: str | Path, *, every: int = 1) -> FileReport:
    """Compare the records of a file with the facades.

    Args:
        path: A JSON Lines file, gzipped if the name ends in ``.gz``.
        every: Compare only every N-th record, where N is this number; 1 compares all records.

    Raises:
        OSError: The file cannot be read, or is not gzipped although its name ends in ``.gz``.
        EOFError: A gzipped file is truncated.
        UnicodeDecodeError: The file is not UTF-8.
    """
    reports = tuple(
        _check_line(number, line)
        for index, (number, line) in enumerate(_lines(Path(path)))
        if index % every == 0
    )
    if not reports:
        reports = (RecordReport(1, "line 1", 0, ("The file contains no records.",)),)
    return FileReport(str(path), reports)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _check_line(number: int, line: str) -> RecordReport:
    found, name = Findings(), f"line {number}"
    try:
        record = parse(line)
        kind = kind_of(record)
        name = str(record.get("id", f"{kind}/{record.get('mode')}"))
        if kind not in CHECKS:
            raise FormatError(
                f"the id must begin with one of {', '.join(sorted(CHECKS))}, got {name!r}."
            )
        CHECKS[kind](record, found)
    except FormatError as error:
        return RecordReport(number, name, found.num_compared, (f"invalid record: {error}",))
    except Exception as error:  # noqa: BLE001 - any unexpected error is a result to report
        problem = f"unexpected error: {describe(error)}"
        return RecordReport(number, name, found.num_compared, (problem,))
    problems = tuple(
        f"{each.where}: expected {each.expected!r}, got {each.got!r}" for each in found.mismatches
    )
    return RecordReport(number, name, found.num_compared, problems)
