"""A run of a step that lets other threads' steps in between its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from dispatchkit.backends.watching.dispatch_mode import DispatchMode
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import Pacer

_T = TypeVar("_T")

#: Parts of a capture in the background, as its pauses name them.
WARMUP: Final = "warmup"
REHEARSAL: Final = "run that measures its memory"
CAPTURE: Final = "capture"
END: Final = "end and instantiation of the graph, by the driver"
PROOF: Final = "replay that proves its rows"


class PacedRun(DispatchMode):
    """Shows each operator that is done to a pacer.

    Args:
        pacer: Releases the lock of steps when it has been held for long enough.
        part: Which part of the capture it is.
        lane: Whose stream is waited for after each operator, where they run, and waits for the
            steps that were let in: libraries may give both the same memory to work in. None
            where nothing runs.
    """

    def __init__(self, pacer: Pacer, part: str, lane: Lane | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._pacer, self._part, self._lane = pacer, part, lane

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
        lane = self._lane
        if lane is not None:
            lane.stream.synchronize()
        if self._pacer.end_operator(self._part, func) and lane is not None:
            lane.go_on(self._pacer)
        return result


def paced_warmup(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Return a run that lets steps in, where a capture in the background may; else the same."""
    return _paced(lane, run, WARMUP)


def paced_step(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Return a run to be captured that lets steps in, where the capture may; else the same."""
    return _paced(lane, run, CAPTURE)


@contextmanager
def ended_beside_steps(lane: Lane, run: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Let steps in once what is captured has run, while the backend makes the graph of it.

    Args:
        lane: Where.
        run: What is to be captured.

    Returns:
        What to capture in its place, in the block that captures it.
    """
    pacer = lane.pacer
    if pacer is None or not lane.backend.capabilities.steps_beside_captures:
        yield run
        lane.let_steps_in(CAPTURE)
        return

    def run_and_release() -> None:
        pacer.take_back(END)  # where it is captured anew, with other settings
        run()
        pacer.release(CAPTURE)

    try:
        yield run_and_release
    finally:
        pacer.take_back(END)
        lane.go_on(pacer)


def _paced(lane: Lane, run: Callable[[], _T], part: str) -> Callable[[], _T]:
    pacer = lane.pacer
    if pacer is None or not pacer.between_operators:
        return run

    def paced() -> _T:
        with PacedRun(pacer, part, lane if part == WARMUP else None):
            return run()

    return paced
