"""A run of a step that lets other threads' steps in between its operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dispatchkit.backends.base import Stream
from dispatchkit.backends.watching.dispatch_mode import DispatchMode
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import Pacer

_T = TypeVar("_T")


class PacedRun(DispatchMode):
    """Shows each operator that is done to a pacer.

    Args:
        pacer: Releases the lock of steps when it has been held for long enough.
        stream: Waited for after each operator, where they run: what is queued there would take
            the device from the steps that are let in. None where nothing runs.
    """

    def __init__(self, pacer: Pacer, stream: Stream | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._pacer, self._stream = pacer, stream

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled functions of other threads as they are; there are none in here."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._stream is not None:
            self._stream.synchronize()
        self._pacer.note(func)
        return result


def paced_warmup(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Return a run that lets steps in, where a capture in the background may; else the same."""
    return _paced(lane, run, lane.stream)


def paced_step(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Return a run to be captured that lets steps in, where the capture may; else the same."""
    return _paced(lane, run, None)


def _paced(lane: Lane, run: Callable[[], _T], stream: Stream | None) -> Callable[[], _T]:
    pacer = lane.group.turns.pacer
    if pacer is None or not pacer.allows_turns:
        return run

    def paced() -> _T:
        with PacedRun(pacer, stream):
            return run()

    return paced


def beside_steps(
    lane: Lane, capture: Callable[[Callable[[], None]], _T]
) -> Callable[[Callable[[], None]], _T]:
    """Return a capture that leaves steps the lock outside of the run, where it may; else the same.

    Args:
        lane: Where.
        capture: Calls the backend with what is captured.
    """
    pacer, can = lane.group.turns.pacer, lane.backend.capabilities
    if pacer is None or not (pacer.allows_turns and can.inert_captures):
        return capture
    return lambda run: pacer.aside(
        "the beginning of the capture",
        lambda: capture(lambda: pacer.held("the operators of the capture", run)),
    )
