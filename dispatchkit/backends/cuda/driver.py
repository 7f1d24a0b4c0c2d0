"""Driver calls that bypass torch: begin and abandon captures, and count nodes.

Torch ends a capture together with its own bookkeeping. If the driver refuses to end an invalidated
capture, that bookkeeping stays open. An empty capture begun in its place gives torch something to
end.

Source: CUDA Driver API, "Stream Management", "Graph Management".
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class DriverCallError(RuntimeError):
    """The driver's library is missing, or one of its calls failed."""


@lru_cache(maxsize=1)
def driver_library() -> ctypes.CDLL:
    """Return the driver's library.

    Raises:
        DriverCallError: It cannot be loaded.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverCallError(f"The driver's library {name} cannot be loaded: {error}") from error


def begin_stream_capture(stream: int, mode: str) -> None:
    """Begin a capture on a stream that is not capturing.

    Args:
        stream: The raw handle.
        mode: ``"global"``, ``"thread_local"`` or ``"relaxed"``.

    Raises:
        DriverCallError: The driver refused, or is missing.
    """
    call = driver_library().cuStreamBeginCapture_v2
    result = call(ctypes.c_void_p(stream), ctypes.c_int(_MODES[mode]))
    if result != 0:
        raise DriverCallError(f"cuStreamBeginCapture failed with CUDA error {result}")


def leave_stream_capture(stream: int) -> None:
    """End the capture of a stream, valid or invalidated, and discard it.

    Does nothing if the stream is not capturing.

    Raises:
        DriverCallError: The driver is missing.
    """
    driver = driver_library()
    status = ctypes.c_int(0)
    if driver.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)) != 0:
        return
    if status.value == 0:
        return
    graph = ctypes.c_void_p()
    # Its result reports that the capture was invalidated, which is known.
    driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    if graph.value:
        driver.cuGraphDestroy(graph)


def count_nodes(graph: int) -> int:
    """Return the number of nodes of a graph: kernels, copies and fills.

    Args:
        graph: The raw handle of the captured graph, not of its instance.

    Raises:
        DriverCallError: The driver refused, or is missing.
    """
    number = ctypes.c_size_t(0)
    call = driver_library().cuGraphGetNodes
    result = call(ctypes.c_void_p(graph), None, ctypes.byref(number))
    if result != 0:
        raise DriverCallError(f"cuGraphGetNodes failed with CUDA error {result}")
    return number.value
