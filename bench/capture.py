"""Measure the capture of a decoder at vLLM's 51 default sizes, compared with handwritten loops.

    python bench/capture.py [--rounds N] [--layers N] [--profile]

- ``by hand``: the fastest handwritten loop: largest size first, one warmup per size, one pool,
  outputs copied to one shared buffer within the graph, no garbage collection.
- ``by hand, torch.cuda.graph``: the same loop with torch's context manager, which collects garbage
  and empties the cache before every capture.
- ``GraphRunner``: ``runner.capture()`` of the same step with the same outputs. The creation of the
  runner (plugins, policy, static inputs) has a separate line, because the handwritten loops do not
  create their static inputs.
- ``GraphRunner with max_bytes``: the same with a memory budget that is large enough for all graphs.
  With a budget, the runner rehearses each capture.
- ``first answer, lazy``: the time from the first call of a new runner with ``lazy=True`` to the
  result, for a batch of the largest size and for 8 rows. The ratio is to the time of the complete
  ``GraphRunner`` capture.

Cases take turns in one process and start without graphs. The ratio is the median of the ratios
within a round, and ``best`` the minimum over rounds. ``pool`` lines contain the bytes that torch
reserved for graphs and their shared outputs. ``device`` lines contain the decrease of free device
memory, which includes the instantiated graphs. Without a CUDA device, the tape backend captures a
small decoder at the smallest sizes, and there are no handwritten loops. This tests the script only.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from _common import emit

from dispatchkit import (
    GraphRunner,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    StepState,
)
from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache

BENCH = "capture"
VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
SIZES = VLLM_SIZES if torch.cuda.is_available() else VLLM_SIZES[:11]
NAMES = ("tokens", "positions", "slots")

#: Function that prepares a case, and returns the function that captures all sizes.
Case = Callable[[], Callable[[], tuple[Any, int]]]


class CapturedDecoder:
    """A decoder with its cache, and static inputs of the largest size."""

    def __init__(self, shape: DecoderShape, device: str) -> None:
        self.device, self.shape = device, shape
        self.model = Decoder(shape, device=device)
        self.cache = KVCache(shape, device=device)
        sink = shape.num_slots
        self.inputs = {
            "tokens": StaticInput((None,), "int64"),
            "positions": StaticInput((None,), "int64"),
            "slots": StaticInput((None,), "int64", fill=sink),
        }
        self.static = {
            name: one.full(max(SIZES), torch.device(device)) for name, one in self.inputs.items()
        }

    def step(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits. Shape (T, V)."""
        return self.model(tokens, positions, slots, self.cache)

    def batch(self, rows: int) -> dict[str, torch.Tensor]:
        """Return a decode batch with one request per row."""
        generator = torch.Generator().manual_seed(rows)
        slots = torch.randperm(self.shape.num_slots, generator=generator)
        return {
            "tokens": torch.randint(self.shape.vocab, (rows,), generator=generator).to(self.device),
            "positions": torch.zeros(rows, dtype=torch.int64, device=self.device),
            "slots": slots[:rows].to(self.device),
        }

    def make_runner(self, **settings: Any) -> GraphRunner:
        """Return a new runner of the step."""
        return GraphRunner(
            self.step,
            self.inputs,
            sizes=SIZES,
            mode="FULL",
            backend="cuda" if self.device != "cpu" else "tape",
            outputs="view",
            # As in a server whose cache fills the device, rows without a token write to a slot that
            # is never read. Therefore neither the runner nor the handwritten loops save and restore
            # the cache.
            state=StepState(scratch=self.cache.tensors),
            **settings,
        )


def capture_by_hand(subject: CapturedDecoder, *, without_gc: bool) -> tuple[Any, int]:
    """Capture all sizes; return the objects to keep alive, and the bytes of the pool.

    Args:
        subject: Decoder to capture.
        without_gc: Whether to avoid the garbage collections of torch's context manager.
    """
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    graphs = {}
    shared: torch.Tensor | None = None
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        for size in sorted(SIZES, reverse=True):
            views = [subject.static[name][:size] for name in NAMES]
            out = subject.step(*views)
            if shared is None:
                shared = torch.empty_like(out)
            del out
            graph = torch.cuda.CUDAGraph()
            if without_gc:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                shared[:size].copy_(subject.step(*views))
                graph.capture_end()
            else:
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    shared[:size].copy_(subject.step(*views))
            graphs[size] = graph
    torch.cuda.synchronize()
    reserved = sum(
        one["total_size"]
        for one in torch.cuda.memory_snapshot()
        if tuple(one["segment_pool_id"]) == tuple(pool)
    )
    return (graphs, shared), reserved + (0 if shared is None else shared.nbytes)


def capture_by_runner(runner: GraphRunner) -> tuple[Any, int]:
    """Capture all sizes with a runner; return the runner and the bytes of its graphs."""
    report = runner.capture()
    if report.failed or report.skipped:
        raise SystemExit(f"not all sizes were captured: {report}")
    runner.backend.synchronize()
    return runner, runner.num_bytes


def wait(subject: CapturedDecoder) -> None:
    """Synchronize the device."""
    if subject.device != "cpu":
        torch.cuda.synchronize()


