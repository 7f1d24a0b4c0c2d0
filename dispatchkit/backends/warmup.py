"""Run a warmup on a stream, for all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_warmup(backend: Any, run: Callable[[], Any], stream: Any, iterations: int) -> Any:
    """Run a callable repeatedly on a stream.

    The runs start after all earlier work of the caller's stream, and its later work waits for them.

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
        # Wait even after a failure, because queued work may still write the caller's state.
        caller.wait_stream(stream)
    return result
