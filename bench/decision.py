"""Measure one decision: ``dispatch(n, num_reqs, uniform, loras, ceiling)`` with all checks.

    python bench/decision.py [ROUNDS] [--trace steps.csv.gz]

The cases of a group take turns:

- ``one cell``: the same batch repeatedly, compared with a dictionary of tuples with the same
  checks, and with building a descriptor and probing sets of keys, as engines do.
- ``walk``: the batches of a step trace in order, with about 50 and about 100,000 keys, and with a
  table whose cells were set by updates instead of by the policy (``updated``).
- ``hot``: single batches of the trace, each repeated many times, so that caches are warm.
- ``releases``: the dispatchers of published vLLM releases, fetched by ``make rivals``.
- ``plugins``: the same policy with one loaded plugin, and with seven.
- ``kinds``: less common decisions: from a table so large that its rows are dicts, and for a batch
  with more requests than the graph holds.

The time of the calling loop is subtracted, except in ``hot``. With ``--trace``, steps are read from
a gzipped CSV file with the columns of a step trace. By default, steps like those of a chat server
are generated from a fixed seed.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from _common import emit, emit_all, interleaved
from _releases import calls

from dispatchkit.dispatch import CellUpdate, Decision, Dispatcher
from dispatchkit.errors import DescriptorError
from dispatchkit.hookspecs import ObserverSpec, hookimpl
from dispatchkit.keys import (
    ALLOWED_MODES,
    BatchDescriptor,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
    padding_table,
)
from dispatchkit.plugins import PolicySpec, load_plugins
from dispatchkit.testing import SmallestPolicy

BENCH = "decision"
FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE
Step = tuple[int, int, int, int, int]  # tokens, requests, uniform, adapters, ceiling


class EveryCountPolicy(SmallestPolicy):
    """Policy with graphs for each number of adapters."""

    def lora_counts(self, config: DispatchConfig) -> Sequence[int]:
        """Return all numbers of adapters that a batch may have."""
        return range(config.max_loras + 1)


class DictOfTuples:
    """A dispatcher with the checks of ``Dispatcher``, but one dictionary of decisions."""

    def __init__(self, dispatcher: Dispatcher, steps: Iterable[Step]) -> None:
        self.table = {
            (n, uniform, loras, ceiling): dispatcher.dispatch(n, 0, uniform, loras, ceiling)
            for n, _, uniform, loras, ceiling in steps
        }
        config = dispatcher.config
        self.max_num_tokens, self.max_num_seqs = config.max_num_tokens, config.max_num_seqs
        self.max_loras, self.num_classes = config.max_loras, config.num_query_classes

    def dispatch(
        self, num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> Decision:
        """Check all arguments, then look up the decision."""
        if (
            0 <= num_tokens <= self.max_num_tokens
            and 0 <= num_reqs <= self.max_num_seqs
            and num_reqs <= num_tokens
            and 0 <= uniform < self.num_classes
            and 0 <= loras <= self.max_loras
            and 0 <= ceiling < len(ALLOWED_MODES)
        ):
            decision = self.table[num_tokens, uniform, loras, ceiling]
            if num_reqs <= decision.max_num_reqs:
                return decision
        raise DescriptorError("batch", (num_tokens, num_reqs), "within the limits")


@dataclasses.dataclass(frozen=True)
class PlainDescriptor:
    """Descriptor as engines build it for a look-up: frozen, hashable, and not validated."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    num_active_loras: int = 0


