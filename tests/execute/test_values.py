"""Values baked into graphs: replacements are detected within a stated number of replays."""

from __future__ import annotations

import copy
import itertools
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import parametrize  # noqa: E402

from dispatchkit import GraphRunner, StaticInput  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.step.python_state import PythonState  # noqa: E402
from dispatchkit.execute.step.values import (  # noqa: E402
    CONTAINERS_AT_ONCE,
    VALUES_AT_ONCE,
    ValueWatch,
)


class Adapter(torch.nn.Module):
    """A small LoRA: Python reads a scale and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2))
        self.scale, self.enabled, self.config = 0.5, True, {"gain": 2.0}
        self.num_served = 0

    def forward(self, x: Any) -> Any:
        y = self.base(x) * self.mask * self.config["gain"]
        return y * self.scale if self.enabled else y

    def serve(self, x: Any) -> Any:
        self.num_served += 1
        return self(x)


def _watch(model: torch.nn.Module) -> ValueWatch:
    return ValueWatch(PythonState({"model": model}))


def _compare(watch: ValueWatch, times: int) -> bool:
    """Return whether a number of comparisons, each when due, detects nothing."""
    return all(watch.is_unchanged(watch.due) for _ in range(times))


def _assign(model: Adapter) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


AT_ONCE: dict[str, Callable[[Adapter], Any]] = {
    "load_state_dict(assign=True)": _assign,
    "a parameter by setattr": lambda one: setattr(
        one.base, "bias", torch.nn.Parameter(torch.ones(2))
    ),
    "a buffer by setattr": lambda one: setattr(one, "mask", torch.zeros(2)),
    "a submodule": lambda one: setattr(one, "base", torch.nn.Linear(2, 2)),
    "a parametrization": lambda one: parametrize.register_parametrization(
        one.base, "weight", torch.nn.Identity()
    ),
}
IN_TURN: dict[str, Callable[[Adapter], Any]] = {
    ".data": lambda one: setattr(one.base.weight, "data", torch.ones(2, 2)),
    "_parameters": lambda one: one.base._parameters.update(
        weight=torch.nn.Parameter(torch.ones(2, 2))
    ),
    "swap_tensors": lambda one: torch.utils.swap_tensors(
        one.base.weight, torch.nn.Parameter(torch.ones(2, 2))
    ),
    "a parameter set to None": lambda one: setattr(one.base, "bias", None),
    "another type": lambda one: one.double(),
    "a scale": lambda one: setattr(one, "scale", 0.25),
    "a switch": lambda one: setattr(one, "enabled", False),
    "an entry of a dictionary": lambda one: one.config.update(gain=3.0),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_an_assignment_is_found_before_the_next_replay(case: str) -> None:
    """torch reports the assignment, and the next replay compares everything."""
    model = Adapter()
    watch = _watch(model)
    assert _compare(watch, 3 * watch.num_values)
    tick = watch.due - 1
    AT_ONCE[case](model)
    assert watch.due <= tick
    assert not watch.is_unchanged(tick)
    assert watch.changes()


@pytest.mark.parametrize("case", IN_TURN)
def test_anything_else_is_found_within_one_turn(case: str) -> None:
    """This holds for any position of the turn at the change."""
    for begun in range(3):
        model = Adapter()
        watch = _watch(model)
        assert _compare(watch, begun)
        IN_TURN[case](model)
        turn = -(-watch.num_values // VALUES_AT_ONCE)
        assert not _compare(watch, turn)
        assert watch.changes()


class Growing(torch.nn.Module):
    """Reads containers that may get further items."""

    is_loud = False

    def __init__(self) -> None:
        super().__init__()
        self.gains, self.names = {"one": 2.0}, ["one"]
        self.recent: deque[float] = deque()
        self.config = types.SimpleNamespace(scale=1.0)
        self.log: list[float] = []

    def forward(self, x: Any) -> Any:
        for name in self.names:
            x = x * self.gains.get(name, 1.0)
        x = x * getattr(self.config, "further", 1.0) + sum(self.recent)
        return x * 10 if self.is_loud else x

    def serve(self, x: Any) -> Any:
        self.log.append(1.0)
        return self(x)


ADDED: dict[str, Callable[[Growing], Any]] = {
    "an item of a list": lambda one: one.names.append("one"),
    "a key": lambda one: one.gains.update(two=3.0),
    "an item of a deque": lambda one: one.recent.append(1.0),
    "an attribute of an object": lambda one: setattr(one.config, "further", 2.0),
    "an attribute over a default of the class": lambda one: setattr(one, "is_loud", True),
}


@pytest.mark.parametrize("case", ADDED)
def test_what_is_added_after_a_capture_is_found_within_one_turn(case: str) -> None:
    """A list, a dictionary or an object may get new items."""
    model = Growing()
    watch = _watch(model)
    assert _compare(watch, 2 * watch.num_values)
    ADDED[case](model)
    assert not _compare(watch, -(-watch.num_containers // CONTAINERS_AT_ONCE))
    assert _compare(watch, 2 * watch.num_values)  # reported once, because a new capture contains it


def test_what_is_added_to_a_module_is_returned_once() -> None:
    """New attributes and new hooks are both found through the same module."""
    model = Growing()
    watch = _watch(model)
    model.is_loud = True
    model.register_forward_hook(lambda *_: None)
    for found in (watch.differences(), watch.changes()):
        assert sorted(entry.key for entry in found) == ["_forward_hooks", "is_loud"]


def test_what_is_added_and_not_read_changes_nothing() -> None:
    """Values that no code names, or only code outside the step, have no effect."""
    model = Growing()
    watch = _watch(model)
    model.serve(torch.ones(2))
    model.unheard_of = 1
    assert _compare(watch, 2 * watch.num_values)


def test_what_modules_hold_does_not_wait_for_tables_of_their_classes() -> None:
    """Both have their own turns, because a library's code names thousands of values."""

    def make() -> tuple[torch.nn.Module, dict[str, Any]]:
        by_name, table = {"one": [1.0], "two": [2.0]}, {n: [0.0] for n in range(500)}

        class Layer(torch.nn.Module):
            families: ClassVar[dict[int, list[float]]] = {n: [1.0] for n in range(500)}

            def __init__(self) -> None:
                super().__init__()
                self.active, self.gains = "one", by_name

            def forward(self, x: Any) -> Any:
                return x * self.gains[self.active][0] * self.families[7][0] + table[7][0]

        model = torch.nn.Sequential(*(Layer() for _ in range(4)))
        return model, {"model": model, "gains": by_name, "class": Layer.families, "table": table}

    changes: dict[str, Callable[[Any], Any]] = {
        "a switch": lambda one: setattr(one["model"][3], "active", "two"),
        "a table that an object holds": lambda one: one["gains"]["two"].clear(),
        "of a class": lambda one: one["class"].update({7: [0.0]}),
        "of a class, an item": lambda one: one["class"][8].clear(),
        "of a class, in its code": lambda one: one["table"][9].clear(),
    }
    for name, change in changes.items():
        model, parts = make()
        watch = _watch(model)
        assert watch.num_values < 200 < 1000 < watch.num_class_values
        num = watch.num_class_values if name.startswith("of a class") else watch.num_values
        assert _compare(watch, 5), name
        change(parts)
        assert not _compare(watch, -(-num // VALUES_AT_ONCE)), name
        assert len(watch.changes()) == 1, name


def test_only_watches_that_hold_the_module_are_marked() -> None:
    one, other = Adapter(), Adapter()
    watches = _watch(one), _watch(other)
    AT_ONCE["a buffer by setattr"](one)
    assert not _compare(watches[0], 1)
    assert _compare(watches[1], watches[1].num_values)


def test_what_no_code_of_the_step_reads_may_change() -> None:
    model = Adapter()
    watch = _watch(model)
    model.num_served += 1
    model.unused = 3
    assert _compare(watch, 2 * watch.num_values)
    assert watch.changes() == ()


def test_an_equal_number_is_no_change() -> None:
    model = Adapter()
    watch = _watch(model)
    model.scale = float("0.5")
    assert _compare(watch, 2 * watch.num_values)


def test_what_the_step_changes_itself_is_compared_at_every_replay() -> None:
    """The caller may reset a flag that a first call sets."""
    model = Adapter()
    state = PythonState({"model": model})
    always = [one for one in state.values_read() if one.path == "model.enabled"]
    watch = ValueWatch(state, always)
    for tick in range(3):
        assert watch.due <= tick
        assert watch.is_unchanged(tick)
    model.enabled = False
    assert not watch.is_unchanged(3)
    assert [one.path for one in watch.changes()] == ["model.enabled", "model.enabled"]


@pytest.mark.parametrize("begun", [0, 5, VALUES_AT_ONCE])
def test_a_changed_number_is_found_within_the_stated_number_of_replays(begun: int) -> None:
    """This holds for any graphs replayed meanwhile; from then on results are eager's."""
    model = Adapter().eval()
    runner = GraphRunner(
        model, {"x": StaticInput((None, 2), "float32")}, sizes=[1, 2], mode="FULL", backend="tape"
    )
    with torch.no_grad():
        runner.capture()
        batches = itertools.cycle([torch.ones(1, 2), torch.ones(2, 2)])
        for _ in range(begun):
            runner(next(batches))
        model.scale = 4.0
        captured, _ = (entry.graph for entry in runner.registry.entries.values())
        bound = captured.values.num_values + VALUES_AT_ONCE
        with pytest.warns(EagerStepWarning) as caught:
            _ = [runner(next(batches)) for _ in range(bound)]
        assert "Replaced since the capture: Adapter.scale" in str(caught[0].message)
        x = torch.ones(2, 2)
        torch.testing.assert_close(runner(x), model(x))
    assert runner.stats().eager_by_reason["value_changed"] == 1


def test_gradients_are_watched_where_the_step_reads_them() -> None:
    """A graph of a step that names no gradient contains none."""

    def step(x: Any) -> Any:
        return x * weight.grad

    weight = torch.nn.Parameter(torch.ones(2))
    model = Adapter()
    watches = _watch(model), ValueWatch(PythonState({"step": step}))
    for one in (weight, *model.parameters()):
        one.grad = torch.ones_like(one)
    assert [_compare(one, one.num_values) for one in watches] == [True, False]
    assert [entry.path for entry in watches[1].changes()] == ["weight.grad"]


def test_values_of_every_kind_of_container_are_watched() -> None:
    """Includes items and values that are read otherwise."""

    class Slots:
        __slots__ = ("scale",)

    class Held(dict):  # type: ignore[type-arg]
        """Reading an item of it may run code."""

        def __getitem__(self, key: Any) -> Any:
            raise AssertionError(key)

    def make() -> tuple[dict[str, Any], Callable[..., Any]]:
        slots, factor = Slots(), 2.0
        slots.scale = 1.0
        at = {
            "list": [1.0],
            "held": Held(gain=1.0),
            "set": {1.0},
            "tuple": (torch.ones(1),),
            "slots": slots,
        }

        def step(x: Any) -> Any:
            return x * at["list"][0] * at["held"]["gain"] * factor * slots.scale

        def set_factor() -> None:
            nonlocal factor
            factor = 3.0

        return {**at, "cell": set_factor}, step

    changes: dict[str, Callable[[Any], Any]] = {
        "list": lambda one: one.clear(),
        "held": lambda one: one.update(gain=2.0),
        "set": lambda one: one.add(2.0),
        "tuple": lambda one: setattr(one[0], "data", torch.zeros(1)),
        "slots": lambda one: delattr(one, "scale"),
        "cell": lambda one: one(),
    }
    for name, change in changes.items():
        at, step = make()
        watch = ValueWatch(PythonState({"step": step}))
        turn = -(-watch.num_values // VALUES_AT_ONCE)
        assert _compare(watch, 2 * turn), name
        change(at[name])
        assert not _compare(watch, turn), name
        assert len(watch.changes()) == 1, name


def test_hooks_of_torch_leave_compiled_modules_alone() -> None:
    model = Adapter()
    _watch(model)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("h", torch.zeros(2))

        def forward(self, x: Any) -> Any:
            self.h = self.h + x
            return self.h

    compiled = torch.compile(Outer(), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert compiled(torch.ones(2)).tolist() == [1, 1]
        assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_a_watch_keeps_no_module_alive_and_goes_with_its_owner() -> None:
    import gc
    import weakref

    gc.disable()
    try:
        model = Adapter()
        watch = _watch(model)
        gone = weakref.ref(watch)
        del watch
        assert gone() is None
    finally:
        gc.enable()
