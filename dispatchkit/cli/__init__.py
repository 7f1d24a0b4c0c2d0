"""The command line, and helpers for plugin commands.

A command is a function with typer's annotations. It prints its result with ``console``, ``table``
and ``print_json``, and other messages with ``print_stderr``. For bad input it raises a
``DispatchkitError``. A ``DispatchkitError``, ``OSError`` or ``MemoryError`` is printed as one
message, and the exit code is 2. If the command completes but a check fails, it raises
``typer.Exit(1)``. Any other exception is a bug, and its traceback is printed.

Importing this package does not import typer or rich: names are imported on first use.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from dispatchkit.cli.endings import STOPPED, Terminated
from dispatchkit.lazy import lazy_names

if TYPE_CHECKING:
    from dispatchkit.cli.app import run
    from dispatchkit.cli.options import (
        AxesOption,
        BackendOption,
        CostModelOption,
        MaxLorasOption,
        MaxNumSeqsOption,
        MaxNumTokensOption,
        ModeOption,
        PolicyOption,
        QueryLensOption,
        SizesOption,
        TraceArgument,
        dispatcher_of,
        load_installed_plugins,
        policy_name,
        settings_of,
    )
    from dispatchkit.cli.output import (
        FORCE_HINT,
        ForceOption,
        JsonOption,
        console,
        print_json,
        print_stderr,
        progress,
        report_skipped_plugins,
        short_origin,
        table,
    )

_LAZY_NAMES = {
    "AxesOption": "options",
    "BackendOption": "options",
    "CostModelOption": "options",
    "FORCE_HINT": "output",
    "ForceOption": "output",
    "JsonOption": "output",
    "MaxLorasOption": "options",
    "MaxNumSeqsOption": "options",
    "MaxNumTokensOption": "options",
    "ModeOption": "options",
    "PolicyOption": "options",
    "QueryLensOption": "options",
    "SizesOption": "options",
    "TraceArgument": "options",
    "print_stderr": "output",
    "console": "output",
    "dispatcher_of": "options",
    "load_installed_plugins": "options",
    "report_skipped_plugins": "output",
    "policy_name": "options",
    "print_json": "output",
    "progress": "output",
    "run": "app",
    "settings_of": "options",
    "short_origin": "output",
    "table": "output",
}

__all__ = [
    "FORCE_HINT",
    "AxesOption",
    "BackendOption",
    "CostModelOption",
    "ForceOption",
    "JsonOption",
    "MaxLorasOption",
    "MaxNumSeqsOption",
    "MaxNumTokensOption",
    "ModeOption",
    "PolicyOption",
    "QueryLensOption",
    "SizesOption",
    "TraceArgument",
    "console",
    "dispatcher_of",
    "load_installed_plugins",
    "main",
    "policy_name",
    "print_json",
    "print_stderr",
    "progress",
    "report_skipped_plugins",
    "run",
    "settings_of",
    "short_origin",
    "table",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY_NAMES)


_NEEDS = ("typer", "rich")
# Older versions of typer lose arguments if a newer version of click is installed.
_OLDEST_TYPER = (0, 20)


def main() -> NoReturn:
    """Run the command line with ``sys.argv``, and exit with its exit code.

    Exit codes: 0 success, 1 a check failed, 2 bad input, 130 stopped by Ctrl-C, 141 the output pipe
    was closed, 143 terminated.
    """
    _open_missing_streams()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _terminate)
    try:
        import typer

        if _release(typer.__version__) < _OLDEST_TYPER:
            oldest = ".".join(map(str, _OLDEST_TYPER))
            print(
                f"The command line needs typer {oldest} or newer, but {typer.__version__} is "
                "installed. Next: pip install --upgrade 'dispatchkit[cli]'.",
                file=sys.stderr,
            )
            sys.exit(2)
        from dispatchkit.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDS:
            raise
        print(
            f"The command line needs {' and '.join(_NEEDS)}; {error.name!r} is not installed. "
            "Next: pip install 'dispatchkit[cli]'.",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(STOPPED)  # Ctrl-C while typer was being imported
    sys.exit(run())


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


def _open_missing_streams() -> None:
    """Open the null device for standard streams that are closed.

    Otherwise a file opened later would get the descriptor of the closed stream, and output would be
    written to that file.
    """
    if sys.stdin is None or sys.stdout is None or sys.stderr is None:
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        print("Note: standard output is closed, so all output is lost.", file=sys.stderr)


def _release(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version."""
    parts = version.split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
