"""A tape that offers every optional part of a backend, as a device backend would."""

from __future__ import annotations

import ctypes

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dispatchkit.backends.tape import TapeBackend
from dispatchkit.errors import ReplayError


class Notes:
    """Storages that operations read or write."""

    is_plain = True

    def __init__(self):
        self.given = {}

    def record(self, func, args, kwargs):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.given[storage._cdata] = storage


class Watch(TorchDispatchMode):
    """Mode that records each operation in notes."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.notes.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class OfferedNode:
    """Node that copies before a graph's replay."""

    def __init__(self, data_bytes):
        self.data = (ctypes.c_ubyte * data_bytes)()
        self.work, self.is_recorded = (), False

    def record(self, stream):
        self.is_recorded = True

    def attach(self, graph):
        graph.node = self
        return "" if self.is_recorded else "it was not recorded"

    def setter(self, regions, offsets=()):
        def set_node(tensors):
            data = (ctypes.c_ubyte * len(self.data)).from_buffer_copy(self.data)
            begin = ctypes.addressof(data)
            sources = [*(one.data_ptr() for one in tensors), *(begin + one for one in offsets)]
            self.work, self.kept = tuple(zip(regions, sources, strict=True)), data
            return 0

        return set_node

    def stop(self):
        self.work = ()
        return 0

    def play(self):
        for region, source in self.work:
            if source != region.target:
                ctypes.memmove(region.target, source, region.num_bytes)
            fill = region.fill.to_bytes(8, "little") * -(-region.tail_bytes // 8)
            ctypes.memmove(region.target + region.num_bytes, fill, region.tail_bytes)


class OfferedGraph:
    """A tape graph with a handle, which keeps the storages of its operations."""

    num_plain_operations = 0
    node = None

    def __init__(self, graph, handle, holds):
        self.graph, self.handle, self.is_released = graph, handle, False
        self.holds, self.host_tensors = holds, []

    @property
    def outputs(self):
        return self.graph.outputs

    @property
    def has_random_state(self):
        return self.graph.has_random_state

    def replay(self):
        if self.node is not None:
            self.node.play()
        self.graph.replay()

    def release(self):
        self.is_released = True
        self.holds = []
        self.graph.release()


class OfferingTape(TapeBackend):
    """A tape that launches by handle, uploads, and captures with or without a watch."""

    def __init__(self):
        super().__init__()
        self.by_handle = {}

    @property
    def capabilities(self):
        return attrs.evolve(super().capabilities, unwatched_captures=True)

    def new_notes(self):
        return Notes()

    def capture(self, run, *, watched=True, notes=None, compiled=False, draws=True, **options):
        seen = notes or Notes()

        def watched_run():
            with Watch(seen):
                return run()

        graph = super().capture(watched_run if watched and notes is None else run, **options)
        handle = len(self.by_handle) + 1
        self.by_handle[handle] = OfferedGraph(graph, handle, list(seen.given.values()))
        return self.by_handle[handle]

    def direct_launch(self, graph):
        if not isinstance(graph, OfferedGraph):
            return None
        if graph.is_released:
            raise ReplayError("The graph is released.")
        return self.launch, ctypes.c_void_p(graph.handle)

    def launch(self, graph, stream):
        self.by_handle[graph.value].replay()
        return 0

    def upload(self, graph, stream):
        if graph.is_released:
            raise ReplayError("The graph is released.")
        return True

    def copy_node(self, num_regions, num_bytes, data_bytes=0):
        return OfferedNode(data_bytes)
