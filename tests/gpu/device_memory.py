"""Device memory in use, which tests can attribute to this process only if it runs alone."""

from __future__ import annotations

import time

import torch


def outside() -> int:
    """Return the bytes in use on the device outside torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def is_alone() -> bool:
    """Return whether no other process allocates or frees memory on the device meanwhile."""
    torch.zeros(1, device="cuda")
    seen = set()
    for _ in range(20):
        torch.cuda.synchronize()
        seen.add(outside())
        time.sleep(0.02)
    return len(seen) == 1
