"""A long run with everything at once, and faults at random; every result compared with eager.

    python scripts/soak.py --steps 100000 --seed 0

A real trace is looped through a runner on the tape: an adaptive policy in a composite, two lanes
beside it, lazy capture under a budget that evicts. Meanwhile captures fail at any operation or run
out of memory, launches are refused, observers and policies raise, policies are swapped, modes and
keys switched, weights changed in place and replaced, and threads submit at once. One JSON line
says what happened; exit 1 and a message say what was wrong.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import logging
import random
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from dispatchkit import GraphRunner, StaticInput, eager_piece, graph_piece
from dispatchkit.backends.tape import TapeBackend
from dispatchkit.dispatch import Decision
from dispatchkit.errors import ReplayError
from dispatchkit.hookspecs import PolicySpec, hookimpl
from dispatchkit.observe import read_trace
from dispatchkit.plugins import PluginSet, load_plugins

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "tests" / "data" / "traces" / "step_azure_conv_peak.csv.gz"
SIZES = (1, 2, 4, 8, 16, 24)
SINK = 64
MAX_GRAPHS = 7


class SoakError(AssertionError):
    """Something that must hold did not."""


class PlannedError(RuntimeError):
    """A fault that was planted."""


class Faults:
    """Which fault comes next: each is armed for one use."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.at_operation = -1
        self.out_of_memory = False
        self.launch = False
        self.policy = False
        self.observer = False
        self.done: collections.Counter[str] = collections.Counter()

    def operation(self, backend: TapeBackend) -> None:
        """Called by the step between operations; may fail in a capture."""
        if self.at_operation < 0 or not backend.is_capturing():
            return
        self.at_operation -= 1
        if self.at_operation < 0:
            if self.out_of_memory:
                self.done["capture out of memory"] += 1
                raise torch.OutOfMemoryError("planted")
            self.done["capture failed"] += 1
            raise PlannedError("planted in a capture")


class FaultyTape(TapeBackend):
    """The tape; a launch may be refused. Counts the graphs that are alive."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults, self.num_live = faults, 0

    def capture(self, run: Any, **options: Any) -> Any:
        """Capture a graph that is counted."""
        graph = super().capture(run, **options)
        self.num_live += 1
        return FaultyGraph(graph, self)


class FaultyGraph:
    """A graph whose launch may be refused."""

    def __init__(self, graph: Any, backend: FaultyTape) -> None:
        self.graph, self.backend, self.is_released = graph, backend, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)

    def replay(self) -> None:
        """Launch once, unless refused."""
        if self.backend.faults.launch:
            self.backend.faults.launch = False
            self.backend.faults.done["launch refused"] += 1
            raise PlannedError("planted at a launch")
        self.graph.replay()

    def release(self) -> None:
        """Let go of it, and count it no longer."""
        self.backend.num_live -= not self.is_released
        self.is_released = True
        self.graph.release()


class Model:
    """A step with a cache, a counter, a weight, a look across rows and several outputs."""

    def __init__(self, faults: Faults | None = None, backend: Any = None) -> None:
        self.faults, self.backend = faults, backend
        self.cache = torch.zeros(SINK + 1, 2)
        self.counter = torch.zeros((), dtype=torch.int64)
        self.weight = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])

    def trip(self) -> None:
        """Between two operations."""
        if self.faults is not None:
            self.faults.operation(self.backend)

    def project(self, slots: torch.Tensor, values: torch.Tensor) -> Any:
        """Write the cache."""
        self.trip()
        self.counter.add_(1)
        self.trip()
        hidden = values @ self.weight
        self.trip()
        self.cache.index_copy_(0, slots, hidden)
        self.trip()
        return hidden, values.abs()

    def attend(self, pair: Any) -> Any:
        """Look across rows."""
        return pair[0].cumsum(0), pair[1]

    def finish(self, pair: Any, slots: torch.Tensor) -> Any:
        """Read the cache."""
        self.trip()
        mixed = pair[0] + self.cache[slots]
        self.trip()
        return {"mixed": mixed, "more": [pair[1] * 2, self.counter + 0]}

    def __call__(self, slots: torch.Tensor, values: torch.Tensor) -> Any:
        """Run it plainly."""
        return self.finish(self.attend(self.project(slots, values)), slots)

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a user sees of it."""
        return self.cache[:SINK], self.counter


