"""The registry of graph keys, with the state and graph of each key."""

from dispatchkit.registry.entry import GraphEntry, KeyState
from dispatchkit.registry.registry import GraphRegistry, RegistryEvent

__all__ = ["GraphEntry", "GraphRegistry", "KeyState", "RegistryEvent"]
