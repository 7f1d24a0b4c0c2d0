"""Memory that cuBLAS works in, kept in a pool that no tensor is allocated from.

torch gives each pair of a cuBLAS handle (one for each thread) and a stream two workspaces from its
allocator, one of cuBLAS and one of cuBLASLt, which runs products with a bias
(aten/src/ATen/cuda/CublasHandlePool.cpp). A graph goes on writing to those that were there at
capture. All of them may be given back at any time: ``torch.compile`` in mode ``reduce-overhead``
does so around each of its own captures (torch/_inductor/cudagraph_trees.py,
``clear_cublas_manager``). From then on a replay would overwrite whatever tensors lie there by
then; and once the memory is the device's again, launching a graph that sets some of it to zero
ends the process. So the workspaces of streams that are captured come from a pool for each stream
that serves nothing else and stays for good: one given back is free in there, and the next of that
stream takes its place.
"""

from __future__ import annotations

import os
import threading

import torch

from dispatchkit.backends.cuda.segments import segments_of

_guard = threading.Lock()
_pools: dict[tuple[int, int], torch.cuda.MemPool] = {}


def hold_workspace(stream: torch.cuda.Stream) -> None:
    """Allocate this thread's workspaces for a stream from the stream's own pool.

    To be called before anything else uses cuBLAS on the stream, a capture included: torch may
    have given the last ones back meanwhile. It queues a tiny product there, and takes some tens of
    microseconds, but for the first call of a process, which loads cuBLAS. Within a
    ``torch.cuda.use_mem_pool`` of the caller, the memory comes from there. Allocators other than
    torch's native one know no such pools: there nothing is done.

    Args:
        stream: The stream, which is the current one.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return
    place = stream.device_index, stream.cuda_stream
    with _guard:
        pool = _pools.get(place)
        if pool is None:
            pool = _pools[place] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, stream.device_index):
        torch.cuda.current_blas_handle()  # asking for it makes the workspace of cuBLAS
        if _may_multiply():
            # Nothing else asks for the one of cuBLASLt: it is made by the first product that goes
            # there, as those with a bias of one dimension do.
            square = torch.zeros(16, 16, device=torch.device("cuda", stream.device_index))
            torch.addmm(square[0], square, square)


def workspace_bytes(stream: torch.cuda.Stream) -> int:
    """Return the bytes that are reserved for the workspaces of a stream."""
    with _guard:
        pool = _pools.get((stream.device_index, stream.cuda_stream))
    if pool is None:
        return 0
    return sum(int(segment["total_size"]) for segment in segments_of(pool.id))


def _may_multiply() -> bool:
    """Return whether torch refuses no product; where it does, none is captured either."""
    if not torch.are_deterministic_algorithms_enabled():
        return True
    # at::Context::alertCuBLASConfigNotDeterministic
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
