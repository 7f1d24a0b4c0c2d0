"""Simulate ``adaptive`` with a host and a device that have separate clocks and a queue.

    python bench/policies_host.py
    python bench/policies_host.py --hosts 300~530 --traces azure_conv_high --json
    python bench/policies_host.py --model decoder --steps 2000

In ``bench/policies.py``, each arm has a single time. On a GPU, a step takes host time for its
launches and device time for its kernels. Which of the two counts depends on the other steps: if the
host is ahead of the device, the host time is hidden; otherwise, the device waits. Here, host and
device have separate clocks. Times were measured on an H200; noise and hosts of different speeds are
simulated.

The policy receives outcomes as from a runner: one in 16 regular steps (those that are not probes)
is measured. The outcome of a step is reported at a later measured step, after the device has
finished the earlier one. The simulated host time includes outcomes, refilled cells and the
measurement of steps. The host waits for the device after every 50 steps, as in
``bench/policies_gpu.py``.

A host is specified by its time for an eager step of the MLP, in microseconds; the times of its
other work are proportional. ``300-530`` changes from the first value to the second after a third of
the steps. ``300~530`` changes to a random value between the two, every 1,500 steps on average.

The decoder has graphs of 51 sizes up to 512 and of three larger sizes, and ten times as many
launches as the MLP. Eager can be its best arm only in the three largest buckets.

``over`` is the time of ``adaptive`` relative to that of the best fixed arms, where each bucket
always uses its graph or always runs eager. ``gain`` is the time of ``vllm`` relative to that of
``adaptive``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from dispatchkit import DispatchConfig, Dispatcher, Outcome, load_plugins
from dispatchkit.execute.replay.timing import HOST_SHARE
from dispatchkit.observe.trace import read_trace

TRACES = Path(__file__).resolve().parents[1] / "tests" / "data" / "traces"
BLOCK = 50
EARLY = 2000
#: Host times in microseconds, if an eager step takes ``USUAL_US``: a replay, the time between two
#: steps, events of a measured step, an outcome, a cell with its plan, and a wait for the device.
REPLAY_US, BETWEEN_US, EVENTS_US, OUTCOME_US, FILL_US, WAIT_US = 25.0, 15.0, 8.0, 30.0, 25.0, 20.0
USUAL_US = 400.0
#: Mean number of steps between changes of a host's speed.
STEPS_PER_SPEED = 1500
#: Maximum number of outcomes reported after a step.
MAX_OUTCOMES = 2
#: Maximum number of launches in a stream's queue.
QUEUE = 1000


@attrs.frozen
class Model:
    """Times of a model's steps on an H200.

    Attributes:
        graphs: Device time of each graph in microseconds, by its size.
        eager: Device time of eager steps in microseconds, by number of tokens, in ascending order.
        launches: Number of launches of an eager step.
        host: Host time of an eager step, relative to the MLP.
        limit: Largest number of tokens in the largest bucket for which eager is the best arm.
    """

    graphs: dict[int, float]
    eager: dict[int, float]
    launches: int
    host: float
    limit: float

    def eager_us(self, num_tokens: int) -> float:
        """Return the device time of an eager step, interpolated linearly."""
        measured = list(self.eager)
        index = max(bisect_left(measured, num_tokens), 1)
        low, high = measured[index - 1], measured[index]
        share = (num_tokens - low) / (high - low)
        return self.eager[low] + share * (self.eager[high] - self.eager[low])

    def top_of(self, num_tokens: int) -> int:
        """Return the size of the smallest graph that covers a batch."""
        return next(size for size in self.graphs if size >= num_tokens)


MODELS = {
    # 8 layers of width 4096, in bfloat16.
    "mlp": Model(
        graphs={512: 264.0, 768: 370.0, 1024: 467.0, 2048: 971.0},
        eager={
            1: 147.0,
            140: 165.0,
            233: 210.0,
            373: 263.0,
            512: 268.0,
            606: 307.0,
            768: 374.0,
            908: 442.0,
            1024: 488.0,
            1025: 529.0,
            1211: 594.0,
            1397: 713.0,
            1583: 799.0,
            1770: 886.0,
            2048: 971.0,
        },
        launches=28,
        host=1.0,
        limit=2000.0,
    ),
    # 16 layers of width 2048, in bfloat16.
    "decoder": Model(
        graphs={
            size: 870.0 + 2.25 * size
            for size in (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 768, 1024, 2048)
        },
        eager={1: 802.6, 2048: 800.0 + 2.6 * 2048},
        launches=290,
        host=7.5,
        limit=1799.0,
    ),
}


def speeds(host: str, count: int, seed: int) -> list[float]:
    """Return, for each step, the host time that an eager step of the MLP would take."""
    if "-" in host:
        first, second = map(float, host.split("-"))
        return [first] * (count // 3) + [second] * (count - count // 3)
    if "~" not in host:
        return [float(host)] * count
    low, high = map(float, host.split("~"))
    chance, found = random.Random(seed), []
    while len(found) < count:
        speed = low * (high / low) ** chance.random()
        found += [speed] * (1 + int(chance.expovariate(1.0 / STEPS_PER_SPEED)))
    return found[:count]


@attrs.define
class Clocks:
    """Simulated clocks of a host that submits steps and a device that runs them.

    Attributes:
        model: Model of the steps.
        eager_host_us: Host time of an eager step of the MLP.
        chance: Source of noise.
        host_us: Clock of the host.
        device_us: Time at which the device finishes all submitted steps.
    """

    model: Model
    eager_host_us: float
    chance: random.Random
    host_us: float = 0.0
    device_us: float = 0.0
    _running: deque[tuple[float, int]] = attrs.field(factory=deque)
    _launches: int = 0

    def spend(self, us: float) -> None:
        """Advance the host clock by ``us``, scaled to the speed of this host (see ``USUAL_US``)."""
        self.host_us += us * self.eager_host_us / USUAL_US

    def step(self, graph: int, num_tokens: int) -> tuple[float, float, bool, float]:
        """Submit a step.

        Returns:
            Start and end on the device, whether other work was queued, and the host time without
            waits for the device. All times are in microseconds.
        """
        model = self.model
        launches = 1 if graph else model.launches
        host = self.eager_host_us * (REPLAY_US / USUAL_US if graph else model.host)
        host *= max(0.5, self.chance.gauss(1.0, 0.1))
        device = model.graphs[graph] if graph else model.eager_us(num_tokens)
        device *= max(0.5, self.chance.gauss(1.0, 0.02))
        if self.chance.random() < 0.003:
            host += 1000.0
        begun, queued = self.host_us, self.device_us > self.host_us
        self.host_us += host
        while self._running and self._running[0][0] <= begun:
            self._launches -= self._running.popleft()[1]
        while self._launches + launches > QUEUE:
            done, freed = self._running.popleft()
            self._launches -= freed
            self.host_us = max(self.host_us, done + host / 2)
        start = max(self.device_us, begun + 3.0)
        end = max(start + device, self.host_us + device / launches)
        self.device_us = end
        self._running.append((end, launches))
        self._launches += launches
        return start, end, queued, host

    def wait(self) -> None:
        """Wait on the host until the device is idle."""
        self.host_us = max(self.host_us, self.device_us)
        self.spend(WAIT_US)
        self._running.clear()
        self._launches = 0


class Server:
    """A simulated runner, which decides and runs batches on simulated clocks.

    Args:
        policy: Policy that chooses the arms.
        clocks: Clocks on which steps run.
        sample_every: One in ``sample_every`` regular steps is measured.
    """

    def __init__(self, policy: Any, clocks: Clocks, sample_every: int = 16) -> None:
        self.policy, self.clocks, self.sample_every = policy, clocks, sample_every
        config = DispatchConfig(mode="FULL", max_num_tokens=2048, sizes=tuple(clocks.model.graphs))
        self.table = Dispatcher(policy, config, strict=True)
        for key in self.table.registry:
            self.table.registry.captured(key, object())
        self.outcomes = self.filled = self.eager = self.probes = 0
        self._ran_eager: set[int] = set()
        self._pending: deque[tuple[Outcome, float]] = deque()
        self._step = self._due = 0
        self._calibrate()
        for num_tokens in range(1, 2049):
            if self.table.dispatch(num_tokens).key is None:
                self._ran_eager.add(num_tokens)
        decide = policy.decide

        def counted(*args: Any) -> Any:
            self.filled += 1
            return decide(*args)

        policy.decide = counted
        clocks.host_us = clocks.device_us = 0.0
        self.outcomes = 0

    def _calibrate(self) -> None:
        requests = getattr(self.policy, "calibration_runs", lambda graphs: ())
        while runs := requests(self.table.graphs):
            for run in runs:
                for _ in range(run.runs):
                    self.clocks.wait()
                    for kind in ("idle", "queued"):
                        if kind == "queued" and run.decision.key is None:
                            self.clocks.step(2048, 2048)
                        self._report(self._run(run.decision, run.batch)[0])

    def _run(self, decision: Any, batch: Any) -> tuple[Outcome, float]:
        graph = decision.key.num_tokens if decision.key else 0
        start, end, queued, host = self.clocks.step(graph, batch.num_tokens)
        us = max(end - start, HOST_SHARE * host)
        is_first = not graph and self._step > 0 and batch.num_tokens not in self._ran_eager
        if is_first:
            self._ran_eager.add(batch.num_tokens)
        was_ahead = queued and self.clocks.host_us <= start
        outcome = Outcome(
            batch,
            decision,
            us,
            queued=queued,
            step=self._step,
            is_first=is_first,
            host_us=host,
            device_us=end - start if was_ahead else None,
        )
        return outcome, end

    def _report(self, outcome: Outcome) -> None:
        self.table.observe(outcome)
        self.outcomes += 1

    def serve(self, num_tokens: int) -> None:
        """Decide and run a batch, and report outcomes."""
        clocks = self.clocks
        clocks.spend(BETWEEN_US)
        self._step += 1
        before = self.filled
        decision = self.table.dispatch(num_tokens)
        clocks.spend(FILL_US * (self.filled - before))
        is_due = decision.one_shot or self._step >= self._due
        if is_due and decision.timed:
            clocks.spend(EVENTS_US)
            self._due = self._step + self.sample_every * getattr(self.policy, "pace", 1)
        ran = self._run(decision, self.table.batch(num_tokens))
        self.eager += decision.key is None
        self.probes += decision.reason == "probe"
        if not (is_due and decision.timed):
            return
        self._pending.append(ran)
        for _ in range(MAX_OUTCOMES if self.filled == before else 0):
            if self._pending and self._pending[0][1] <= clocks.host_us:
                self._report(self._pending.popleft()[0])
                clocks.spend(OUTCOME_US)


def traffic(name: str, count: int) -> list[int]:
    """Return the sizes of the steps, at most 2048."""
    if name == "uniform":
        chance = random.Random(1)
        return [chance.randint(1, 2048) for _ in range(count)]
    read = [step.num_tokens for step in read_trace(TRACES / f"step_{name}.csv.gz")]
    fitting = [size for size in read if 1 <= size <= 2048]
    return [fitting[index % len(fitting)] for index in range(count)]


def fixed_us(
    model: Model, steps: Iterable[int], limits: dict[int, float], hosts: list[float], seed: int
) -> tuple[float, float]:
    """Simulate fixed arms: in each bucket, eager up to a limit, and its graph above.

    Returns:
        Time of all steps and of the first ``EARLY`` steps, in microseconds.
    """
    clocks, early = Clocks(model, hosts[0], random.Random(seed)), 0.0
    for index, num_tokens in enumerate(steps):
        clocks.eager_host_us = hosts[index]
        if index % BLOCK == 0:
            clocks.wait()
        if index == EARLY:
            early = clocks.host_us
        clocks.spend(BETWEEN_US)
        top = model.top_of(num_tokens)
        clocks.step(0 if num_tokens <= limits.get(top, 0.0) else top, num_tokens)
    clocks.wait()
    return clocks.host_us, early or clocks.host_us


def best_us(model: Model, steps: list[int], hosts: list[float], seed: int) -> tuple[float, float]:
    """Return the shortest times of ``fixed_us`` over all candidates for the best arms."""
    *few, last = sorted(model.graphs)[-4:]
    few = few if model is MODELS["mlp"] else few[1:]
    choices = itertools.product((False, True), repeat=len(few))
    limits = [{top: top * at for top, at in zip(few, each, strict=True)} for each in choices]
    return min(fixed_us(model, steps, {**each, last: model.limit}, hosts, seed) for each in limits)


def serve(model: Model, trace: str, host: str, seed: int, count: int) -> dict[str, Any]:
    """Simulate a trace with ``adaptive``; return the result as a row."""
    steps, hosts = traffic(trace, count), speeds(host, count, seed)
    best, best_early = best_us(model, steps, hosts, seed)
    base, _ = fixed_us(model, steps, {}, hosts, seed)
    clocks, early = Clocks(model, hosts[0], random.Random(seed)), 0.0
    server = Server(load_plugins().create_policy("adaptive", seed=seed), clocks)
    for index, num_tokens in enumerate(steps):
        clocks.eager_host_us = hosts[index]
        if index % BLOCK == 0:
            clocks.wait()
        if index == EARLY:
            early = clocks.host_us
        server.serve(num_tokens)
    clocks.wait()
    return {
        "bench": "policies_host",
        "trace": trace,
        "host": host,
        "seed": seed,
        "steps": count,
        "over": clocks.host_us / best,
        "early_over": (early or clocks.host_us) / best_early,
        "gain": base / clocks.host_us,
        "outcomes": server.outcomes,
        "filled": server.filled,
        "eager": server.eager,
        "probes": server.probes,
    }


def main() -> None:
    """Run each trace with each host, and print the means of all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="mlp", choices=sorted(MODELS))
    add("--traces", default="uniform,azure_conv_high")
    add(
        "--hosts",
        default="270,400,480,300-530,300~530",
        help="host times of an eager step of the MLP in microseconds, comma-separated",
    )
    add("--steps", type=int, default=12_000)
    add("--seeds", type=int, default=3)
    add("--json", action="store_true", help="print one JSON object per run")
    options = parser.parse_args()
    for trace in options.traces.split(","):
        for host in options.hosts.split(","):
            rows = [
                serve(MODELS[options.model], trace, host, seed, options.steps)
                for seed in range(options.seeds)
            ]
            for row in rows if options.json else ():
                print(json.dumps(row), flush=True)
            if not options.json:
                print(summary(rows), flush=True)


def summary(rows: list[dict[str, Any]]) -> str:
    mean = {
        name: statistics.mean(row[name] for row in rows)
        for name in ("over", "early_over", "gain", "outcomes", "filled", "probes")
    }
    return (
        f"{rows[0]['trace']:<16} host {rows[0]['host']} us: over {mean['over']:.4f} "
        f"(worst {max(row['over'] for row in rows):.4f}, first {EARLY} {mean['early_over']:.4f}), "
        f"gain {mean['gain']:.3f}, {mean['outcomes']:.0f} outcomes, {mean['filled']:.0f} filled, "
        f"{mean['probes']:.0f} probes"
    )


if __name__ == "__main__":
    main()
