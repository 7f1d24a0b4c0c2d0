"""CopyNode on CUDA: a kernel that copies small inputs at the beginning of a graph.

Copying an input with torch before each launch takes more host time than the launch itself. Setting
the parameters of a kernel node takes one call, which copies them by value.

Host inputs are part of the parameters, so their memory may be overwritten after the call. The time
of the call grows with the kernel's capacity for host data, even if the capacity is not used.
Therefore, there is one kernel for each of the ``CAPACITIES``. A kernel that the driver cannot load
is not used.

``copy.cu`` is the source of the kernel. The driver compiles ``copy.ptx`` for the device, and caches
the result for later processes; NVRTC would compile in every process (``bench/floors.py``, group
"kernel"). ``blockIdx.y`` is the index of the input. Each input is copied in the widest words that
its addresses and length allow.

Measured on one H200 (torch 2.11, driver 580): writing three host inputs with numpy, setting the
parameters and launching the graph takes 4.0 us with up to 2 KiB of data, 4.5 us with 8 KiB, 5.3 us
with 16 KiB and 6.5 us with 29 KiB. Copies from pinned memory, guarded by an event, take 8.2 us
including the launch, and each step must also wait for the previous step.

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

#: Capacities for host data in bytes, one per kernel. CUDA limits the parameters of a kernel to
#: 32,764 bytes in all.
CAPACITIES = (16, 2 << 10, 8 << 10, 16 << 10, 29 << 10)
#: Maximum number of inputs of a node.
MAX_REGIONS = 16
#: Every driver supports kernel parameters of up to this size in bytes. Larger parameters need PTX
#: ISA 8.1 (CUDA 12.1).
_PLAIN_PARAMETERS = 4096
_THREADS, _MAX_BLOCKS, _WIDEST = 256, 64, 16
_KERNEL_NODE = 0
# CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, and the size of the buffer.
_ERROR_LOG, _ERROR_LOG_BYTES, _LOG_BYTES = 5, 6, 4096


class Work(ctypes.Structure):
    """The kernel's first argument, with one entry per input.

    Each entry of ``fills`` is a pattern of eight bytes, written after the rows of the input.
    """

    _fields_ = (
        ("sources", ctypes.c_uint64 * MAX_REGIONS),
        ("targets", ctypes.c_uint64 * MAX_REGIONS),
        ("fills", ctypes.c_uint64 * MAX_REGIONS),
        ("num_bytes", ctypes.c_uint * MAX_REGIONS),
        ("tail_bytes", ctypes.c_uint * MAX_REGIONS),
    )


class LaunchConfig(ctypes.Structure):
    """The driver's ``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class NodeParams(ctypes.Structure):
    """The driver's ``CUDA_KERNEL_NODE_PARAMS``, version 2."""

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
    """The copy kernel on one device, with the driver functions that it requires.

    Attributes:
        function: Handle of the kernel.
        launch: ``cuLaunchKernelEx``.
        change: ``cuGraphExecKernelNodeSetParams_v2``.
        find: Function that returns the first node of a raw graph, or the reason why the node is not
            this kernel.
        enter: Function that makes the device's context current in this thread.
        capacity: Size in bytes of the kernel's second argument, the host data.
        thread: Thread-local state; ``has_context`` is set in threads with a current context.
    """

    function: ctypes.c_void_p
    launch: Callable[..., int]
    change: Callable[..., int]
    find: Callable[[int], int | str]
    enter: Callable[[], None]
    capacity: int = CAPACITIES[0]
    thread: threading.local = attrs.field(factory=threading.local, repr=False)

    def ensure_context(self) -> None:
        """Make the device's context current in this thread; without it, ``change`` crashes."""
        if not hasattr(self.thread, "has_context"):
            self.enter()
            self.thread.has_context = True


