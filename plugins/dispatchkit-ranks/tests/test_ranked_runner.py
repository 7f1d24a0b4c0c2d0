"""A runner on several ranks runs agreed graphs, or no rank waits for it."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from local_ranks import all_good, run_ranks  # noqa: E402
from rank_policies import AlwaysFull, make_dispatcher  # noqa: E402

from dispatchkit import (  # noqa: E402
    Axis,
    GraphRunner,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import (  # noqa: E402
    ConfigError,
    DescriptorError,
    InputError,
    RankError,
    ReplayError,
)
from dispatchkit.execute import PackedRunner  # noqa: E402
from dispatchkit.keys import allowed_modes_code  # noqa: E402
from dispatchkit.observe import Timeline  # noqa: E402

from dispatchkit_ranks import RankedRunner  # noqa: E402

INPUTS = {"x": StaticInput((None,), "float32")}


class Refusing:
    """A graph whose launch fails on demand."""

    def __init__(self, graph, backend):
        self._graph, self._backend = graph, backend

    def __getattr__(self, name):
        return getattr(self._graph, name)

    def replay(self):
        if self._backend.refuses:
            raise RuntimeError("launch refused")
        self._graph.replay()


class RefusingTape(TapeBackend):
    refuses = False

    def capture(self, run, *, stream, pool, generators=()):
        return Refusing(super().capture(run, stream=stream, pool=pool, generators=generators), self)


def given(ran):
    """Return the single arguments of a mock's calls."""
    return [call.args[0] for call in ran.call_args_list]


def make_runner(ranks, step=None):
    """Return this rank's captured runner, its backend, and its plain calls."""
    ran, backend = Mock(), RefusingTape()

    def doubled(x):
        ran(len(x))
        return x * 2

    runner = GraphRunner(
        step or doubled,
        INPUTS,
        policy=AlwaysFull(),
        backend=backend,
        options=RunnerOptions(config=make_dispatcher().config),
    )
    ranked = RankedRunner(runner, ranks, INPUTS)
    ranked.capture()
    ran.reset_mock()
    return ranked, backend, ran


def test_a_replay_that_fails_on_one_rank_runs_no_other_way_there():
    """It notifies the others, which may wait for it inside the graph."""

    def run(ranks):
        ranked, backend, ran = make_runner(ranks)
        assert ranked(x=torch.ones(3)).tolist() == [2.0] * 3
        if ranks.rank == 1:
            backend.refuses = True
            with pytest.raises(ReplayError, match="replay_failed"):
                ranked(x=torch.ones(3))
            return given(ran)
        ranked(x=torch.ones(3))
        with pytest.raises(RankError) as caught:
            ranked(x=torch.ones(3))
        return caught.value.ranks

    assert all_good(run_ranks(2, run)) == [(1,), []]


