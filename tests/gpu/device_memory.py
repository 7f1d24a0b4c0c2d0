"""What the device has given away, which tells of this process only where it is alone."""

from __future__ import annotations

import time

import torch


def outside() -> int:
    """Return the bytes that the device has given away past torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def is_alone() -> bool:
    """Return whether no other process takes memory of the device or gives it back meanwhile."""
    torch.zeros(1, device="cuda")
    seen = set()
    for _ in range(20):
        torch.cuda.synchronize()
        seen.add(outside())
        time.sleep(0.02)
    return len(seen) == 1
