"""Graph memory of a process: shared pools with a common budget and account."""

from dispatchkit.execute.memory.account import MemoryAccount, PoolAccount
from dispatchkit.execute.memory.graph_memory import GraphMemory, MemoryGroup
from dispatchkit.execute.memory.pool_group import PoolGroup, PoolMember
from dispatchkit.execute.memory.turns import GAP_S, LongPause, Pacer, Turns

__all__ = [
    "GAP_S",
    "GraphMemory",
    "LongPause",
    "MemoryAccount",
    "MemoryGroup",
    "Pacer",
    "PoolAccount",
    "PoolGroup",
    "PoolMember",
    "Turns",
]
