"""The keys that may be dispatched, with the state and graph of each."""

from dispatchkit.registry.entry import GraphEntry, KeyState
from dispatchkit.registry.registry import GraphRegistry, RegistryEvent

__all__ = ["GraphEntry", "GraphRegistry", "KeyState", "RegistryEvent"]
