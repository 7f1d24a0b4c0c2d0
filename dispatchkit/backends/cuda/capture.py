"""Capturing into a torch.cuda.CUDAGraph."""

from __future__ import annotations

from typing import Any

import torch

from dispatchkit.backends.cuda.destroy import PendingDestroy
from dispatchkit.backends.cuda.pool import CudaPool
from dispatchkit.backends.cuda.repair import (
    PoolState,
    abandon,
    end_failed_capture,
    repair,
    restore_generators,
)


class CaptureAttempt:
    """One capture from its beginning to its end, good or bad, on the current stream.

    Args:
        stream: The stream, which is the current one.
        pool: Where the graph's memory comes from.
        generators: Those to register, the default one apart.
        mode: The capture error mode.

    Attributes:
        graph: The graph.
        handle: Torch's handle of the pool, once it has begun.
    """

    def __init__(
        self, stream: torch.cuda.Stream, pool: CudaPool, generators: list[Any], mode: str
    ) -> None:
        self.graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph(keep_graph=True)
        self.handle: Any = None
        self._stream = stream
        self._pool = pool
        self._generators = generators
        self._mode = mode
        for generator in generators:
            self.graph.register_generator_state(generator)

    def begin(self) -> BaseException | None:
        """Begin; return what went wrong, after which there is nothing to end."""
        with self._pool.guard:
            self.handle = self._pool.take()
            try:
                self.graph.capture_begin(pool=self.handle, capture_error_mode=self._mode)
            except RuntimeError as error:
                abandon(self.graph, self._stream.device_index, self.handle)
                self._pool.start_anew()
                failure = error
            else:
                return None
        restore_generators(self._stream.device_index, self._generators, self._mode)
        return failure

    def end(self, failure: BaseException | None) -> BaseException | None:
        """End, and make the graph launchable; return the first error.

        Args:
            failure: What the callable raised.
        """
        try:
            if failure is None:
                self.graph.capture_end()
            else:
                end_failed_capture(self.graph)
        except RuntimeError as error:
            self._close_voided()
            return failure or error
        except Warning as warning:  # of an empty graph, where warnings are errors
            failure = failure or warning
        if failure is None:
            try:
                self.graph.instantiate()
            except RuntimeError as error:
                failure = error
        if failure is not None:
            self._discard()
        return failure

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
