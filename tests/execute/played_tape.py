"""A tape that imitates the driver's part for CUDA's copy nodes; import it after torch."""

from __future__ import annotations

import ctypes
import threading

from dispatchkit.backends.cuda.copy import (
    CAPACITIES,
    CopyKernel,
    CopyNode,
    LaunchConfig,
    NodeParams,
    Work,
)
from dispatchkit.backends.tape import TapeBackend


class PlayedTape(TapeBackend):
    """A tape whose graphs begin with CUDA's copy node; a handle is the number of its graph.

    Attributes:
        code: Error code returned when a node is set.
        stop_code: Error code returned when a node is stopped.
        problem: Reason why no node can be made; empty if it can.
        most_data: Maximum bytes of host inputs per node.
        contexts: Native ids of the threads that have a device context.
        changes: Number of times that a node was set or stopped.
    """

    def __init__(self):
        super().__init__()
        self.code = self.stop_code = 0
        self.problem = ""
        self.work, self.grids, self.launches = {}, [], []
        self.contexts = set()
        self.changes = 0
        self.most_data = CAPACITIES[-1]
        self.capacities = {}  # by number of the kernel

    def copy_node(self, num_regions, num_bytes, data_bytes=0):
        if self.problem or data_bytes > self.most_data:
            return self.problem or f"{data_bytes} bytes are too many"
        capacity = next(one for one in CAPACITIES if one >= data_bytes)
        number = 1 + CAPACITIES.index(capacity)
        self.capacities[number] = capacity
        function = ctypes.c_void_p(number)
        kernel = CopyKernel(function, self.launch, self.change, self.find, self.enter, capacity)
        return CopyNode(kernel, num_regions, num_bytes)

    def launch(self, config, function, params, extra):
        self.launches.append(LaunchConfig.from_address(config).stream)
        return 0

    def find(self, raw_graph):
        return raw_graph

    def enter(self):
        self.contexts.add(threading.get_native_id())

    def change(self, handle, node, place):
        params = NodeParams.from_address(place.value)
        assert handle.value == node.value
        assert list(params.block) == [256, 1, 1]
        first, second = (ctypes.c_void_p * 2).from_address(params.params)
        work = Work.from_buffer_copy(ctypes.string_at(first, ctypes.sizeof(Work)))
        capacity = self.capacities[params.function]
        data = ctypes.create_string_buffer(ctypes.string_at(second, capacity), capacity)
        is_stop = not any(work.targets)
        if threading.get_native_id() not in self.contexts:
            raise AssertionError("The driver ends the process where a thread has no context.")
        if self.stop_code if is_stop else self.code:
            return self.stop_code if is_stop else self.code
        self.work[handle.value] = work, params.grid[1], data
        self.changes += 1
        return 0

    def play(self, number):
        work, num_pieces, data = self.work.get(number, (None, 0, b""))
        for index in range(num_pieces):
            size, tail, target = work.num_bytes[index], work.tail_bytes[index], work.targets[index]
            source = work.sources[index]
            if source != target:
                source += ctypes.addressof(data) if source < len(data) else 0
                ctypes.memmove(target, source, size)
            fill = work.fills[index].to_bytes(8, "little")
            ctypes.memmove(target + size, fill * -(-tail // 8), tail)

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        number = len(self.grids) + 1
        self.grids.append(number)
        graph.raw_graph_handle = graph.raw_exec_handle = number
        replay = graph.replay

        def played():
            self.play(number)
            replay()

        graph.replay = played
        return graph
