"""Steps that change state run one after another, for any threads and streams.

On a deferred tape, a missing wait between two streams loses an update.
"""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    Batch,
    Decision,
    LaneOptions,
    Lanes,
    RunnerOptions,
    StaticInput,
    eager_piece,
    eager_region,
    graph_piece,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.dispatch import CalibrationRun  # noqa: E402

# Batches above the largest size run eager here as intended.
pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")

SEEDS = range(2)
ROWS = {"x": StaticInput((None, 2), "float32")}
GRAPH, EAGER = torch.ones(8, 2), torch.ones(9, 2)  # eager: above the largest size


class InTurn:
    """Chooses lanes in turn."""

    name = "in-turn"

    def __init__(self):
        self.steps = 0

    def choose(self, step, lanes):
        self.steps += 1
        return (self.steps - 1) % len(lanes)


class Counting:
    """A runner whose step counts rows by a read and a later write."""

    def __init__(self, make_runner, seed, *, lanes=1, **settings):
        self.total = torch.zeros(2)
        self.is_refusing = False
        settings.setdefault("mode", "FULL")
        step = self.count
        if settings["mode"] == "PIECEWISE":
            step = [graph_piece(self.count), eager_piece(self.between), graph_piece(torch.neg)]
        self.backend = TapeBackend(scheduler=seed)
        self.runner = make_runner(
            step,
            ROWS,
            sizes=(4, 8),
            max_num_tokens=16,
            state=[self.total],
            backend=self.backend,
            lanes=Lanes(lanes, InTurn()) if lanes > 1 else 1,
            **settings,
        )

    def count(self, x):
        before = self.total + 0
        self.total.copy_(before + x.sum(0))
        return x * 2

    def between(self, x):
        if self.is_refusing:
            raise ValueError("not now")
        return x + 1

    def on_a_stream(self):
        return self.backend.use_stream(self.backend.new_stream())

    def counted(self):
        self.backend.synchronize()
        return int(self.total[0])


