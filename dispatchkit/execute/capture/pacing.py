"""Run a step while letting other threads' steps run between its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from dispatchkit.backends.watching.dispatch_mode import DispatchMode
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import Pacer

_T = TypeVar("_T")

#: Phases of a background capture, as named in its pauses.
WARMUP: Final = "warmup"
REHEARSAL: Final = "run that measures memory"
CAPTURE: Final = "capture"
END: Final = "end and instantiation of the graph, by the driver"
PROOF: Final = "replay that proves its rows"


class PacedRun(DispatchMode):
    """Notifies a pacer of each finished operator.

    Args:
        pacer: Releases the lock of steps once it has been held long enough.
        part: The phase of the capture.
        lane: The lane whose stream is synchronized after each operator that runs, and waits for the
            steps let in between, since libraries may give both the same workspace. None if
            operators do not run.
    """

    def __init__(self, pacer: Pacer, part: str, lane: Lane | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._pacer, self._part, self._lane = pacer, part, lane

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not affect compiled functions of other threads; there are none in this one."""
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
    """Return a run that lets steps in if a background capture allows it, else the run itself."""
    return _paced(lane, run, WARMUP)


def paced_step(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Return a function to capture that lets steps in if allowed, else the function itself."""
    return _paced(lane, run, CAPTURE)


@contextmanager
def ended_beside_steps(lane: Lane, run: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Let steps in after the captured function has run, while the backend creates the graph.

    Args:
        lane: The lane.
        run: The function to capture.

    Returns:
        The function to capture instead, inside the capturing block.
    """
    pacer = lane.pacer
    if pacer is None or not lane.backend.capabilities.steps_beside_captures:
        yield run
        lane.let_steps_in(CAPTURE)
        return

    def run_and_release() -> None:
        pacer.take_back(END)  # if it is captured again with other settings
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
