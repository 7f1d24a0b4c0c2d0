"""Measure the individual operations of a step on a device.

    python bench/floors.py [ROUNDS] [--only GROUP]

``account`` attributes the time of a warm step of the runner to its parts (``_account.py``). It also
runs without a GPU, with launches that do nothing. ``properties`` (the current stream, locks, tensor
attributes, events), ``copies`` and ``launches`` measure the host time of single calls. ``launches``
also measures the device time of graphs that begin with copies from pinned memory: one copy of all
inputs, or one per input. ``ways`` measures all ways to copy device inputs and launch in one step
(``_copies.py``), and the load time of the package's copy kernel. ``host`` measures ways to copy
host arrays and launch (``_host.py``).
"""

# ruff: noqa: SLF001 - private functions of torch are also measured

from __future__ import annotations

import argparse
import ctypes
import statistics
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from _account import account
from _common import at_least_one, emit
from _copies import ROOM, ROWS, captured, copies_and_launch, measure_kernel_loading
from _host import host_and_launch

BENCH = "floors"
BUCKET = 256


def measure(
    group: str, name: str, call: Callable[[], Any], rounds: int, together: int = 50
) -> None:
    """Print the host time of one call. The device is synchronized between samples."""
    for _ in range(20):
        call()
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = perf_counter_ns()
        for _ in range(together):
            call()
        samples.append((perf_counter_ns() - start) / together / 1000)
    torch.cuda.synchronize()
    emit(BENCH, name, statistics.median(samples), "us", rounds, group=group)


def properties(rounds: int) -> None:
    """Measure operations on streams, locks, tensor attributes and events."""
    x = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    shape, device, lock, current = x.shape, x.device, threading.RLock(), torch.cuda.current_stream
    raw = torch._C._cuda_getCurrentRawStream

    def locked() -> None:
        with lock:
            pass

    def acquired() -> None:
        lock.acquire()
        lock.release()

    for name, call in {
        "nothing": lambda: None,
        "raw handle of the current stream": lambda: raw(0),
        "torch.cuda.current_stream": current,
        "is the stream capturing": torch.cuda.is_current_stream_capturing,
        "is any autocast enabled": torch._C._is_any_autocast_enabled,
        "with RLock": locked,
        "RLock, acquire and release": acquired,
        "shape compared": lambda: x.shape != shape,
        "dtype": lambda: x.dtype,
        "device compared": lambda: x.device != device,
        "is_cuda": lambda: x.is_cuda,
        "requires_grad": lambda: x.requires_grad,
        "slice": lambda: x[:100],
        "clone": x.clone,
    }.items():
        measure("properties", name, call, rounds)
    event, stream = torch.cuda.Event(), current()
    measure("properties", "event.record(stream)", lambda: event.record(stream), rounds)
    measure("properties", "event.query", event.query, rounds)


def copies(rounds: int) -> None:
    """Measure copies of device inputs to static memory."""
    fused = torch._foreach_copy_
    for count in (1, 3, 8):
        given = [torch.ones(ROWS, dtype=torch.int64, device="cuda") for _ in range(count)]
        static = [torch.zeros(ROOM, dtype=torch.int64, device="cuda") for _ in range(count)]
        views = [one[:ROWS] for one in static]
        both = views + [one[ROWS:BUCKET] for one in static]
        filled = given + [torch.zeros_like(one[ROWS:BUCKET]) for one in static]
        group = f"{count} inputs"

        def one_by_one(views: Any = views, given: Any = given) -> None:
            for view, tensor in zip(views, given, strict=True):
                view.copy_(tensor)

        measure(group, "one copy_ per input", one_by_one, rounds)
        measure(group, "one fused copy", lambda v=views, g=given: fused(v, g), rounds)
        measure(
            group, "one fused copy, with padding rows", lambda b=both, f=filled: fused(b, f), rounds
        )


def launches(rounds: int) -> None:
    """Measure launches of graphs through torch and through the CUDA runtime."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    launch = runtime.cudaGraphLaunch
    launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    for nodes in (1, 50, 500):
        x = torch.zeros(BUCKET, device="cuda")

        def body(x: torch.Tensor = x, nodes: int = nodes) -> None:
            for _ in range(nodes):
                x.add_(1)

        graph, handle = captured(body)
        together = 50 if nodes < 100 else 5
        measure(f"{nodes} nodes", "replay", graph.replay, rounds, together)
        measure(
            f"{nodes} nodes", "direct launch", lambda h=handle: launch(h, None), rounds, together
        )
    for count in (1, 3, 8):
        for whole in (True, False):
            staged(launch, count, rounds, whole=whole)


def staged(launch: Callable[..., int], count: int, rounds: int, *, whole: bool) -> None:
    """Measure a graph that copies from pinned memory and reads one input."""
    host = torch.zeros(count, ROOM, dtype=torch.int64).pin_memory()
    device = torch.zeros(count, ROOM, dtype=torch.int64, device="cuda")
    out = torch.zeros(BUCKET, dtype=torch.int64, device="cuda")

    def body() -> None:
        if whole:
            device.copy_(host, non_blocking=True)
        else:
            for target, source in zip(device, host, strict=True):
                target[:BUCKET].copy_(source[:BUCKET], non_blocking=True)
        out.add_(device[0, :BUCKET])

    graph, handle = captured(body)
    group = f"{count} host inputs, " + ("one block" if whole else "one copy per input")
    measure(group, "direct launch", lambda: launch(handle, None), rounds)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = []
    for _ in range(rounds):
        torch.cuda._sleep(2_000_000)  # lets the host run ahead of the device
        first.record()
        for _ in range(20):
            launch(handle, None)
        last.record()
        torch.cuda.synchronize()
        samples.append(first.elapsed_time(last) * 1000 / 20)
    emit(BENCH, "device time", statistics.median(samples), "us", rounds, group=group)
    view, array = host[0].numpy()[:ROWS], torch.arange(ROWS).numpy()

    def write() -> None:
        view[...] = array

    if count == 1 and whole:
        measure(group, "write one array", write, rounds)
    del graph


def main() -> None:
    """Measure the selected groups and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about = "number of rounds, 50 by default"
    parser.add_argument("rounds", nargs="?", type=at_least_one, default=50, help=about)
    groups: dict[str, Callable[[int], None]] = {
        "account": account,
        "properties": properties,
        "copies": copies,
        "launches": launches,
        "ways": copies_and_launch,
        "host": host_and_launch,
    }
    parser.add_argument("--only", metavar="GROUP", choices=groups, help="group to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        for name, group in groups.items():
            if options.only not in (None, name):
                continue
            if name != "account" and not torch.cuda.is_available():
                emit(BENCH, name, 0, "us", 0, missing="torch finds no CUDA device")
                continue
            if name == "ways":
                measure_kernel_loading()
            group(options.rounds)


if __name__ == "__main__":
    main()
