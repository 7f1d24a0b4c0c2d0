"""Allocate the cuBLAS workspaces of each captured stream from a separate memory pool.

torch allocates two workspaces for each combination of a thread's cuBLAS handle and a stream: one
for cuBLAS, and one for cuBLASLt, which computes matrix products with a bias
(aten/src/ATen/cuda/CublasHandlePool.cpp). Replays of a graph write to the workspaces of its
capture, but torch may free these workspaces at any time. For example, ``torch.compile`` in mode
``reduce-overhead`` frees all workspaces before and after each of its captures
(torch/_inductor/cudagraph_trees.py, ``clear_cublas_manager``). A replay would then overwrite
tensors allocated in this memory. If the memory was returned to the device, a graph that zeroes a
workspace would crash the process.

Workspaces of captured streams are therefore allocated from a separate pool per stream, which is
never freed. The memory of a freed workspace stays in the pool for the stream's next workspace.
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

    Call this function before other uses of cuBLAS on the stream, including captures, because torch
    may have freed earlier workspaces. The function queues a tiny matrix product, which takes tens
    of microseconds. The first call in a process also loads cuBLAS. Inside a
    ``torch.cuda.use_mem_pool`` block of the caller, the memory comes from the block's pool. Only
    torch's native allocator has pools; with other allocators, the call has no effect.

    Args:
        stream: The stream, which must be the current stream.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return
    key = stream.device_index, stream.cuda_stream
    with _guard:
        pool = _pools.get(key)
        if pool is None:
            pool = _pools[key] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, stream.device_index):
        torch.cuda.current_blas_handle()  # allocates the cuBLAS workspace
        if _may_multiply():
            # Products with a one-dimensional bias use cuBLASLt. The first of them allocates the
            # cuBLASLt workspace.
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
    """Return whether torch's determinism settings allow matrix products."""
    if not torch.are_deterministic_algorithms_enabled():
        return True
    # at::Context::alertCuBLASConfigNotDeterministic
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
