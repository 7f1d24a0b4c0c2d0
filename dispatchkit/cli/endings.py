"""Exit codes and exceptions for interrupted commands."""

from __future__ import annotations

__all__ = ["STOPPED", "TERMINATED", "Terminated"]

STOPPED = 130
"""Exit code after Ctrl-C."""
TERMINATED = 143
"""Exit code after SIGTERM or when the terminal was closed."""


class Terminated(SystemExit):
    """Raised on SIGTERM or when the terminal is closed, so that unfinished output is cleaned up."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)
