"""Warmup on a stream, the same on every backend; no torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_warmup(backend: Any, run: Callable[[], Any], stream: Any, iterations: int) -> Any:
    """Run a callable on a stream, after the caller's work and before its next.

    Returns:
        What the last run returned.
    """
    caller = backend.current_stream()
    stream.wait_stream(caller)
    result: Any = None
    try:
        with backend.use_stream(stream):
            for _ in range(iterations):
                result = run()
    finally:
        # Also after a failure: what was queued before it may still write the caller's state.
        caller.wait_stream(stream)
    return result
