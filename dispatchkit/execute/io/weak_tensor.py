"""Aliases of tensors that do not own their memory."""

from __future__ import annotations

import torch


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a device tensor that does not own its memory.

    The allocator may then reuse the memory for later graphs of the pool, which is the purpose of
    weak outputs. CPU memory would be returned to the system, so there the alias owns it.
    """
    if tensor.device.type != "cuda" or tensor.numel() == 0:
        return tensor
    storage = tensor.untyped_storage()
    # Source: torch/_inductor/cudagraph_trees.py creates its non-owning aliases this way.
    alias = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    weak = torch.empty((0,), dtype=tensor.dtype, device=tensor.device)
    weak.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
    return weak
