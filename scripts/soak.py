"""Stress-test all features together with random faults; compare all results with eager.

    python scripts/soak.py --steps 100000 --seed 0
    python scripts/soak.py --steps 100000 --seed 0 --device cuda --seconds 80

A real trace is looped through a runner on the tape or on a device, with an adaptive policy in a
composite, lazy capture under a budget that evicts, and a second runner with two lanes. Meanwhile,
captures fail at any operation or run out of memory, launches fail, observers and policies raise,
policies and limits are swapped, modes and keys are disabled, weights are changed in place or
replaced, and threads submit concurrently. A few steps after each event, everything that can be
repaired is repaired, so most steps are replays. One JSON line summarizes the run. If a check fails,
the exit code is 1, and a message and a line with the latest events and the state are printed.
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
from soak_parts import (
    SINK,
    Comparison,
    Faults,
    Model,
    SoakError,
    faulty_device,
    plugins_with_faults,
)

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
#: Highest runtime modes of steps, drawn at random; few steps may use no graph.
CEILINGS = (2,) * 16 + (1,) * 3 + (0,)
# The first policy learns, and needs hundreds of measured steps to compare its graphs.
POLICIES = (
    "flaky-member:20, adaptive:10, vllm",
    "flaky-member:20, vllm",
    "flaky-member:20, threshold:10, vllm",
    "flaky-member:5, vllm@0.11",
    "flaky-policy",
)
#: Events between two steps; the number of repetitions is the relative frequency.
EVENTS = (
    "capture capture memory launch launch policy policy learning learning learning observer "
    "observer swap config mode key in_place replace evict limits idle drain stream storm"
).split()


class Soak:
    """One run, as described in the module docstring."""

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
        # The step does not use self, because other attributes of self change, and such steps run
        # eager.
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
        # One block of random rows is sliced for each step, because drawing takes longer than a
        # step.
        self.rows = torch.randn(4096, 2, generator=generator).to(device)
        self.places = torch.stack(
            [torch.randperm(SINK, generator=generator) for _ in range(256)]
        ).to(device)
        self.streams = [self.backend.current_stream(), *(self.backend.new_stream() for _ in "ab")]
        self.stream = self.streams[0]
        self.comparison, self.state_comparison = Comparison(device), Comparison(device)
        self.steps = self.storms = self.swaps = self.raised = 0
        self.repair_after = -1
        self.recent: collections.deque[str] = collections.deque(maxlen=16)

    def _policy(self, members: str) -> Any:
        if members == "flaky-policy":
            return self.plugins.create_policy("flaky-policy")
        return self.plugins.create_policy("composite", members=members, plugins=self.plugins)

    # -- steps ----------------------------------------------------------------------------

    def step(self, num_tokens: int) -> None:
        """Run one batch with the runner and eager, and compare the results."""
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
            # The step may have run in part and was not repeated. Restore its state, as the message
            # requires, and do not count the step.
            self.raised += 1
            for theirs, mine in zip(self.theirs.state(), self.mine.state(), strict=True):
                theirs.copy_(mine)
            return
        want = self.mine(slots, values)
        self.steps += 1
        self.comparison.compare(got, want, self.steps)

    # -- events -----------------------------------------------------------------------------

    def trigger_event(self) -> None:
        """Trigger a random event, which is repaired a few steps later."""
        what = self.rng.choice(EVENTS)
        self.faults.done[f"event: {what}"] += 1
        self.recent.append(f"{what} after {self.steps}")
        getattr(self, f"on_{what}")()
        if self.repair_after < 0:
            self.repair_after = self.rng.randrange(3, 9)

    def on_capture(self, *, out_of_memory: bool = False) -> None:
        """Make the next capture fail, and perhaps cause a capture."""
        self.faults.arm_capture(self.rng.randrange(7), out_of_memory=out_of_memory)
        key = self.rng.choice(list(self.runner.registry))
        if self.rng.random() < 0.5:
            self.runner.capture([key])
        elif key in self.runner.lanes[0].lifecycle.live():
            self.runner.evict(key)

    def on_memory(self) -> None:
        """Make the next capture run out of memory."""
        self.on_capture(out_of_memory=True)

    def on_launch(self) -> None:
        """Make a launch fail."""
        self.faults.arm("launch refused")

    def on_policy(self) -> None:
        """Make a policy raise when it decides, and cause a decision."""
        self.faults.arm("policy raised")
        self.on_key(again=True)

    def on_learning(self) -> None:
        """Make a policy raise when it receives a measured time."""
        self.faults.arm("learning raised")

    def on_observer(self) -> None:
        """Make an observer raise."""
        self.faults.arm("observer raised")
        # Not always immediately: three consecutive faults of a hook would disable it permanently.
        if self.rng.random() < 0.5:
            self.on_evict()

    def on_swap(self) -> None:
        """Swap the policy."""
        self._swap(policy=self._policy(self.rng.choice(POLICIES)))

    def on_config(self) -> None:
        """Swap the sizes with a copy of the policy; common sizes keep their graphs."""
        sizes = SIZES if self.runner.config.sizes != SIZES else (1, 3, 8, 20, 24)
        self._swap(sizes=sizes)

    def _swap(self, **changes: Any) -> None:
        try:
            self.runner.swap(**changes)
            self.swaps += 1
        except PolicyError:  # the candidate raised, so the previous policy stays
            self.faults.done["swap refused"] += 1

    def on_mode(self) -> None:
        """Disable a mode."""
        self.runner.controls.set_enabled(False, mode=self.rng.choice(("FULL", "PIECEWISE")))

    def on_key(self, *, again: bool = False) -> None:
        """Disable a key, and enable it again if ``again``."""
        key = self.rng.choice(list(self.runner.registry))
        self.runner.controls.set_enabled(False, key=key)
        if again:
            self.runner.controls.set_enabled(True, key=key)

    def on_in_place(self) -> None:
        """Change weights in place; the next replay reads them."""
        factor = self.rng.choice((0.5, 2.0, -1.0))
        for model in (self.mine, self.theirs):
            model.weight.mul_(factor).clamp_(-2, 2)

    def on_replace(self) -> None:
        """Replace weights with other tensors, which invalidates all graphs."""
        for model in (self.mine, self.theirs):
            model.weight = model.weight.flip(0).clone()
        self.runner.invalidate()

    def on_evict(self) -> None:
        """Evict a graph."""
        live = list(self.runner.lanes[0].lifecycle.live())
        if live:
            self.runner.evict(self.rng.choice(live))

    def on_limits(self) -> None:
        """Reduce the limit on graphs or memory below its current use."""
        if self.rng.random() < 0.5:
            fewer = [*range(2, MAX_GRAPHS)]
            if (now := self.runner.lanes[0].lifecycle.budget.max_graphs) in fewer:
                fewer.remove(now)  # the swap must change the limit
            self.runner.swap(max_graphs=self.rng.choice(fewer))
            self.swaps += 1
        elif self.runner.num_bytes:
            if self.rng.random() < 0.5:
                self.runner.clear()  # then limit the memory that remains without graphs
            self.runner.swap(max_bytes=int(self.runner.num_bytes * 0.9))
            self.swaps += 1
        self.check()

    def on_idle(self) -> None:
        """Capture a graph in an idle moment."""
        self.runner.controls.capture_next()

    def on_drain(self) -> None:
        """Wait for all measurements."""
        self.runner.drain(wait=True)

    def on_stream(self) -> None:
        """Continue on another stream."""
        before, self.stream = self.stream, self.rng.choice(self.streams)
        self.stream.wait_stream(before)

    def on_storm(self) -> None:
        """Submit concurrently from several threads to two lanes, and compare all results."""
        self.storms += 1
        seed = self.rng.randrange(2**31)
        errors: list[BaseException] = []
        self.backend.synchronize()  # threads read data written on this thread's stream

        def work(number: int) -> None:
            try:
                comparison, rng = Comparison(self.device), random.Random(seed + number)
                for turn, rows in enumerate((1, 3, 8, 5)):
                    at = rng.randrange(1000)
                    x = self.rows[at : at + 2 * rows].reshape(rows, 4)
                    got = self.laned.submit(x, num_reqs=rows, uniform=True).result()
                    comparison.compare(got, torch.relu(x @ self.laned_weight), turn)
                comparison.raise_if_wrong(f"storm {self.storms}: submitted step")
            except BaseException as error:  # noqa: BLE001 - raised again by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.laned.capture(list(self.laned.registry))  # a failed launch destroys its graph

    # -- repairs ----------------------------------------------------------------------------

    def repair(self) -> None:
        """Repair everything that can be repaired, except that armed faults stay armed."""
        self.recent.append(f"repair after {self.steps}")
        runner = self.runner
        for mode in ("FULL", "PIECEWISE"):
            runner.controls.set_enabled(True, mode=mode)
        for key in runner.registry:
            runner.controls.set_enabled(True, key=key)
        budget = runner.lanes[0].lifecycle.budget
        if (budget.max_graphs, budget.max_bytes) != (MAX_GRAPHS, None):
            runner.swap(max_graphs=MAX_GRAPHS, max_bytes=None)
            self.swaps += 1
        self.recapture_failed()

    def recapture_failed(self) -> None:
        """Capture failed keys again; others are captured when a step needs them."""
        entries = list(self.runner.registry.entries.items())
        failed = [key for key, one in entries if one.state is KeyState.FAILED]
        if failed:
            self.runner.capture(failed, again=True)

    def end_faults(self) -> None:
        """Disarm all faults and repair, so that steps run normally."""
        self.faults.disarm()
        self.repair()

    # -- checks -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of the run, to analyze a failure."""
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
        """Raise ``SoakError`` unless results, counts, budget and reasons are correct."""
        runner, stats = self.runner, self.runner.stats()
        self.comparison.raise_if_wrong(f"seed {self.seed}: step")
        self.state_comparison.compare(self.theirs.state(), self.mine.state(), self.steps)
        self.state_comparison.raise_if_wrong("the state after step")
        eager = stats.eager_by_reason
        if stats.steps != self.steps:
            raise SoakError(
                f"{self.steps} steps returned a result, but {stats.steps} were counted."
            )
        if sum(stats.hits.values()) + sum(eager.values()) != self.steps or "" in eager:
            raise SoakError(f"Some steps are neither replays nor eager with a reason: {stats}")
        live, budget = runner.lanes[0].lifecycle.live(), runner.lanes[0].lifecycle.budget
        if budget.max_graphs is not None and len(live) > budget.max_graphs:
            raise SoakError(f"{len(live)} graphs are live, but the budget is {budget.max_graphs}.")
        if budget.max_bytes is not None and runner.num_bytes > budget.max_bytes:
            raise SoakError(
                f"{runner.num_bytes} bytes are used, but the budget is {budget.max_bytes}."
            )
        graphs = sum(len(step.graphs) for step in live.values())
        if self.backend.num_live != graphs:
            problem = f"The device has {self.backend.num_live} graphs, the runner {graphs}."
            raise SoakError(problem)