def plugins_with_faults(faults: Faults) -> PluginSet:
    """The installed plugins, and one with a policy and an observer that raise now and then."""

    class Moody:
        name = "moody"
        traits = frozenset[str]()

        def declare(self, config: Any) -> list[Any]:
            """It has no graphs of its own."""
            return []

        def decide(self, batch: Any, graphs: Any) -> Decision | None:
            """Leave every batch to others, or raise."""
            if faults.policy:
                faults.policy = False
                faults.done["policy raised"] += 1
                raise PlannedError("planted in a policy")
            return None

    module = types.ModuleType("soak_plugin")

    @hookimpl
    def dispatchkit_register_policies() -> list[PolicySpec]:
        return [PolicySpec("moody", Moody)]

    @hookimpl
    def dispatchkit_on_evict(event: Any) -> None:
        if faults.observer:
            faults.observer = False
            faults.done["observer raised"] += 1
            raise PlannedError("planted in an observer")

    module.dispatchkit_register_policies = dispatchkit_register_policies  # type: ignore[attr-defined]
    module.dispatchkit_on_evict = dispatchkit_on_evict  # type: ignore[attr-defined]
    return load_plugins(extra=[("soak", module)])


POLICIES = ("moody:20, adaptive:10, vllm", "adaptive:5, vllm", "moody:20, threshold:10, vllm")


class Soak:
    """One run; see the module."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.faults = Faults(self.rng)
        self.plugins = plugins_with_faults(self.faults)
        self.backend = FaultyTape(self.faults)
        self.mine = Model()
        self.theirs = Model(self.faults, self.backend)
        model = self.theirs
        pieces = [graph_piece(model.project), eager_piece(model.attend), graph_piece(model.finish)]
        self.runner = GraphRunner(
            pieces,
            {
                "slots": StaticInput((None,), "int64", fill=SINK),
                "values": StaticInput((None, 2), "float32", fill=-3.0),
            },
            sizes=SIZES,
            max_num_seqs=SIZES[-1],
            policy=self._policy(POLICIES[0]),
            backend=self.backend,
            state=[model.cache, model.counter],
            lazy=True,
            max_graphs=MAX_GRAPHS,
            plugins=self.plugins,
        )
        self.laned_weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.laned = GraphRunner(
            lambda x: torch.relu(x @ self.laned_weight),
            {"x": StaticInput((None, 4), "float32")},
            sizes=(1, 2, 4, 8),
            max_num_seqs=8,
            mode="FULL",
            policy="vllm",
            backend=TapeBackend(),
            lanes=2,
            plugins=self.plugins,
        )
        self.laned.capture()
        self.steps = self.storms = self.raised = 0

    def _policy(self, members: str) -> Any:
        return self.plugins.create_policy("composite", members=members, plugins=self.plugins)

    # -- one step -------------------------------------------------------------------------

    def step(self, num_tokens: int) -> None:
        """Run one batch through both, and compare result and state."""
        rng = self.rng
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        slots = torch.randperm(SINK, generator=generator)[:num_tokens]
        values = torch.randn(num_tokens, 2, generator=generator)
        uniform = rng.random() < 0.5
        try:
            got = self.runner(
                slots,
                values,
                num_reqs=num_tokens,
                uniform=uniform,
                ceiling=rng.choice((2, 2, 2, 1, 0)),
            )
        except ReplayError:
            # Told that the step may have run in part, and was not run again: its state is put
            # back, as the message says, and the step is not counted.
            self.raised += 1
            for theirs, mine in zip(self.theirs.state(), self.mine.state(), strict=True):
                theirs.copy_(mine)
            return
        want = self.mine(slots, values)
        self.steps += 1
        self.same(got, want, f"step {self.steps} of {num_tokens} tokens gave another result")
        self.same(self.theirs.counter, self.mine.counter, f"step {self.steps} did not run once")

    def same(self, got: Any, want: Any, problem: str) -> None:
        """Raise SoakError with the problem unless two values agree."""
        try:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        except AssertionError as error:
            raise SoakError(f"{problem}: {error}") from error

    # -- what happens meanwhile -------------------------------------------------------------

    def happen(self) -> None:
        """Let one thing happen."""
        rng, runner, faults = self.rng, self.runner, self.faults
        what = rng.choice(
            "capture memory launch policy observer swap mode key in_place replace evict idle "
            "all all storm drain".split()
        )
        faults.done[f"event: {what}"] += 1
        match what:
            case "capture" | "memory":
                faults.at_operation, faults.out_of_memory = rng.randrange(7), what == "memory"
            case "launch" | "policy" | "observer":
                setattr(faults, what, True)
            case "swap":
                runner.dispatcher.swap(self._policy(rng.choice(POLICIES)))
            case "mode":
                runner.set_enabled(rng.random() < 0.7, mode=rng.choice(("FULL", "PIECEWISE")))
            case "key":
                runner.set_enabled(rng.random() < 0.7, key=rng.choice(list(runner.registry)))
            case "in_place":
                factor = rng.choice((0.5, 2.0, -1.0))
                for model in (self.mine, self.theirs):
                    model.weight.mul_(factor).clamp_(-2, 2)
            case "replace":
                for model in (self.mine, self.theirs):
                    model.weight = model.weight.flip(0).clone()
                runner.invalidate()
            case "evict":
                live = list(runner.lifecycle.live())
                if live:
                    runner.evict(rng.choice(live))
            case "idle":
                runner.capture_next()
                runner.capture(rng.sample(list(runner.registry), 3))  # failed ones again, too
            case "all":
                runner.set_enabled(True, mode="FULL")
                runner.set_enabled(True, mode="PIECEWISE")
                for key in runner.registry:
                    runner.set_enabled(True, key=key)
            case "drain":
                runner.drain(wait=True)
            case "storm":
                self.storm()

    def storm(self) -> None:
        """Several threads submit at once to two lanes; every result is compared."""
        self.storms += 1
        seed = self.rng.randrange(2**31)
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                generator = torch.Generator().manual_seed(seed + number)
                for rows in (1, 3, 8, 5):
                    x = torch.randn(rows, 4, generator=generator)
                    want = torch.relu(x @ self.laned_weight)
                    got = self.laned.submit(x, num_reqs=rows, uniform=True).result()
                    self.same(got, want, f"a step of {rows} rows on a lane gave another result")
            except BaseException as error:  # noqa: BLE001 - raised by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    # -- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """Raise SoakError unless counts, budget and reasons hold."""
        runner, stats = self.runner, self.runner.stats()
        self.same(self.theirs.state(), self.mine.state(), f"state after {self.steps} steps")
        eager = stats.eager_by_reason
        if stats.steps != self.steps:
            raise SoakError(f"{self.steps} steps gave a result, {stats.steps} were counted.")
        if sum(stats.hits.values()) + sum(eager.values()) != self.steps or "" in eager:
            raise SoakError(f"Not every step is a replay or eager with a reason: {stats}")
        live = runner.lifecycle.live()
        if len(live) > MAX_GRAPHS:
            raise SoakError(f"{len(live)} graphs are alive; the budget is {MAX_GRAPHS}.")
        graphs = sum(len(step.graphs) for step in live.values())
        if self.backend.num_live != graphs:
            raise SoakError(f"The device holds {self.backend.num_live} graphs, the runner {graphs}")


def resources() -> tuple[int, int, int, int]:
    """Return resident bytes, open files, threads and live objects of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(list(Path("/proc/self/fd").iterdir()))
    return pages * 4096, files, threading.active_count(), len(gc.get_objects())


