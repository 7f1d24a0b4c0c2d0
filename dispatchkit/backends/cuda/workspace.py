"""Allocate cuBLAS workspaces from separate memory pools.

torch allocates two workspaces for each pair of a cuBLAS handle (one per thread) and a stream, one
for cuBLAS and one for cuBLASLt, which runs products with a bias
(aten/src/ATen/cuda/CublasHandlePool.cpp). A graph keeps writing to the workspaces it was captured
with. They may be freed at any time: ``torch.compile`` in mode ``reduce-overhead`` frees all
workspaces around each of its captures (torch/_inductor/cudagraph_trees.py,
``clear_cublas_manager``). A replay would then overwrite tensors allocated in that memory, and if
the memory was returned to the device, launching a graph that zeroes a workspace would crash the
process. Workspaces of captured streams therefore come from a separate pool per stream, which is
never freed: the memory of a freed workspace stays in the pool and is used for the stream's next
workspace.
"""

from __future__ import annotations

import os
import threading

import torch

from dispatchkit.backends.cuda.segments import segments_of

_guard = threading.Lock()
_pools: dict[tuple[int, int], torch.cuda.MemPool] = {}


def hold_workspace(stream: torch.cuda.Stream) -> None:
    """Allocate this thread's workspaces for a stream from the stream's pool.

    Call it before other uses of cuBLAS on the stream, including captures, because torch may have
    freed earlier workspaces. It queues a tiny product, which takes tens of microseconds; the first
    call in a process also loads cuBLAS. Inside the caller's ``torch.cuda.use_mem_pool``, the memory
    comes from that pool. It has no effect with allocators other than torch's native allocator,
    which do not have pools.

    Args:
        stream: The stream, which must be the current one.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return
    place = stream.device_index, stream.cuda_stream
    with _guard:
        pool = _pools.get(place)
        if pool is None:
            pool = _pools[place] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, stream.device_index):
        torch.cuda.current_blas_handle()  # requesting it allocates the cuBLAS workspace
        if _may_multiply():
            # The first product that uses cuBLASLt allocates its workspace, such as a product with a
            # one-dimensional bias.
            square = torch.zeros(16, 16, device=torch.device("cuda", stream.device_index))
            torch.addmm(square[0], square, square)


def workspace_bytes(stream: torch.cuda.Stream) -> int:
    """Return the bytes reserved for the workspaces of a stream."""
    with _guard:
        pool = _pools.get((stream.device_index, stream.cuda_stream))
    if pool is None:
        return 0
    return sum(int(segment["total_size"]) for segment in segments_of(pool.id))


def _may_multiply() -> bool:
    """Return whether torch allows products; otherwise no products are captured."""
    if not torch.are_deterministic_algorithms_enabled():
        return True
    # at::Context::alertCuBLASConfigNotDeterministic
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
