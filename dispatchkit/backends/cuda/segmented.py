"""Capture a callable in segments, with breaks within one call.

The watch is a torch dispatch mode. At a break, modes that the callable entered may be above the
watch on the thread's mode stack. The watch therefore stays on the stack between segments, and is
paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from dispatchkit.backends.capture_errors import capture_error, clear_frames
from dispatchkit.backends.capture_guard import pause_capture, resume_capture
from dispatchkit.backends.cuda.capture import CaptureAttempt
from dispatchkit.backends.cuda.graph import CudaGraph
from dispatchkit.backends.cuda.segments import Segment, blocks_in_use
from dispatchkit.backends.cuda.streams import make_current
from dispatchkit.backends.cuda.watch import CaptureWatch
from dispatchkit.backends.optional import SegmentedCapture
from dispatchkit.errors import CaptureError

_T = TypeVar("_T")


class CudaSegments:
    """The segments of one capture.

    Args:
        stream: The stream of the capture.
        new_attempt: Function that creates the capture attempt of a segment.
        make_graph: Function that returns the graph of a successful attempt.
        watch: Watch of the captured operations; None if they are not watched.
        memory: Function that returns the memory segments of the graphs' pool.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        new_attempt: Callable[[], CaptureAttempt],
        make_graph: Callable[[CaptureAttempt], CudaGraph],
        watch: CaptureWatch | None,
        memory: Callable[[], Iterable[Segment]],
    ) -> None:
        self._stream, self._new_attempt, self._make_graph = stream, new_attempt, make_graph
        self._watch, self._memory = watch, memory
        self._before: set[int] = set()
        self._spans: list[tuple[int, int]] | None = None
        self._attempt: CaptureAttempt | None = None
        self._graphs: list[CudaGraph] = []

    def run(self, run: Callable[[SegmentedCapture], _T], handled: BaseException | None) -> _T:
        """Capture a callable that ends and begins segments, and return its result.

        Args:
            run: The callable, which is passed this object.
            handled: The exception that the caller was handling, or None.

        Raises:
            CaptureError: The capture failed, or the callable returned with an open segment. The
                graphs of all segments of this capture are released.
        """
        failure: BaseException | None = None
        try:
            try:
                self._before = blocks_in_use(self._memory())
                self.begin()
                if self._watch is None:
                    result = run(self)
                else:
                    with self._watch.watching():
                        result = run(self)
                    self._watch.raise_swallowed_error()
                if self._attempt is not None:
                    raise CaptureError(
                        "The callable returned with an open segment, whose graph would be "
                        "lost. Call end() before returning."
                    )
            except BaseException as error:  # noqa: BLE001 - raised below, after the capture has ended
                failure = error
            make_current(self._stream)  # the callable may have changed it
            attempt, self._attempt = self._attempt, None
            if attempt is not None:
                failure = attempt.end(failure)
        except BaseException as interrupt:  # raised by a signal handler
            if self._attempt is not None:
                self._attempt.close(interrupt)
            self._release()
            raise
        if failure is None:
            return result
        self._release()
        clear_frames(failure, handled)
        try:
            if not isinstance(failure, Exception):
                raise failure
            first = None if self._watch is None else self._watch.first_error
            raise capture_error(first or failure) from failure
        finally:
            del failure  # break the cycle between frame and error

    def end(self) -> CudaGraph:
        """End the segment, and return its graph; later operations run immediately."""
        if self._attempt is None:
            raise CaptureError("No segment is open. Call begin() first.")
        if torch.cuda.current_stream(self._stream.device_index) != self._stream:
            raise CaptureError(
                "A segment must end on the stream on which it began, but a different stream is "
                "current. Before the break, make the first stream wait for the current stream "
                "(wait_stream), then make the first stream current again."
            )
        if self._watch is not None:
            self._watch.raise_swallowed_error()
            self._watch.pause()
        failure = self._attempt.end(None, may_be_empty=True)
        attempt, self._attempt = self._attempt, None
        self._spans = None  # the pool may have grown
        pause_capture()
        if failure is not None:
            raise failure
        graph = self._make_graph(attempt)
        self._graphs.append(graph)
        return graph

    def begin(self) -> None:
        """Begin the next segment."""
        if self._attempt is not None:
            raise CaptureError("A segment is already open. Call end() first.")
        make_current(self._stream)  # code between segments may have changed it
        resume_capture()
        # Assigned before the capture begins, so that ``run`` ends it if a signal handler raises.
        self._attempt = self._new_attempt()
        failure = self._attempt.begin()
        if failure is not None:
            self._attempt = None
            raise failure
        if self._watch is not None:
            self._watch.resume()

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory was allocated from the pool during this capture."""
        address = tensor.untyped_storage().data_ptr()
        if self._spans is None:
            self._spans = [
                (one["address"], one["address"] + one["total_size"]) for one in self._memory()
            ]
        is_of_pool = any(start <= address < end for start, end in self._spans)
        return is_of_pool and address not in self._before

    def _release(self) -> None:
        for graph in self._graphs:
            graph.release()
