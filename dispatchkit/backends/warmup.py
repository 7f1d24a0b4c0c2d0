"""Warmup on a stream, the same on every backend; no torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_warmup(backend: Any, run: Callable[[], Any], stream: Any, iterations: int) -> Any:
    """Run a callable on a stream, ordered between the caller's earlier and later work.

    Returns:
        The result of the last run.
    """
    caller = backend.current_stream()
    stream.wait_stream(caller)
    result: Any = None
    try:
        with backend.use_stream(stream):
            for _ in range(iterations):
                result = run()
    finally:
        # Also after a failure: work queued before it may still write the caller's state.
        caller.wait_stream(stream)
    return result
