"""A runner of several ranks: what was agreed on is run, or nobody waits for it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from local_ranks import all_good, run_ranks  # noqa: E402
from rank_policies import AlwaysFull, make_dispatcher  # noqa: E402

from dispatchkit import GraphRunner, StaticInput  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import InputError, RankError, ReplayError  # noqa: E402
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
