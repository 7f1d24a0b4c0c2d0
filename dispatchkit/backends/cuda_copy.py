"""Copying several small pieces of device memory by one kernel, launched by the driver itself.

The kernel is given here in PTX, which every driver compiles for its device when it is loaded: no
compiler of CUDA is needed. It copies words of four bytes; ``blockIdx.y`` is the number of the
piece. Its one argument is a ``Pieces``, taken by value at the launch, so that the next step may
change it at once.

Source: CUDA Driver API, "Module Management" and "Execution Control"; PTX ISA 7.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch

from dispatchkit.backends.cuda_driver import driver_library
from dispatchkit.backends.cuda_launch import runtime_library

#: Pieces of one launch at most.
MAX_PIECES = 16
_THREADS, _MAX_BLOCKS = 256, 64

_PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry dispatchkit_copy(.param .align 8 .b8 pieces[320])
{
    .reg .pred %done;
    .reg .b32 %at, %words, %step, %piece, %threads, %block, %thread, %blocks, %value;
    .reg .b64 %base, %offset, %from, %to, %source, %target;

    mov.b64 %base, pieces;
    mov.u32 %piece, %ctaid.y;
    mul.wide.u32 %offset, %piece, 4;
    add.s64 %offset, %base, %offset;
    ld.param.u32 %words, [%offset+256];
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %at, %block, %threads, %thread;
    setp.ge.u32 %done, %at, %words;
    @%done bra END;

    mul.wide.u32 %offset, %piece, 8;
    add.s64 %offset, %base, %offset;
    ld.param.u64 %from, [%offset];
    ld.param.u64 %to, [%offset+128];
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;
    mov.u32 %blocks, %nctaid.x;
    mul.lo.u32 %step, %blocks, %threads;
AGAIN:
    mul.wide.u32 %offset, %at, 4;
    add.s64 %source, %from, %offset;
    add.s64 %target, %to, %offset;
    ld.global.u32 %value, [%source];
    st.global.u32 [%target], %value;
    add.u32 %at, %at, %step;
    setp.lt.u32 %done, %at, %words;
    @%done bra AGAIN;
END:
    ret;
}
"""


class Pieces(ctypes.Structure):
    """The kernel's argument: addresses, and lengths in words of four bytes."""

    _fields_ = (
        ("sources", ctypes.c_void_p * MAX_PIECES),
        ("targets", ctypes.c_void_p * MAX_PIECES),
        ("words", ctypes.c_uint * MAX_PIECES),
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


class PieceCopy(Protocol):
    """Copies pieces of memory in one call."""

    def put(self, index: int, source: int, target: int, num_bytes: int) -> None:
        """Say what one piece is: two addresses, and a length that is a multiple of four."""

    def __call__(self, sources: list[int], count: int, stream: int) -> int:
        """Queue the first pieces, the first of them from new sources; return an error code."""


class KernelCopy:
    """Copies up to 16 pieces by one launch.

    Args:
        launch: ``cuLaunchKernelEx``.
        function: The kernel.
    """

    def __init__(self, launch: Callable[..., int], function: ctypes.c_void_p) -> None:
        self._pieces = Pieces()
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self._pieces))
        self._config = LaunchConfig((1, 1, 1), (_THREADS, 1, 1))
        self._arguments = (
            ctypes.c_void_p(ctypes.addressof(self._config)),
            function,
            ctypes.c_void_p(ctypes.addressof(self._params)),
            None,
        )
        self._launch, self._sources = launch, self._pieces.sources
        self._count, self._stream = 1, 0

    def put(self, index: int, source: int, target: int, num_bytes: int) -> None:
        """Say what one piece is: two addresses, and a length that is a multiple of four."""
        pieces = self._pieces
        pieces.sources[index], pieces.targets[index] = source, target
        pieces.words[index] = num_bytes // 4
        blocks = min(-(-num_bytes // 4 // _THREADS), _MAX_BLOCKS)
        self._config.grid[0] = max(self._config.grid[0], blocks)

    def __call__(self, sources: list[int], count: int, stream: int) -> int:
        """Queue the first pieces, the first of them from new sources; return an error code."""
        self._sources[: len(sources)] = sources
        if count != self._count or stream != self._stream:
            self._config.grid[1], self._config.stream = count, stream
            self._count, self._stream = count, stream
        return self._launch(*self._arguments)


@lru_cache(maxsize=1)
def kernel() -> tuple[Callable[..., int], ctypes.c_void_p] | None:
    """Return the launch and the kernel, loaded for the only device; None where they cannot be."""
    runtime = runtime_library()
    if runtime is None or torch.cuda.device_count() != 1:
        return None
    driver = driver_library()
    runtime.cudaFree(None)  # makes the device's context the thread's own
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuModuleLoadData(ctypes.byref(module), _PTX):
        return None
    if driver.cuModuleGetFunction(ctypes.byref(function), module, b"dispatchkit_copy"):
        return None
    launch = driver["cuLaunchKernelEx"]
    launch.argtypes, launch.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return launch, function


def kernel_copy() -> PieceCopy | None:
    """Return a new copy by the kernel; None where it cannot be."""
    found = kernel()
    return None if found is None else KernelCopy(*found)
