"""A run of a step that lets other threads' steps in between its operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dispatchkit.backends.watching.dispatch_mode import DispatchMode
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.memory import Pacer

_T = TypeVar("_T")


class PacedRun(DispatchMode):
    """Shows each operator that is done to a pacer.

    Args:
        pacer: Releases the lock of steps when it has been held for long enough.
        lane: Whose stream is waited for after each operator, where they run, and waits for the
            steps that were let in: libraries may give both the same memory to work in. None
            where nothing runs.
    """

    def __init__(self, pacer: Pacer, lane: Lane | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._pacer, self._lane = pacer, lane

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
        if self._pacer.note(func) and lane is not None:
            lane.order()
        return result


def paced_warmup(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Return a run that lets steps in, where a capture in the background may; else the same."""
    return _paced(lane, run, runs=True)


def paced_step(lane: Lane, run: Callable[[], _T]) -> Callable[[], _T]:
    """Return a run to be captured that lets steps in, where the capture may; else the same."""
    return _paced(lane, run, runs=False)


def _paced(lane: Lane, run: Callable[[], _T], *, runs: bool) -> Callable[[], _T]:
    pacer = lane.group.turns.pacer
    if pacer is None or not pacer.allows_turns:
        return run

    def paced() -> _T:
        with PacedRun(pacer, lane if runs else None):
            return run()

    return paced
