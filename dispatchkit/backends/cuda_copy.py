"""The first node of a graph: one kernel that brings all small device inputs in.

A copy by torch before each launch costs more on the host than the launch itself. A kernel that
is a node of the graph costs one call: its parameters are set anew, by value, before the launch.

The kernel is given in PTX, which every driver compiles for its device when it is loaded, so that
no compiler of CUDA is needed. ``blockIdx.y`` is the number of the piece. Each piece is copied in
the widest words that its addresses and length allow, and behind it as much fill is written as is
asked for. A piece whose source is its target is not copied.

Source: CUDA Driver API, "Module Management", "Execution Control" and "Graph Management"; PTX ISA
7.0.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import attrs
import torch

from dispatchkit.backends.cuda_driver import DriverCallError, driver_library

#: Pieces of one node at most.
MAX_PIECES = 16
_THREADS, _MAX_BLOCKS, _WIDEST = 256, 64, 16
_KERNEL_NODE = 0
# Options of the compiler of PTX: where its complaints go, and how much room there is.
_ERROR_LOG, _ERROR_LOG_BYTES, _LOG_BYTES = 5, 6, 4096

_KINDS = {16: "v4.u32", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}
_VALUES = {16: "{%w0, %w1, %w2, %w3}", 8: "%long"}


def _loop(name: str, width: int, num_bytes: str, end: str, body: str) -> str:
    """Return a loop over words of a width; it is left out where the mask is no multiple of it."""
    return f"""
    and.b64 %low, %mask, {width - 1};
    setp.ne.u64 %done, %low, 0;
    @%done bra NOT_{name}_{width};
    mul.lo.u32 %at, %first, {width};
    mul.lo.u32 %step, %all, {width};
{name}_{width}:
    setp.ge.u32 %done, %at, {num_bytes};
    @%done bra {end};
    cvt.u64.u32 %offset, %at;{body}
    add.u32 %at, %at, %step;
    bra {name}_{width};
NOT_{name}_{width}:"""


def _copy_loop(width: int) -> str:
    kind, value = _KINDS[width], _VALUES.get(width, "%word")
    body = f"""
    add.s64 %source, %from, %offset;
    add.s64 %target, %to, %offset;
    ld.global.{kind} {value}, [%source];
    st.global.{kind} [%target], {value};"""
    return _loop("COPY", width, "%bytes", "TAIL", body)


def _fill_loop(width: int) -> str:
    kind, value = _KINDS[width], _VALUES.get(width, "%word")
    narrow = "" if width == 8 else "\n    cvt.u32.u64 %word, %long;"
    body = f"""
    add.s64 %target, %to, %offset;
    and.b32 %word, %at, 7;
    shl.b32 %word, %word, 3;
    shr.u64 %long, %fill, %word;{narrow}
    st.global.{kind} [%target], {value};"""
    return _loop("FILL", width, "%tail", "END", body)


def kernel_text() -> str:
    """Return the kernel in PTX; its one argument is a ``Work``."""
    return f""".version 7.0
.target sm_70
.address_size 64

