"""Python state reached by a step: changes by a run are detected, named and put back."""

from __future__ import annotations

import argparse
import array
import configparser
import contextvars
import copy
import ctypes
import functools
import io
import itertools
import os
import queue
import random
import threading
import types
import warnings
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dispatchkit import GraphRunner, StaticInput, graphed  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.execute.step.container_kinds import is_same  # noqa: E402
from dispatchkit.execute.step.python_state import PythonState  # noqa: E402
from dispatchkit.execute.step.records import restore  # noqa: E402
from dispatchkit.execute.step.walk import declare_bookkeeping  # noqa: E402

COUNT = 0
TABLE: dict[str, Any] = {"kept": 1}


@dataclass
class Plain:
    """A user's dataclass."""

    n: int = 0
    seen: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    """Its attributes are set by ``object.__setattr__``, as caches of frozen classes are."""

    n: int = 0


class Slotted:
    """Without ``__dict__``."""

    __slots__ = ("missing", "n")

    def __init__(self) -> None:
        self.n = 0


class Shared:
    """A counter stored on the class."""

    total = 0


def _bump_global() -> None:
    global COUNT
    COUNT += 1


def _bump_by_name() -> None:
    globals()["COUNT"] += 1


def _nonlocal() -> tuple[Callable[[], None], Callable[[], Any]]:
    n = 0

    def bump() -> None:
        nonlocal n
        n += 1

    return bump, lambda: n


def _table() -> None:
    TABLE["new"] = TABLE.get("new", 0) + 1


def _own_attribute() -> None:
    _own_attribute.n += 1  # type: ignore[attr-defined]


_own_attribute.n = 0  # type: ignore[attr-defined]


SETTINGS = types.ModuleType("settings_of_a_step")
SETTINGS.inner = types.ModuleType("settings_of_a_step.inner")  # type: ignore[attr-defined]
SETTINGS.inner.scale = 1


def _in_a_module() -> None:
    SETTINGS.inner.scale += 1


def _default(seen: list[int] = []) -> None:  # noqa: B006 - the case to test
    seen.append(1)


class Holder(torch.nn.Module):
    """Holds a value that each case changes differently."""

    def __init__(self, value: Any, change: Any = None) -> None:
        super().__init__()
        self.value, self.change = value, change
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(2))

    def forward(self) -> None:
        self.change(self)


def _set_value(holder: Holder) -> None:
    holder.value = holder.value + 1