class CopyNode:
    """The copy kernel at the beginning of one graph; see ``backends.optional.CopyNode``.

    A launch uses the latest parameters, so hold a lock while setting them and launching the graph.

    Args:
        kernel: Kernel with enough capacity for the host inputs.
        num_regions: Number of inputs to copy, at most ``MAX_REGIONS``.
        num_bytes: Size of the largest input in bytes.

    Attributes:
        data: Host buffer that is read when the node's parameters are set.
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
        # Current parameters of the node; None if unknown or if host data is copied.
        self._work: Work | None = None

    def record(self, stream: int) -> None:
        """Queue the node on a capturing stream (a raw handle), before any other work."""
        code = launch_once(self._kernel, self._grid, self._nothing, stream, self.data)
        if code:
            self._problem = f"the copy node could not be captured: CUDA error {code}"

    def attach(self, graph: Any) -> str:
        """Find the node in its captured graph; return the problem, or ``""``."""
        raw, handle = (getattr(graph, f"raw_{what}_handle", None) for what in ("graph", "exec"))
        if self._problem or raw is None or handle is None:
            return self._problem or "the graph does not expose its handles"
        found = self._kernel.find(raw)
        if isinstance(found, str):
            return found
        self._exec, self._node = ctypes.c_void_p(handle), ctypes.c_void_p(found)
        self._idle = self._params(self._nothing)
        return ""

    def stop(self) -> int:
        """Make later launches copy nothing; return the CUDA error code."""
        self._work = None
        self._kernel.ensure_context()
        return self._kernel.change(self._exec, self._node, self._idle)

    def setter(
        self, regions: Sequence[CopyRegion], offsets: Sequence[int] = ()
    ) -> Callable[[Sequence[torch.Tensor]], int]:
        """Return a function that sets the node's parameters for batches of one size.

        The function accepts contiguous tensors and returns the CUDA error code. The tensors are
        read in stream order when the graph runs. ``data`` is read before the function returns.
        Without ``offsets``, repeated calls with tensors at the same addresses call CUDA only the
        first time.

        Args:
            regions: Regions of the tensors, followed by the regions of host inputs.
            offsets: Offsets of the host inputs in ``data``.
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
        addresses = [0] * MAX_REGIONS  # reading a list takes half as long as reading a ctypes array

        def set_node(values: Sequence[torch.Tensor]) -> int:
            # Separate assignments take half as long as packing with struct, which requests a buffer
            # from ctypes in each call.
            for index, value in enumerate(values):
                address = value.data_ptr()
                if address != addresses[index]:
                    self._work = None  # first, because an interrupt may occur at any point below
                    sources[index] = addresses[index] = address
            if self._work is work:
                return 0
            self._work = None
            if not hasattr(thread, "has_context"):  # inlined, because a call takes longer
                ensure_context()
            code = change(handle, node, params)
            if keeps and not code:
                self._work = work
            return code

        return set_node

    def _params(self, work: Work) -> ctypes.c_void_p:
        """Return a pointer to new node parameters. The pointer keeps their memory alive."""
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
    """Queue the kernel on a stream; return the CUDA error code."""
    config = LaunchConfig(grid, (_THREADS, 1, 1))
    config.stream = stream
    arguments = _arguments(work, data)
    return kernel.launch(
        ctypes.addressof(config), kernel.function, ctypes.addressof(arguments), None
    )


def copy_node(device_index: int, num_regions: int, num_bytes: int, data: int) -> CopyNode | str:
    """Return a node with capacity for ``data`` bytes of host data, or why it is unavailable."""
    capacity = next((one for one in CAPACITIES if one >= data), None)
    if capacity is None:
        return f"{data} bytes of host data exceed the maximum of {CAPACITIES[-1]}"
    kernel = copy_kernel(device_index, capacity)
    return kernel if isinstance(kernel, str) else CopyNode(kernel, num_regions, num_bytes)


@lru_cache(maxsize=64)
def copy_kernel(device_index: int, capacity: int = CAPACITIES[0]) -> CopyKernel | str:
    """Load the kernel on a device; return it, or why it is unavailable.

    Do not call this function inside a capture.
    """
    try:
        with torch.cuda.device(device_index):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            kernel = _loaded(driver_library(), device_index, capacity)
            stream = torch.cuda.current_stream().cuda_stream
            # The driver's setup for the first launch must not happen inside a capture.
            code = launch_once(kernel, (1, 1, 1), Work(), stream, (ctypes.c_ubyte * capacity)())
    except (DriverCallError, AttributeError, RuntimeError) as error:
        return f"the copy kernel cannot be loaded: {error}"
    return f"the copy kernel cannot be launched: CUDA error {code}" if code else kernel


def kernel_text(capacity: int) -> str:
    """Return the kernel's PTX for a capacity in bytes."""
    text = Path(__file__).with_name("copy.ptx").read_text(encoding="ascii")
    if ctypes.sizeof(Work) + capacity > _PLAIN_PARAMETERS:
        text = text.replace(".version 7.7", ".version 8.1")
    return text.replace(f"[{CAPACITIES[-1]}]", f"[{capacity}]")


def _loaded(driver: ctypes.CDLL, device_index: int, capacity: int) -> CopyKernel:
    launch = driver.cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    # No argtypes, because all arguments are ctypes.c_void_p; see ``launch.direct_launch``.
    change = driver.cuGraphExecKernelNodeSetParams_v2
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
    text = ctypes.c_char_p(kernel_text(capacity).encode())
    code = driver.cuModuleLoadDataEx(ctypes.byref(module), text, 2, options, values)
    if code:
        problem = log.value.decode(errors="replace").strip()
        raise DriverCallError(f"cuModuleLoadDataEx failed with CUDA error {code}: {problem}")
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
    """Return the root node of a graph if it is the copy kernel, or else the problem."""
    node, count, kind = ctypes.c_void_p(), ctypes.c_size_t(0), ctypes.c_int(-1)
    raw, params = ctypes.c_void_p(graph), NodeParams()
    code = driver.cuGraphGetRootNodes(raw, None, ctypes.byref(count))
    if not code and count.value != 1:
        return f"the graph begins with {count.value} nodes instead of the copy node"
    code = code or driver.cuGraphGetRootNodes(raw, ctypes.byref(node), ctypes.byref(count))
    code = code or driver.cuGraphNodeGetType(node, ctypes.byref(kind))
    if not code and kind.value != _KERNEL_NODE:
        return "the graph begins with a node that is not a kernel"
    code = code or driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params))
    if code:
        return f"the first node of the graph cannot be read: CUDA error {code}"
    # No other kernel may receive this kernel's arguments.
    if params.function != function.value:
        return "the graph begins with a kernel other than the copy kernel"
    return node.value or 0
