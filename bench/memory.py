"""Memory of the graphs of a process: shared pools, sleep, captures beside serving, runners dropped.

    python bench/memory.py pools [--steps N] [--apart | --by-hand]
    python bench/memory.py sleep [--gib N]
    python bench/memory.py beside [--model small|large] [--way none|background|lock]
        [--full] [--max-pause-us N]
    python bench/memory.py dropped [--runners N]

- ``pools``: eight runners (a UNet at four resolutions, two decoders, an encoder, a drafter) that
  share one pool; ``--apart``: a pool each; ``--by-hand``: a loop of torch.cuda.graph with one pool.
  What the device has given away, what the account does not explain, and random steps of all eight
  against eager.
- ``sleep``: memory given back by ``memory.sleep()``, times of sleep, wake, first replay and of
  capturing again, and whether the first replays are bit for bit those of before.
- ``beside``: times of steps of one thread while another captures 51 graphs: in the background, by
  ``capture()`` under the lock, or not at all. ``--full``: little memory is free.
- ``dropped``: runners made, captured and dropped with the collector off: host and device memory.

A case a process, so that none finds what another has loaded. Without a GPU the tape is measured,
which tells whether it runs and nothing of a device.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _common import emit

from dispatchkit import GraphMemory, GraphRunner, Lanes, StaticInput
from dispatchkit.testing import OneBucketPolicy

BENCH = "memory"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
BACKEND = "cuda" if HAS_GPU else "tape"
SCALE = 1 if HAS_GPU else 8  # a CPU gets a fraction


class Unet(torch.nn.Module):
    """Convolutions down and up again, with connections across."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        conv = torch.nn.Conv2d
        self.first = conv(4, channels, 3, padding=1)
        self.down = torch.nn.ModuleList(
            conv(channels << level, channels << level + 1, 3, stride=2, padding=1)
            for level in range(3)
        )
        self.up = torch.nn.ModuleList(
            conv((channels << level + 1) + (channels << level), channels << level, 3, padding=1)
            for level in reversed(range(3))
        )
        self.last = conv(channels, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the same size."""
        found = [torch.relu(self.first(x))]
        for layer in self.down:
            found.append(torch.relu(layer(found[-1])))
        h = found.pop()
        for layer in self.up:
            wide = torch.nn.functional.interpolate(h, scale_factor=2.0)
            h = torch.relu(layer(torch.cat([wide, found.pop()], dim=1)))
        return self.last(h)


class Layers(torch.nn.Module):
    """Linear layers with residuals, as the feed-forward half of a decoder."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.wide = torch.nn.ModuleList(torch.nn.Linear(width, 4 * width) for _ in range(count))
        self.back = torch.nn.ModuleList(torch.nn.Linear(4 * width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the same width."""
        for wide, back in zip(self.wide, self.back, strict=True):
            x = x + back(torch.nn.functional.gelu(wide(x)))
        return x


def ready(module: torch.nn.Module) -> torch.nn.Module:
    return module.to(DEVICE, DTYPE).requires_grad_(False).eval()


def eight() -> dict[str, tuple[torch.nn.Module, tuple[int | None, ...], tuple[int, ...]]]:
    """Return the module, input shape and sizes of each runner, by name."""
    unet = ready(Unet(64 // SCALE))
    cases: dict[str, Any] = {
        f"unet {side}": (
            unet,
            (None, 4, max(16, side // SCALE), max(16, side // SCALE)),
            (1, 2, 4, 8),
        )
        for side in (32, 64, 96, 128)
    }
    width, ladder = 2048 // SCALE, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    cases["decoder a"] = (ready(Layers(width, 12)), (None, width), ladder)
    cases["decoder b"] = (ready(Layers(width, 8)), (None, width), ladder)
    cases["encoder"] = (ready(Layers(width, 6)), (None, width), (256, 1024, 4096 // SCALE * 2))
    cases["drafter"] = (ready(Layers(width // 2, 2)), (None, width // 2), ladder)
    return cases


def make_runner(module: Any, shape: Any, sizes: Any, memory: Any, **settings: Any) -> GraphRunner:
    return GraphRunner(
        module,
        {"x": StaticInput(shape, DTYPE)},
        sizes=sizes,
        mode="FULL",
        policy=OneBucketPolicy(),
        lanes=Lanes(memory=memory),
        **{"backend": BACKEND, **settings},
    )


def used() -> int:
    """Return what the device has given away, without what torch keeps for later."""
    gc.collect()
    if not HAS_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def batch(shape: Any, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sized = [rows if size is None else size for size in shape]
    return torch.randn(sized, device=DEVICE, generator=generator).to(DTYPE)


# -- pools ----------------------------------------------------------------------------------


def pools(options: argparse.Namespace) -> None:
    cases = eight()
    for module, shape, sizes in cases.values():  # kernels are loaded before anything is counted
        with torch.no_grad():
            module(batch(shape, max(sizes), 0))
            module(batch(shape, min(sizes), 0))
    before = used()
    if options.by_hand:
        pools_by_hand(cases, before)
        return
    memory = GraphMemory()
    runners = {}
    start = time.perf_counter()
    for number, (name, (module, shape, sizes)) in enumerate(cases.items()):
        own = memory.group(f"{number} {name}") if options.apart else memory
        runners[name] = make_runner(module, shape, sizes, own)
        runners[name].capture()
    seconds = time.perf_counter() - start
    way = "apart" if options.apart else "shared"
    account = memory.account()[0]
    print(memory, flush=True)
    emit(
        BENCH,
        f"eight runners, pools {way}",
        used() - before,
        "bytes",
        1,
        pools=account.pool_bytes,
        counted=account.num_bytes,
        gone=account.gone_bytes,
        unexplained=account.unexplained_bytes,
        unexplained_share=round(abs(account.unexplained_bytes) / max(1, account.gone_bytes), 4),
        capture_s=round(seconds, 2),
    )
    chooser, wrong, worst = random.Random(0), 0, 0.0
    names = list(cases)
    deadline = time.monotonic() + 100
    done = 0
    with torch.no_grad():
        while done < options.steps and time.monotonic() < deadline:
            name = chooser.choice(names)
            module, shape, sizes = cases[name]
            x = batch(shape, chooser.randint(1, max(sizes)), done)
            got, expected = runners[name](x), module(x)
            difference = (got.float() - expected.float()).abs().max().item()
            scale = expected.float().abs().max().item() + 1e-6
            worst = max(worst, difference / scale)
            wrong += difference > 0.03 * scale
            done += 1
    eager = sum(runner.stats().steps_by_mode.get("NONE", 0) for runner in runners.values())
    emit(
        BENCH,
        f"random steps of eight runners, pools {way}",
        done,
        "steps",
        done,
        wrong=wrong,
        eager=eager,
        worst_relative=round(worst, 5),
    )
    emit(
        BENCH,
        f"unexplained after the steps, pools {way}",
        memory.account()[0].unexplained_bytes,
        "bytes",
        1,
        gone=memory.account()[0].gone_bytes,
    )


def pools_by_hand(cases: Any, before: int) -> None:
    """Capture the same graphs in a loop with one pool, largest first, as an engine does."""
    if not HAS_GPU:
        raise SystemExit("by hand: needs a GPU")
    pool, stream, kept = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), []
    for module, shape, sizes in cases.values():
        static = batch(shape, max(sizes), 0)
        for size in sorted(sizes, reverse=True):
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph, pool=pool, stream=stream):
                kept.append((module(static[:size]), static, graph))
    emit(BENCH, "eight loops by hand, one pool", used() - before, "bytes", 1)


# -- sleep ----------------------------------------------------------------------------------


def sleep(options: argparse.Namespace) -> None:
    width = 4096 // SCALE
    rows = max(8, int(options.gib * (1 << 30) / (width * 2) / 8)) if HAS_GPU else 64
    sizes = tuple(rows >> shift for shift in range(4))
    module = ready(Layers(width, 3))
    memory = GraphMemory(sleeps=True)
    start = time.perf_counter()
    runners = [make_runner(module, (None, width), sizes, memory.group(str(n))) for n in range(2)]
    for runner in runners:
        runner.capture()
    synchronize()
    capture_s = time.perf_counter() - start
    x = batch((None, width), rows // 3, 1)
    before = [runner(x).clone() for runner in runners]
    synchronize()
    awake = used()
    start = time.perf_counter()
    given = memory.sleep()
    sleep_s = time.perf_counter() - start
    asleep = used()
    start = time.perf_counter()
    memory.wake()
    wake_s = time.perf_counter() - start
    start = time.perf_counter()
    after = [runner(x).clone() for runner in runners]
    synchronize()
    first_s = time.perf_counter() - start
    equal = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    emit(
        BENCH,
        "sleep and wake",
        given,
        "bytes",
        1,
        device_bytes_given_back=awake - asleep,
        sleep_ms=round(sleep_s * 1e3, 2),
        wake_ms=round(wake_s * 1e3, 2),
        first_steps_ms=round(first_s * 1e3, 2),
        capture_ms=round(capture_s * 1e3, 2),
        bit_for_bit=equal,
        captures=sum(runner.stats().captures for runner in runners),
    )
    start = time.perf_counter()
    for runner in runners:
        runner.invalidate()
    for runner in runners:
        runner.capture()
    synchronize()
    emit(BENCH, "capture again", (time.perf_counter() - start) * 1e3, "ms", 1)


# -- captures beside serving ----------------------------------------------------------------


def beside_backend() -> Any:
    """Return a backend that lets steps in between the operators of a capture."""
    if not HAS_GPU:
        return BACKEND
    from dispatchkit.backends.cuda import CudaBackend

    return CudaBackend(steps_beside_captures=True)


def beside(options: argparse.Namespace) -> None:
    width, count = (512, 12) if options.model == "small" else (4096 // SCALE, 24)
    module = ready(Layers(width, count))
    ladder = (1, 2, 4, *range(8, 385, 8))  # 51 sizes
    runner = make_runner(module, (None, width), ladder, None, backend=beside_backend())
    warnings.simplefilter("ignore")
    # The largest is there: what is measured is steps that replay, beside captures of the others.
    runner.capture([key for key in runner.registry if key.num_tokens == max(ladder)])
    inputs = [batch((None, width), rows, rows) for rows in (1, 30, 100, 250, 384)]
    with torch.no_grad():
        expected = [module(x).float() for x in inputs]
    filler = None
    if options.full and HAS_GPU:
        free, _ = torch.cuda.mem_get_info()
        filler = torch.empty(free - (1500 << 20), dtype=torch.uint8, device=DEVICE)
    stop, times, wrong, lost = threading.Event(), [], 0, 0

    def serve() -> None:
        nonlocal wrong, lost
        stream: Any = torch.cuda.Stream() if HAS_GPU else None
        number = 0
        while not stop.is_set():
            time.sleep(0.0005)  # requests come now and then
            at = number % len(inputs)
            number += 1
            start = time.perf_counter()
            try:
                if stream is None:
                    result = runner(inputs[at])
                else:
                    with torch.cuda.stream(stream):
                        result = runner(inputs[at])
                    stream.synchronize()
            except Exception as error:  # noqa: BLE001 - counted, whatever it is
                lost += 1
                print(f"lost: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            times.append((time.perf_counter() - start) * 1e6)
            scale = expected[at].abs().max() + 1e-6
            wrong += bool((result.float() - expected[at]).abs().max() > 0.03 * scale)

    thread = threading.Thread(target=serve)
    thread.start()
    time.sleep(0.5)
    times.clear()
    start = time.perf_counter()
    pauses: list[Any] = []
    report: Any = None
    if options.way == "background":
        background = runner.controls.capture_in_background(max_pause_us=options.max_pause_us)
        background.wait(110)
        report = background.stop()
        pauses = background.pauses
    elif options.way == "lock":
        report = runner.capture()
    else:
        time.sleep(8)
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    del filler
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
    named: dict[str, list[float]] = {}
    for pause in pauses:
        named.setdefault(pause.what, []).append(pause.us)
    longest = sorted(named.items(), key=lambda item: -max(item[1]))[:8]
    emit(
        BENCH,
        f"{options.model} model, {'little' if options.full else 'much'} memory, {options.way}",
        cuts[49],
        "us",
        len(times),
        p90=round(cuts[89], 1),
        p99=round(cuts[98], 1),
        longest=round(max(times, default=0.0), 1),
        wrong=wrong,
        lost=lost,
        seconds=round(seconds, 2),
        graphs=None if report is None else report.num_graphs,
        failed=None if report is None else [str(one)[:200] for one in report.failed.values()][:3],
        long_pauses=len(pauses),
        pauses={what: [len(us), round(max(us))] for what, us in longest},
    )


# -- runners that are dropped ---------------------------------------------------------------


def dropped(options: argparse.Namespace) -> None:
    module = ready(Layers(64, 2))
    memory = GraphMemory()

    def once() -> None:
        runner = make_runner(module, (None, 64), (8,), memory)
        runner.capture()
        runner(batch((None, 64), 3, 0))

    def look() -> tuple[int, int]:
        synchronize()
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        free, total = torch.cuda.mem_get_info() if HAS_GPU else (0, 0)
        return host, total - free

    for _ in range(50):
        once()
    gc.collect()
    gc.disable()
    begun = look()
    deadline = time.monotonic() + 120
    start, done = time.perf_counter(), 0
    seen: list[tuple[int, int, int]] = []
    while done < options.runners and time.monotonic() < deadline:
        once()
        done += 1
        if done % max(1, options.runners // 8) == 0:
            host, device = look()
            seen.append((done, host - begun[0], device - begun[1]))
    seconds = time.perf_counter() - start
    gc.enable()
    host, device = look()
    emit(
        BENCH,
        "runners made and dropped",
        done,
        "runners",
        done,
        host_bytes=host - begun[0],
        device_bytes=device - begun[1],
        ms_each=round(1e3 * seconds / max(1, done), 2),
        over_time=seen,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cases = parser.add_subparsers()

    def case(run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        made = cases.add_parser(run.__name__)
        made.set_defaults(run=run)
        return made

    one = case(pools)
    one.add_argument("--steps", type=int, default=10_000)
    one.add_argument("--apart", action="store_true")
    one.add_argument("--by-hand", action="store_true")
    case(sleep).add_argument("--gib", type=float, default=10.0)
    one = case(beside)
    one.add_argument("--model", choices=("small", "large"), default="small")
    one.add_argument("--way", choices=("none", "background", "lock"), default="background")
    one.add_argument("--full", action="store_true")
    one.add_argument("--max-pause-us", type=float, default=2000.0)
    case(dropped).add_argument("--runners", type=int, default=10_000)
    options = parser.parse_args()
    if not hasattr(options, "run"):  # with all benchmarks: the two that take no minutes
        options = parser.parse_args(["sleep", "--gib", "1"])
        dropped(parser.parse_args(["dropped", "--runners", "50"]))
    options.run(options)


if __name__ == "__main__":
    main()