def run(steps: int, seed: int, *, every: int = 25) -> dict[str, Any]:
    """Run that many steps, an event after about each ``every``; return what happened.

    Raises:
        SoakError: Something that must hold did not.
    """
    soak = Soak(seed)
    sizes = [max(0, n) % (SIZES[-1] + 1) for n in read_trace(TRACE).column("num_tokens")]
    logging.getLogger("dispatchkit").setLevel(logging.CRITICAL)  # faults are planted here
    start = time.perf_counter()
    begun: tuple[int, int, int, int] | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(steps):
            soak.step(sizes[number % len(sizes)])
            if soak.rng.random() < 1 / every:
                soak.happen()
            if number % 1000 == 999 or number == steps - 1:
                soak.check()
            if begun is None and number >= steps // 3:
                begun = resources()
        ended = resources()
    if begun is not None:
        soak.faults.done["bytes grown"] = grown = ended[0] - begun[0]
        if grown > 100e6:
            raise SoakError(f"Memory grew by {grown / 1e6:.0f} MB in the last two thirds.")
        if ended[1] > begun[1] + 2 or ended[2] > begun[2]:
            raise SoakError(f"Files and threads grew from {begun[1:3]} to {ended[1:3]}.")
        soak.faults.done["objects grown"] = ended[3] - begun[3]
        if ended[3] - begun[3] > 5000 + begun[3] // 20:
            raise SoakError(f"Live objects grew from {begun[3]} to {ended[3]}.")
    stats = soak.runner.stats()
    return {
        "seed": seed,
        "steps": soak.steps,
        "raised": soak.raised,
        "storms": soak.storms,
        "seconds": round(time.perf_counter() - start, 1),
        "by_mode": stats.steps_by_mode,
        "eager": stats.eager_by_reason,
        "captures": stats.captures,
        "capture_failures": stats.capture_failures,
        "replay_failures": stats.replay_failures,
        "evictions": stats.evictions,
        "happened": dict(sorted(soak.faults.done.items())),
    }


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description="Run everything at once, with faults at random.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=25, help="steps between two events, about")
    chosen = parser.parse_args()
    try:
        print(json.dumps(run(chosen.steps, chosen.seed, every=chosen.every)))
    except SoakError as error:
        sys.exit(f"Soak, seed {chosen.seed}: {error}")


if __name__ == "__main__":
    main()
