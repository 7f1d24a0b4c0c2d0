"""A runner and a naive eager model that run the same random operations."""

from __future__ import annotations

import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from hypothesis import Phase, settings, strategies  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dispatchkit import (  # noqa: E402
    Axis,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import CaptureError, RegistryError, ReplayError  # noqa: E402
from dispatchkit.execute import ChurnWarning, EagerStepWarning  # noqa: E402
from dispatchkit.options import with_settings  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

SIZES = (1, 2, 4, 8)
SINK = 16
INPUTS = {
    "slots": StaticInput((None,), "int64", fill=SINK),
    "values": StaticInput((None, 2), "float32", fill=-3.0),
}
TWIST = Axis("twist", (1, 3), exact=True)  # a host value: 2 has no graph
REACH = Axis("reach", (4, 12))  # a dimension: padded, and cut in the results
REACHES = {1: 3, 3: 9, 2: 20}  # in place of the twists of calls; 20 is outside
NEAR = {"near": StaticInput((None, "reach"), "float32")}
NUM_KEYS = 2 * len(SIZES)
CALLS = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([8, 7, 5, 4, 3, 2, 1, 3, 0]),
        strategies.integers(0, 99),
        strategies.sampled_from([2, 1, 2, 1, 0]),
        strategies.sampled_from([1, 3, 1, 3, 2]),
    ),
    min_size=3,
    max_size=10,
)


class Model:
    """A step with a cache, a counter, a weight, and results of every kind."""

    def __init__(self):
        self.cache = torch.zeros(SINK + 1, 2)
        self.counter = torch.zeros((), dtype=torch.int64)
        self.weight = torch.tensor([[1.0, 2.0], [-1.0, 0.5]])

    def project(self, slots, values, twist=1, near=None):
        self.counter.add_(1)
        hidden = values @ self.weight * twist
        if near is not None:
            hidden = hidden + near.sum(1, keepdim=True)
        self.cache.index_copy_(0, slots, hidden)
        return hidden, values.abs()

    def attend(self, pair):
        hidden, size = pair
        return hidden.cumsum(0), size  # the second keeps its address, the first does not

    def finish(self, pair, slots, near=None):
        mixed, size = pair
        more = [size * 2, self.counter + 0, *([] if near is None else [near * 2])]
        return {"mixed": mixed + self.cache[slots], "more": more}

    def __call__(self, slots, values, twist=1, near=None, reach=0):
        return self.finish(self.attend(self.project(slots, values, twist, near)), slots, near)

    def pieces(self):
        return [graph_piece(self.project), eager_piece(self.attend), graph_piece(self.finish)]

    def visible(self):
        return self.cache[:SINK], self.counter, self.weight


def _count_of(pair):
    """Return the step that a result belongs to, from the counter in it."""
    return int(pair[1]["more"][1])