def resources(device: str) -> dict[str, int]:
    """Return the resources of this process."""
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


#: Allowed growth of each resource in the last two thirds of a run.
MAY_GROW = {"bytes": 200e6, "files": 2, "threads": 0, "objects": 10_000, "device bytes": 16e6}


@contextmanager
def state_on_failure(soak: Soak) -> Iterator[None]:
    """Print the state of a soak if it fails."""
    try:
        yield
    except Exception:
        try:
            print(json.dumps(soak.state(), default=str), file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - report the first failure
            print(f"After {soak.steps} steps, {list(soak.recent)}: {error!r}", file=sys.stderr)
        raise


def run(
    steps: int, seed: int, *, every: int = 20, device: str = "cpu", seconds: float = math.inf
) -> dict[str, Any]:
    """Run ``steps`` steps with an event every ``every`` steps on average; return a summary.

    The run stops after ``seconds`` seconds with the steps done so far.

    Raises:
        SoakError: A check failed.
    """
    soak = Soak(seed, device)
    sizes = [max(0, n) % (SIZES[-1] + 1) for n in read_trace(TRACE).column("num_tokens")]
    logging.getLogger("dispatchkit").setLevel(logging.CRITICAL)  # faults are intended
    start = time.perf_counter()
    begun: dict[str, int] = {}
    with warnings.catch_warnings(), state_on_failure(soak):
        warnings.simplefilter("ignore")
        for number in range(steps):
            with soak.backend.use_stream(soak.stream):
                soak.step(sizes[number % len(sizes)])
                if soak.rng.random() < 1 / every:
                    soak.trigger_event()
                elif soak.repair_after == 0:
                    soak.repair()
                soak.repair_after = max(-1, soak.repair_after - 1)
                if number % 50 == 49:
                    soak.check()
            if time.perf_counter() - start > seconds:
                break
            if number % 10_000 == 9_999:
                print(f"{number + 1} steps, {time.perf_counter() - start:.0f} s", file=sys.stderr)
            is_third = number >= steps // 3 or time.perf_counter() - start > seconds / 3
            if not begun and is_third:
                begun = resources(device)
        soak.end_faults()
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
    """Run with the command-line arguments."""
    parser = argparse.ArgumentParser(description="Run everything at once with random faults.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="average steps between two events")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time limit")
    parser.add_argument("--device", default="cpu", help="cpu for the tape, or cuda, cuda:1, ...")
    chosen = parser.parse_args()
    try:
        summary = run(
            chosen.steps,
            chosen.seed,
            every=chosen.every,
            device=chosen.device,
            seconds=chosen.seconds,
        )
        print(json.dumps(summary))
    except Exception:  # noqa: BLE001 - reported with the seed and the exit status
        traceback.print_exc()
        sys.exit(f"Soak of {chosen.steps} steps with seed {chosen.seed} failed; see above.")


if __name__ == "__main__":
    main()
