"""A batch of independent rows split over several graphs: one step, with eager's rows in order."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    BufferOptions,
    CaptureOptions,
    Decision,
    GraphRunner,
    MemoryOptions,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    StepState,
)
from dispatchkit.dispatch import Part, greedy_parts  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.keys import CaptureSizeWarning  # noqa: E402
from dispatchkit.observe import Timeline  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

X = {"x": StaticInput((None, 4), "float32")}
IDS = {"ids": StaticInput((None,), "int64")}
WEIGHT = torch.arange(16.0).view(4, 4).sin()
INDEPENDENT = RunnerOptions(rows_independent=True)


class SplitPolicy(OneBucketPolicy):
    """Splits batches that no graph covers, and with ``always`` all batches."""

    def __init__(self, *, always: bool = False, timed: bool = False, parts=greedy_parts) -> None:
        self.always, self.timed, self.parts = always, timed, parts

    def decide(self, batch, graphs):
        answer = super().decide(batch, graphs)
        if answer.key is None or self.always:
            parts = self.parts(batch, graphs, RuntimeMode.FULL)
            if parts:
                return Decision.split(parts, timed=self.timed)
        return answer


def make(step, inputs=X, *, policy=None, sizes=(4, 8), most=64, capture=True, **arguments):
    arguments.setdefault("options", INDEPENDENT)
    arguments.setdefault("backend", "tape")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        runner = GraphRunner(
            step,
            inputs,
            sizes=sizes,
            max_num_tokens=most,
            mode="FULL",
            policy=policy or SplitPolicy(),
            **arguments,
        )
    if capture:
        runner.capture()
    return runner


def rows(count, width=4):
    return torch.arange(1.0 * count * width).view(count, width).sin()


def sizes_of(runner, num_tokens):
    return [
        (part.key.num_tokens, part.num_tokens) for part in runner.explain(num_tokens).decision.parts
    ]


# -- one step with parts --------------------------------------------------------------------


def test_a_split_step_is_one_step_of_its_graphs():
    runner = make(lambda x: (x @ WEIGHT, x.sum(1)))
    step = runner.spec.step
    for count in (8, 19, 20):
        for got, want in zip(runner(rows(count)), step(rows(count)), strict=True):
            torch.testing.assert_close(got, want)
    assert sizes_of(runner, 19) == [(8, 8), (8, 8), (4, 3)]
    stats = runner.stats()
    assert (stats.steps, stats.real_tokens, stats.padded_tokens) == (3, 47, 48)
    name = "FULL tokens=8"
    assert stats.hits == {name: 1, f"{name} + {name} + FULL tokens=4": 2}
    assert runner.lanes[0].lane.tick == 3
    assert "FULL tokens=8  captured  5" in str(runner)


def test_it_is_explained_and_watched_with_its_parts():
    runner = make(lambda x: x + 1)
    found = runner.explain(11)
    assert "split into 8 rows on FULL tokens=8, 3 rows on FULL tokens=4" in str(found)
    parts = found.to_json()["decision"]["parts"]
    assert [part["num_tokens"] for part in parts] == [8, 3]
    timeline = Timeline()
    runner.taps.watch_steps(timeline)
    runner(rows(11))
    assert "FULL tokens=8 + FULL tokens=4" in str(timeline.to_json())


def test_results_are_the_callers_own_whatever_runs_next():
    for outputs in ("owned", "view"):
        runner = make(lambda x: x * 2, outputs=outputs)
        first = runner(rows(11))
        runner(torch.zeros(11, 4))
        assert torch.equal(first, rows(11) * 2)


def test_a_step_in_place_is_cut_as_a_call_is():
    runner = make(lambda x: x + 1, policy=SplitPolicy(always=True), sizes=(4, 16))
    runner.buffers["x"][:7] = rows(7)
    assert torch.equal(runner.run_in_place(7), rows(7) + 1)
    assert sizes_of(runner, 7) == [(4, 4), (4, 3)]


def test_it_is_timed_as_a_whole():
    told = []

    class Learning(SplitPolicy):
        def observe(self, outcome):
            told.append(outcome)

    runner = make(lambda x: x + 1, policy=Learning(timed=True))
    for _ in range(40):
        runner(rows(11))
    runner.drain(wait=True)
    assert len(told) > 1
    assert all(len(one.decision.parts) == 2 and one.elapsed_us > 0 for one in told)
    assert [one.step for one in told] == sorted({one.step for one in told})
    assert max(one.step for one in told) <= 40
    assert runner.explain(11).times


def test_submitted_steps_are_cut_on_their_lane():
    runner = make(lambda x: x + 1, lanes=2)
    handles = [runner.submit(rows(11) + number) for number in range(4)]
    for number, handle in enumerate(handles):
        assert torch.equal(handle.result(), rows(11) + number + 1)


# -- inputs of all kinds --------------------------------------------------------------------


def test_rows_are_cut_along_the_batch_dimension_of_each_input():
    inputs = {
        "across": StaticInput((3, None), "float32"),
        "host": StaticInput((None,), "int32", host=True),
        "whole": StaticInput((3,), "float32"),
    }

    def step(across, host, whole):
        return (across * whole[:, None] + host.float(), host * 2)

    runner = make(step, inputs)
    across, host, whole = rows(3, 11), np.arange(11, dtype=np.int32), torch.ones(3)
    for got, want in zip(
        runner(across, host, whole), step(across, torch.from_numpy(host), whole), strict=True
    ):
        assert torch.equal(got, want)
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_parts_are_of_one_bucket_of_the_axes_and_cut_to_its_value():
    inputs = {"x": StaticInput((None, "length"), "float32")}
    runner = make(lambda x: x * 2, inputs, axes=[Axis("length", buckets=(2, 6))])
    for length in (2, 5):
        x = rows(11, length)
        assert torch.equal(runner(x, length=length), x * 2)
    keys = {key for key in runner.stats().hits if " + " in key}
    assert {"axes=2" in key for key in keys} == {True, False}
    assert not any("axes=2" in key and "axes=6" in key for key in keys)


# -- what keeps a batch whole ---------------------------------------------------------------

#: Rows that depend on others in ways that two tails show partly or not at all.
COUPLED = {
    "mean over the real rows": lambda x, rows: (
        x - (x * (torch.arange(x.shape[0]) < rows)[:, None]).sum(0) / rows
    ),
    "the number of rows": lambda x, rows: x * rows,
    "row above": lambda x, rows: x + x.roll(1, 0) * (torch.arange(x.shape[0]) > 0)[:, None],
    "sum of those before": lambda x, rows: x.cumsum(0),
}


@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_depend_on_each_other_are_found_at_the_capture(name):
    """Eager is correct where parts would not be; a batch that fits one graph still replays."""
    step = COUPLED[name]
    options = RunnerOptions(rows_independent=True, buffers=BufferOptions(row_count="rows"))
    runner = make(step, options=options)
    with pytest.warns(EagerStepWarning, match="rows_not_independent"):
        got = runner(rows(11))
    torch.testing.assert_close(got, step(rows(11), torch.tensor(11)))
    assert runner.stats().eager_by_reason == {"rows_not_independent": 1}
    assert "cannot serve part of a split batch: " in str(runner)
    assert runner.explain(11).decision.reason == "rows_not_independent"
    torch.testing.assert_close(runner(rows(5)), step(rows(5), torch.tensor(5)))
    assert runner.stats().steps_by_mode["FULL"] == 1  # one graph still serves a batch that fits


def test_a_step_that_draws_or_counts_its_runs_is_not_split():
    """Each part would be an additional run."""
    count = torch.zeros(())

    def counts(x):
        count.add_(1)
        return x + 1

    for step, state, what in (
        (lambda x: x + torch.rand_like(x), (), "the step draws random numbers"),
        (counts, [count], "the step changes state, and would change it again for each part"),
    ):
        runner = make(step, state=state)
        with pytest.warns(EagerStepWarning, match="rows_not_independent"):
            runner(rows(11))
        assert what in str(runner)
    assert count == 1


def test_rows_that_write_their_own_slots_are_split():
    """Running the same rows a second time leaves a cache unchanged."""
    cache = torch.zeros(65, 4)
    inputs = {**X, "slot": StaticInput((None,), "int64", fill=64)}

    def step(x, slot):
        cache[slot] = x
        return cache[slot] * 2

    runner = make(step, inputs, state=StepState([cache]))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:21]
    assert torch.equal(runner(rows(21), slots), rows(21) * 2)
    assert torch.equal(cache[slots], rows(21))
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_integers_show_by_the_first_split_call_what_depends_on_them():
    """Fill alone proves nothing about a look-up."""
    table = rows(40)

    def coupled(ids):
        return table[ids] + table[ids.max()]

    for step, mode in ((coupled, "NONE"), (lambda ids: table[ids], "FULL")):
        options = RunnerOptions(rows_independent=True, buffers=BufferOptions(output_batch_dims=0))
        runner = make(step, IDS, options=options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            for _ in range(2):
                ids = torch.arange(16)
                torch.testing.assert_close(runner(ids), step(ids))
        assert runner.stats().steps_by_mode[mode] == 2


def test_outputs_that_cannot_be_joined_keep_a_batch_whole():
    for step in (lambda x: (x + 1, WEIGHT.sum()), lambda x: (x + 1, x.shape[0])):
        runner = make(step)
        with pytest.warns(EagerStepWarning, match="outputs_not_joined"):
            found = runner(rows(11))
        assert torch.equal(found[0], rows(11) + 1)
    declared = RunnerOptions(rows_independent=True, buffers=BufferOptions(output_batch_dims=(0, 0)))
    runner = make(lambda x: (x + 1, x.shape[0]), options=declared)
    assert runner(rows(11))[1] == 11
    assert runner.stats().steps_by_mode["FULL"] == 1


def test_nothing_is_split_that_was_not_declared():
    runner = make(lambda x: x + 1, options=RunnerOptions())
    with pytest.warns(EagerStepWarning, match="above_largest"):
        runner(rows(11))
    asks_anyway = SplitPolicy(parts=lambda batch, graphs, mode: _forced(batch, graphs))
    with pytest.raises(Exception, match="RunnerOptions\\(rows_independent=True\\)"):
        make(lambda x: x + 1, policy=asks_anyway, options=RunnerOptions())


def _forced(batch, graphs):
    keys = sorted(graphs, key=lambda key: key.num_tokens)
    if batch.num_tokens != 9:
        return ()
    return [Part(keys[-1], 8), Part(keys[0], 1)]


def test_what_is_not_to_be_proven_is_believed():
    options = RunnerOptions(rows_independent=True, capture=CaptureOptions(prove_rows=False))
    runner = make(lambda x: x - x.mean(0), options=options)
    runner(rows(11))
    assert runner.stats().steps_by_mode["FULL"] == 1


# -- graphs that come and go ----------------------------------------------------------------


def test_parts_are_captured_when_a_batch_asks_for_them():
    runner = make(lambda x: x + 1, lazy=True, capture=False)
    assert torch.equal(runner(rows(24)), rows(24) + 1)
    assert runner.stats().captures == 1
    assert torch.equal(runner(rows(11)), rows(11) + 1)
    assert (runner.stats().captures, runner.stats().steps_by_mode["FULL"]) == (2, 2)


def test_parts_that_find_no_room_beside_each_other_run_eager_at_once():
    """Each capture would evict the other part, and the step would never run."""
    options = RunnerOptions(rows_independent=True, memory=MemoryOptions(max_graphs=1))
    runner = make(lambda x: x + 1, lazy=True, capture=False, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for _ in range(3):
            assert torch.equal(runner(rows(11)), rows(11) + 1)
    assert runner.stats().eager_by_reason == {"evicted": 3}
    assert runner.stats().captures == 0


def test_the_table_follows_what_happens_to_a_part():
    runner = make(lambda x: x + 1)
    small = next(key for key in runner.registry if key.num_tokens == 4)
    assert sizes_of(runner, 11) == [(8, 8), (4, 3)]
    runner(rows(11))
    runner.evict(small)
    assert sizes_of(runner, 11) == [(8, 8), (8, 3)]
    assert torch.equal(runner(rows(11)), rows(11) + 1)
    runner.capture()
    assert sizes_of(runner, 11) == [(8, 8), (4, 3)]
    assert torch.equal(runner(rows(11)), rows(11) + 1)
    assert runner.stats().steps_by_mode["NONE"] == 0


def test_a_part_that_cannot_replay_runs_eager_alone(backend):
    """Each row runs once, and the failure is counted by its reason."""
    runner = make(lambda x: x + 1, backend=backend)
    backend.replay_fault = "before"
    with pytest.warns(EagerStepWarning, match="replay_failed"):
        got = runner(rows(11))
    assert torch.equal(got, rows(11) + 1)
    reasons = runner.stats().eager_by_reason
    assert reasons == {"replay_failed": 2}
    assert runner.stats().real_tokens == 11


def test_check_mode_compares_the_whole_batch():
    unproven = CaptureOptions(prove_rows=False)
    options = RunnerOptions(rows_independent=True, check=1, capture=unproven)
    runner = make(lambda x: x - x.mean(0), options=options)
    with pytest.warns(RuntimeWarning, match="A check of a step of 11 tokens failed"):
        got = runner(rows(11))
    torch.testing.assert_close(got, rows(11) - rows(11).mean(0))
    assert runner.stats().eager_by_reason == {"check_failed": 1}


# -- properties -----------------------------------------------------------------------------

CUTS: dict[int, list[Part]] = {}


@functools.cache
def runner_of(dtype):
    """Return a runner of a step with state, split by ``CUTS``, and the step."""
    cache = torch.zeros(65, 4, dtype=dtype)
    inputs = {
        "x": StaticInput((None, 4), str(dtype).removeprefix("torch.")),
        "slot": StaticInput((None,), "int64", fill=64),
    }

    def step(x, slot):
        cache[slot] = x
        return (x * 3 + 1 if dtype is torch.int64 else x @ WEIGHT, cache[slot] + slot[:, None])

    def parts(batch, graphs, mode):
        is_meant = batch.allows(mode) and not batch.uniform
        return CUTS.get(batch.num_tokens, ()) if is_meant else ()

    policy = SplitPolicy(always=True, parts=parts)
    return make(step, inputs, policy=policy, sizes=(2, 4, 8), state=[cache]), step, cache


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_way_to_cut_serves_each_row_once_in_order(data):
    """Results and state are bitwise equal for integers, and within rounding otherwise."""
    dtype = data.draw(st.sampled_from((torch.int64, torch.float32)))
    runner, step, cache = runner_of(dtype)
    keys = {key.num_tokens: key for key in runner.registry}
    sizes = sorted(data.draw(st.lists(st.sampled_from((2, 4, 8)), min_size=2, max_size=5)))
    parts = [Part(keys[size], data.draw(st.integers(1, size))) for size in sizes[::-1]]
    count = sum(part.num_tokens for part in parts)
    CUTS.clear()
    CUTS[count] = parts
    runner.dispatcher.set_lazy(False)  # empties the table
    assert list(runner.explain(count).decision.parts) == parts
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randint(-9, 9, (count, 4), generator=seed).to(dtype)
    slot = torch.randperm(64, generator=seed)[:count]
    before = cache.clone()
    got, after = runner(x, slot), cache[:64].clone()
    cache.copy_(before)
    want = step(x, slot)
    for one, other in zip((*got, after), (*want, cache[:64]), strict=True):
        if dtype is torch.int64:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other)
    assert runner.stats().steps_by_mode["NONE"] == 0