@pytest.mark.filterwarnings("ignore:sizes ends", "ignore:Steps run eager")
class TestOrder:
    def test_capture_keeps_what_submitted_steps_change(self, make_runner):
        for seed in SEEDS:
            one = Counting(make_runner, seed)
            one.runner.capture()
            one.runner.evict(next(key for key in one.runner.registry if key.num_tokens == 4))
            for _ in range(4):
                one.runner.submit(GRAPH)
            one.runner.capture()
            assert one.counted() == 4 * 8, f"seed {seed}"

    def test_lazy_capture_on_another_stream_keeps_what_steps_change(self, make_runner):
        for seed in SEEDS:
            one = Counting(make_runner, seed, lazy=True)
            with one.on_a_stream():
                for _ in range(3):
                    one.runner(GRAPH)
            with one.on_a_stream():
                one.runner(GRAPH[:4])
            assert one.counted() == 3 * 8 + 4, f"seed {seed}"

    @pytest.mark.parametrize("given", [(EAGER, GRAPH), (GRAPH, EAGER)], ids=["eager", "replay"])
    def test_submits_and_calls_of_one_lane(self, make_runner, given):
        """Submitted steps run eager or by a graph; the call runs the other way."""
        submitted, called = given
        for seed in SEEDS:
            one = Counting(make_runner, seed)
            one.runner.capture()
            with one.on_a_stream():
                for _ in range(3):
                    one.runner.submit(submitted)
                    one.runner(called)
            assert one.counted() == 3 * (8 + 9), f"seed {seed}"

    @pytest.mark.slow_except("True")
    @pytest.mark.parametrize("disjoint_state", [False, True])
    def test_lazy_capture_of_a_lane_keeps_what_eager_calls_change(
        self, make_runner, disjoint_state
    ):
        options = RunnerOptions(lanes=LaneOptions(disjoint_state=disjoint_state))
        for seed in SEEDS:
            one = Counting(make_runner, seed, lanes=2, lazy=True, options=options)
            with one.on_a_stream():
                for _ in range(3):
                    one.runner(EAGER)
            with one.on_a_stream():
                one.runner.submit(GRAPH)
                one.backend.synchronize()
                one.runner.submit(GRAPH)
            assert one.counted() == 3 * 9 + 2 * 8, f"seed {seed}"

    @pytest.mark.parametrize("settings", [{}, {"options": RunnerOptions(check=1)}])
    def test_a_capture_keeps_what_steps_of_another_runner_change(self, make_runner, settings):
        """Two runners change different rows of one tensor, on different streams."""
        for seed in range(8):
            one = Counting(make_runner, seed)
            backend, total = one.backend, one.total

            def step(x, total=total):
                total[1].add_(x[:, 1].sum())
                return x

            def step_of_one(x, total=total):
                total[0].add_(x[:, 0].sum())
                return x

            settings_of_both = {"sizes": (8,), "mode": "FULL", "state": [total], "backend": backend}
            first = make_runner(step_of_one, ROWS, **settings_of_both)
            other = make_runner(step, ROWS, lazy=True, **settings_of_both, **settings)
            first.capture()
            streams = [backend.new_stream() for _ in range(2)]
            for _ in range(2):
                with backend.use_stream(streams[0]):
                    first(GRAPH)
                with backend.use_stream(streams[1]):
                    other(GRAPH)  # captures the first time
            with backend.use_stream(streams[0]):
                first(GRAPH)
            backend.synchronize()
            assert total.tolist() == [3 * 8, 2 * 8], f"seed {seed}"

    def test_a_capture_in_segments_keeps_what_steps_in_flight_change(self, make_runner):
        region = eager_region(lambda x: x * 1)
        for seed in range(8):
            one = Counting(make_runner, seed)
            total = torch.zeros(2)

            def step(x, total=total):
                total.add_(x.sum(0))
                return region(x) + total

            runner = make_runner(
                step,
                ROWS,
                sizes=(4, 8),
                mode="PIECEWISE",
                state=[total],
                backend=one.backend,
                lazy=True,
            )
            with one.on_a_stream():
                runner(GRAPH)
                runner(GRAPH[:4])
            one.backend.synchronize()
            assert total.tolist() == [8 + 4] * 2, f"seed {seed}"

    def test_runs_for_a_learning_policy_keep_what_steps_change(self, make_runner, policy):
        class Asking(type(policy)):
            asked = False

            def calibration_runs(self, graphs):
                self.asked = not self.asked
                run = CalibrationRun(Batch(9), Decision.eager("calibration"), runs=1)
                return [run] if self.asked else []

        for seed in SEEDS:
            one = Counting(make_runner, seed, policy=Asking())
            one.runner.capture()
            for _ in range(4):
                one.runner.submit(GRAPH)
            assert one.runner.lanes[0].calibration.run() == 2
            assert one.counted() == 4 * 8, f"seed {seed}"

    def test_call_inside_a_capture_leaves_the_order_of_the_lanes(self, make_runner):
        for seed in SEEDS:
            one = Counting(make_runner, seed, lanes=2)
            one.runner.capture()
            stream, pool = one.backend.new_stream(), one.backend.new_pool()
            with one.on_a_stream():
                for _ in range(3):
                    one.runner.submit(GRAPH)
                    one.backend.capture(partial(one.runner, GRAPH), stream=stream, pool=pool)
                    one.runner.submit(GRAPH)
            assert one.counted() == 6 * 8, f"seed {seed}"

    def test_step_that_raises_halfway_is_waited_for_by_other_lanes(self, make_runner):
        for seed in range(6):
            one = Counting(make_runner, seed, lanes=2, mode="PIECEWISE")
            one.runner.capture()
            one.runner.submit(GRAPH)
            one.backend.synchronize()
            with one.on_a_stream():
                one.is_refusing = True
                with pytest.raises(ValueError, match="not now"):
                    one.runner(GRAPH)
                one.is_refusing = False
            with one.on_a_stream():
                one.runner.submit(GRAPH)
            assert one.counted() == 3 * 8, f"seed {seed}"
