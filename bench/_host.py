"""Ways to bring host inputs in and launch, as one step, for ``floors.py``.

Three int64 arrays and a graph of 50 operations. By the package's own node, with data of every
capacity; and by a copy of pinned memory in the graph, with what guards that memory.
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
from _copies import V, call_of, captured, must, runtime

from dispatchkit.backends.cuda.copy import CAPACITIES, copy_node
from dispatchkit.backends.optional import CopyRegion

BENCH = "floors"
ARRAYS = 3


def tell(name: str, group: str, step: Callable[[], Any], rounds: int, wrong: int | None) -> None:
    """Print the host time of a step alone, and of one of ten that follow each other at once."""
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


class ByNode:
    """A graph that begins with the node, and what sets it."""

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
        """Set the node and launch."""
        must(self.set(()))
        must(self.run(self.handle, None))

    def step(self, arrays: list[Any]) -> None:
        """Write the arrays, set the node and launch."""
        for place, array in zip(self.arrays, arrays):  # noqa: B905 - the checked form costs more
            place[...] = array
        self.set_and_launch()

    def num_wrong(self) -> int:
        """Return how many of 50 steps on a late device saw what was written after them."""
        torch.cuda._sleep(20_000_000)  # noqa: SLF001
        given = np.arange(self.rows)
        kept = []
        for number in range(50):
            self.step([given + number] * ARRAYS)
            self.arrays[...] = -1
            kept.append(self.sum.clone())
        wanted = torch.arange(self.rows, device="cuda") + 1
        return sum(not bool((got == wanted + number).all()) for number, got in enumerate(kept))


def by_nodes(rounds: int) -> None:
    """The node with data of every capacity."""
    for capacity in CAPACITIES[1:]:
        group = f"{ARRAYS} host arrays, node with {capacity} bytes"
        try:
            way = ByNode(capacity)
            wrong = way.num_wrong()
        except RuntimeError as error:
            emit(BENCH, "all", 0, "us", 0, group=group, failed=str(error)[:300])
            continue
        arrays = [np.arange(way.rows)] * ARRAYS
        tell("set", group, lambda way=way: way.set(()), rounds, None)
        tell("set and launch", group, way.set_and_launch, rounds, None)
        tell(
            "write, set and launch",
            group,
            lambda way=way, arrays=arrays: way.step(arrays),
            rounds,
            wrong,
        )


def by_pinned_memory(rounds: int) -> None:
    """A graph that copies pinned memory, and the event that guards it."""
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
        must(run(handle, None))
        event.record(stream)

    def guarded() -> None:
        if not event.query():
            event.synchronize()
        recorded()

    group = f"{ARRAYS} host arrays, pinned memory"
    tell("launch without a copy", group, lambda: must(run(bare, None)), rounds, None)
    tell("launch", group, lambda: must(run(handle, None)), rounds, None)
    tell("launch and record", group, recorded, rounds, None)
    tell("query, launch and record", group, guarded, rounds, None)
    del graph, other


def host_and_launch(rounds: int) -> None:
    """Every way."""
    by_pinned_memory(rounds)
    by_nodes(rounds)
