"""CopyNode on CUDA: a kernel, the first node of a graph, that copies small inputs in.

A copy by torch before each launch takes longer on the host than the launch itself. Setting the
parameters of a kernel node takes one call, which copies them by value.

Host inputs are part of the parameters, so that their memory may be overwritten immediately. The
time of the call grows with the kernel's capacity for data, used or not, so there are kernels with
several ``CAPACITIES``. A kernel that the driver cannot load is not used.

``copy.cu`` is the kernel's source, and ``copy.ptx`` is loaded: the driver compiles it for its
device and caches the result for later processes. NVRTC would take longer in every process
(``bench/floors.py``, group "kernel"). ``blockIdx.y`` is the index of the input. Each input is
copied in the widest words that its addresses and length allow.

Measured on one H200 (torch 2.11, driver 580), three host inputs written by numpy, parameters set
and graph launched: 4.0 us with up to 2 KiB of data, 4.5 with 8, 5.3 with 16, 6.5 with 29. A graph
that copies from pinned memory instead, guarded by an event, takes 8.2 us, and a step must wait for
the previous one.

Source: CUDA Driver API, "Module Management", "Execution Control" and "Graph Management".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from dispatchkit.backends.cuda.driver import DriverCallError, driver_library
from dispatchkit.backends.optional import CopyRegion

#: Capacities of the kernels for data, in bytes. CUDA allows 32,764 bytes of parameters in total.
CAPACITIES = (16, 2 << 10, 8 << 10, 16 << 10, 29 << 10)
#: Most inputs of one node.
MAX_REGIONS = 16
#: Bytes of parameters that every driver allows; more need PTX ISA 8.1, i.e. CUDA 12.1.
_PLAIN_PARAMETERS = 4096
_THREADS, _MAX_BLOCKS, _WIDEST = 256, 64, 16
_KERNEL_NODE = 0
# Options of the PTX compiler: the buffer for its log, and the buffer's size.
_ERROR_LOG, _ERROR_LOG_BYTES, _LOG_BYTES = 5, 6, 4096


class Work(ctypes.Structure):
    """The kernel's first argument: one entry per input; fill repeats every eight bytes."""

    _fields_ = (
        ("sources", ctypes.c_uint64 * MAX_REGIONS),
        ("targets", ctypes.c_uint64 * MAX_REGIONS),
        ("fills", ctypes.c_uint64 * MAX_REGIONS),
        ("num_bytes", ctypes.c_uint * MAX_REGIONS),
        ("tail_bytes", ctypes.c_uint * MAX_REGIONS),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, version 2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@attrs.frozen
class CopyKernel:
    """The kernel, loaded on one device, with the driver functions it needs.

    Attributes:
        function: The kernel.
        launch: ``cuLaunchKernelEx``.
        change: ``cuGraphExecKernelNodeSetParams_v2``.
        find: Returns the first node of a raw graph, or why it is not this kernel.
        enter: Makes the device's context current in this thread.
        capacity: Bytes of its second argument, the data.
        thread: Whether this thread has a context, as ``has_context``.
    """

    function: ctypes.c_void_p
    launch: Callable[..., int]
    change: Callable[..., int]
    find: Callable[[int], int | str]
    enter: Callable[[], None]
    capacity: int = CAPACITIES[0]
    thread: threading.local = attrs.field(factory=threading.local, repr=False)

    def ensure_context(self) -> None:
        """Give this thread a context if it has none; without one ``change`` ends the process."""
        if not hasattr(self.thread, "has_context"):
            self.enter()
            self.thread.has_context = True


class CopyNode:
    """The copy kernel at the beginning of one graph; see ``backends.optional.CopyNode``.

    Set it and launch the graph under one lock: a launch uses the last parameters set.

    Args:
        kernel: The kernel.
        num_regions: Number of inputs to copy, at most ``MAX_REGIONS``.
        num_bytes: Bytes of the largest.

    Attributes:
        data: Host memory whose contents are read when the node is set.
    """

    def __init__(self, kernel: CopyKernel, num_regions: int, num_bytes: int) -> None:
        blocks = -(-num_bytes // (_THREADS * _WIDEST))
        self._kernel = kernel
        self._grid = (max(1, min(_MAX_BLOCKS, blocks)), num_regions, 1)
        self._nothing = Work()
        self.data: Any = (ctypes.c_ubyte * kernel.capacity)()
        self._exec, self._node = ctypes.c_void_p(), ctypes.c_void_p()
        self._problem = ""
        self._idle = ctypes.c_void_p()
        # What the next launch does, if known and independent of host data.
        self._work: Work | None = None

    def record(self, stream: int) -> None:
        """Queue the node on a stream (its raw handle), before anything else in a capture."""
        code = launch_once(self._kernel, self._grid, self._nothing, stream, self.data)
        if code:
            self._problem = f"its capture failed with CUDA error {code}"

    def attach(self, graph: Any) -> str:
        """Find the node in its captured graph; return the problem, or ``""``."""
        raw, handle = (getattr(graph, f"raw_{what}_handle", None) for what in ("graph", "exec"))
        if self._problem or raw is None or handle is None:
            return self._problem or "the graph does not expose its handle"
        found = self._kernel.find(raw)
        if isinstance(found, str):
            return found
        self._exec, self._node = ctypes.c_void_p(handle), ctypes.c_void_p(found)
        self._idle = self._params(self._nothing)
        return ""

    def stop(self) -> int:
        """Make later launches copy nothing; return CUDA's error code."""
        self._work = None
        self._kernel.ensure_context()
        return self._kernel.change(self._exec, self._node, self._idle)

    def setter(
        self, regions: Sequence[CopyRegion], offsets: Sequence[int] = ()
    ) -> Callable[[Sequence[torch.Tensor]], int]:
        """Return a function that sets the node for batches of one size.

        It takes contiguous tensors and returns CUDA's error code. The tensors are read when the
        graph runs, in stream order; ``data`` is read before the function returns. If a node without
        data was last set by the same function for tensors at the same addresses, it is up to date
        and CUDA is not called.

        Args:
            regions: What to copy and fill, one region per tensor and offset.
            offsets: Offsets in ``data`` of the rows of the last regions.
        """
        work = Work()
        for index, region in enumerate(regions):
            work.targets[index], work.fills[index] = region.target, region.fill
            work.num_bytes[index], work.tail_bytes[index] = region.num_bytes, region.tail_bytes
        for index, offset in enumerate(offsets, len(regions) - len(offsets)):
            work.sources[index] = offset
        params, sources, thread = self._params(work), work.sources, self._kernel.thread
        change, handle, node = self._kernel.change, self._exec, self._node
        ensure_context, keeps = self._kernel.ensure_context, not offsets
        addresses = [0] * MAX_REGIONS  # reading from a list takes half the time

        def set_node(values: Sequence[torch.Tensor]) -> int:
            # One by one takes half the time of struct, which requests a buffer from ctypes each
            # time.
            for index, value in enumerate(values):
                address = value.data_ptr()
                if address != addresses[index]:
                    self._work = None  # first: an interrupt may occur before it is set again
                    sources[index] = addresses[index] = address
            if self._work is work:
                return 0
            self._work = None
            if not hasattr(thread, "has_context"):  # inlined, since a call takes longer
                ensure_context()
            code = change(handle, node, params)
            if keeps and not code:
                self._work = work
            return code

        return set_node

    def _params(self, work: Work) -> ctypes.c_void_p:
        """Return the address of node parameters for the given regions; keeps them alive."""
        arguments = _arguments(work, self.data)
        params = NodeParams(self._kernel.function, self._grid, (_THREADS, 1, 1))
        params.params = ctypes.addressof(arguments)
        place: Any = ctypes.c_void_p(ctypes.addressof(params))
        place.kept = work, self.data, arguments, params
        return cast(ctypes.c_void_p, place)


def _arguments(work: Work, data: Any) -> Any:
    """Return the addresses of the kernel's arguments."""
    return (ctypes.c_void_p * 2)(ctypes.addressof(work), ctypes.addressof(data))


def launch_once(
    kernel: CopyKernel, grid: tuple[int, int, int], work: Work, stream: int, data: Any
) -> int:
    """Queue the kernel on a stream; return CUDA's error code."""
    config = LaunchConfig(grid, (_THREADS, 1, 1))
    config.stream = stream
    arguments = _arguments(work, data)
    return kernel.launch(
        ctypes.addressof(config), kernel.function, ctypes.addressof(arguments), None
    )


def copy_node(device_index: int, num_regions: int, num_bytes: int, data: int) -> CopyNode | str:
    """Return a node with capacity for ``data`` bytes of data, or why there is none."""
    capacity = next((one for one in CAPACITIES if one >= data), None)
    if capacity is None:
        return f"{data} bytes of data exceed the maximum of {CAPACITIES[-1]}"
    kernel = copy_kernel(device_index, capacity)
    return kernel if isinstance(kernel, str) else CopyNode(kernel, num_regions, num_bytes)


@lru_cache(maxsize=64)
def copy_kernel(device_index: int, capacity: int = CAPACITIES[0]) -> CopyKernel | str:
    """Return the kernel, loaded on a device, or why it cannot be loaded. Not inside a capture."""
    try:
        with torch.cuda.device(device_index):
            torch.cuda.current_stream().synchronize()  # gives this thread a context
            kernel = _loaded(driver_library(), device_index, capacity)
            stream = torch.cuda.current_stream().cuda_stream
            # The setup of a first launch must not happen inside a capture.
            code = launch_once(kernel, (1, 1, 1), Work(), stream, (ctypes.c_ubyte * capacity)())
    except (DriverCallError, AttributeError, RuntimeError) as error:
        return f"the kernel cannot be loaded: {error}"
    return f"the kernel's launch failed with CUDA error {code}" if code else kernel


def kernel_text(capacity: int) -> str:
    """Return the kernel's PTX, with capacity for ``capacity`` bytes of data."""
    text = Path(__file__).with_name("copy.ptx").read_text(encoding="ascii")
    if ctypes.sizeof(Work) + capacity > _PLAIN_PARAMETERS:
        text = text.replace(".version 7.7", ".version 8.1")
    return text.replace(f"[{CAPACITIES[-1]}]", f"[{capacity}]")


def _loaded(driver: ctypes.CDLL, device_index: int, capacity: int) -> CopyKernel:
    launch = driver.cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    # Called only with ctypes.c_void_p, which needs no conversion: see ``launch.direct_launch``.
    change = driver.cuGraphExecKernelNodeSetParams_v2
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
    text = ctypes.c_char_p(kernel_text(capacity).encode())
    code = driver.cuModuleLoadDataEx(ctypes.byref(module), text, 2, options, values)
    if code:
        problem = log.value.decode(errors="replace").strip()
        raise DriverCallError(f"cuModuleLoadDataEx failed with CUDA error {code} {problem}")
    code = driver.cuModuleGetFunction(ctypes.byref(function), module, b"dispatchkit_copy")
    if code:
        raise DriverCallError(f"cuModuleGetFunction failed with CUDA error {code}")

    def find(graph: int) -> int | str:
        return _first_node(driver, graph, function)

    def enter() -> None:
        with torch.cuda.device(device_index):
            torch.cuda.current_stream().query()

    return CopyKernel(function, launch, change, find, enter, capacity)


def _first_node(driver: ctypes.CDLL, graph: int, function: ctypes.c_void_p) -> int | str:
    """Return the root node of a graph if it is the copy kernel, else the problem."""
    node, count, kind = ctypes.c_void_p(), ctypes.c_size_t(0), ctypes.c_int(-1)
    raw, params = ctypes.c_void_p(graph), NodeParams()
    code = driver.cuGraphGetRootNodes(raw, None, ctypes.byref(count))
    if code or count.value != 1:
        return f"the graph begins with {count.value} nodes (CUDA error {code})"
    code = driver.cuGraphGetRootNodes(raw, ctypes.byref(node), ctypes.byref(count))
    code = code or driver.cuGraphNodeGetType(node, ctypes.byref(kind))
    if code or kind.value != _KERNEL_NODE:
        return f"the graph begins with a node of kind {kind.value} (CUDA error {code})"
    code = driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params))
    # Another kernel must never receive this kernel's argument.
    if code or params.function != function.value:
        return f"the graph begins with another kernel (CUDA error {code})"
    return node.value or 0