.visible .entry dispatchkit_copy(.param .align 8 .b8 work[{32 * MAX_PIECES}])
{{
    .reg .pred %done;
    .reg .b32 %at, %step, %first, %all, %bytes, %tail, %piece;
    .reg .b32 %blocks, %threads, %block, %thread, %word, %w0, %w1, %w2, %w3;
    .reg .b64 %base, %of_8, %of_4, %offset, %from, %to, %fill, %mask, %low;
    .reg .b64 %source, %target, %long;

    mov.b64 %base, work;
    mov.u32 %piece, %ctaid.y;
    mul.wide.u32 %offset, %piece, 8;
    add.s64 %of_8, %base, %offset;
    mul.wide.u32 %offset, %piece, 4;
    add.s64 %of_4, %base, %offset;
    ld.param.u64 %from, [%of_8];
    ld.param.u64 %to, [%of_8+{8 * MAX_PIECES}];
    ld.param.u64 %fill, [%of_8+{16 * MAX_PIECES}];
    ld.param.u32 %bytes, [%of_4+{24 * MAX_PIECES}];
    ld.param.u32 %tail, [%of_4+{28 * MAX_PIECES}];
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mad.lo.u32 %first, %block, %threads, %thread;
    mul.lo.u32 %all, %blocks, %threads;
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;
    setp.eq.u64 %done, %from, %to;
    @%done bra TAIL;
    cvt.u64.u32 %mask, %bytes;
    or.b64 %mask, %mask, %from;
    or.b64 %mask, %mask, %to;
{"".join(map(_copy_loop, (16, 8, 4, 2, 1)))}
TAIL:
    cvt.u64.u32 %offset, %bytes;
    add.s64 %to, %to, %offset;
    cvt.u64.u32 %mask, %tail;
    or.b64 %mask, %mask, %to;
{"".join(map(_fill_loop, (8, 4, 2, 1)))}
END:
    ret;
}}
"""


class Work(ctypes.Structure):
    """The kernel's argument; fill is repeated every eight bytes."""

    _fields_ = (
        ("sources", ctypes.c_uint64 * MAX_PIECES),
        ("targets", ctypes.c_uint64 * MAX_PIECES),
        ("fills", ctypes.c_uint64 * MAX_PIECES),
        ("num_bytes", ctypes.c_uint * MAX_PIECES),
        ("tail_bytes", ctypes.c_uint * MAX_PIECES),
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
    """The kernel as one device has it, and the driver's calls that it takes.

    Attributes:
        function: The kernel.
        launch: ``cuLaunchKernelEx``.
        change: ``cuGraphExecKernelNodeSetParams_v2``.
        find: Returns the node that a raw graph begins with, or why that is not this kernel.
        enter: Makes the device's context the thread's own.
        thread: Whether this thread has a context, as ``has_context``.
    """

    function: ctypes.c_void_p
    launch: Callable[..., int]
    change: Callable[..., int]
    find: Callable[[int], int | str]
    enter: Callable[[], None]
    thread: threading.local = attrs.field(factory=threading.local, repr=False)

    def ensure_context(self) -> None:
        """Give this thread a context if it has none: without, ``change`` ends the process."""
        if not hasattr(self.thread, "has_context"):
            self.enter()
            self.thread.has_context = True


class CopyNode:
    """The copy at the beginning of one graph; it copies nothing until it is told.

    Whoever launches the graph sets it before, under the lock that the launch is made under: what
    was set last is done by every launch from then on.

    Args:
        kernel: The kernel.
        num_pieces: How many pieces it brings in, at most ``MAX_PIECES``.
        num_bytes: Bytes of the largest.
    """

    def __init__(self, kernel: CopyKernel, num_pieces: int, num_bytes: int) -> None:
        blocks = -(-num_bytes // (_THREADS * _WIDEST))
        self._kernel = kernel
        self._grid = (max(1, min(_MAX_BLOCKS, blocks)), num_pieces, 1)
        self._nothing = Work()
        self._exec, self._node = ctypes.c_void_p(), ctypes.c_void_p()
        self._problem = ""
        self._idle = ctypes.c_void_p()

    def record(self, stream: int) -> None:
        """Queue it on a stream: first thing in a capture. It copies nothing.

        Args:
            stream: The raw handle.
        """
        code = launch_once(self._kernel, self._grid, self._nothing, stream)
        if code:
            self._problem = f"its capture failed with CUDA error {code}"

    def attach(self, graph: Any) -> str:
        """Find itself in the graph it was recorded in; return what stands in the way, if any."""
        raw, handle = (getattr(graph, f"raw_{what}_handle", None) for what in ("graph", "exec"))
        if self._problem or raw is None or handle is None:
            return self._problem or "the graph gives no handle of itself"
        found = self._kernel.find(raw)
        if isinstance(found, str):
            return found
        self._exec, self._node = ctypes.c_void_p(handle), ctypes.c_void_p(found)
        self._idle = self._params(self._nothing)
        return ""

    def stop(self) -> int:
        """Copy nothing from now on; return CUDA's error code."""
        self._kernel.ensure_context()
        return self._kernel.change(self._exec, self._node, self._idle)

    def sender(
        self, pieces: Sequence[tuple[int, int, int, int]]
    ) -> Callable[[Sequence[torch.Tensor]], int]:
        """Return what sets the node for calls of one size, from contiguous tensors.

        It returns CUDA's error code. The tensors are read when the graph runs, in the order of
        the stream it is launched on.

        Args:
            pieces: For each tensor where it goes, how many bytes of it are copied, how many
                bytes of fill are written behind, and eight bytes of fill as a number.
        """
        work = Work()
        for index, (target, num_bytes, tail_bytes, fill) in enumerate(pieces):
            work.targets[index], work.fills[index] = target, fill
            work.num_bytes[index], work.tail_bytes[index] = num_bytes, tail_bytes
        params, sources, thread = self._params(work), work.sources, self._kernel.thread
        change, handle, node = self._kernel.change, self._exec, self._node
        ensure_context = self._kernel.ensure_context

        def send(values: Sequence[torch.Tensor]) -> int:
            # One by one: half the price of struct, which asks ctypes for a buffer each time.
            for index, value in enumerate(values):
                sources[index] = value.data_ptr()
            if not hasattr(thread, "has_context"):  # asked here, since a call costs more
                ensure_context()
            return change(handle, node, params)

        return send

    def _params(self, work: Work) -> ctypes.c_void_p:
        """Return where parameters lie that give the kernel some work; they keep it alive."""
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(work))
        params = NodeParams(self._kernel.function, self._grid, (_THREADS, 1, 1))
        params.params = ctypes.addressof(arguments)
        place: Any = ctypes.c_void_p(ctypes.addressof(params))
        place.kept = work, arguments, params
        return cast(ctypes.c_void_p, place)


def launch_once(kernel: CopyKernel, grid: tuple[int, int, int], work: Work, stream: int) -> int:
    """Queue the kernel on a stream; return CUDA's error code."""
    config = LaunchConfig(grid, (_THREADS, 1, 1))
    config.stream = stream
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(work))
    return kernel.launch(
        ctypes.addressof(config), kernel.function, ctypes.addressof(arguments), None
    )


