"""Measure the memory of graphs: shared pools, sleep, concurrent captures, dropped runners.

    python bench/memory.py pools [--steps N] [--apart | --by-hand]
    python bench/memory.py sleep [--gib N]
    python bench/memory.py concurrent [--model small|large] [--way WAY] [--max-pause-us N]
    python bench/memory.py dropped [--runners N]

- ``pools``: eight runners (a UNet at four resolutions, two decoders, an encoder, a drafter) that
  share one pool; ``--apart``: one pool each; ``--by-hand``: a loop of torch.cuda.graph with one
  pool. The lines contain the memory allocated on the device, and the part that the memory account
  does not explain. The runners first run alone, and their results are compared approximately with
  eager. Then all eight run random steps on two streams, and the results are compared bit for bit
  with those of running alone.
- ``sleep``: the memory released by ``memory.sleep()``; the times of sleep, wake, the first replays
  and new captures; and whether the first replays return bit for bit the same results as before.
- ``concurrent``: the step times of one thread while another thread captures 50 graphs. There are
  four ways: ``background``, with steps between the parts of a capture; ``between operators``, in
  the background with steps also between operators; ``lock``, by ``capture()`` under the lock; and
  ``none``, without captures. Each way runs with much free memory, and with little more than the
  captures need.
- ``dropped``: host and device memory after runners are created, captured and dropped with garbage
  collection disabled.

Each subcommand stops after ``--seconds`` (default: 50) with its results so far. Without a
subcommand, short versions of ``dropped`` and ``sleep`` run. Without a GPU, the tape backend is
measured, which tests the script only.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
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
SCALE = 1 if HAS_GPU else 8  # divisor of all sizes; a CPU gets small models
MIB = 1 << 20
_start_time = time.monotonic()


class Unet(torch.nn.Module):
    """A small UNet: convolutions that halve and double the resolution, with skip connections."""

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
        """Return an image of the same resolution."""
        found = [torch.relu(self.first(x))]
        for layer in self.down:
            found.append(torch.relu(layer(found[-1])))
        h = found.pop()
        for layer in self.up:
            wide = torch.nn.functional.interpolate(h, scale_factor=2.0)
            h = torch.relu(layer(torch.cat([wide, found.pop()], dim=1)))
        return self.last(h)


class Layers(torch.nn.Module):
    """Linear layers with residuals, like the MLPs of a decoder."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.wide = torch.nn.ModuleList(torch.nn.Linear(width, 4 * width) for _ in range(count))
        self.back = torch.nn.ModuleList(torch.nn.Linear(4 * width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the same width."""
        for wide, back in zip(self.wide, self.back, strict=True):
            x = x + back(torch.nn.functional.gelu(wide(x)))
        return x


def ready(make: Callable[..., torch.nn.Module], *sizes: int) -> torch.nn.Module:
    """Return a module created on the device; creating the weights on a CPU would take a minute."""
    with DEVICE:
        module = make(*sizes)
    return module.to(DTYPE).requires_grad_(False).eval()


def seconds_left(options: argparse.Namespace) -> float:
    """Return the remaining seconds, counted from the start of the process."""
    return options.seconds - (time.monotonic() - _start_time)


def eight() -> dict[str, tuple[torch.nn.Module, tuple[int | None, ...], tuple[int, ...]]]:
    """Return the module, input shape and sizes of each runner, by name."""
    unet = ready(Unet, 64 // SCALE)
    cases: dict[str, Any] = {
        f"unet {side}": (
            unet,
            (None, 4, max(16, side // SCALE), max(16, side // SCALE)),
            (1, 2, 4, 8),
        )
        for side in (32, 64, 96, 128)
    }
    width, ladder = 2048 // SCALE, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512 // SCALE, 1024 // SCALE)
    cases["decoder a"] = (ready(Layers, width, 12), (None, width), ladder)
    cases["decoder b"] = (ready(Layers, width, 8), (None, width), ladder)
    cases["encoder"] = (
        ready(Layers, width, 6),
        (None, width),
        (256 // SCALE, 1024 // SCALE, 8192 // SCALE),
    )
    cases["drafter"] = (ready(Layers, width // 2, 2), (None, width // 2), ladder)
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
    """Return the memory in use on the device, without torch's cache."""
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
    for module, shape, sizes in cases.values():  # load kernels before memory is counted
        with torch.no_grad():
            for rows in (1, 3, *sizes):
                module(batch(shape, rows, 0))
    before = used()
    if options.by_hand:
        pools_by_hand(cases, before, keep_outputs=True)
        pools_by_hand(cases, before, keep_outputs=False)
        return
    memory = GraphMemory()
    runners = {}
    start = time.perf_counter()
    for number, (name, (module, shape, sizes)) in enumerate(cases.items()):
        own = memory.group(f"{number} {name}") if options.apart else memory
        runners[name] = make_runner(module, shape, sizes, own)
        report = runners[name].capture()
        print(name, report, flush=True)
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
        graphs=sum(runner.stats().captures for runner in runners.values()),
        pools=account.pool_bytes,
        counted=account.num_bytes,
        gone=account.taken_bytes,
        unexplained=account.unexplained_bytes,
        unexplained_share=round(abs(account.unexplained_bytes) / max(1, account.taken_bytes), 4),
        capture_s=round(seconds, 2),
    )
    random_steps(options, cases, runners, way)
    account = memory.account()[0]
    emit(
        BENCH,
        f"unexplained memory after the steps, pools {way}",
        account.unexplained_bytes,
        "bytes",
        1,
        gone=account.taken_bytes,
        share=round(abs(account.unexplained_bytes) / max(1, account.taken_bytes), 4),
    )


def random_steps(options: argparse.Namespace, cases: Any, runners: Any, way: str) -> None:
    """Run random steps of all runners on two streams without waiting, and check the results."""
    chooser, far, worst = random.Random(0), 0, 0.0
    known: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for number, (name, (module, shape, sizes)) in enumerate(cases.items()):
        known[name] = []
        for index in range(16):
            rows = chooser.choice((1, max(sizes), chooser.randint(1, max(sizes))))
            x = batch(shape, rows, 100 * number + index)
            with torch.no_grad():
                alone, expected = runners[name](x), module(x)
            synchronize()
            known[name].append((x, alone.clone()))
            scale = expected.abs().max().item() + 1e-6
            difference = (alone.float() - expected.float()).abs().max().item() / scale
            far, worst = far + (difference > 0.03), max(worst, difference)
    synchronize()
    names, done = list(cases), 0
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)] if HAS_GPU else [None]
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in streams]
    synchronize()
    start = time.perf_counter()
    while done < options.steps and seconds_left(options) > 2:
        index = chooser.randrange(len(streams))
        name = chooser.choice(names)
        x, alone = chooser.choice(known[name])
        with torch.cuda.stream(streams[index]):
            wrong[index] += (runners[name](x) != alone).any()
        done += 1
        if done % 2500 == 0:
            print(done, "steps,", sum(one.item() for one in wrong), "wrong", flush=True)
    synchronize()
    seconds = time.perf_counter() - start
    reasons: dict[str, int] = {}
    for runner in runners.values():
        for reason, count in runner.stats().eager_by_reason.items():
            reasons[reason] = reasons.get(reason, 0) + count
    emit(
        BENCH,
        f"random steps of eight runners, pools {way}",
        done,
        "steps",
        done,
        not_bit_for_bit=sum(one.item() for one in wrong),
        far_from_eager=far,
        worst_relative=round(worst, 5),
        eager=reasons,
        ms_each=round(1e3 * seconds / max(1, done), 3),
    )