# A change that a run makes to a holder, the value before it, and its name.
CASES: dict[str, tuple[Any, Callable[[Holder], Any], str]] = {
    "an attribute": (0, _set_value, "holder.value"),
    "a new attribute": (0, lambda one: setattr(one, "made", 1), "holder.made"),
    "a removed attribute": (0, lambda one: delattr(one, "value"), "holder.value"),
    "a tensor assigned": (torch.zeros(2), _set_value, "holder.value"),
    "a list": ([1], lambda one: one.value.append(2), "holder.value[1]"),
    "a list that shrinks": ([1, 2, 3], lambda one: one.value.clear(), "holder.value[0]"),
    "a list of lists": ([[0]], lambda one: one.value[0].append(1), "holder.value[0][1]"),
    "a tuple of lists": (([0],), lambda one: one.value[0].append(1), "holder.value[0][1]"),
    "a dictionary": ({}, lambda one: one.value.update(a=1), "holder.value['a']"),
    "a key removed": ({"a": 1}, lambda one: one.value.pop("a"), "holder.value['a']"),
    "a key renamed": (
        {"a": 1},
        lambda one: one.value.update(b=one.value.pop("a")),
        "holder.value['b']",
    ),
    "a default dictionary": (defaultdict(int), lambda one: one.value["a"], "holder.value['a']"),
    "an ordered dictionary": (
        OrderedDict(a=1),
        lambda one: one.value.update(a=2),
        "holder.value['a']",
    ),
    "a counter": (Counter(), lambda one: one.value.update("ab"), "holder.value['a']"),
    "a deque": (deque([1, 2], maxlen=2), lambda one: one.value.append(3), "holder.value[0]"),
    "a set": ({1}, lambda one: one.value.add(2), "holder.value"),
    "bytes": (bytearray(b"ab"), lambda one: one.value.extend(b"c"), "holder.value"),
    "an array": (array.array("i", [1]), lambda one: one.value.append(2), "holder.value"),
    "a dataclass": (Plain(), lambda one: setattr(one.value, "n", 1), "holder.value.n"),
    "its list": (Plain(), lambda one: one.value.seen.append(1), "holder.value.seen[0]"),
    "slots": (Slotted(), lambda one: setattr(one.value, "n", 1), "holder.value.n"),
    "a slot filled": (Slotted(), lambda one: setattr(one.value, "missing", 1), ".missing"),
    "a frozen dataclass": (
        Frozen(),
        lambda one: object.__setattr__(one.value, "n", 1),
        "holder.value.n",
    ),
    "a class": (Shared(), lambda one: setattr(Shared, "total", Shared.total + 1), "Shared.total"),
    "numpy memory": (
        pytest.importorskip("numpy").zeros(2),
        lambda one: one.value.__setitem__(0, 1),
        "holder.value",
    ),
    "an order of keys": (
        {"a": 1, "b": 2},
        lambda one: one.value.update(a=one.value.pop("a")),
        "holder.value['a']",
    ),
    "the order of an ordered dictionary": (
        OrderedDict(a=1, b=2),
        lambda one: one.value.move_to_end("a"),
        "holder.value['a']",
    ),
    "a user dictionary": (
        UserDict(a=1),
        lambda one: one.value.update(a=2),
        "holder.value.data['a']",
    ),
    "a user list": (UserList([1]), lambda one: one.value.append(2), "holder.value.data[1]"),
    "a chain of dictionaries": (
        ChainMap({"a": 1}, {}),
        lambda one: one.value.update(a=2),
        "holder.value.maps[0]['a']",
    ),
    "a queue": (queue.Queue(), lambda one: one.value.put(1), "holder.value.queue[0]"),
    "a configuration file": (
        configparser.ConfigParser(),
        lambda one: one.value.read_string("[a]"),
        "holder.value._sections['a']",
    ),
    "weak values": (
        weakref.WeakValueDictionary(),
        lambda one: one.value.update(a=one.inner),
        "holder.value.data['a']",
    ),
    "a namespace of arguments": (
        argparse.Namespace(value=1),
        lambda one: setattr(one.value, "value", 2),
        "holder.value.value",
    ),
    "a value of a thread": (
        threading.local(),
        lambda one: setattr(one.value, "value", 2),
        "holder.value.value",
    ),
    "a context variable": (
        contextvars.ContextVar("value", default=1),
        lambda one: one.value.set(2),
        "holder.value",
    ),
    "text in memory": (io.StringIO("ab"), lambda one: one.value.read(1), "holder.value"),
    "bytes in memory": (io.BytesIO(b"ab"), lambda one: one.value.write(b"c"), "holder.value"),
    "a number of C": (
        ctypes.c_int(1),
        lambda one: setattr(one.value, "value", 2),
        "holder.value",
    ),
    "a view of memory": (
        memoryview(bytearray(b"ab")),
        lambda one: one.value.__setitem__(0, 1),
        "holder.value",
    ),
    "the environment": (
        os.environ,
        lambda one: one.value.update(COUNT_OF_A_STEP="1"),
        "holder.value['COUNT_OF_A_STEP']",
    ),
    "random numbers of numpy": (
        pytest.importorskip("numpy").random.default_rng(1),
        lambda one: one.value.random(),
        "holder.value",
    ),
    "older random numbers of numpy": (
        pytest.importorskip("numpy").random.RandomState(1),
        lambda one: one.value.rand(),
        "holder.value",
    ),
    "random numbers of torch": (
        torch.Generator().manual_seed(1),
        lambda one: torch.rand(1, generator=one.value),
        "holder.value",
    ),
    "the memory of a tensor": (
        torch.zeros(2),
        lambda one: setattr(one.value, "data", torch.ones(2)),
        "holder.value.data",
    ),
    "the memory of a tensor, set": (
        torch.zeros(2),
        lambda one: one.value.set_(torch.ones(2)),
        "holder.value.data",
    ),
    "the size of a tensor": (
        torch.zeros(2),
        lambda one: one.value.resize_(1),
        "holder.value.data",
    ),
    "the memory of a weight": (
        0,
        lambda one: setattr(one.inner.weight, "data", torch.ones(2, 2)),
        "holder.inner.weight.data",
    ),
    "random numbers of Python": (random.Random(1), lambda one: one.value.random(), "holder.value"),
    "a buffer": (0, lambda one: setattr(one, "kept", torch.ones(2)), "holder.kept"),
    "a buffer past setattr": (
        0,
        lambda one: one._buffers.update(kept=torch.ones(2)),
        "holder.kept",
    ),
    "a weight": (
        0,
        lambda one: setattr(one.inner, "weight", torch.nn.Parameter(torch.ones(2, 2))),
        "holder.inner.weight",
    ),
    "a submodule": (0, lambda one: setattr(one, "inner", torch.nn.ReLU()), "holder.inner"),
    "a gradient": (
        0,
        lambda one: setattr(one.inner.bias, "grad", torch.ones(2)),
        "holder.inner.bias.grad",
    ),
    "a mode": (0, lambda one: one.inner.eval(), "holder.inner.training"),
    "a hook": (
        0,
        lambda one: one.inner.register_forward_hook(lambda *_: None),
        "holder.inner._forward_hooks",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_changes_is_found_and_put_back(case: str) -> None:
    """Each kind of container is compared, named, and restored entry by entry."""
    value, change, path = CASES[case]
    holder = Holder(value, change)
    before = PythonState({"holder": holder})
    assert before.changes() == ()
    with before.data_held():
        holder()
        found = before.changes()
        assert any(entry.path.endswith(path) for entry in found), [str(one) for one in found]
        assert all(entry.can_restore for entry in found)
        restore(found)
    assert before.changes() == ()


@pytest.mark.parametrize(
    ("fn", "path"),
    [
        (_bump_global, "COUNT"),
        (_bump_by_name, "COUNT"),
        (_nonlocal()[0], "n"),
        (_table, "TABLE['new']"),
        (_default, "a default argument of _default[0]"),
        (functools.partial(_default, []), "step[0]"),
        (_own_attribute, "_own_attribute.n"),
        (_in_a_module, "settings_of_a_step.inner.scale"),
        (Plain().seen.append, None),
    ],
    ids=[
        *(
            "global",
            "name of a global",
            "nonlocal",
            "global dictionary",
            "default",
            "partial",
            "its own attribute",
        ),
        *("a module", "builtin"),
    ],
)
def test_what_a_function_refers_to_is_reached(fn: Any, path: str | None) -> None:
    """State outside modules is found through the function that uses it."""
    before = PythonState({"step": fn})
    fn(*([1] if path is None else []))
    found = before.changes()
    assert [entry.path for entry in found] == [path or "step[0]"]
    restore(found)
    assert before.changes() == ()


def test_a_method_a_helper_and_a_decorated_function_are_followed() -> None:
    model = Plain()

    def helper() -> None:
        model.n += 1

    @functools.wraps(helper)
    def step() -> None:
        helper()

    class Engine:
        def __init__(self) -> None:
            self.model = model

        def run(self) -> None:
            step()

    for name, fn in (("step", step), ("run", Engine().run)):
        before = PythonState({name: fn})
        fn()
        assert {entry.path.rpartition(".")[2] for entry in before.changes()} == {"n"}
        restore(before.changes())
        assert model.n == 0


def test_an_iterator_that_moved_is_named_and_cannot_be_put_back() -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)

    iterators = (
        itertools.count(),
        itertools.repeat(1, 5),
        itertools.cycle([1, 2]),
        itertools.chain([1], [2, 3]),
        itertools.islice(iter([1, 2, 3]), 2),
        itertools.accumulate(itertools.repeat(1)),
        iter([1, 2, 3]),
        numbers(),
        iter(range(4)),
    )
    for iterator in iterators:
        holder = Holder(iterator, lambda one: next(one.value))
        before = PythonState({"holder": holder})
        holder()
        (entry,) = before.changes()
        assert entry.path == "holder.value"
        assert not entry.can_restore


def test_attributes_of_script_modules_are_seen_and_put_back() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = torch.zeros(2)
            self.n = 0

        def forward(self, x):  # no annotations, because scripting cannot resolve strings
            self.h = self.h + x
            self.n += 1
            return self.h

    with pytest.warns(DeprecationWarning, match="script"):
        script = torch.jit.script(Recurrent().eval())
    before = PythonState({"model": script})
    assert before.changes() == ()
    script(torch.ones(2))
    assert {entry.path for entry in before.changes()} == {"model.h", "model.n"}
    restore(before.changes())
    assert before.changes() == ()
    assert script(torch.ones(2)).tolist() == [1, 1]


def test_a_change_names_class_file_and_line() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return x

    model = Model()
    before = PythonState({"model": model})
    model(1)
    (entry,) = before.changes()
    line = Model.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in str(entry)
    assert "Model" in str(entry)
    assert "model.calls" in str(entry)


def test_equal_plain_values_are_unchanged_and_other_objects_are_not() -> None:
    assert is_same(1000, int("1000"))
    assert is_same(float("nan"), float("nan"))
    assert not is_same(0.0, -0.0)
    assert not is_same(1, True)
    assert not is_same(torch.zeros(1), torch.zeros(1))
    assert not is_same([1], [1])


def test_what_only_another_thread_of_the_owner_changes_is_left_alone() -> None:
    """State that no code of the step names is neither compared nor put back."""

    class Engine:
        def __init__(self) -> None:
            self.queue: list[int] = []
            self.weight, self.num_steps = torch.ones(2), 0

        def step(self, x: Any) -> Any:
            return x * self.weight

        def loop(self) -> None:
            self.queue.append(1)
            self.num_steps += 1

    engine = Engine()
    before = PythonState({"step": engine.step})
    engine.loop()
    assert before.changes() == ()
    engine.weight = torch.zeros(2)
    assert [one.path for one in before.changes()] == ["step.weight"]


def test_a_method_s_owner_may_go_on_in_its_own_call() -> None:
    class Server:
        def __init__(self) -> None:
            self.weight, self.tokens = torch.ones(2), torch.zeros(2)

        def step(self, x: Any) -> Any:
            return x * self.weight

        def __call__(self) -> None:
            self.tokens = self.step(self.tokens)

    server = Server()
    before = PythonState({"step": server.step})
    server()
    assert before.changes() == ()
    called = PythonState({"step": server})
    server()
    assert [one.path for one in called.changes()] == ["step.tokens"]


def test_attributes_by_made_up_names_are_seen() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h0 = 0

        def forward(self) -> None:
            setattr(self, f"h{0}", 1)

    model = Model()
    before = PythonState({"model": model})
    model()
    assert [one.path for one in before.changes()] == ["model.h0"]


class Owner:
    """An engine whose class references the package as well as the step."""

    def step(self, x: Any) -> Any:
        return x + 1

    def serve(self) -> GraphRunner:
        return GraphRunner(self.step, {"x": StaticInput((None,), "float32")}, sizes=[2])


def test_the_package_that_makes_the_runners_is_not_entered() -> None:
    """Captures compare everything reachable, which would mostly be the package."""
    state = PythonState({"step": Owner().step})
    assert {one.holder for one in state._records if isinstance(one.holder, type)} == {Owner}
    assert len(state._records) < 20


@pytest.mark.slow
def test_libraries_are_not_entered() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    model = transformers.BertModel(config).eval()
    state = PythonState({"model": model})
    assert 20 < sum(1 for _ in state.values_read()) < 2000
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.int64))
    assert state.changes() == ()


