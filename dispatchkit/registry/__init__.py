"""What may be dispatched: keys, their graphs and the life of each."""

from dispatchkit.registry.entry import GraphEntry, KeyState
from dispatchkit.registry.registry import GraphRegistry, RegistryEvent

__all__ = ["GraphEntry", "GraphRegistry", "KeyState", "RegistryEvent"]