def machine(watched_tape, smallest_policy):
    class RunnerMachine(RuleBasedStateMachine):
        @initialize(
            lazy=strategies.booleans(),
            capture_after=strategies.integers(1, 3),
            max_graphs=strategies.sampled_from([None, 1, 2, 5]),
            max_bytes=strategies.sampled_from([None, None, 300, 700, 1500]),
            eviction=strategies.sampled_from(["lru", "benefit"]),
            outputs=strategies.sampled_from(["owned", "view"]),
            share_outputs=strategies.booleans(),
            declare_state=strategies.booleans(),
            axis=strategies.sampled_from([None, TWIST, REACH]),
            in_threads=strategies.booleans(),
            check=strategies.sampled_from([0, 0, 1, 3]),
        )
        def build(self, declare_state, axis, in_threads, outputs, lazy, **options):
            self.axis, self.in_threads = axis, in_threads
            self.owned = outputs == "owned"
            self.backend = watched_tape()
            self.mine, self.theirs = Model(), Model()
            self.max_graphs, self.max_bytes = options["max_graphs"], options["max_bytes"]
            self.backend.hold_to(self.max_bytes)
            state = [self.theirs.cache, self.theirs.counter] if declare_state else []
            self.runner = GraphRunner(
                self.theirs.pieces(),
                INPUTS | (NEAR if axis is REACH else {}),
                sizes=SIZES,
                policy=smallest_policy(),
                backend=self.backend,
                state=state,
                axes=None if axis is None else [axis],
                outputs=outputs,
                lazy=lazy,
                options=with_settings(RunnerOptions(), options),
            )
            self.keys = list(self.runner.registry)
            assert len(self.keys) == NUM_KEYS * (1 if axis is None else 2)
            self.steps = 0
            self.frozen = False

        def axis_facts(self, rows, twist):
            """Return the axis inputs of a call."""
            if self.axis is REACH:
                reach = REACHES[twist]
                return {"near": torch.ones(rows, reach).cumsum(1), "reach": reach}
            return {"twist": twist} if self.axis is TWIST else {}

        # Every rule ends with several calls, so that each change takes effect.

        def burst(self, data):
            calls = data.draw(CALLS)
            if data.draw(strategies.booleans()):
                self.runner.lanes[0].lane.buffers.poison()
            for rows, seed, ceiling, twist in calls:
                more = self.axis_facts(rows, twist)
                generator = torch.Generator().manual_seed(seed)
                slots = torch.randperm(SINK, generator=generator)[:rows]
                values = torch.randn(rows, 2, generator=generator)
                try:
                    got = self.result(slots, values, ceiling=ceiling, **more)
                except ReplayError:
                    # Nothing has run, and nothing may run again, including the model's step.
                    assert self.backend.replay_fault == "before"
                    self.backend.replay_fault = ""
                    continue
                want = self.mine(slots, values, **more)
                self.steps += 1
                torch.testing.assert_close(got, want)
                del got  # a view would keep its memory, and the test counts bytes

        def result(self, *args, **kwargs):
            if not self.in_threads:
                return self.runner(*args, **kwargs)
            with ThreadPoolExecutor(1) as pool:  # a different thread for each call
                return pool.submit(self.runner, *args, **kwargs).result()

        @rule(data=strategies.data())
        def call(self, data):
            self.burst(data)

        @rule(data=strategies.data(), rows=strategies.lists(strategies.integers(1, 4), max_size=4))
        def call_from_threads_at_once(self, data, rows):
            """Run steps that write to different slots; their counts show the order."""
            generator = torch.Generator().manual_seed(sum(rows))
            slots = torch.randperm(SINK, generator=generator).split([*rows, SINK - sum(rows)])
            calls = [(one, torch.randn(len(one), 2, generator=generator)) for one in slots[:-1]]
            twist = data.draw(strategies.integers(1, 3))
            calls = [(*call, self.axis_facts(len(call[0]), twist)) for call in calls]
            with ThreadPoolExecutor(max(1, len(calls))) as pool:
                futures = [pool.submit(self.runner, *call, **more) for *call, more in calls]
                results = [(call, one.result()) for call, one in zip(calls, futures, strict=True)]
            if self.owned:  # a view is valid until the next call of any thread
                results.sort(key=_count_of)
            for (*call, more), got in results:
                want = self.mine(*call, **more)
                if self.owned:
                    torch.testing.assert_close(got, want)
            self.steps += len(calls)
            got, results, futures = None, [], []  # they would keep memory that is counted in bytes
            self.burst(data)

        @precondition(lambda self: not self.frozen)
        @rule(
            data=strategies.data(),
            keys=strategies.sampled_from([slice(None), slice(4, None), slice(None, None, 3)]),
        )
        def capture(self, data, keys):
            self.runner.capture(self.keys[keys])
            self.burst(data)

        @precondition(lambda self: not self.frozen)
        @rule(data=strategies.data(), warm=strategies.booleans())
        def use_an_idle_moment(self, data, warm):
            if warm:
                self.runner.controls.warm_up()
            else:
                self.runner.controls.capture_next()
            self.burst(data)

        @rule(data=strategies.data(), number=strategies.integers(0, 2 * NUM_KEYS - 1))
        def evict(self, data, number):
            key = self.keys[number % len(self.keys)]
            if self.runner.controls.has(key):
                self.runner.evict(key)
                assert self.runner.registry.get(key).state is KeyState.EVICTED
            else:
                with pytest.raises(RegistryError):
                    self.runner.evict(key)
            self.burst(data)

        @rule(data=strategies.data())
        def next_replay_fails(self, data):
            self.backend.replay_fault = "before"
            self.burst(data)
            self.backend.replay_fault = ""

        @rule(data=strategies.data())
        def captures_fail(self, data):
            self.backend.capture_fault = data.draw(
                strategies.sampled_from(
                    [
                        CaptureError("planted", reason="planted"),
                        torch.OutOfMemoryError("planted"),
                        ValueError("planted"),
                    ]
                )
            )
            self.burst(data)
            self.backend.capture_fault = None

        @rule(data=strategies.data(), mode=strategies.sampled_from(["FULL", "PIECEWISE"]))
        def switch_a_mode(self, data, mode):
            self.runner.controls.set_enabled(False, mode=mode)
            self.burst(data)
            self.runner.controls.set_enabled(True, mode=mode)

        @rule(data=strategies.data(), number=strategies.integers(0, 2 * NUM_KEYS - 1))
        def switch_a_key(self, data, number):
            key = self.keys[number % len(self.keys)]
            self.runner.controls.set_enabled(not self.runner.registry.is_enabled(key), key=key)
            self.burst(data)

        @rule(data=strategies.data(), factor=strategies.sampled_from([0.5, 2.0, -1.0]))
        def change_weight_in_place(self, data, factor):
            for model in (self.mine, self.theirs):
                model.weight.mul_(factor).clamp_(-4, 4)
            self.burst(data)

        @rule(data=strategies.data(), again=strategies.booleans())
        def replace_weight(self, data, again):
            for model in (self.mine, self.theirs):
                model.weight = model.weight.flip(0).clone()
            self.runner.invalidate()
            if again and not self.frozen:
                self.runner.capture()
            self.burst(data)

        @precondition(lambda self: not self.frozen and self.steps > 60)
        @rule()
        def freeze(self):
            self.runner.freeze()
            self.frozen = True

        @invariant()
        def same_state(self):
            if hasattr(self, "runner"):
                torch.testing.assert_close(self.theirs.visible(), self.mine.visible())

        @invariant()
        def counts_add_up(self):
            if not hasattr(self, "runner"):
                return
            stats = self.runner.stats()
            assert stats.steps == self.steps
            assert sum(stats.hits.values()) + sum(stats.eager_by_reason.values()) == self.steps
            live = self.runner.lanes[0].lifecycle.live()
            if self.max_graphs is not None:
                assert len(live) <= self.max_graphs
            if self.max_bytes is not None:
                assert self.runner.num_bytes <= self.max_bytes
            assert not getattr(self.backend, "broken", False)
            assert self.backend.live == sum(len(step.graphs) for step in live.values())

    return RunnerMachine


