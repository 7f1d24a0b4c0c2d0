"""How a command is ended from outside."""

from __future__ import annotations

__all__ = ["STOPPED", "TERMINATED", "Terminated"]

STOPPED = 130
"""Exit code after Ctrl-C."""
TERMINATED = 143
"""Exit code after SIGTERM, and when the terminal was closed."""


class Terminated(SystemExit):
    """SIGTERM or a closed terminal, as an exception: what is being written is cleaned up."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)