@lru_cache(maxsize=64)
def copy_kernel(device_index: int) -> CopyKernel | str:
    """Return the kernel, loaded on a device, or why there is none. Not inside a capture."""
    try:
        with torch.cuda.device(device_index):
            torch.cuda.current_stream().synchronize()  # gives this thread a context
            kernel = _loaded(driver_library(), device_index)
            stream = torch.cuda.current_stream().cuda_stream
            # Whatever a first launch brings about is not brought about inside a capture.
            code = launch_once(kernel, (1, 1, 1), Work(), stream)
    except (DriverCallError, AttributeError, RuntimeError) as error:
        return f"the kernel cannot be had: {error}"
    return f"the kernel's launch failed with CUDA error {code}" if code else kernel


def _loaded(driver: ctypes.CDLL, device_index: int) -> CopyKernel:
    launch = driver.cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    change = driver.cuGraphExecKernelNodeSetParams_v2
    change.argtypes = (ctypes.c_void_p,) * 3
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(_LOG_BYTES)
    options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
    text = ctypes.c_char_p(kernel_text().encode())
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

    return CopyKernel(function, launch, change, find, enter)


def _first_node(driver: ctypes.CDLL, graph: int, function: ctypes.c_void_p) -> int | str:
    """Return the one node that a graph begins with, if it is the kernel."""
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
    # Another kernel must never be given this one's argument.
    if code or params.function != function.value:
        return f"the graph begins with another kernel (CUDA error {code})"
    return node.value or 0