def free_unused(subject: CapturedDecoder) -> int:
    """Free unused memory; return the free bytes of the device."""
    gc.collect()
    if subject.device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def check(subject: CapturedDecoder, kept: Any) -> None:
    """Compare some replays with the model; raise if they differ."""
    for rows in (8, 100, 512) if subject.device != "cpu" else (8, 61):
        given = subject.batch(rows)
        with torch.no_grad():
            want = subject.step(**given)
            if isinstance(kept, GraphRunner):
                got = kept(**given)
            else:
                size = min(one for one in SIZES if one >= rows)
                for name, static in subject.static.items():
                    static[:rows] = given[name]
                    static[rows:].fill_(subject.inputs[name].fill)
                kept[0][size].replay()
                got = kept[1][:rows]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def measure(subject: CapturedDecoder, case: Case) -> dict[str, float]:
    """Capture all sizes once, starting without graphs; return milliseconds and bytes."""
    free = free_unused(subject)
    start = perf_counter()
    run = case()
    wait(subject)
    making = perf_counter() - start
    start = perf_counter()
    kept, pool_bytes = run()
    wait(subject)
    seconds = perf_counter() - start
    del run
    gc.collect()
    if subject.device != "cpu":
        torch.cuda.empty_cache()
        free -= torch.cuda.mem_get_info()[0]
    check(subject, kept)
    return {
        "time": seconds * 1e3,
        "pool": pool_bytes,
        "device": free,
        "making it": making * 1e3,
    }


def first_answer(subject: CapturedDecoder, rows: int) -> float:
    """Return milliseconds from the first call of a lazy runner to its result."""
    given = subject.batch(rows)
    runner = subject.make_runner(lazy=True)
    free_unused(subject)
    start = perf_counter()
    result = runner(**given)
    wait(subject)
    elapsed = (perf_counter() - start) * 1e3
    torch.testing.assert_close(result, subject.step(**given), rtol=1e-3, atol=1e-3)
    return elapsed


def profile(subject: CapturedDecoder) -> None:
    """Print a profile of ``runner.capture()``."""
    import cProfile
    import pstats

    runner = subject.make_runner()
    with cProfile.Profile() as profiler:
        runner.capture()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    on_device = torch.cuda.is_available()
    if not on_device:
        torch.set_num_threads(1)  # more threads mostly wait for each other
    parser.add_argument("--rounds", type=int, default=5 if on_device else 1)
    parser.add_argument("--layers", type=int, default=16 if on_device else 1)
    parser.add_argument("--profile", action="store_true", help="print a profile")
    options = parser.parse_args()

    shape = DecoderShape(
        num_layers=options.layers,
        num_heads=16 if on_device else 2,
        head_dim=64 if on_device else 8,
        cache_len=256 if on_device else 16,
        num_slots=512,
        vocab=32_000 if on_device else 64,
    )
    warnings.simplefilter("ignore")
    subject = CapturedDecoder(shape, "cuda:0" if on_device else "cpu")
    cases: dict[str, Case] = {}
    if on_device:
        cases["by hand"] = lambda: partial(capture_by_hand, subject, without_gc=True)
        cases["by hand, torch.cuda.graph"] = lambda: partial(
            capture_by_hand, subject, without_gc=False
        )
    cases["GraphRunner"] = lambda: partial(capture_by_runner, subject.make_runner())
    cases["GraphRunner with max_bytes"] = lambda: partial(
        capture_by_runner,
        subject.make_runner(options=RunnerOptions(memory=MemoryOptions(max_bytes=1 << 40))),
    )
    if options.profile:
        profile(subject)
    for case in cases.values():  # load libraries and kernels, and warm the allocator
        check(subject, case()()[0])
        free_unused(subject)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, case in cases.items():
            found[name].append(measure(subject, case))
    base = "by hand" if on_device else "GraphRunner"
    for what, unit in (("time", "ms"), ("pool", "bytes"), ("device", "bytes"), ("making it", "ms")):
        for name, samples in found.items():
            if what == "making it" and name != "GraphRunner":
                continue
            ratios = [
                mine[what] / theirs[what]
                for mine, theirs in zip(samples, found[base], strict=True)
                if theirs[what] and what != "making it"
            ]
            emit(
                BENCH,
                f"{name}: {what}",
                statistics.median(one[what] for one in samples),
                unit,
                len(samples),
                ratio_to=None if name == base or not ratios else f"{base}: {what}",
                ratio=statistics.median(ratios) if name != base and ratios else None,
                best=round(min(one[what] for one in samples), 2),
                sizes=len(SIZES),
                layers=options.layers,
            )
    whole = statistics.median(one["time"] for one in found["GraphRunner"])
    for rows in (max(SIZES), 8):
        times = [first_answer(subject, rows) for _ in range(max(3, options.rounds))]
        emit(
            BENCH,
            f"first answer, lazy: {rows} rows",
            statistics.median(times),
            "ms",
            len(times),
            ratio_to="GraphRunner: time",
            ratio=statistics.median(times) / whole,
            best=round(min(times), 2),
            layers=options.layers,
        )


if __name__ == "__main__":
    main()
