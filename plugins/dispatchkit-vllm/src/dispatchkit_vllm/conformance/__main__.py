"""Command-line interface of the comparison with golden vectors."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dispatchkit.errors import counted

from dispatchkit_vllm.conformance import FileReport, check_file

_MAX_RECORDS = 5
_MAX_PROBLEMS = 3
_MAX_TEXT = 400


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the given files with the facades, and print the results.

    Returns:
        0 if all records of all files agree with the facades, 1 if a record differs or is invalid,
        2 if a file cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dispatchkit_vllm.conformance",
        description="Compare dispatchkit-vllm with golden vectors of vLLM's dispatchers.",
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="golden vectors in a .jsonl or .jsonl.gz file"
    )
    options = parser.parse_args(arguments)
    num_passed = num_failed = num_compared = 0
    unreadable = False
    for path in options.files:
        try:
            # Print only results, even if a recorded configuration causes warnings.
            with warnings.catch_warnings(), _quiet_log():
                warnings.simplefilter("ignore")
                report = check_file(path)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            sys.stderr.write(f"Cannot read {path}: {reason}.\n")
            unreadable = True
            continue
        _write_report(report)
        num_passed += report.num_passed
        num_failed += len(report.failed)
        num_compared += report.num_compared
    _write_line(f"all files: {_counts(num_passed, num_failed, num_compared)}")
    if unreadable:
        return 2
    return 1 if num_failed else 0


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Hide log warnings, such as the warning that a dispatcher's keys are not initialized."""
    logger = logging.getLogger("dispatchkit_vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _counts(num_passed: int, num_failed: int, num_compared: int) -> str:
    return (
        f"{counted(num_passed, 'record')} passed, {num_failed:,} failed "
        f"({counted(num_compared, 'comparison')})"
    )


def _write_report(report: FileReport) -> None:
    failed = report.failed
    _write_line(f"{report.path}: {_counts(report.num_passed, len(failed), report.num_compared)}")
    for record in failed[:_MAX_RECORDS]:
        line = f"line {record.line}"
        name = record.name if record.name == line else f"{record.name} ({line})"
        _write_line(f"  {name}:")
        for problem in record.problems[:_MAX_PROBLEMS]:
            text = problem if len(problem) <= _MAX_TEXT else f"{problem[:_MAX_TEXT]}..."
            _write_line(f"    {text}")
        if len(record.problems) > _MAX_PROBLEMS:
            _write_line(f"    and {counted(len(record.problems) - _MAX_PROBLEMS, 'more problem')}")
    if len(failed) > _MAX_RECORDS:
        _write_line(f"  and {counted(len(failed) - _MAX_RECORDS, 'more failed record')}")


if __name__ == "__main__":
    sys.exit(main())