def pools_by_hand(cases: Any, before: int, *, keep_outputs: bool) -> None:
    """Capture the same graphs in a loop with one pool, largest first, as engines do."""
    if not HAS_GPU:
        raise SystemExit("--by-hand requires a GPU")
    pool, stream, kept = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), []
    start = time.perf_counter()
    for module, shape, sizes in cases.values():
        static = batch(shape, max(sizes), 0)
        for size in sorted(sizes, reverse=True):
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = module(static[:size])
            kept.append((outputs if keep_outputs else None, static, graph))
            del outputs
    seconds = time.perf_counter() - start
    emit(
        BENCH,
        f"eight handwritten loops, one pool, outputs {'kept' if keep_outputs else 'released'}",
        used() - before,
        "bytes",
        1,
        graphs=len(kept),
        capture_s=round(seconds, 2),
    )


# -- sleep ----------------------------------------------------------------------------------


def sleep(options: argparse.Namespace) -> None:
    width = 2048 // SCALE
    # Each of the two runners needs about 13 two-byte values per row and feature: intermediates of
    # the layers, the static input and the output.
    rows = max(256, int(options.gib * (1 << 30) / (2 * 13 * 2 * width))) if HAS_GPU else 256
    sizes = tuple(rows * part // 16 for part in range(1, 17))
    module = ready(Layers, width, 3)
    with torch.no_grad():
        module(batch((None, width), rows, 0))
    memory = GraphMemory(sleeps=True)
    start = time.perf_counter()
    runners = [make_runner(module, (None, width), sizes, memory.group(str(n))) for n in range(2)]
    for runner in runners:
        print(runner.capture(), flush=True)
    synchronize()
    capture_s = time.perf_counter() - start
    print(memory, flush=True)
    inputs = [batch((None, width), rows * part // 16 - 3, part) for part in (1, 5, 16)]
    before = [[runner(x).clone() for x in inputs] for runner in runners]
    for number in range(3):
        cycle(memory, runners, inputs, before, number, capture_s)
        if seconds_left(options) < 10:
            return
    for again in ("capture again", "capture once more"):
        for runner in runners:
            runner.invalidate()
        start = time.perf_counter()
        for runner in runners:
            runner.capture()
        synchronize()
        emit(BENCH, again, (time.perf_counter() - start) * 1e3, "ms", 1)
        if seconds_left(options) < 10:
            return


def cycle(
    memory: GraphMemory, runners: Any, inputs: Any, before: Any, number: int, capture_s: float
) -> None:
    """Sleep, overwrite the released memory, wake, and compare the first replays."""
    awake = used()
    start = time.perf_counter()
    given = memory.sleep()
    sleep_s = time.perf_counter() - start
    asleep = used()
    if HAS_GPU:
        filler = torch.full((given // 2,), 255, dtype=torch.uint8, device=DEVICE)
        synchronize()
        del filler
        used()
    start = time.perf_counter()
    memory.wake()
    wake_s = time.perf_counter() - start
    start = time.perf_counter()
    after = [[runner(inputs[0])] for runner in runners]
    synchronize()
    first_s = time.perf_counter() - start
    for runner, results in zip(runners, after, strict=True):
        results += [runner(x) for x in inputs[1:]]
    synchronize()
    equal = all(
        torch.equal(one, other)
        for mine, theirs in zip(before, after, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )
    emit(
        BENCH,
        f"sleep and wake, cycle {number + 1}",
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


# -- captures during serving ----------------------------------------------------------------

WAYS = ("none", "background", "between operators", "lock")


class ServingThread:
    """A thread that runs steps, measures them and compares them with eager.

    Args:
        runner: Runner that runs the steps.
        inputs: Inputs, used in turn.
        expected: Eager result for each input.
    """

    def __init__(self, runner: GraphRunner, inputs: Any, expected: Any) -> None:
        self.times: list[float] = []
        self.wrong = self.lost = 0
        self._runner, self._inputs, self._expected = runner, inputs, expected
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        stream: Any = torch.cuda.Stream() if HAS_GPU else None
        number = 0
        while not self._stop.is_set():
            time.sleep(0.0005)  # requests arrive with pauses
            at = number % len(self._inputs)
            number += 1
            start = time.perf_counter()
            try:
                with torch.cuda.stream(stream):
                    result = self._runner(self._inputs[at])
                if stream is not None:
                    stream.synchronize()
            except Exception as error:  # noqa: BLE001 - any failure is counted
                self.lost += 1
                print(f"a step raised {type(error).__name__}: {error}"[:300], flush=True)
                continue
            self.times.append((time.perf_counter() - start) * 1e6)
            expected = self._expected[at]
            scale = expected.abs().max() + 1e-6
            self.wrong += bool((result.float() - expected).abs().max() > 0.03 * scale)


def concurrent(options: argparse.Namespace) -> None:
    width, count = (512 // SCALE, 12) if options.model == "small" else (4096 // SCALE, 24)
    module = ready(Layers, width, count)
    ladder = (1, 2, 4, *range(8, 385, 8)) if HAS_GPU else (1, 2, 4, 8, 384)
    # All inputs use the largest graph, which is captured before the measurement.
    inputs = [batch((None, width), rows, rows) for rows in (377, 378, 380, 382, 384)]
    with torch.no_grad():
        for rows in (3, *ladder):  # load kernels before the measurement
            module(batch((None, width), rows, 0))
        expected = [module(x).float() for x in inputs]
    warnings.simplefilter("ignore")
    taken, quiet = 0, 0.0
    for little in (False, True):
        for way in WAYS if options.way == "all" else (options.way,):
            if seconds_left(options) < 5:
                print(f"no time left to measure {way} with {'little' if little else 'much'} memory")
                return
            case = ConcurrentCase(options, module, width, ladder, inputs, expected)
            found, now_taken = case.run(way, leave=taken if little else None)
            taken = max(taken, now_taken)
            quiet = found if way == "none" else quiet
            emit(BENCH, **case.row, limit_us=round(quiet + options.max_pause_us, 1))
            del case
            used()


class ConcurrentCase:
    """The measurement of steps that run concurrently with captures.

    Attributes:
        row: Result of the last run, as arguments of ``emit``.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        module: Any,
        width: int,
        ladder: Any,
        inputs: Any,
        expected: Any,
    ) -> None:
        self._options, self._module, self._width, self._ladder = options, module, width, ladder
        self._inputs, self._expected = inputs, expected
        self.row: dict[str, Any] = {}

    def run(self, way: str, leave: int | None) -> tuple[float, int]:
        """Measure the case; return the 99th percentile and the bytes used by captures.

        Args:
            way: How the captures run, one of ``WAYS``.
            leave: Bytes that the captures used in an earlier run; 1.5 times this amount plus 64 MiB
                stays free. None leaves all memory free.
        """
        runner = make_runner(self._module, (None, self._width), self._ladder, None)
        runner.capture([key for key in runner.registry if key.num_tokens == max(self._ladder)])
        filler, free = None, 0
        if HAS_GPU:
            used()
            free, _ = torch.cuda.mem_get_info()
            if leave is not None:
                left = leave * 3 // 2 + 64 * MIB
                filler = torch.empty(free - left, dtype=torch.uint8, device=DEVICE)
                free, _ = torch.cuda.mem_get_info()
        serving = ServingThread(runner, self._inputs, self._expected)
        time.sleep(0.3)
        serving.times.clear()
        start = time.perf_counter()
        pauses: list[Any] = []
        report: Any = None
        try:
            if way == "none":
                time.sleep(2.5)
            elif way == "lock":
                report = runner.capture()
            else:
                background = runner.controls.capture_in_background(
                    max_pause_us=self._options.max_pause_us,
                    between_operators=way == "between operators",
                )
                background.wait(max(1.0, seconds_left(self._options) - 3))
                report, pauses = background.stop(), background.pauses
            seconds = time.perf_counter() - start
        finally:
            serving.stop()
        taken = free - torch.cuda.mem_get_info()[0] if HAS_GPU else 0
        del filler
        times = serving.times
        cuts = [0.0] * 99
        if len(times) > 1:
            cuts = statistics.quantiles(times, n=100, method="inclusive")
        named: dict[str, list[float]] = {}
        for pause in pauses:
            named.setdefault(pause.part, []).append(pause.us)
        longest = sorted(named.items(), key=lambda item: -max(item[1]))[:8]
        memory = "much" if leave is None else "little"
        self.row = {
            "case": f"{self._options.model} model, {memory} memory, {way}",
            "median": cuts[49],
            "unit": "us",
            "n": len(times),
            "p90": round(cuts[89], 1),
            "p99": round(cuts[98], 1),
            "longest": round(max(times, default=0.0), 1),
            "wrong": serving.wrong,
            "lost": serving.lost,
            "seconds": round(seconds, 2),
            "free_mib": free // MIB,
            "taken_mib": round(taken / MIB, 1),
            "graphs": None if report is None else report.num_graphs,
            "failed": None
            if report is None
            else [str(one)[:200] for one in report.failed.values()][:3],
            "eager": dict(runner.stats().eager_by_reason),
            "long_pauses": len(pauses),
            "pauses": {what: [len(us), round(max(us))] for what, us in longest},
        }
        return cuts[98], taken


# -- dropped runners ------------------------------------------------------------------------


def dropped(options: argparse.Namespace) -> None:
    module = ready(Layers, 64, 2)
    memory = GraphMemory()

    def once() -> None:
        runner = make_runner(module, (None, 64), (8,), memory)
        runner.capture()
        runner(batch((None, 64), 3, 0))

    def memory_in_use() -> tuple[int, int]:
        synchronize()
        host = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        free, total = torch.cuda.mem_get_info() if HAS_GPU else (0, 0)
        return host, total - free

    for _ in range(50):
        once()
    gc.collect()
    gc.disable()
    begun = memory_in_use()
    start, done = time.perf_counter(), 0
    samples: list[tuple[int, int, int]] = []
    while done < options.runners and seconds_left(options) > 2:
        once()
        done += 1
        if done % max(1, options.runners // 20) == 0:
            host, device = memory_in_use()
            samples.append((done, host - begun[0], device - begun[1]))
            print(*samples[-1], flush=True)
    seconds = time.perf_counter() - start
    gc.enable()
    host, device = memory_in_use()
    emit(
        BENCH,
        "runners created and dropped",
        done,
        "runners",
        done,
        host_bytes=host - begun[0],
        device_bytes=device - begun[1],
        ms_each=round(1e3 * seconds / max(1, done), 2),
        over_time=samples,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    cases = parser.add_subparsers()

    def case(run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        made = cases.add_parser(run.__name__)
        made.set_defaults(run=run)
        made.add_argument("--seconds", type=float, default=50.0)
        return made

    one = case(pools)
    one.add_argument("--steps", type=int, default=10_000)
    one.add_argument("--apart", action="store_true")
    one.add_argument("--by-hand", action="store_true")
    case(sleep).add_argument("--gib", type=float, default=10.0)
    one = case(concurrent)
    one.add_argument("--model", choices=("small", "large"), default="small")
    one.add_argument("--way", choices=(*WAYS, "all"), default="all")
    one.add_argument("--max-pause-us", type=float, default=2000.0)
    case(dropped).add_argument("--runners", type=int, default=10_000)
    options = parser.parse_args()
    if not hasattr(options, "run"):  # no subcommand, as in `make bench`
        options = parser.parse_args(["sleep", "--gib", "1"])
        dropped(parser.parse_args(["dropped", "--runners", "50"]))
    options.run(options)


if __name__ == "__main__":
    main()
