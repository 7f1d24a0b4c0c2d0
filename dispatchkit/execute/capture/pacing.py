"""Let steps run between the operators of a background capture, and while the backend ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from dispatchkit.backends.watching.dispatch_mode import DispatchMode
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import Pacer

_T = TypeVar("_T")

#: Phases of a background capture, as reported in ``LongPause.part``.
WARMUP: Final = "warmup"
REHEARSAL: Final = "memory measurement"
CAPTURE: Final = "capture"
END: Final = "graph instantiation"
PROOF: Final = "row proof"


class PacedRun(DispatchMode):
    """Dispatch mode that notifies a pacer of each finished operator.

    Args:
        pacer: Pacer that lets steps run if the capture has held their lock for long enough.
        part: Phase of the capture.
        lane: Lane whose stream is synchronized after each operator. If steps ran after an operator,
            the stream also waits for them, because steps and captures may share the workspace of a
            library. None if operators are recorded but not executed.
    """

    def __init__(self, pacer: Pacer, part: str, lane: Lane | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._pacer, self._part, self._lane = pacer, part, lane

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions of other threads are not affected."""
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
            lane.resume_capture(self._pacer)
        return result


def paced_warmup(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap a warmup so that steps may run between its operators, if the lane's pacer allows it."""
    return _paced(lane, run, WARMUP)


def paced_step(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap a captured function so that steps may run between operators, if the pacer allows it."""
    return _paced(lane, run, CAPTURE)


@contextmanager
def releasing_lock_at_end(lane: Lane, run: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Let steps run while the backend ends the capture and creates the graph.

    Args:
        lane: Lane of the capture.
        run: Function to capture.

    Yields:
        The function to capture in place of ``run``.
    """
    pacer = lane.pacer
    if pacer is None or not lane.backend.capabilities.steps_during_captures:
        yield run
        lane.let_steps_run(CAPTURE)
        return

    def run_and_release() -> None:
        pacer.reacquire(END)  # needed if the backend repeats the capture with other settings
        run()
        pacer.release(CAPTURE)

    try:
        yield run_and_release
    finally:
        pacer.reacquire(END)
        lane.resume_capture(pacer)


def _paced(lane: Lane, run: Callable[[], _T], part: str) -> Callable[[], _T]:
    pacer = lane.pacer
    if pacer is None or not pacer.between_operators:
        return run

    def paced() -> _T:
        with PacedRun(pacer, part, lane if part == WARMUP else None):
            return run()

    return paced