# -- random mutations of nested containers --------------------------------------------------

_leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.floats())
_nests = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.lists(inner, max_size=3).map(deque),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=20,
)


def _mutate(value: Any, data: st.DataObject) -> None:
    """Change nested containers at random places, several times."""
    if isinstance(value, dict):
        key = data.draw(st.text(max_size=2))
        if value and data.draw(st.booleans()):
            value.pop(next(iter(value)))
        value[key] = data.draw(_nests)
    elif isinstance(value, (list, deque)):
        what = data.draw(st.sampled_from(["append", "clear", "reverse", "pop"]))
        if what == "append":
            value.append(data.draw(_nests))
        elif what != "pop" or value:
            getattr(value, what)()
    inner = list(value.values() if isinstance(value, dict) else value)
    for one in inner:
        if isinstance(one, (list, dict, deque, tuple)):
            _mutate(one, data)


def _copied(value: Any) -> Any:
    """Return a copy of nested containers with exact floats."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, (list, deque, tuple)):
        return type(value).__name__, [_copied(one) for one in value]
    return value.hex() if isinstance(value, float) else value


@given(st.lists(_nests, min_size=1, max_size=4), st.data())
def test_any_mutation_of_nested_containers_is_put_back(
    nest: list[Any], data: st.DataObject
) -> None:
    before = PythonState({"nest": nest})
    then = _copied(nest)
    _mutate(nest, data)
    changed = before.changes()
    assert changed or _copied(nest) == then
    restore(changed)
    assert _copied(nest) == then
    assert before.changes() == ()


def _move_last(source: Any, target: Any) -> None:
    target.insert(0, source.pop())


def _move_to_dictionary(target: dict[str, Any], source: list[Any]) -> None:
    target["b"] = source[1]
    source.clear()


@pytest.mark.parametrize(
    ("first", "second", "move"),
    [
        pytest.param([1, 2], [3], _move_last, id="to the next list"),
        pytest.param([1, 2], deque([3]), _move_last, id="to the next deque"),
        pytest.param([None], [], _move_last, id="to an empty list"),
        pytest.param([1], [1, 1], lambda one, other: one.append(other.pop()), id="equal items"),
        pytest.param({"a": "b"}, ["b", 1], _move_to_dictionary, id="to a dictionary"),
    ],
)
def test_an_item_moved_between_containers_is_a_change(
    first: Any, second: Any, move: Callable[[Any, Any], Any]
) -> None:
    """The containers together keep the same items in the same order, as when a request moves from a
    queue to a batch.
    """
    nest = [first, second]
    before, then = PythonState({"nest": nest}), _copied(nest)
    move(first, second)
    assert not before.is_current()
    restore(before.changes())
    assert _copied(nest) == then


def test_notes_of_a_declared_class_are_no_state_of_the_step() -> None:
    """A piece that records its place of failure must keep it when a failed run is undone."""

    @declare_bookkeeping
    class Piece:
        def __init__(self) -> None:
            self.failed_at = ""

    class Derived(Piece):
        pass

    pieces = [Piece(), Derived(), Plain()]
    state = PythonState({"step": functools.partial(len, pieces)})
    for piece in pieces[:2]:
        piece.failed_at = "here"
    pieces[2].n = 1
    assert [entry.key for entry in state.changes()] == ["n"]


def test_what_bookkeeping_wraps_is_part_of_the_step() -> None:
    @declare_bookkeeping
    class Compiled:
        def __init__(self, model: Any) -> None:
            self.__wrapped__, self.calls = model, 0

        def __call__(self) -> None:
            self.calls += 1
            self.__wrapped__()

    plain = Plain()
    compiled = Compiled(lambda: setattr(plain, "n", plain.n + 1))
    for step in (compiled, functools.partial(compiled)):
        state = PythonState({"step": step})
        step()
        assert [entry.key for entry in state.changes()] == ["n"]


def test_hooks_that_a_first_call_installs_are_installed_by_the_callers_own():
    """Libraries that record hidden states do so; a warmup's hooks are removed individually."""

    class Recording(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.is_installed = False

        def forward(self, x):
            if not self.is_installed:
                self.is_installed = True
                self.inner.register_forward_hook(lambda module, args, out: out + 1)
            return self.inner(x)

    module = Recording().eval()
    plain = copy.deepcopy(module)
    run = graphed(module, backend="tape")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        for rows in (3, 4, 3):
            x = torch.randn(rows, 2)
            torch.testing.assert_close(run(x), plain(x))
    assert len(module.inner._forward_hooks) == 1
    assert run.graphed.stats().steps_by_mode["FULL"] >= 1


class _Making(OrderedDict):  # type: ignore[type-arg]
    """A table as in libraries: each read creates a new object or raises."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read by the class's own way")


class _Counting(list):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read by the class's own way")


_MADE = _Making(relu=lambda: 1 / 0)
_COUNTED = _Counting([1, 2])


def test_containers_are_read_past_what_their_classes_make_of_it() -> None:
    """No method of theirs runs, so a capture neither fails nor gets new objects each time."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if _MADE and _COUNTED else x

    runner = GraphRunner(
        step, {"x": StaticInput((None, 2), "float32")}, sizes=[2], mode="FULL", backend="tape"
    )
    assert runner.capture().num_graphs == 1
    before = PythonState({"step": step})
    _MADE["gelu"] = int
    _COUNTED.append(3)
    assert {entry.path for entry in before.changes()} == {"_MADE['gelu']", "_COUNTED[2]"}
    restore(before.changes())
    assert before.changes() == ()
