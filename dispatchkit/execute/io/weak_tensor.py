"""Tensor aliases that do not own their memory."""

from __future__ import annotations

import torch


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a device tensor; the alias does not own the memory.

    If only aliases of an output are kept, the allocator may reuse the memory for later graphs of
    the pool. A CPU tensor is returned unchanged, because the system may reclaim its freed memory.
    """
    if tensor.device.type != "cuda" or tensor.numel() == 0:
        return tensor
    storage = tensor.untyped_storage()
    # As in torch/_inductor/cudagraph_trees.py.
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    weak = torch.empty((0,), dtype=tensor.dtype, device=tensor.device)
    weak.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
    return weak
