"""Record one call of a callable as several segments, with breaks between them.

The recorder is a torch dispatch mode. At a break, modes that the callable entered may be above the
recorder on the thread's mode stack. The recorder therefore stays on the stack between segments, and
is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from dispatchkit.backends.capture_errors import capture_error, clear_frames
from dispatchkit.backends.capture_guard import pause_capture, resume_capture
from dispatchkit.backends.optional import SegmentedCapture
from dispatchkit.backends.tape.graph import TapeGraph
from dispatchkit.backends.tape.recorder import Recorder
from dispatchkit.backends.tape.stream_query import reporting_capture
from dispatchkit.backends.watching.host_sync import HostSyncGuard
from dispatchkit.errors import CaptureError

_T = TypeVar("_T")


class TapeSegments:
    """The segments of one recording.

    Args:
        make_graph: Function that creates a segment's graph from the recorder.
        generators: Random generators that the callable may draw from.
    """

    def __init__(
        self, make_graph: Callable[[Recorder], TapeGraph], generators: Iterable[Any]
    ) -> None:
        self._make_graph, self._generators = make_graph, tuple(generators)
        self._recorder = Recorder()
        self._graphs: list[TapeGraph] = []
        self._is_open = False

    def run(self, run: Callable[[SegmentedCapture], _T], handled: BaseException | None) -> _T:
        """Record a callable that ends and begins segments, and return its result.

        Args:
            run: The callable, which is passed this object.
            handled: The exception that the caller was handling, or None.

        Raises:
            CaptureError: The callable raised, or returned with an open segment.
        """
        recorder = self._recorder
        try:
            self.begin()
            with reporting_capture(), HostSyncGuard(recorder, "cpu"), recorder:
                result = run(self)
            recorder.raise_swallowed_error()
            if self._is_open:
                raise CaptureError(
                    "The callable returned with an open segment, whose graph would be lost. "
                    "Call end() before returning."
                )
        except BaseException as error:
            for graph in self._graphs:
                graph.release()
            if not isinstance(error, Exception):
                raise
            clear_frames(error, handled)
            raise capture_error(recorder.first_error or error) from error
        finally:
            recorder.restore()
        return result

    def end(self) -> TapeGraph:
        """End the segment, and return its graph; later operations are not recorded."""
        if not self._is_open:
            raise CaptureError("No segment is open. Call begin() first.")
        recorder = self._recorder
        recorder.raise_swallowed_error()
        self._set_open(False)
        recorder.restore()  # inside the capture, where a deferred tape runs operations immediately
        pause_capture()
        graph = self._make_graph(recorder)
        self._graphs.append(graph)
        recorder.restart()
        return graph

    def begin(self) -> None:
        """Begin the next segment."""
        if self._is_open:
            raise CaptureError("A segment is already open. Call end() first.")
        resume_capture()
        self._recorder.add_generators(self._generators)
        self._set_open(True)

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Return False, because tensors that outlive a segment have their own memory."""
        return False

    def _set_open(self, is_open: bool) -> None:
        self._is_open = is_open
        self._recorder.is_paused = not is_open
