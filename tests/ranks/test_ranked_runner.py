"""A runner of several ranks: what was agreed on is run, or nobody waits for it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from local_ranks import all_good, run_ranks  # noqa: E402
from rank_policies import AlwaysFull, make_dispatcher  # noqa: E402

from dispatchkit import Axis, GraphRunner, StaticInput  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import DescriptorError, InputError, RankError, ReplayError  # noqa: E402
from dispatchkit.ranks import RankedRunner  # noqa: E402

INPUTS = {"x": StaticInput((None,), "float32")}


class Refusing:
    """A graph whose launch is refused when its backend says so."""

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


def make_runner(ranks):
    """Return a captured runner of this rank, its backend and what it ran plainly."""
    ran, backend = [], RefusingTape()

    def step(x):
        ran.append(len(x))
        return x * 2

    runner = GraphRunner(
        step, INPUTS, config=make_dispatcher().config, policy=AlwaysFull(), backend=backend
    )
    ranked = RankedRunner(runner, ranks, INPUTS)
    ranked.capture()
    ran.clear()
    return ranked, backend, ran


def test_a_replay_that_fails_on_one_rank_runs_no_other_way_there():
    """It says so to the others, who may wait for it inside the graph."""

    def run(ranks):
        ranked, backend, ran = make_runner(ranks)
        assert ranked(x=torch.ones(3)).tolist() == [2.0] * 3
        if ranks.rank == 1:
            backend.refuses = True
            with pytest.raises(ReplayError, match="replay_failed"):
                ranked(x=torch.ones(3))
            return ran
        ranked(x=torch.ones(3))
        with pytest.raises(RankError) as caught:
            ranked(x=torch.ones(3))
        return caught.value.ranks

    assert all_good(run_ranks(2, run)) == [(1,), []]


def test_an_input_that_is_refused_after_the_agreement_stops_the_others():
    def run(ranks):
        ranked, _, _ = make_runner(ranks)
        if ranks.rank == 1:
            with pytest.raises(InputError):
                ranked(x=torch.ones(3, dtype=torch.float64))
            return None
        ranked(x=torch.ones(3))
        with pytest.raises(RankError) as caught:
            ranked(x=torch.ones(3))
        return caught.value.ranks

    assert all_good(run_ranks(2, run)) == [(1,), None]


def test_a_rank_under_another_autocast_has_all_run_eager():
    """Its graphs were not captured under that: all ranks do what it can do."""

    def run(ranks):
        ranked, _, ran = make_runner(ranks)
        with torch.autocast("cpu", enabled=ranks.rank == 1):
            assert ranked(x=torch.ones(3)).tolist() == [2.0] * 3
        assert ranked(x=torch.ones(3)).tolist() == [2.0] * 3
        return ran, ranked.runner.stats().steps_by_mode["FULL"]

    assert all_good(run_ranks(2, run)) == [([3], 1)] * 2


AXES_INPUTS = {
    "x": StaticInput((None, "length"), "float32", fill=1.0),
    "scale": StaticInput((None,), "float32"),
}


def axes_runner(ranks):
    """Return a ranked runner with a length that is a dimension, and a kind that steers."""
    ran = []

    def step(x, scale, kind):
        ran.append((tuple(x.shape), kind))
        return {"long": x * scale[:, None] * kind, "last": x.prod(1)}

    runner = GraphRunner(
        step,
        AXES_INPUTS,
        sizes=(2, 4),
        max_num_tokens=4,
        axes=[Axis("length", (4, 8)), Axis("kind", (1, 3), exact=True)],
        mode="FULL",
        policy=AlwaysFull(),
        backend=TapeBackend(),
    )
    ranked = RankedRunner(runner, ranks, AXES_INPUTS)
    assert ranked.capture() == {}
    ran.clear()
    return ranked, ran


@pytest.mark.filterwarnings("ignore:Steps run eager")
def test_ranks_with_other_lengths_run_one_graph_and_get_their_own_cut():
    """Rows and lengths are padded to those of the longest; an idle rank joins with fill."""
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
        return ran, ranked.runner.stats().eager_by_reason

    first, second = all_good(run_ranks(2, run))
    assert first == ([((4, 9), 1), ((2, 5), 1), ((3, 3), 2)], {"outside_axis": 3})
    assert second == ([((4, 9), 1), ((2, 5), 3), ((3, 3), 2)], {"outside_axis": 3})


def test_values_that_fit_no_input_are_refused_before_anybody_waits():
    def run(ranks):
        ranked, _ = axes_runner(ranks)
        x, scale = torch.ones(2, 3), torch.ones(2)
        if ranks.rank == 1:
            with pytest.raises(InputError, match=r"'x' must be \(2, 5\) here, got \(2, 3\)"):
                ranked(x=x, scale=scale, length=5, kind=1)
            with pytest.raises(InputError, match="'kind' has no value"):
                ranked(x=x, scale=scale, length=3)
            with pytest.raises(DescriptorError, match="length"):
                ranked(x=x, scale=scale, length=-3, kind=1)
        assert ranked(x=x, scale=scale, length=3, kind=1)["long"].shape == (2, 3)
        return ranked.ranked.step

    assert all_good(run_ranks(2, run)) == [1, 1]
