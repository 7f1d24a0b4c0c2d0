"""Measure ways to copy host inputs and launch a graph in one step, for ``floors.py``.

The step has three int64 arrays and a graph of 50 operations. The arrays reach the graph as data of
the package's copy node, measured with several capacities of the node, or in pinned memory that the
graph copies from. An event prevents the host from overwriting this memory too early.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _common import emit
from _copies import V, call_of, captured, check_cuda, runtime

from dispatchkit.backends.cuda.copy import CAPACITIES, copy_node
from dispatchkit.backends.optional import CopyRegion

BENCH = "floors"
ARRAYS = 3


def measure(name: str, group: str, step: Callable[[], Any], rounds: int, wrong: int | None) -> None:
    """Print the host time per step, for single steps and for ten consecutive steps."""
    for together in (1, 10):
        samples = []
        for _ in range(rounds + 5):
            torch.cuda.synchronize()
            start = perf_counter_ns()
            for _ in range(together):
                step()
            samples.append((perf_counter_ns() - start) / together / 1000)
        torch.cuda.synchronize()
        more = {"steps_between_waits": together, "wrong": wrong}
        emit(BENCH, name, statistics.median(samples[5:]), "us", rounds, group=group, **more)


class CopyNodeGraph:
    """A graph that begins with a copy node, and the call that updates the node."""

    def __init__(self, capacity: int) -> None:
        self.rows = capacity // ARRAYS // 16 * 2
        size = self.rows * 8
        node = copy_node(torch.cuda.current_device(), ARRAYS, size, size * ARRAYS)
        problem = node if isinstance(node, str) else ""
        if problem:
            raise RuntimeError(problem)
        self.static = torch.zeros(ARRAYS, self.rows + 2, dtype=torch.int64, device="cuda")
        self.sum = torch.zeros(ARRAYS, self.rows, dtype=torch.int64, device="cuda")

        def body() -> None:
            node.record(torch.cuda.current_stream().cuda_stream)
            for _ in range(50):
                torch.add(self.static[:, : self.rows], 1, out=self.sum)

        graph, handle = captured(body)
        raw = int(graph.raw_cuda_graph())
        problem = node.attach(SimpleNamespace(raw_graph_handle=raw, raw_exec_handle=handle.value))
        if problem:
            raise RuntimeError(problem)
        regions = [CopyRegion(row.data_ptr(), size, 8, 7) for row in self.static]
        self.set = node.setter(regions, [index * size for index in range(ARRAYS)])
        self.arrays = np.ndarray((ARRAYS, self.rows), np.int64, node.data)
        self.graph, self.handle, self.node = graph, handle, node
        self.run = call_of(runtime(), "cudaGraphLaunch", V, V)

    def set_and_launch(self) -> None:
        """Update the node and launch the graph."""
        check_cuda(self.set(()))
        check_cuda(self.run(self.handle, None))

    def step(self, arrays: list[Any]) -> None:
        """Write the arrays, update the node and launch the graph."""
        for place, array in zip(self.arrays, arrays):  # noqa: B905 - strict=True costs more
            place[...] = array
        self.set_and_launch()

    def num_wrong(self) -> int:
        """Return how many of 50 steps read data that was written after their launch."""
        torch.cuda._sleep(20_000_000)  # noqa: SLF001
        given = np.arange(self.rows)
        kept = []
        for number in range(50):
            self.step([given + number] * ARRAYS)
            self.arrays[...] = -1
            kept.append(self.sum.clone())
        expected = torch.arange(self.rows, device="cuda") + 1
        return sum(not bool((got == expected + number).all()) for number, got in enumerate(kept))


def by_nodes(rounds: int) -> None:
    """Measure copy nodes of each capacity but the smallest, filled with host data."""
    for capacity in CAPACITIES[1:]:
        group = f"{ARRAYS} host arrays, node with {capacity} bytes"
        try:
            way = CopyNodeGraph(capacity)
            wrong = way.num_wrong()
        except RuntimeError as error:
            emit(BENCH, "all", 0, "us", 0, group=group, failed=str(error)[:300])
            continue
        arrays = [np.arange(way.rows)] * ARRAYS
        measure("set", group, lambda way=way: way.set(()), rounds, None)
        measure("set and launch", group, way.set_and_launch, rounds, None)
        measure(
            "write, set and launch",
            group,
            lambda way=way, arrays=arrays: way.step(arrays),
            rounds,
            wrong,
        )


def by_pinned_memory(rounds: int) -> None:
    """Measure a graph that copies from pinned memory, and the event that guards it."""
    host = torch.zeros(ARRAYS, 256, dtype=torch.int64).pin_memory()
    static = torch.zeros_like(host, device="cuda")
    out = torch.zeros_like(static)
    plain = torch.zeros_like(static)

    def body() -> None:
        static.copy_(host, non_blocking=True)
        for _ in range(50):
            torch.add(static, 1, out=out)

    def without() -> None:
        for _ in range(50):
            torch.add(plain, 1, out=out)

    graph, handle = captured(body)
    other, bare = captured(without)
    run = call_of(runtime(), "cudaGraphLaunch", V, V)
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()

    def recorded() -> None:
        check_cuda(run(handle, None))
        event.record(stream)

    def guarded() -> None:
        if not event.query():
            event.synchronize()
        recorded()

    group = f"{ARRAYS} host arrays, pinned memory"
    measure("launch without a copy", group, lambda: check_cuda(run(bare, None)), rounds, None)
    measure("launch", group, lambda: check_cuda(run(handle, None)), rounds, None)
    measure("launch and record", group, recorded, rounds, None)
    measure("query, launch and record", group, guarded, rounds, None)
    del graph, other


def host_and_launch(rounds: int) -> None:
    """Measure copy nodes and pinned memory."""
    by_pinned_memory(rounds)
    by_nodes(rounds)
