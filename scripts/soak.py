"""A long run with everything at once, and faults at random; every result compared with eager.

    python scripts/soak.py --steps 100000 --seed 0
    python scripts/soak.py --steps 100000 --seed 0 --device cuda --seconds 80

A real trace is looped through a runner on the tape, or on a device: an adaptive policy in a
composite, two lanes beside it, lazy capture under a budget that evicts. Meanwhile captures fail
at any operation or run out of memory, launches are refused, observers and policies raise, policies
and limits are swapped, modes and keys switched, weights changed in place and replaced, and threads
submit at once. A few steps after each of these somebody mends what can be mended, so that most
steps are replays. One JSON line says what happened; exit 1 and a message say what was wrong, with a
line that tells the last events and what was held.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import logging
import math
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from soak_parts import SINK, Faults, Model, SoakError, Verdict, faulty_device, plugins_with_faults

from dispatchkit import (
    DispatchConfig,
    GraphRunner,
    MemoryOptions,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import PolicyError, ReplayError
from dispatchkit.observe import read_trace
from dispatchkit.registry import KeyState

ROOT = Path(__file__).resolve().parent.parent
TRACE = ROOT / "tests" / "data" / "traces" / "step_azure_conv_peak.csv.gz"
SIZES = (1, 2, 4, 8, 16, 24)
LANE_SIZES = (1, 2, 4, 8)
MAX_GRAPHS = 10
#: Highest runtime mode of the steps, drawn at random: few may use no graph.
CEILINGS = (2,) * 16 + (1,) * 3 + (0,)
# The first learns, and has hundreds of steps timed before it knows its graphs.
POLICIES = (
    "moody:20, adaptive:10, vllm",
    "moody:20, vllm",
    "moody:20, threshold:10, vllm",
    "moody:5, vllm@0.11",
    "grumpy",
)
#: What can happen between two steps; the more often in the list, the more often it does.
EVENTS = (
    "capture capture memory launch launch policy policy learning learning learning observer "
    "observer swap config mode key in_place replace evict limits idle drain stream storm"
).split()


class Soak:
    """One run; see the module."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng = random.Random(seed)
        self.device, self.seed = device, seed
        self.faults = Faults()
        self.plugins = plugins_with_faults(self.faults)
        self.backend = faulty_device(device, self.faults)
        self.device = device = self.backend.torch_device
        self.mine = Model(device)
        self.theirs = model = Model(device, self.faults, self.backend)
        self.runner = GraphRunner(
            [graph_piece(model.project), eager_piece(model.attend), graph_piece(model.finish)],
            {
                "slots": StaticInput((None,), "int64", fill=SINK),
                "values": StaticInput((None, 2), "float32", fill=-3.0),
            },
            sizes=SIZES,
            backend=self.backend,
            state=[model.cache, model.counter],
            lazy=True,
            policy=self.plugins.with_policy(self._policy(POLICIES[0])),
            options=RunnerOptions(
                config=DispatchConfig(max_num_seqs=SIZES[-1]),
                memory=MemoryOptions(max_graphs=MAX_GRAPHS),
            ),
        )
        self.lane_backend = faulty_device(device, self.faults)
        generator = torch.Generator().manual_seed(seed)
        # Not through self: what else it holds changes in Python, and such steps run eager.
        self.laned_weight = weight = torch.randn(4, 4, generator=generator).to(device)
        self.laned = GraphRunner(
            lambda x: torch.relu(x @ weight),
            {"x": StaticInput((None, 4), "float32")},
            sizes=LANE_SIZES,
            mode="FULL",
            backend=self.lane_backend,
            lanes=2,
            policy=self.plugins.with_policy("vllm"),
            options=RunnerOptions(config=DispatchConfig(max_num_seqs=LANE_SIZES[-1])),
        )
        self.laned.capture()
        # One block of random rows, cut anew for each step: drawing some takes longer than a step.
        self.rows = torch.randn(4096, 2, generator=generator).to(device)
        self.places = torch.stack(
            [torch.randperm(SINK, generator=generator) for _ in range(256)]
        ).to(device)
        self.streams = [self.backend.current_stream(), *(self.backend.new_stream() for _ in "ab")]
        self.stream = self.streams[0]
        self.verdict, self.state_verdict = Verdict(device), Verdict(device)
        self.steps = self.storms = self.swaps = self.raised = 0
        self.heal_after = -1
        self.recent: collections.deque[str] = collections.deque(maxlen=16)

    def _policy(self, members: str) -> Any:
        if members == "grumpy":
            return self.plugins.create_policy("grumpy")
        return self.plugins.create_policy("composite", members=members, plugins=self.plugins)

    # -- one step -------------------------------------------------------------------------

    def step(self, num_tokens: int) -> None:
        """Run one batch through both, and compare the results."""
        rng = self.rng
        at = rng.randrange(len(self.rows) - num_tokens)
        slots = self.places[rng.randrange(len(self.places))][:num_tokens]
        values = self.rows[at : at + num_tokens]
        try:
            got = self.runner(
                slots,
                values,
                num_reqs=num_tokens,
                uniform=rng.random() < 0.5,
                ceiling=rng.choice(CEILINGS),
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
        self.verdict.compare(got, want, self.steps)

    # -- what happens meanwhile -------------------------------------------------------------

    def happen(self) -> None:
        """Let one thing happen, to be mended a few steps later."""
        what = self.rng.choice(EVENTS)
        self.faults.done[f"event: {what}"] += 1
        self.recent.append(f"{what} after {self.steps}")
        getattr(self, f"on_{what}")()
        if self.heal_after < 0:
            self.heal_after = self.rng.randrange(3, 9)

    def on_capture(self, *, out_of_memory: bool = False) -> None:
        """The next capture fails; give it a cause to come."""
        self.faults.arm_capture(self.rng.randrange(7), out_of_memory=out_of_memory)
        key = self.rng.choice(list(self.runner.registry))
        if self.rng.random() < 0.5:
            self.runner.capture([key])
        elif key in self.runner.lanes[0].lifecycle.live():
            self.runner.evict(key)

    def on_memory(self) -> None:
        """The same, by memory that runs out."""
        self.on_capture(out_of_memory=True)

    def on_launch(self) -> None:
        """A launch is refused."""
        self.faults.arm("launch refused")

    def on_policy(self) -> None:
        """A policy raises when it is asked; give it a cause to be."""
        self.faults.arm("policy raised")
        self.on_key(again=True)

    def on_learning(self) -> None:
        """A policy raises when it is told what a step took."""
        self.faults.arm("learning raised")

    def on_observer(self) -> None:
        """An observer raises."""
        self.faults.arm("observer raised")
        # Not always at once: three faults of a hook in a row, and it is switched off for good.
        if self.rng.random() < 0.5:
            self.on_evict()

    def on_swap(self) -> None:
        """Another policy."""
        self._swap(policy=self._policy(self.rng.choice(POLICIES)))

    def on_config(self) -> None:
        """Other sizes, with a copy of the policy; those in both keep their graphs."""
        sizes = SIZES if self.runner.config.sizes != SIZES else (1, 3, 8, 20, 24)
        self._swap(sizes=sizes)

    def _swap(self, **changes: Any) -> None:
        try:
            self.runner.swap(**changes)
            self.swaps += 1
        except PolicyError:  # it raised when it was tried: what was in force stays so
            self.faults.done["swap refused"] += 1

    def on_mode(self) -> None:
        """A mode is switched off."""
        self.runner.controls.set_enabled(False, mode=self.rng.choice(("FULL", "PIECEWISE")))

    def on_key(self, *, again: bool = False) -> None:
        """A key is switched off, and perhaps on again."""
        key = self.rng.choice(list(self.runner.registry))
        self.runner.controls.set_enabled(False, key=key)
        if again:
            self.runner.controls.set_enabled(True, key=key)

    def on_in_place(self) -> None:
        """Weights change in place: the next replay sees them."""
        factor = self.rng.choice((0.5, 2.0, -1.0))
        for model in (self.mine, self.theirs):
            model.weight.mul_(factor).clamp_(-2, 2)

    def on_replace(self) -> None:
        """Weights are in other memory: all graphs go."""
        for model in (self.mine, self.theirs):
            model.weight = model.weight.flip(0).clone()
        self.runner.invalidate()

    def on_evict(self) -> None:
        """A graph is given up."""
        live = list(self.runner.lanes[0].lifecycle.live())
        if live:
            self.runner.evict(self.rng.choice(live))

    def on_limits(self) -> None:
        """Fewer graphs, or less memory, than there are now."""
        if self.rng.random() < 0.5:
            fewer = [*range(2, MAX_GRAPHS)]
            if (now := self.runner.lanes[0].lifecycle.budget.max_graphs) in fewer:
                fewer.remove(now)  # what is so already is no swap
            self.runner.swap(max_graphs=self.rng.choice(fewer))
            self.swaps += 1
        elif self.runner.num_bytes:
            if self.rng.random() < 0.5:
                self.runner.clear()  # what is left of them is to fit, too
            self.runner.swap(max_bytes=int(self.runner.num_bytes * 0.9))
            self.swaps += 1
        self.check()

    def on_idle(self) -> None:
        """Idle moments are used."""
        self.runner.controls.capture_next()

    def on_drain(self) -> None:
        """What was measured is waited for."""
        self.runner.drain(wait=True)

    def on_stream(self) -> None:
        """The caller goes on on another stream."""
        before, self.stream = self.stream, self.rng.choice(self.streams)
        self.stream.wait_stream(before)

    def on_storm(self) -> None:
        """Several threads submit at once to two lanes; every result is compared."""
        self.storms += 1
        seed = self.rng.randrange(2**31)
        errors: list[BaseException] = []
        self.backend.synchronize()  # what they read was written on the stream of this thread

        def work(number: int) -> None:
            try:
                verdict, rng = Verdict(self.device), random.Random(seed + number)
                for turn, rows in enumerate((1, 3, 8, 5)):
                    at = rng.randrange(1000)
                    x = self.rows[at : at + 2 * rows].reshape(rows, 4)
                    got = self.laned.submit(x, num_reqs=rows, uniform=True).result()
                    verdict.compare(got, torch.relu(x @ self.laned_weight), turn)
                verdict.ask(f"storm {self.storms}: submitted step")
            except BaseException as error:  # noqa: BLE001 - raised by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.laned.capture(list(self.laned.registry))  # a refused launch cost a graph

    # -- mending ----------------------------------------------------------------------------

    def heal(self) -> None:
        """Mend what can be mended; what was armed and not used is kept for another time."""
        self.recent.append(f"heal after {self.steps}")
        runner = self.runner
        for mode in ("FULL", "PIECEWISE"):
            runner.controls.set_enabled(True, mode=mode)
        for key in runner.registry:
            runner.controls.set_enabled(True, key=key)
        budget = runner.lanes[0].lifecycle.budget
        if (budget.max_graphs, budget.max_bytes) != (MAX_GRAPHS, None):
            runner.swap(max_graphs=MAX_GRAPHS, max_bytes=None)
            self.swaps += 1
        self.mend_captures()

    def mend_captures(self) -> None:
        """Capture what failed; all else is captured again when a step asks for it."""
        entries = list(self.runner.registry.entries.items())
        failed = [key for key, one in entries if one.state is KeyState.FAILED]
        if failed:
            self.runner.capture(failed, again=True)

    def settle_faults(self) -> None:
        """Disarm, mend, and see that steps run as if nothing had been."""
        self.faults.disarm()
        self.heal()

    # -- what must hold -----------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        """Return where it stands, to understand a failure by."""
        runner = self.runner
        lane = runner.lanes[0].lane
        return {
            "seed": self.seed,
            "steps": self.steps,
            "raised": self.raised,
            "storms": self.storms,
            "recent": list(self.recent),
            "policy": runner.dispatcher.policy_name,
            "sizes": runner.config.sizes,
            "budget": str(runner.lanes[0].lifecycle.budget),
            "bytes": {
                "pool": lane.backend.pool_bytes(lane.pool),
                "outputs": lane.outputs.num_bytes,
                "between": lane.between.num_bytes,
            },
            "graphs": {str(key): str(one.state) for key, one in runner.registry.entries.items()},
            "on device": self.backend.num_live,
            "happened": dict(sorted(self.faults.done.items())),
            "stats": runner.stats().to_dict(),
            "lanes": self.laned.stats().to_dict(),
        }

    def check(self) -> None:
        """Raise SoakError unless results, counts, budget and reasons hold."""
        runner, stats = self.runner, self.runner.stats()
        self.verdict.ask(f"seed {self.seed}: step")
        self.state_verdict.compare(self.theirs.state(), self.mine.state(), self.steps)
        self.state_verdict.ask("the state after step")
        eager = stats.eager_by_reason
        if stats.steps != self.steps:
            raise SoakError(f"{self.steps} steps gave a result, {stats.steps} were counted.")
        if sum(stats.hits.values()) + sum(eager.values()) != self.steps or "" in eager:
            raise SoakError(f"Not every step is a replay or eager with a reason: {stats}")
        live, budget = runner.lanes[0].lifecycle.live(), runner.lanes[0].lifecycle.budget
        if budget.max_graphs is not None and len(live) > budget.max_graphs:
            raise SoakError(f"{len(live)} graphs are alive; the budget is {budget.max_graphs}.")
        if budget.max_bytes is not None and runner.num_bytes > budget.max_bytes:
            raise SoakError(f"{runner.num_bytes} bytes are held of {budget.max_bytes}.")
        graphs = sum(len(step.graphs) for step in live.values())
        if self.backend.num_live != graphs:
            raise SoakError(f"The device holds {self.backend.num_live} graphs, the runner {graphs}")


def resources(device: str) -> dict[str, int]:
    """Return what this process holds."""
    gc.collect()
    held = {
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
    }
    if device != "cpu":
        torch.cuda.synchronize()
        held["device bytes"] = torch.cuda.memory_allocated()
    return held


#: By how much each may grow in the last two thirds of a run.
MAY_GROW = {"bytes": 200e6, "files": 2, "threads": 0, "objects": 10_000, "device bytes": 16e6}


@contextmanager
def telling(soak: Soak) -> Iterator[None]:
    """Print where a soak stands when it fails."""
    try:
        yield
    except Exception:
        try:
            print(json.dumps(soak.told(), default=str), file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - what failed first is what is to be seen
            print(f"After {soak.steps} steps, {list(soak.recent)}: {error!r}", file=sys.stderr)
        raise


def run(
    steps: int, seed: int, *, every: int = 20, device: str = "cpu", seconds: float = math.inf
) -> dict[str, Any]:
    """Run that many steps, an event after about each ``every``; return what happened.

    After so many seconds it ends with the steps done by then.

    Raises:
        SoakError: Something that must hold did not.
    """
    soak = Soak(seed, device)
    sizes = [max(0, n) % (SIZES[-1] + 1) for n in read_trace(TRACE).column("num_tokens")]
    logging.getLogger("dispatchkit").setLevel(logging.CRITICAL)  # faults are planted here
    start = time.perf_counter()
    begun: dict[str, int] = {}
    with warnings.catch_warnings(), telling(soak):
        warnings.simplefilter("ignore")
        for number in range(steps):
            with soak.backend.use_stream(soak.stream):
                soak.step(sizes[number % len(sizes)])
                if soak.rng.random() < 1 / every:
                    soak.happen()
                elif soak.heal_after == 0:
                    soak.heal()
                soak.heal_after = max(-1, soak.heal_after - 1)
                if number % 50 == 49:
                    soak.check()
            if time.perf_counter() - start > seconds:
                break
            if number % 10_000 == 9_999:
                print(f"{number + 1} steps, {time.perf_counter() - start:.0f} s", file=sys.stderr)
            is_third = number >= steps // 3 or time.perf_counter() - start > seconds / 3
            if not begun and is_third:
                begun = resources(device)
        soak.settle_faults()
        soak.check()
        ended = resources(device)
    grown = {name: ended[name] - begun[name] for name in begun}
    for name, amount in grown.items():
        if amount > MAY_GROW[name]:
            raise SoakError(f"{name} grew from {begun[name]} to {ended[name]}.")
    stats = soak.runner.stats()
    replays = sum(stats.hits.values())
    return {
        "seed": seed,
        "device": soak.backend.device_info()["device"],
        "torch": torch.__version__,
        "steps": soak.steps,
        "raised": soak.raised,
        "storms": soak.storms,
        "swaps": soak.swaps,
        "seconds": round(time.perf_counter() - start, 1),
        "replayed": round(replays / max(1, soak.steps), 3),
        "by_mode": stats.steps_by_mode,
        "eager": stats.eager_by_reason,
        "captures": stats.captures,
        "capture_failures": stats.capture_failures,
        "replay_failures": stats.replay_failures,
        "evictions": stats.evictions,
        "lanes": {
            "by_mode": soak.laned.stats().steps_by_mode,
            "eager": soak.laned.stats().eager_by_reason,
        },
        "grown": grown,
        "happened": dict(sorted(soak.faults.done.items())),
    }


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description="Run everything at once, with faults at random.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="steps between two events, about")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many")
    parser.add_argument("--device", default="cpu", help="cpu: the tape; or cuda, cuda:1")
    chosen = parser.parse_args()
    try:
        told = run(
            chosen.steps,
            chosen.seed,
            every=chosen.every,
            device=chosen.device,
            seconds=chosen.seconds,
        )
        print(json.dumps(told))
    except Exception:  # noqa: BLE001 - told with the seed, and the status says it
        traceback.print_exc()
        sys.exit(f"Soak of {chosen.steps} steps, seed {chosen.seed}: see above.")


if __name__ == "__main__":
    main()
