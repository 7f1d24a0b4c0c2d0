"""Capture into a torch.cuda.CUDAGraph."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from dispatchkit.backends.cuda.destroy import PendingDestroy
from dispatchkit.backends.cuda.pool import CudaPool
from dispatchkit.backends.cuda.repair import (
    PoolState,
    abandon,
    end_quietly,
    repair,
    restore_generators,
)


class _State(enum.Enum):
    NEW = "new"
    BEGINNING = "beginning"
    OPEN = "open"
    OVER = "over"


class CaptureAttempt:
    """An attempt to capture a graph on the current stream.

    Args:
        stream: The stream, which must be the current stream.
        pool: The pool for the graph's memory.
        generators: Random generators to register, except the default generator.
        mode: torch's ``capture_error_mode``.
        begin_by: Function that receives and calls the function that begins the capture; None to
            begin the capture directly.

    Attributes:
        graph: torch's object for the graph.
        handle: torch's handle of the pool; None before ``begin``.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        pool: CudaPool,
        generators: list[Any],
        mode: str,
        begin_by: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph(keep_graph=True)
        self.handle: Any = None
        self._stream = stream
        self._pool = pool
        self._generators = generators
        self._mode = mode
        self._begin_by = begin_by
        self._state = _State.NEW
        for generator in generators:
            self.graph.register_generator_state(generator)

    def begin(self) -> BaseException | None:
        """Begin the capture; return the error if it could not begin, or None."""
        with self._pool.guard:
            self._state = _State.BEGINNING
            self.handle = self._pool.take()
            try:
                if self._begin_by is None:
                    self._begin()
                else:
                    self._begin_by(self._begin)
            except RuntimeError as error:
                self._give_up()
                failure = error
            else:
                self._state = _State.OPEN
                return None
        restore_generators(self._stream.device_index, self._generators, self._mode)
        return failure

    def _begin(self) -> None:
        self.graph.capture_begin(pool=self.handle, capture_error_mode=self._mode)

    def end(
        self, failure: BaseException | None, *, may_be_empty: bool = False
    ) -> BaseException | None:
        """End the capture and instantiate the graph; return the first error, or None.

        Args:
            failure: The exception raised by the callable, or None.
            may_be_empty: Whether to suppress torch's warning about an empty graph.
        """
        if self._state is _State.NEW or self._state is _State.OVER:
            self._state = _State.OVER
            return failure
        if self._state is _State.BEGINNING and not torch.cuda.is_current_stream_capturing():
            self._give_up()
            return failure
        try:
            if failure is None and not may_be_empty:
                self.graph.capture_end()
            else:
                end_quietly(self.graph)
        except RuntimeError as error:
            self._state = _State.OVER
            self._close_voided()
            return failure or error
        except Warning as warning:  # torch's warning about an empty graph, raised as an error
            failure = failure or warning
        self._state = _State.OVER
        if failure is None:
            try:
                self.graph.instantiate()
            except RuntimeError as error:
                failure = error
        if failure is not None:
            self._discard()
        return failure

    def close(self, interrupt: BaseException) -> None:
        """End an unfinished capture after an exception from a signal handler."""
        if self._state is not _State.OPEN or torch.cuda.is_current_stream_capturing():
            self.end(interrupt)
        else:
            self._state = _State.OVER
            self._discard()

    def _give_up(self) -> None:
        """Keep a graph whose capture did not begin.

        If a signal handler raised while torch registered a generator with the graph, the destructor
        of the graph would abort the process.
        """
        self._state = _State.OVER
        with self._pool.guard:
            if self.handle is not None:
                abandon(self.graph, self._stream.device_index, self.handle)
                self._pool.start_anew()

    def _close_voided(self) -> None:
        state = repair(
            self.graph,
            stream=self._stream,
            handle=self.handle,
            generators=self._generators,
            mode=self._mode,
        )
        if state is PoolState.WHOLE:
            self._discard()
        elif state is PoolState.LOST:
            with self._pool.guard:
                self._pool.start_anew()

    def _discard(self) -> None:
        PendingDestroy(self.graph, self._pool, self.handle).destroy()
