"""``explain`` predicts the next step and changes nothing."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    CaptureOptions,
    GraphMemory,
    GraphRunner,
    Lanes,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.errors import DispatchkitError  # noqa: E402

HIT = "FULL tokens=4 reqs=4"
INPUT = {"x": StaticInput((None, 4), "float32")}

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.execute.EagerStepWarning")


class Scaled(torch.nn.Module):
    """A weight, a Python value, and modules in a dictionary that may grow."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.scale = 2.0
        self.offsets = {"first": 1.0}

    def forward(self, x):
        return x @ self.weight * self.scale + sum(self.offsets.values())


def runner_of(module, **settings):
    made = GraphRunner(module, INPUT, sizes=[2, 4], backend="tape", **settings)
    if not settings.get("lazy"):
        made.capture()
    return made


def next_step(runner, rows):
    """Return the next step's key, the reason why it ran eager, or its error."""
    before = runner.stats()
    try:
        runner(torch.randn(rows, 4))
    except DispatchkitError as error:
        return type(error).__name__
    after = runner.stats()
    new = [
        name
        for name, number in (after.hits | after.eager_by_reason).items()
        if number != before.hits.get(name, 0) + before.eager_by_reason.get(name, 0)
    ]
    assert len(new) == 1
    return str(new[0])


def predicted(runner, rows):
    found = runner.explain(rows)
    if found.error:
        assert f"-> raises {found.error}" in str(found)
        return found.error.partition(":")[0]
    assert [one.key for one in found.candidates if one.chosen] == [*found.decision.keys]
    return found.decision.graphs or found.decision.reason


def switched_to_training(runner, module, during):
    module.train(not module.training)


def moved(runner, module, during):
    module.double().float()
    module.weight.data = module.weight.data.clone()


def under_autocast(runner, module, during):
    during.enter_context(torch.autocast("cpu", torch.bfloat16))


def weight_assigned(runner, module, during):
    module.weight = torch.nn.Parameter(torch.randn(4, 4))


def value_changed(runner, module, during):
    module.scale = 3.0


def item_added(runner, module, during):
    module.offsets["second"] = 1.0


def graph_evicted(runner, module, during):
    runner.evict(next(key for key in runner.registry if key.num_tokens == 4))


CHANGES = {
    switched_to_training: "training_mode",
    under_autocast: "autocast",
    moved: "moved_module",
    weight_assigned: "weights_replaced",
    value_changed: "value_changed",
    item_added: "value_changed",
    graph_evicted: "evicted",
    lambda *_: None: HIT,
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.items())
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_step_does_what_was_predicted(change, expected, is_strict):
    module = Scaled()
    runner = runner_of(module, options=RunnerOptions(strict=is_strict))
    with ExitStack() as during:
        runner(torch.randn(3, 4))
        change(runner, module, during)
        stats = runner.stats()
        first, again = predicted(runner, 3), predicted(runner, 3)
        assert runner.stats() == stats
        if is_strict and not expected.startswith(HIT):
            expected = "NoGraphError"
        assert first == again == expected
        for _ in range(64):  # values are compared in turn
            found = next_step(runner, 3)
            if found == expected:
                break
        assert found == expected


def test_a_stale_graph_is_explained_by_what_was_replaced():
    module = Scaled()
    runner = runner_of(module)
    module.weight = torch.nn.Parameter(torch.randn(4, 4))
    assert next_step(runner, 3) == "weights_replaced"
    assert next_step(runner, 3) == "stale"
    because = runner.explain(3).because
    assert because.startswith("state: the graph for this batch is outdated: ")
    assert "weight" in because
    runner.invalidate("new adapters")
    assert predicted(runner, 3) == "stale"
    other = runner_of(Scaled())
    other.invalidate("new adapters")
    assert other.explain(3).because.endswith("invalidate() was called (new adapters)")


@pytest.mark.parametrize("is_limited", [False, True])
def test_batches_above_the_largest_size(is_limited):
    runner = runner_of(Scaled(), max_num_tokens=4 if is_limited else None)
    expected = "DescriptorError" if is_limited else "above_largest_size"
    assert predicted(runner, 5) == next_step(runner, 5) == expected


def test_a_lazy_runner_waits_captures_and_captures_anew():
    module = Scaled()
    options = RunnerOptions(capture=CaptureOptions(capture_after=2))
    runner = runner_of(module, lazy=True, options=options)
    assert predicted(runner, 3) == next_step(runner, 3) == "capture_pending"
    assert runner.explain(3).note == f"The step first captures {HIT}."
    assert predicted(runner, 3) == next_step(runner, 3) == HIT
    assert not runner.explain(3).note
    runner.invalidate()
    assert f"tries to capture {HIT}" in runner.explain(3).note
    assert next_step(runner, 3) == HIT
    runner.evict(next(iter(runner.controls._first.lifecycle.live())))
    runner.freeze()
    assert predicted(runner, 3) == next_step(runner, 3) == "evicted"


def test_an_error_of_the_batch_has_no_second_next_step(make_runner):
    found = make_runner(lambda tokens: tokens + 1, max_num_tokens=8).explain(9)
    assert "Raise max_num_tokens" in found.error
    assert found.note == ""


def test_memory_that_is_asleep():
    memory = GraphMemory(sleeps=True)
    runner = runner_of(Scaled(), lanes=Lanes(memory=memory))
    memory.sleep()
    assert predicted(runner, 3) == next_step(runner, 3) == "ReplayError"
    assert "the runner's GraphMemory is asleep: call memory.wake()" in str(runner)
    memory.wake()
    assert "asleep" not in str(runner)
    assert predicted(runner, 3) == next_step(runner, 3) == HIT


def test_a_step_inside_the_capture_of_another():
    runner, found = runner_of(Scaled()), []

    def outer():
        found.extend([predicted(runner, 3), next_step(runner, 3)])
        return torch.zeros(1)

    backend = runner.backend
    backend.capture(outer, stream=backend.new_stream(), pool=backend.new_pool())
    assert found == ["inside_capture"] * 2