@dataclasses.dataclass
class Outputs:
    """An object with tensors in its attributes, as libraries return."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    kind: str = "dense"


def test_tensors_inside_of_objects_are_cut_to_the_rows_of_each_rank():
    def run(ranks):
        def step(x):
            return Outputs(x * 2, (x + 1, x[0]))

        ranked, _, _ = make_runner(ranks, step)
        rows = 3 + 2 * ranks.rank
        result = ranked(x=torch.ones(rows))
        assert (type(result), result.kind) == (Outputs, "dense")
        assert result.hidden[1] == 1
        return len(result.logits), len(result.hidden[0])

    assert all_good(run_ranks(2, run)) == [(3, 3), (5, 5)]


TWO_INPUTS = {**INPUTS, "y": StaticInput((None,), "float32")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.ones(3, dtype=torch.float64), "y": torch.ones(3)},
        {"x": torch.ones(3)},
        {"x": torch.ones(3), "y": torch.ones(2)},
        {"x": torch.ones(3), "y": torch.ones(3), "z": torch.ones(3)},
        {"x": torch.ones(3), "y": torch.ones(3).numpy()},
    ],
    ids=["type", "missing", "rows", "unknown", "array"],
)
def test_an_input_that_does_not_fit_is_refused_before_anything_is_exchanged(wrong):
    """Otherwise its agreement would end, or fill would be used where another rank is larger."""

    def run(ranks):
        runner = GraphRunner(
            lambda x, y: x + y,
            TWO_INPUTS,
            policy=AlwaysFull(),
            backend="tape",
            options=RunnerOptions(config=make_dispatcher().config),
        )
        ranked = RankedRunner(runner, ranks, TWO_INPUTS)
        ranked.capture()
        before = ranks.num_exchanges
        if ranks.rank == 1:
            with pytest.raises(InputError):
                ranked(**wrong)
        assert ranks.num_exchanges == before
        rows = 3 if ranks.rank == 1 else 7
        return ranked(x=torch.ones(rows), y=torch.ones(rows)).tolist()

    assert all_good(run_ranks(2, run)) == [[2.0] * 7, [2.0] * 3]


def test_a_rank_under_another_autocast_has_all_run_eager():
    """Its graphs were captured under another setting, so all ranks run eager."""

    def run(ranks):
        ranked, _, ran = make_runner(ranks)
        with torch.autocast("cpu", enabled=ranks.rank == 1):
            assert ranked(x=torch.ones(3)).tolist() == [2.0] * 3
        assert ranked(x=torch.ones(3)).tolist() == [2.0] * 3
        return given(ran), ranked.runner.stats().steps_by_mode["FULL"]

    assert all_good(run_ranks(2, run)) == [([3], 1)] * 2


def test_a_rank_under_another_autocast_runs_eager_where_eager_is_among_what_it_allows():
    """A set of allowed modes is no ceiling, but contains eager too."""

    def run(ranks):
        ranked, _, ran = make_runner(ranks)
        neither_or_full = allowed_modes_code(invalid=["PIECEWISE"])
        with torch.autocast("cpu", enabled=ranks.rank == 1):
            ranked(x=torch.ones(3), ceiling=neither_or_full)
        return given(ran)

    assert all_good(run_ranks(2, run)) == [[3]] * 2


class Scaled:
    """A step that reads a Python number, which its graphs contain."""

    def __init__(self):
        self.scale = 2.0

    def __call__(self, x):
        return x * self.scale


def test_a_value_that_changes_on_one_rank_has_all_run_eager():
    """Its graphs are invalid; the others learn before the step which rank it is."""

    def run(ranks):
        scaled = Scaled()
        config = make_dispatcher().config
        runner = GraphRunner(
            scaled,
            INPUTS,
            policy=AlwaysFull(),
            backend="tape",
            options=RunnerOptions(config=config),
        )
        ranked = RankedRunner(runner, ranks, INPUTS)
        ranked.capture()
        modes, found = [], []
        for step in range(40):
            if step == 5 and ranks.rank == 1:
                scaled.scale = 3.0
            found.append(float(ranked(x=torch.ones(3))[0]))
            modes.append({**runner.stats().steps_by_mode})
        withheld = ranked.ranked.withheld
        again = ranked.capture()
        ranked(x=torch.ones(3))
        return modes, (found[0], found[-1]), withheld, again, runner.stats().steps_by_mode["FULL"]

    first, second = all_good(run_ranks(2, run))
    assert first[0] == second[0]
    assert first[0][-1]["NONE"] > 20  # found within as many steps as with a runner alone
    assert (first[1], second[1]) == ((2.0, 2.0), (2.0, 3.0))
    assert all("scale" in why[1] for why in first[2].values())
    assert first[2]
    assert first[3] == second[3] == {}
    assert first[4] == second[4] == first[0][-1]["FULL"] + 1


def test_steps_of_several_ranks_are_recorded_and_watched():
    def run(ranks):
        ranked, _, _ = make_runner(ranks)
        recorder, timeline = ranked.runner.start_recording(), Timeline()
        ranked.runner.taps.watch_steps(timeline)
        ranked(x=torch.ones(3 + ranks.rank))
        ranked.idle() if ranks.rank else ranked(x=torch.ones(1))
        spans = [one for one in timeline.to_json()["traceEvents"] if one["ph"] == "X"]
        return [step.num_tokens for step in recorder.trace()], len(spans)

    assert all_good(run_ranks(2, run)) == [([4, 1], 2)] * 2


def test_a_swap_is_taken_up_by_all_ranks_or_no_step_is_run():
    """The next policy might learn on each rank, so that the ranks diverge."""

    def run(ranks):
        ranked, _, _ = make_runner(ranks)
        ranked.runner.swap(sizes=(1, 2, 8))
        ranked.renew()
        assert ranked(x=torch.ones(3)).tolist() == [2.0] * 3
        assert ranked.runner.stats().hits.keys() == {"FULL tokens=8"}
        ranked.runner.swap(sizes=(1, 4, 8))
        with pytest.raises(RankError, match=r"call renew\(\)"):
            ranked(x=torch.ones(3))

    all_good(run_ranks(2, run))


AXES_INPUTS = {
    "x": StaticInput((None, "length"), "float32", fill=1.0),
    "scale": StaticInput((None,), "float32"),
}


def axes_runner(ranks, captures=True, step=None):
    """Return a ranked runner with a length as a dimension and a controlling kind."""
    ran = Mock()

    def plain_step(x, scale, kind):
        ran((tuple(x.shape), kind))
        return {"long": x * scale[:, None] * kind, "last": x.prod(1)}

    runner = GraphRunner(
        plain_step if step is None else step,
        AXES_INPUTS,
        sizes=(2, 4),
        max_num_tokens=4,
        axes=[Axis("length", (4, 8)), Axis("kind", (1, 3), exact=True)],
        mode="FULL",
        policy=AlwaysFull(),
        backend=TapeBackend(),
    )
    ranked = RankedRunner(runner, ranks, AXES_INPUTS)
    if captures:
        assert ranked.capture() == {}
    ran.reset_mock()
    return ranked, ran


@pytest.mark.filterwarnings("ignore:Steps run eager")
def test_ranks_with_other_lengths_run_one_graph_and_get_their_own_cut():
    """Rows and lengths are padded to the longest; an idle rank joins with fill."""
    steps = [  # rows, length and kind of each rank; None: idle
        [(1, 3, 1), (4, 7, 1)],
        [(2, 4, 3), (1, 2, 3)],
        [None, (3, 8, 1)],
        [(4, 9, 1), (2, 1, 1)],  # outside for one: eager for all
        [(2, 3, 1), (2, 5, 3)],  # no graph is of both kinds
        [(2, 3, 2), (3, 3, 2)],
        [None, None],
    ]

    def run(ranks):
        ranked, ran = axes_runner(ranks)
        for each in steps:
            mine = each[ranks.rank]
            if mine is None:
                assert ranked.idle() is any(one is not None for one in each)
                continue
            rows, length, kind = mine
            x, scale = torch.randn(rows, length), torch.randn(rows)
            got = ranked(x=x, scale=scale, length=length, kind=kind)
            assert got["long"].shape == (rows, length)
            torch.testing.assert_close(got["long"], x * scale[:, None] * kind)
            torch.testing.assert_close(got["last"], x.prod(1))
        return given(ran), ranked.runner.stats().eager_by_reason

    first, second = all_good(run_ranks(2, run))
    assert first == ([((4, 9), 1), ((2, 5), 1), ((3, 3), 2)], {"outside_axis": 3})
    assert second == ([((4, 9), 1), ((2, 5), 3), ((3, 3), 2)], {"outside_axis": 3})


def test_values_that_fit_no_input_are_refused_before_anybody_waits():
    def run(ranks):
        ranked, _ = axes_runner(ranks)
        x, scale = torch.ones(2, 3), torch.ones(2)
        if ranks.rank == 1:
            with pytest.raises(
                InputError, match=r"'x' must be a tensor of shape \(2, 5\), got shape \(2, 3\)"
            ):
                ranked(x=x, scale=scale, length=5, kind=1)
            with pytest.raises(InputError, match="value for axis 'kind'"):
                ranked(x=x, scale=scale, length=3)
            with pytest.raises(DescriptorError, match="length"):
                ranked(x=x, scale=scale, length=-3, kind=1)
        assert ranked(x=x, scale=scale, length=3, kind=1)["long"].shape == (2, 3)
        return ranked.ranked.step

    assert all_good(run_ranks(2, run)) == [1, 1]


def stops_both(ranks, call, error, match, first):
    """Check that a call raises on the first rank and stops the other at its next step."""
    if ranks.rank == first:
        with pytest.raises(error, match=match):
            call()
        return
    with pytest.raises(RankError) as caught:
        [call() for _ in range(3)]
    assert caught.value.ranks == (first,)


@pytest.mark.filterwarnings("ignore:Steps run eager")
@pytest.mark.parametrize(
    ("captures", "kind"),
    [(False, 1), (True, 2)],
    ids=["no capture", "a kind that none is of"],
)
def test_lengths_that_differ_are_refused_where_no_capture_tells_how_to_cut(captures, kind):
    """Otherwise fill would be returned as results; equal lengths need no cut."""

    def run(ranks):
        ranked, ran = axes_runner(ranks, captures)
        same = {"x": torch.ones(2, 5), "scale": torch.ones(2), "length": 5, "kind": kind}
        assert ranked(**same)["long"].shape == (2, 5)
        length = (3, 7)[ranks.rank]
        other = same | {"x": torch.ones(2, length), "length": length}
        match = "length=3 to 7.*Call capture"
        stops_both(ranks, lambda: ranked(**other), RankError, match, 0)
        return ran.call_count

    assert all_good(run_ranks(2, run)) == [1, 2]


def test_outputs_are_cut_as_those_of_their_own_kind():
    """Outputs for one value of an exact axis say nothing about another value."""

    def step(x, scale, kind):
        return x * scale[:, None] if kind == 1 else (x.sum(1), x * kind)

    def run(ranks):
        ranked, _ = axes_runner(ranks, step=step)
        found = []
        for length in ((3, 7)[ranks.rank], (3, 9)[ranks.rank]):
            x, scale = torch.ones(2, length), torch.ones(2)
            found.append(tuple(ranked(x=x, scale=scale, length=length, kind=1).shape))
            found.append(tuple(ranked(x=x, scale=scale, length=length, kind=3)[1].shape))
        return found

    with pytest.warns(match="Steps run eager"):
        first, second = all_good(run_ranks(2, run))
    assert first == [(2, 3)] * 4
    assert second == [(2, 7), (2, 7), (2, 9), (2, 9)]


def test_tensors_inside_of_objects_are_cut_along_an_axis():
    def run(ranks):
        ranked, _ = axes_runner(ranks, step=lambda x, scale, kind: Outputs(x * kind, (scale,)))
        length = 3 + 2 * ranks.rank
        result = ranked(x=torch.ones(2, length), scale=torch.ones(2), length=length, kind=1)
        return tuple(result.logits.shape)

    assert all_good(run_ranks(2, run)) == [(2, 3), (2, 5)]


def test_an_input_that_is_no_tensor_is_refused_before_anybody_waits():
    def run(ranks):
        ranked, _ = axes_runner(ranks)
        given = {"x": torch.ones(2, 3), "length": 3, "kind": 1}
        if ranks.rank == 1:
            for scale in ([1.0, 1.0], torch.ones(2).numpy()):
                with pytest.raises(InputError, match="'scale' must be a tensor"):
                    ranked(scale=scale, **given)
        assert ranked(scale=torch.ones(2), **given)["long"].shape == (2, 3)

    all_good(run_ranks(2, run))


def test_a_runner_of_ranks_cannot_be_packed():
    """Ranks would divide items into different numbers of steps and wait for each other."""

    def run(ranks):
        runner, _, _ = make_runner(ranks)
        with pytest.raises(ConfigError, match=r"RankedRunner.*Pack the items with.*idle\(\)"):
            PackedRunner(runner, lambda lengths, _: [[each] for each in range(len(lengths))])

    all_good(run_ranks(2, run))
