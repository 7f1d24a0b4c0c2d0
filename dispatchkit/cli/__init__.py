"""The command line. Importing it loads neither typer nor rich; ``main`` does."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]

_NEEDS = ("typer", "rich")


def main() -> NoReturn:
    """Run the command line on ``sys.argv`` and exit with its code.

    Codes: 0 done, 1 done and found wanting, 2 bad input, 130 stopped by Ctrl-C, 141 the
    reader of the output went away.
    """
    try:
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
        sys.exit(130)  # Ctrl-C while typer was being imported
    sys.exit(run())