def held_to_a_limit(watched_tape):
    """Return a tape that fails the test when its pools exceed a number of bytes."""

    class Held(watched_tape):
        def hold_to(self, limit):
            self.limit, self.pools = limit, weakref.WeakSet()

        def new_pool(self):
            pool = super().new_pool()
            if hasattr(self, "pools"):
                self.pools.add(pool)
            return pool

        def capture(self, run, *, stream, pool, generators=()):
            graph = super().capture(run, stream=stream, pool=pool, generators=generators)
            if self.limit is not None:
                held = sum(one.num_bytes for one in self.pools)
                # Not an exception that the runner would treat as a failed capture.
                self.broken = getattr(self, "broken", False) or held > self.limit
            return graph

    return Held


def test_runner_and_eager_model_agree(backend, policy, is_nightly):
    # The nightly run has more than 10,000 rules, each with several steps of both models. Shrinking
    # takes minutes, so only the nightly run does it.
    phases = tuple(Phase) if is_nightly else (Phase.explicit, Phase.reuse, Phase.generate)
    bounds = settings(
        max_examples=600 if is_nightly else 3, stateful_step_count=20, deadline=None, phases=phases
    )
    with warnings.catch_warnings():
        for kind in (EagerStepWarning, ChurnWarning):
            warnings.simplefilter("ignore", kind)
        run_state_machine_as_test(
            machine(held_to_a_limit(type(backend)), type(policy)), settings=bounds
        )
