"""Driver calls that torch does not offer: begin and discard captures, and count nodes.

When torch ends a capture, it also updates its own state. Ending an invalidated capture fails, and
torch then skips these updates. repair.py therefore discards the invalidated capture and begins an
empty one, which torch can end.

Source: CUDA Driver API, "Stream Management", "Graph Management".
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

_MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


class DriverCallError(RuntimeError):
    """The driver library cannot be loaded, or a driver call failed."""


@lru_cache(maxsize=1)
def driver_library() -> ctypes.CDLL:
    """Return the driver library.

    Raises:
        DriverCallError: The library cannot be loaded.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverCallError(f"The driver library {name} cannot be loaded: {error}") from error


def begin_stream_capture(stream: int, mode: str) -> None:
    """Begin a capture on a stream that is not capturing.

    Args:
        stream: Raw handle of the stream.
        mode: ``"global"``, ``"thread_local"`` or ``"relaxed"``.

    Raises:
        DriverCallError: The call failed, or the driver library cannot be loaded.
    """
    call = driver_library().cuStreamBeginCapture_v2
    result = call(ctypes.c_void_p(stream), ctypes.c_int(_MODES[mode]))
    if result != 0:
        raise DriverCallError(f"cuStreamBeginCapture failed with CUDA error {result}")


def leave_stream_capture(stream: int) -> None:
    """End and discard the capture of a stream, even if the capture was invalidated.

    If the stream is not capturing, the function does nothing.

    Raises:
        DriverCallError: The driver library cannot be loaded.
    """
    driver = driver_library()
    status = ctypes.c_int(0)
    if driver.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)) != 0:
        return
    if status.value == 0:
        return
    graph = ctypes.c_void_p()
    # The result is ignored: it is an error code if the capture was invalidated.
    driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    if graph.value:
        driver.cuGraphDestroy(graph)


def count_nodes(graph: int) -> int:
    """Return the number of nodes of a graph, such as kernels, copies and fills.

    Args:
        graph: Raw handle of the captured graph, not of the instantiated graph.

    Raises:
        DriverCallError: The call failed, or the driver library cannot be loaded.
    """
    number = ctypes.c_size_t(0)
    call = driver_library().cuGraphGetNodes
    result = call(ctypes.c_void_p(graph), None, ctypes.byref(number))
    if result != 0:
        raise DriverCallError(f"cuGraphGetNodes failed with CUDA error {result}")
    return number.value
