"""Memory pools that can return their memory to the device and keep their addresses.

Graphs contain fixed addresses. The driver can map physical memory to reserved addresses
(``cuMemAddressReserve``, ``cuMemCreate``, ``cuMemMap``) and unmap it, which discards the contents.
Only torch can unmap the segments of its own allocator, so a pool that can sleep has a separate
allocator, written in C (``sleep.c``) and compiled on first use.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from dispatchkit.backends.cuda.pool import CudaPool
from dispatchkit.backends.cuda.segments import Segment, segments_of
from dispatchkit.errors import ReplayError

#: Environment variable with the path of the compiled allocator, for machines without a compiler.
LIBRARY_VARIABLE = "DISPATCHKIT_SLEEP_LIBRARY"

_SOURCE = Path(__file__).with_name("sleep.c")
# In the order of the fields of struct Driver in sleep.c.
_DRIVER_CALLS = (
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAllocationGranularity",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuThreadExchangeStreamCaptureMode",
)
_OUT_OF_MEMORY = 2
_NOT_FOUND = 500

_T = TypeVar("_T")


class UnavailableError(Exception):
    """Raised if pools cannot sleep on this machine; the message is the reason."""


def build(target: Path) -> None:
    """Compile the allocator to a shared library with the C compiler (``CC``, default ``cc``).

    Raises:
        UnavailableError: The compiler cannot be run, or fails.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            raise UnavailableError(
                f"the C compiler {compiler[0]!r} cannot be run ({error.strerror}); install it, set "
                f"CC to another compiler, or set {LIBRARY_VARIABLE} to a compiled allocator"
            ) from None
        except subprocess.CalledProcessError as error:
            problem = " ".join(error.stderr.split())[:200] or f"exit status {error.returncode}"
            raise UnavailableError(
                f"the C compiler {compiler[0]!r} failed: {problem}; set CC to another compiler, or "
                f"set {LIBRARY_VARIABLE} to a compiled allocator"
            ) from None
        made.replace(target)  # atomic, because another process may also build it


@functools.cache
def load_allocator() -> Allocator:
    """Return the allocator of this process, compiling it on first use.

    If ``DISPATCHKIT_SLEEP_LIBRARY`` names a compiled allocator, this allocator is loaded instead.

    Raises:
        UnavailableError: The allocator cannot be used on this machine.
    """
    allocator = torch.cuda.get_allocator_backend()
    if allocator != "native":
        raise UnavailableError(
            f"torch's allocator {allocator!r} does not support pools; use 'native', the default"
        )
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        path = Path(named)
    else:
        mark = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir(), f"dispatchkit-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise UnavailableError(
                f"{folder} belongs to another user; set TMPDIR to a different folder"
            )
        path = folder / f"sleep-{mark}.so"
        if not path.exists():
            build(path)
    return Allocator(path)


class SleepingPool(CudaPool):
    """A private memory pool that can sleep, for graphs or tensors.

    Args:
        allocator: The allocator of the pool's segments.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        # torch pools in use, and how many graphs each has; both by handle.
        self._pools: dict[Any, torch.cuda.MemPool] = {}
        self._uses_of: Counter[Any] = Counter()
        self._asleep: list[int] = []
        super().__init__()

    def take(self) -> Any:
        """Return the handle of the torch pool for a new graph, and count the graph."""
        handle = super().take()
        self._uses_of[handle] += 1
        return handle

    def give_back(self, handle: Any) -> None:
        """Decrement a torch pool's count of graphs; after its last graph, drop the torch pool."""
        self._uses_of[handle] -= 1
        super().give_back(handle)
        if not self._uses_of[handle] and handle != self._handle:
            del self._uses_of[handle]
            self._pools.pop(handle, None)

    def segments(self, device_index: int) -> list[Segment]:
        """Return the pool's segments of device memory; empty while the pool is asleep."""
        if self._asleep:
            return []
        found: list[Segment] = []
        with self.guard:
            for handle in {*self._pools, *self._earlier}:
                segments = segments_of(handle)
                if not segments:
                    self._earlier.discard(handle)
                found += segments
        return [segment for segment in found if segment["device"] == device_index]

    def allocate(self, make: Callable[[], _T], device_index: int) -> _T:
        """Call a function, allocating its new tensors from the pool, and return its result."""
        with torch.cuda.use_mem_pool(self._pools[self._handle], device_index):
            return make()

    def sleep(self, device_index: int) -> int:
        """Release the memory of the pool; return the number of bytes.

        Call this method only if no work in flight uses this memory.
        """
        segments = self.segments(device_index)
        # Set first, so that wake() maps the memory even if a signal interrupts this method.
        self._asleep = [segment["address"] for segment in segments]
        try:
            self._allocator.unmap(self._asleep)
        except ReplayError:  # all segments are mapped again
            self._asleep = []
            raise
        return sum(int(segment["total_size"]) for segment in segments)

    def wake(self) -> None:
        """Map new memory to the addresses of the pool.

        Raises:
            ReplayError: The memory could not be mapped. The pool stays asleep.
        """
        self._allocator.map(self._asleep)
        self._asleep = []

    def _new_handle(self) -> Any:
        pool = self._allocator.new_pool()
        self._pools[pool.id] = pool
        return pool.id


class Allocator:
    """An allocator whose segments can be unmapped and mapped again.

    Args:
        path: Path of the compiled library.

    Raises:
        UnavailableError: The library or the driver cannot be used.
    """

    def __init__(self, path: Path) -> None:
        try:
            library, driver = ctypes.CDLL(str(path)), ctypes.CDLL("libcuda.so.1")
            calls = [ctypes.cast(getattr(driver, name), ctypes.c_void_p) for name in _DRIVER_CALLS]
            library.dispatchkit_set_driver((ctypes.c_void_p * len(calls))(*calls))
            self._set_mapped: Any = library.dispatchkit_set_mapped
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"the driver or {path} cannot be loaded: {error}") from None
        self._set_mapped.argtypes = (ctypes.c_ulonglong, ctypes.c_int)
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(path), "dispatchkit_allocate", "dispatchkit_free"
        )

    def new_pool(self) -> torch.cuda.MemPool:
        """Return a torch pool whose segments can be unmapped."""
        return torch.cuda.MemPool(self._allocator.allocator())

    def unmap(self, addresses: Sequence[int]) -> None:
        """Release the physical memory of segments, which must not be used until ``map``.

        Call this method only if no work is in flight on the device.
        """
        self._change(addresses, wanted=False)

    def map(self, addresses: Sequence[int]) -> None:
        """Map new physical memory, with undefined contents, to segments.

        Raises:
            ReplayError: The driver failed to map a segment. All segments stay unmapped.
        """
        self._change(addresses, wanted=True)

    def _change(self, addresses: Sequence[int], *, wanted: bool) -> None:
        done: list[int] = []
        for address in addresses:
            code = self._set_mapped(address, int(wanted))
            if code == _NOT_FOUND:
                continue  # torch has freed the segment
            if code:
                for other in done:
                    self._set_mapped(other, int(not wanted))
                raise ReplayError(_problem(code, wanted=wanted))
            done.append(address)


def _problem(code: int, *, wanted: bool) -> str:
    if wanted and code == _OUT_OF_MEMORY:
        return (
            "The device does not have enough free memory to wake the pools. Free memory, then "
            "call wake() again."
        )
    return f"The driver refused to {'map' if wanted else 'unmap'} memory: CUDA error {code}."