class DescriptorPerProbe:
    """A dispatcher that looks up a padded descriptor in sets of keys, as engines do.

    It first probes the exact descriptor, then a relaxed one.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.padding = padding_table(dispatcher.config.sizes)
        self.limit = len(self.padding) - 1
        self.keys: dict[RuntimeMode, set[PlainDescriptor]] = {FULL: set(), PIECEWISE: set()}
        for key in dispatcher.registry:
            own = key.descriptor
            plain = PlainDescriptor(own.num_tokens, own.num_reqs, own.uniform, own.num_active_loras)
            self.keys[key.mode].add(plain)

    def dispatch(
        self, num_tokens: int, num_reqs: int = 0, uniform: int = 0, loras: int = 0, ceiling: int = 2
    ) -> tuple[RuntimeMode, PlainDescriptor | None]:
        """Return the runtime mode, and the descriptor of the graph."""
        if not 0 < num_tokens <= self.limit:
            return RuntimeMode.NONE, None
        padded = self.padding[num_tokens]
        descriptor = PlainDescriptor(padded, padded if uniform else None, bool(uniform), loras)
        allowed = ALLOWED_MODES[ceiling]
        if FULL in allowed and descriptor in self.keys[FULL]:
            return FULL, descriptor
        relaxed = PlainDescriptor(padded, num_active_loras=loras)
        if PIECEWISE in allowed and relaxed in self.keys[PIECEWISE]:
            return PIECEWISE, relaxed
        return RuntimeMode.NONE, None


def read_steps(path: Path | None, limit: int, max_loras: int) -> list[Step]:
    """Return the steps of a trace, clipped to the limits of the tables."""
    if path is None:
        return generated_steps(limit, max_loras)
    steps = []
    with gzip.open(path, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            tokens = min(int(row["num_tokens"]), limit)
            uniform = int(row["uniform_decode"]) if row["max_query_len"] == "1" else 0
            loras = min(int(row["num_active_loras"]), max_loras)
            steps.append((tokens, min(int(row["num_reqs"]), tokens), uniform, loras, 2))
    return steps


def generated_steps(limit: int, max_loras: int, count: int = 5000) -> list[Step]:
    """Return decode steps with a slowly changing number of requests, and some prefills."""
    rng = random.Random(0)
    steps, running = [], 60
    for _ in range(count):
        running = max(1, min(256, running + rng.choice((-1, 0, 0, 1))))
        loras = rng.randint(0, max_loras)
        if rng.random() < 0.2:
            tokens = min(limit, running + int(rng.expovariate(1 / 400)))
            steps.append((tokens, min(running, tokens), 0, loras, 2))
        else:
            steps.append((running, running, 1, loras, 2))
    return steps


def build(config: DispatchConfig, steps: Iterable[Step]) -> Dispatcher:
    """Return a dispatcher whose cells for the given steps are filled."""
    dispatcher = Dispatcher(EveryCountPolicy(), config, lazy=True)
    for step in steps:
        dispatcher.dispatch(*step)
    return dispatcher


def repeat(dispatch: Callable[..., object], step: Step, number: int) -> Callable[[], None]:
    """Return a loop of one call with positional arguments, as in an engine."""
    n, reqs, uniform, loras, ceiling = step

    def run() -> None:
        for _ in range(number):
            dispatch(n, reqs, uniform, loras, ceiling)

    return run


def walk(dispatch: Callable[..., object], steps: Sequence[Step]) -> Callable[[], None]:
    """Return a loop over the steps of a trace, in order."""

    def run() -> None:
        for n, reqs, uniform, loras, ceiling in steps:
            dispatch(n, reqs, uniform, loras, ceiling)

    return run


def loop_only(steps: Sequence[Step]) -> Callable[[], None]:
    """Return the loop of ``walk`` without calls."""

    def run() -> None:
        for _n, _reqs, _uniform, _loras, _ceiling in steps:
            pass

    return run


def net(times: dict[str, list[int]], loop: str) -> dict[str, list[int]]:
    """Subtract the median time of the bare loop from every sample."""
    cost = statistics.median(times[loop])
    return {
        name: [max(1, round(sample - cost)) for sample in samples]
        for name, samples in times.items()
        if name != loop
    }


def repeat_call(call: Callable[[], object], number: int) -> Callable[[], None]:
    """Return a loop of one call without arguments."""

    def run() -> None:
        for _ in range(number):
            call()

    return run


def deciding(dispatch: Callable[..., object], step: Step) -> Callable[[], object]:
    """Return a function without arguments that makes one decision."""
    n, reqs, uniform, loras, ceiling = step
    return lambda: dispatch(n, reqs, uniform, loras, ceiling)


def releases_group(rounds: int) -> None:
    """Compare one decision with those of published dispatchers."""
    sizes = [1, 2, 4, *range(8, 249, 8), *range(256, 513, 16)]
    config = DispatchConfig(sizes=sizes, max_num_tokens=512, max_num_seqs=256)
    padding = padding_table(sizes)
    number = 1000
    goals = {"0.33.0": 30, "0.13.0": 18, "0.11.0": 5}
    for uniform, mode in ((1, "FULL"), (0, "PIECEWISE")):
        dispatch = build(config, []).dispatch
        reqs = 60 if uniform else 50
        dispatch(60, reqs, uniform, 0, 2)
        cases = {
            "call": repeat_call(lambda: None, number),
            "dispatch": repeat_call(
                lambda d=dispatch, u=uniform, r=reqs: d(60, r, u, 0, 2), number
            ),
        }
        for release, call in calls(padding, sizes, 60, uniform=bool(uniform)):
            if call is None:
                emit(BENCH, f"vLLM {release}", 0, "ns", 0, missing="not fetched; run `make rivals`")
                continue
            found = call()[0].name
            if found != mode:
                raise SystemExit(f"vLLM {release} returned {found} instead of {mode}")
            cases[f"vLLM {release}"] = repeat_call(call, number)
        times = net(interleaved(cases, rounds=rounds), "call")
        emit_all(BENCH, times, per=number, ratio_to="dispatch", group=f"releases {mode}")
        for release, limit in goals.items():
            if f"vLLM {release}" not in times:
                continue
            # Use the best samples: on a busy machine, long turns are interrupted more often than
            # short turns.
            ratio = min(times[f"vLLM {release}"]) / min(times["dispatch"])
            emit(
                BENCH,
                f"vLLM {release}, {mode}: time relative to dispatchkit, best samples",
                ratio,
                "ratio",
                rounds,
                target=limit,
                reached=ratio >= limit,
            )


class IdlePlugin:
    """Plugin with a policy and an observer."""

    def __init__(self, index: int) -> None:
        self.index = index

    @hookimpl
    def dispatchkit_register_policies(self):
        """Return one policy."""
        return [PolicySpec(f"idle_{self.index}", SmallestPolicy)]

    @hookimpl
    def dispatchkit_register_observers(self):
        """Return one observer."""
        return [ObserverSpec(f"idle_{self.index}", CaptureObserver)]


class CaptureObserver:
    """Observer of captures."""

    def on_capture(self, event):
        """Ignore a capture."""


def plugins_group(rounds: int) -> None:
    """Compare decisions of the same policy with one plugin and with seven plugins."""
    number, step = 2000, (100, 100, 1, 0, 2)
    cases = {"loop": repeat_nothing(number)}
    for count in (1, 7):
        extra = [(f"idle_{index}", IdlePlugin(index)) for index in range(count)]
        plugins = load_plugins(allow=[], extra=extra)
        config = DispatchConfig(sizes=range(8, 257, 8))
        for name in plugins.observers:
            plugins.create_observer(name)
        dispatcher = Dispatcher(plugins.create_policy("idle_0"), config, lazy=True)
        dispatcher.dispatch(*step)
        name = f"{count} plugin" + "s" * (count > 1)
        cases[name] = repeat(dispatcher.dispatch, step, number)
    times = net(interleaved(cases, rounds=rounds), "loop")
    emit_all(BENCH, times, per=number, ratio_to="1 plugin", group="plugins")


def main() -> None:
    """Measure all groups and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=200)
    parser.add_argument("--trace", type=Path, help="step trace, a gzipped CSV file")
    options = parser.parse_args()
    rounds = options.rounds
    releases_group(rounds)
    plugins_group(rounds)

    few_config = DispatchConfig(
        sizes=[*range(8, 129, 8), 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048]
    )
    many_config = DispatchConfig(sizes=range(1, 2049), max_loras=24)
    steps = read_steps(options.trace, 2048, 24)
    plain = [(n, reqs, uniform, 0, ceiling) for n, reqs, uniform, _, ceiling in steps]
    few = build(few_config, plain)
    many = build(many_config, steps)

    number = 2000
    step = (100, 100, 1, 0, 2)
    few.dispatch(*step)
    times = interleaved(
        {
            "loop": repeat_nothing(number),
            "dispatch": repeat(few.dispatch, step, number),
            "dict of tuples": repeat(DictOfTuples(few, [step]).dispatch, step, number),
            "descriptor per probe": repeat(DescriptorPerProbe(few).dispatch, step, number),
        },
        rounds=rounds,
    )
    emit_all(BENCH, net(times, "loop"), per=number, ratio_to="dispatch", group="one cell")

    keys_few, keys_many = f"{len(few.registry)} keys", f"{len(many.registry)} keys"
    updated = build(many_config, [])
    for n, _, uniform, loras, ceiling in dict.fromkeys(steps):
        batch = many.batch(n, 0, uniform, loras, ceiling)
        updated.update(CellUpdate(batch, many.dispatch(n, 0, uniform, loras, ceiling)))
    times = interleaved(
        {
            "loop": loop_only(steps),
            f"walk, {keys_few}": walk(few.dispatch, plain),
            f"walk, {keys_many}": walk(many.dispatch, steps),
            f"walk, {keys_many}, updated": walk(updated.dispatch, steps),
        },
        rounds=max(10, rounds // 4),
    )
    emit_all(BENCH, net(times, "loop"), per=len(steps), ratio_to=f"walk, {keys_few}", group="walk")

    # Repeat single batches of the trace, so that caches are warm, with few and with many keys.
    distinct = list(dict.fromkeys(steps))[:: max(1, len(set(steps)) // 64)]
    hot: dict[str, list[int]] = {keys_few: [], keys_many: []}
    for n, reqs, uniform, loras, ceiling in distinct:
        one = interleaved(
            {
                keys_few: repeat(few.dispatch, (n, reqs, uniform, 0, ceiling), 500),
                keys_many: repeat(many.dispatch, (n, reqs, uniform, loras, ceiling), 500),
            },
            rounds=9,
        )
        for name, samples in one.items():
            hot[name].append(round(statistics.median(samples)))
    named = {f"hot, {name}": samples for name, samples in hot.items()}
    first = next(iter(named))
    emit_all(BENCH, named, per=500, ratio_to=first, group="hot")

    bounded = GraphKey(FULL, BatchDescriptor(512, num_reqs=4))
    few.registry.declare([bounded])
    huge = build(DispatchConfig(sizes=[8, 60_000], max_loras=4), [step])
    narrow_step = (300, 200, 0, 0, 2)
    few.dispatch(*narrow_step)
    times = interleaved(
        {
            "loop": repeat_nothing(number),
            "list rows": repeat(few.dispatch, step, number),
            "dict rows (over a million cells)": repeat(huge.dispatch, step, number),
            "more requests than the graph holds": repeat(few.dispatch, narrow_step, number),
        },
        rounds=rounds // 2,
    )
    emit_all(BENCH, net(times, "loop"), per=number, ratio_to="list rows", group="kinds")


def repeat_nothing(number: int) -> Callable[[], None]:
    """Return the loop of ``repeat`` without calls."""

    def run() -> None:
        for _ in range(number):
            pass

    return run


if __name__ == "__main__":
    main()
