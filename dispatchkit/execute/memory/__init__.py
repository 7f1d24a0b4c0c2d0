"""The memory of all graphs of a process: shared pools, one budget, one account."""

from dispatchkit.execute.memory.account import MemoryAccount, PoolAccount
from dispatchkit.execute.memory.graph_memory import GraphMemory, MemoryGroup
from dispatchkit.execute.memory.pool_group import PoolGroup, PoolMember

__all__ = [
    "GraphMemory",
    "MemoryAccount",
    "MemoryGroup",
    "PoolAccount",
    "PoolGroup",
    "PoolMember",
]
