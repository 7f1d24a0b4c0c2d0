"""The kit for runners accepts correct parts and rejects planted faults by name."""

from __future__ import annotations

import ctypes
import itertools
import re
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from faulty_backends import FoldsConstantsBackend, Graph  # noqa: E402
from faulty_policies import NeverAsksWhetherReadyPolicy  # noqa: E402
from offering_tape import OfferingTape  # noqa: E402
from sample_policies import LargestPolicy  # noqa: E402

from dispatchkit import testing  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.testing import RunnerTests, SmallestPolicy, pytest_plugin  # noqa: E402
from dispatchkit.testing.sample_step import SampleStep  # noqa: E402


class TestVllmOnTheTape(RunnerTests):
    """Nothing overridden."""


@pytest.mark.slow
class TestOwnPolicy(RunnerTests):
    num_steps = 12

    def make_policy(self):
        return LargestPolicy()


class TestOwnStep(RunnerTests):
    """A plain function, so only FULL can run."""

    num_steps = 12

    def make_policy(self):
        return SmallestPolicy()

    def make_step(self):
        return lambda tokens, values: values.cumsum(0) + tokens[:, None]


# -- planted faults --------------------------------------------------------------------------


class CountsUnseen(RunnerTests):
    """A step whose result depends on state invisible to Python."""

    def make_step(self):
        count = Mock(side_effect=itertools.count(1))  # a mock is an object of a library

        def step(tokens, values):
            return values + count()

        return step


class Folds(RunnerTests):
    """A backend that keeps the result of the capture."""

    def make_backend(self):
        return FoldsConstantsBackend()


class PolicyOfLostGraphs(RunnerTests):
    """A policy that chooses missing graphs; the dispatcher saves the step."""

    def make_policy(self):
        return NeverAsksWhetherReadyPolicy()


class ReplayTwiceBackend(TapeBackend):
    """Launches twice, "since the first is slow"."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        return Graph(graph, replay=lambda: (graph.replay(), graph.replay()))


class NothingReplays(RunnerTests):
    """A step that reads on the host, so no graph can contain it."""

    def make_step(self):
        return lambda tokens, values: values * (1 + 0 * values.sum().item())


class RunsTwice(RunnerTests):
    """A backend that runs the step twice, so state changes twice."""

    def make_backend(self):
        return ReplayTwiceBackend()

    def make_step(self):
        count = torch.zeros(())
        return lambda tokens, values: values + count.add_(1)


@pytest.mark.parametrize(
    ("tests", "test", "message"),
    [
        (CountsUnseen, "test_random_traffic_gives_eager_results", "differs from eager"),
        (Folds, "test_large_batch_leaves_nothing_to_a_smaller_one", "differs from eager"),
        (
            PolicyOfLostGraphs,
            "test_random_traffic_gives_eager_results",
            r"The dispatcher counted \d+ faults of the policy \(",
        ),
        (NothingReplays, "test_results_are_those_of_the_step_itself", "No step replayed a graph"),
        (RunsTwice, "test_replay_that_fails_runs_the_step_once", "differs from eager"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_planted_fault_is_rejected_by_name(tests, test, message):
    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some also cause warnings
        try:
            getattr(tests(), test)()
        except AssertionError as error:
            said = str(error)
    assert said, f"not found: {tests.__doc__}"
    assert re.search(message, said), said


class HandleBackend(OfferingTape):
    """Launches anything that has a handle, as the CUDA backend does."""

    copy_node = None

    def direct_launch(self, graph):
        return self.launch, ctypes.c_void_p(graph.handle)


class LaunchesDirectly(RunnerTests):
    """A backend with direct launches and unwatched captures."""

    def make_backend(self):
        return HandleBackend()

    def make_policy(self):
        return SmallestPolicy()

    def make_step(self):
        return lambda tokens, values: values * 2 + tokens[:, None]


def test_launches_fail_on_demand_on_a_backend_with_direct_launches():
    with LaunchesDirectly()._pair() as pair:
        pair.call(3)
        assert not pair.runner.stats().eager_by_reason
        pair.backend.refuse_launches = True
        pair.call(3)
        assert pair.runner.stats().replay_failures == 1
        assert sum(pair.runner.stats().eager_by_reason.values()) == 1


def test_sample_step_has_what_goes_wrong_in_practice():
    """A table, a dependence across rows, and an eager piece between two captured ones."""
    step = SampleStep("cpu")
    assert len(step.pieces()) == 3
    mixed = step.mix(torch.ones(3, 4))
    assert mixed[:, 0].tolist() == [1.0, 2.0, 3.0]


# -- markers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in testing.__all__ if name.endswith("Tests")] + ["object"]
)
def test_tests_of_each_kit_are_marked_where_they_are_collected(name):
    """PolicyTests have the marker ``dispatchkit_policy``; other tests have none."""
    marks = []
    own = type("TestOwn", (getattr(testing, name, object),), {})
    pytest_plugin.pytest_itemcollected(SimpleNamespace(cls=own, add_marker=marks.append))
    words = re.sub("([A-Z])", r"_\1", name.removesuffix("Tests")).lower()
    assert marks == ([] if name == "object" else [f"dispatchkit{words}"])


def test_function_of_no_class_is_left_alone():
    pytest_plugin.pytest_itemcollected(SimpleNamespace(cls=None))
