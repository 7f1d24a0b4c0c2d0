"""Functions with Python state of every kind compute what plain calls compute.

Each form is called plainly and through ``graphed``, with the same inputs, and all results are
compared. These steps run eager, and their hidden runs must not change any state.
"""

from __future__ import annotations

import argparse
import collections
import configparser
import contextvars
import ctypes
import functools
import itertools
import os
import queue
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Any

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from dispatchkit import graphed  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

FORMS: dict[str, Callable[[], Any]] = {}
SETTINGS = types.ModuleType("settings_of_steps")


def form(make: Callable[[], Any]) -> Callable[[], Any]:
    FORMS[make.__name__] = make
    return make


class Counter:
    """Counts its calls, in ways that no code names."""

    def __init__(self) -> None:
        self.n = 0

    def step(self, x: Any) -> Any:
        self.n += 1
        return x * self.n

    def __getitem__(self, key: int) -> int:
        self.n += key
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.n += 1
        return iter((self.n,))

    def __enter__(self) -> int:
        self.n += 1
        return self.n

    def __exit__(self, *_: object) -> None:
        self.n += 1

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        self.n += 1
        return self.n

    def __add__(self, other: int) -> int:
        self.n += other
        return self.n


@form
def bound_method() -> Any:
    return Counter().step


@form
def bound_method_in_a_closure() -> Any:
    step = Counter().step
    return lambda x: step(x) + 1


@form
def bound_method_in_an_attribute() -> Any:
    holder = types.SimpleNamespace(step=Counter().step)
    return lambda x: holder.step(x) + 1


@form
def bound_method_in_a_partial() -> Any:
    step = functools.partial(Counter().step)
    return lambda x: step(x) + 1


@form
def dictionary_in_a_partial() -> Any:
    def counted(seen: dict[str, int], x: Any) -> Any:
        seen["n"] += 1
        return x * seen["n"]

    return functools.partial(counted, {"n": 0})


@form
def builtin_method() -> Any:
    items = [1]
    append = items.append

    def step(x: Any) -> Any:
        append(1)
        return x * len(items)

    return step


@form
def attribute_of_a_function() -> Any:
    def step(x: Any) -> Any:
        step.n += 1
        return x * step.n

    step.n = 0
    return step


@form
def attribute_of_a_module() -> Any:
    SETTINGS.n = 0

    def step(x: Any) -> Any:
        SETTINGS.n += 1
        return x * SETTINGS.n

    return step


@form
def imported_module() -> Any:
    SETTINGS.n = 0

    def step(x: Any) -> Any:
        import settings_of_steps

        settings_of_steps.n += 1
        return x * settings_of_steps.n

    return step


@form
def item_access() -> Any:
    counter = Counter()
    return lambda x: x * counter[1]


@form
def iteration() -> Any:
    counter = Counter()
    return lambda x: x * sum(counter)


@form
def context_manager() -> Any:
    counter = Counter()

    def step(x: Any) -> Any:
        with counter as n:
            return x * n

    return step


@form
def computed_attribute() -> Any:
    counter = Counter()
    return lambda x: x * counter.anything


@form
def operator() -> Any:
    counter = Counter()
    return lambda x: x * (counter + 2)


@form
def descriptor() -> Any:
    class Field:
        def __init__(self) -> None:
            self.values: Any = weakref.WeakKeyDictionary()

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return self.values.get(owner, 0)

        def __set__(self, owner: Any, value: Any) -> None:
            self.values[owner] = value

    class Holder:
        n = Field()

    holder = Holder()

    def step(x: Any) -> Any:
        holder.n += 1
        return x * holder.n

    return step


@form
def user_dictionary() -> Any:
    counts = collections.UserDict(n=0)

    def step(x: Any) -> Any:
        counts["n"] += 1
        return x * counts["n"]

    return step


@form
def keys_in_order() -> Any:
    recent = collections.OrderedDict(a=1, b=2, c=3)

    def step(x: Any) -> Any:
        recent.move_to_end(next(iter(recent)))
        return x * next(iter(recent.values()))

    return step


@form
def last_item() -> Any:
    items = {number: number for number in range(20)}
    return lambda x: x * items.popitem()[1]


@form
def work_queue() -> Any:
    work: Any = queue.Queue()
    for number in range(20):
        work.put(number)
    return lambda x: x * work.get()


@form
def context_variable() -> Any:
    current = contextvars.ContextVar("current", default=1)

    def step(x: Any) -> Any:
        current.set(current.get() + 1)
        return x * current.get()

    return step


@form
def value_of_a_thread() -> Any:
    local = threading.local()
    local.n = 0

    def step(x: Any) -> Any:
        local.n += 1
        return x * local.n

    return step


@form
def environment() -> Any:
    os.environ["COUNT_OF_A_STEP"] = "0"

    def step(x: Any) -> Any:
        os.environ["COUNT_OF_A_STEP"] += "0"
        return x * len(os.environ["COUNT_OF_A_STEP"])

    return step


@form
def number_of_c() -> Any:
    number = ctypes.c_int(0)

    def step(x: Any) -> Any:
        number.value += 1
        return x * number.value

    return step


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "count": lambda: itertools.count(1),
    "cycle": lambda: itertools.cycle((1, 2, 3)),
    "list": lambda: iter(list(range(40))),
    "map": lambda: map(abs, range(40)),
    "zip": lambda: (one for one, _ in zip(range(40), range(40), strict=True)),
    "generator": lambda: (number for number in range(40)),
    "islice": lambda: itertools.islice(itertools.count(), 40),
    "zip_longest": lambda: map(sum, itertools.zip_longest(range(40), (1, 2), fillvalue=0)),
    "accumulate": lambda: itertools.accumulate(range(40)),
    "chain": lambda: itertools.chain((1, 2), range(3, 40)),
    "combinations": lambda: map(sum, itertools.combinations(range(40), 2)),
    "compress": lambda: itertools.compress(range(80), itertools.cycle((0, 1))),
    "groupby": lambda: map(next, (group for _, group in itertools.groupby(range(40)))),
    "pairwise": lambda: map(sum, itertools.pairwise(range(40))),
    "product": lambda: map(sum, itertools.product(range(40), range(2))),
    "starmap": lambda: itertools.starmap(pow, ((one, 1) for one in range(40))),
    "takewhile": lambda: itertools.takewhile(bool, range(1, 40)),
    "reversed": lambda: reversed(range(40)),
    "filter": lambda: filter(None, range(40)),
    "flat": lambda: numpy.arange(1, 40).flat,
    "data": lambda: iter(torch.utils.data.DataLoader(torch.arange(1.0, 40.0))),
}


def _of_iterator(make: Callable[[], Iterator[Any]]) -> Callable[[], Any]:
    def made() -> Any:
        numbers = make()
        return lambda x: x * next(numbers)

    return made


FORMS |= {f"iterator: {name}": _of_iterator(make) for name, make in ITERATORS.items()}


@form
def property_of_another_function() -> Any:
    class Holder:
        n = 0

        def _next(self) -> int:
            self.n += 1
            return self.n

        value = property(_next)

    holder = Holder()
    return lambda x: x * holder.value


@form
def methods_of_functools() -> Any:
    class Holder:
        n = m = 0

        @functools.singledispatchmethod
        def step(self, x: Any) -> Any:
            return x

        @step.register(torch.Tensor)
        def _of_tensor(self, x: Any) -> Any:
            self.n += 1
            return self.half(x * self.n)

        def _add(self, number: int, x: Any) -> Any:
            self.m += number
            return x * self.m

        half = functools.partialmethod(_add, 2)

    return Holder().step


@form
def static_method_of_a_class() -> Any:
    class Counts:
        n = 0

        @staticmethod
        def step() -> int:
            Counts.n += 1
            return Counts.n

    return lambda x: x * Counts.step()


@form
def metaclass() -> Any:
    class Counted(type):
        n = 0

        def step(cls) -> int:
            Counted.n += 1
            return Counted.n

    class Counts(metaclass=Counted):
        pass

    return lambda x: x * Counts.step()


@form
def item_of_a_class() -> Any:
    class Counts:
        n = 0

        def __class_getitem__(cls, key: int) -> int:
            cls.n += key
            return cls.n

    return lambda x: x * Counts[1]


@form
def objects_made_in_the_step() -> Any:
    class Made:
        number = 0

        def __init__(self) -> None:
            Made.number += 1

    def step(x: Any) -> Any:
        Made()
        return x * Made.number

    return step


@form
def method_in_a_table() -> Any:
    class Holder:
        n = 0

        def _first(self, x: Any) -> Any:
            self.n += 1
            return x * self.n

        table = (_first,)

        def step(self, x: Any) -> Any:
            return self.table[0](self, x)

    return Holder().step


@form
def module_in_a_closure() -> Any:
    import random as numbers

    numbers.seed(0)
    return lambda x: x * numbers.random()


@form
def module_in_an_attribute() -> Any:
    class Holder:
        def __init__(self) -> None:
            self.settings = SETTINGS

        def step(self, x: Any) -> Any:
            self.settings.n += 1
            return x * self.settings.n

    SETTINGS.n = 0
    return Holder().step


@form
def numbers_of_a_schedule() -> Any:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step(x: Any) -> Any:
        optimizer.step()
        schedule.step()
        return x * optimizer.param_groups[0]["lr"]

    return step


@form
def objects_of_numpy() -> Any:
    numbers = numpy.array([0], dtype=object)

    def step(x: Any) -> Any:
        numbers[0] += 1
        return x * numbers[0]

    return step


@form
def bits_of_numpy() -> Any:
    bits = numpy.random.PCG64(0)
    return lambda x: x * (bits.random_raw() % 7)


@form
def numbers_of_numpy() -> Any:
    numbers = numpy.random.default_rng(0)
    return lambda x: x * float(numbers.random())


@form
def shared_numbers_of_numpy() -> Any:
    numpy.random.seed(0)
    return lambda x: x * float(numpy.random.rand())


@form
def numbers_of_python() -> Any:
    random.seed(0)
    return lambda x: x * random.random()


@form
def numbers_of_torch() -> Any:
    numbers = torch.Generator().manual_seed(0)
    return lambda x: x * torch.rand((), generator=numbers)


@form
def tensor_with_other_memory() -> Any:
    scale = torch.zeros(1)

    def step(x: Any) -> Any:
        scale.data = scale + 1
        return x * scale

    return step


@form
def tensor_set_to_other_memory() -> Any:
    scale = torch.zeros(1)

    def step(x: Any) -> Any:
        scale.set_(scale + 1)
        return x * scale

    return step


@form
def tensor_that_grows() -> Any:
    ones = torch.ones(1)

    def step(x: Any) -> Any:
        ones.resize_(ones.numel() + 1).fill_(1)
        return x * ones.sum()

    return step


@form
def weight_with_other_memory() -> Any:
    linear = torch.nn.Linear(2, 2)

    def step(x: Any) -> Any:
        linear.weight.data = linear.weight.data * 1.5
        return linear(x)

    return step


@form
def seed_of_the_step() -> Any:
    def step(x: Any) -> Any:
        torch.manual_seed(7)
        return x + torch.rand(2)

    return step


@form
def seed_in_a_fork() -> Any:
    def step(x: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return x + torch.rand(2)

    return step


@form
def generator_state_put_back() -> Any:
    def step(x: Any) -> Any:
        state = torch.get_rng_state()
        x = x + torch.rand(2)
        torch.set_rng_state(state)
        return x

    return step


@form
def own_generator_put_back() -> Any:
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()

    def step(x: Any) -> Any:
        generator.set_state(state)
        return x + torch.rand(2, generator=generator)

    return step


@form
def generator_of_each_call() -> Any:
    return lambda x: x + torch.rand(2, generator=torch.Generator().manual_seed(3))


@form
def default_factory_of_a_dictionary() -> Any:
    numbers = itertools.count()
    found: Any = collections.defaultdict(lambda: next(numbers))
    return lambda x: x * found[len(found)]


@form
def method_of_a_methodcaller() -> Any:
    class Bumped:
        n = 0

        def bump(self, by: int) -> int:
            self.n += by
            return self.n

    bumped, call = Bumped(), methodcaller("bump", by=2)
    return lambda x: x * call(bumped)


@pytest.mark.parametrize("name", FORMS)
def test_results_are_those_of_plain_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call, from the first one on."""
    monkeypatch.setenv("COUNT_OF_A_STEP", "0")
    monkeypatch.setitem(sys.modules, "settings_of_steps", SETTINGS)

    def results(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        step = wrap(FORMS[name]())
        inputs = [torch.arange(2.0 * rows).view(rows, 2) + 1 for rows in (3, 4, 3, 2, 3)]
        return [step(x).clone() for x in inputs]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = results(lambda step: step)
        through = results(lambda step: graphed(step, backend="tape"))
    torch.testing.assert_close(through, plain, rtol=0, atol=0)


def test_the_reason_names_the_iterator_and_the_next_step() -> None:
    """A user then knows which iterator to advance outside the step."""
    numbers = itertools.count()
    step = graphed(lambda x: x * next(numbers), backend="tape")
    with (
        torch.no_grad(),
        pytest.warns(EagerStepWarning, match="reads the iterator numbers .*pass it as an input"),
    ):
        step(torch.ones(3, 2))
    assert "python_state 1" in str(step.graphed.stats())


def test_the_reason_of_an_undeclared_generator_says_how_to_declare_it() -> None:
    """A declared generator is advanced by replays."""
    noise = torch.Generator()
    step = graphed(lambda x: x + torch.rand((), generator=noise), backend="tape")
    with (
        torch.no_grad(),
        pytest.warns(EagerStepWarning, match=r"StepState\(generators=\[\.\.\.\]\)"),
    ):
        step(torch.ones(3, 2))
    assert "python_state 1" in str(step.graphed.stats())


# -- values that other code changes after the capture -----------------------------------------


class ScaleOfOperators:
    """Values that are read by an operator and by a name in an object."""

    hidden = other = 1.0

    def __round__(self) -> float:
        return self.hidden


SCALE_OF_OPERATORS = ScaleOfOperators()


class Scale:
    """A value, and ways to read it that no code names."""

    factor = 1.0

    def __init__(self) -> None:
        self.value = 1.0

    def step(self, x: Any) -> Any:
        return x * self.value

    def scaled(self, x: Any) -> Any:
        return x * 2

    def __len__(self) -> int:
        return int(self.value)

    def __getitem__(self, key: str) -> float:
        return self.value

    @classmethod
    def by_class(cls, x: Any) -> Any:
        return x * cls.factor


SCALE = Scale()
FACTS: dict[str, Any] = {"value": 1.0}
CONFIG = configparser.ConfigParser()
CONFIG.read_string("[step]\nvalue=1")
VARIABLE = contextvars.ContextVar("value", default=1.0)
ARGUMENTS, NUMBER = argparse.Namespace(value=1.0), ctypes.c_double(1)
NORMAL = torch.distributions.Normal(torch.zeros(1), torch.ones(1))


def _with_attribute(x: Any) -> Any:
    return x * _with_attribute.value  # type: ignore[attr-defined]


_with_attribute.value = 1.0  # type: ignore[attr-defined]

LAYER, OTHER = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
SETTINGS.scale = 1.0


class Base:
    """Its attribute is read through a subclass."""

    inherited = 1.0


class Sub(Base):
    """Has no attribute of its own at first."""


class Made:
    """Reads an attribute of its class when it is created."""

    default = 1.0

    def __init__(self) -> None:
        self.value = self.default


SUB = Sub()


def _hook(value: float) -> None:
    LAYER._forward_hooks.clear()
    LAYER.register_forward_hook(lambda _module, _inputs, output: output * value)


#: A step, and a function that changes what it reads to a new value.
READS: dict[str, tuple[Callable[[Any], Any], Callable[[float], Any]]] = {
    "a bound method": (SCALE.step, lambda v: setattr(SCALE, "value", v)),
    "a class method": (Scale.by_class, lambda v: setattr(Scale, "factor", v)),
    "a partial": (
        functools.partial(lambda s, x: s.step(x), SCALE),
        lambda v: setattr(SCALE, "value", v),
    ),
    "an item": (lambda x: x * SCALE["any"], lambda v: setattr(SCALE, "value", v)),
    "a length": (lambda x: x * len(SCALE), lambda v: setattr(SCALE, "value", v)),
    "a cached function": (
        functools.partial(lambda f, x: f().step(x), functools.lru_cache(lambda: SCALE)),
        lambda v: setattr(SCALE, "value", v),
    ),
    "a replaced method": (
        lambda x: SCALE.scaled(x) + 1,
        lambda v: setattr(Scale, "scaled", lambda _, x: x * v),
    ),
    "an attribute of a function": (_with_attribute, lambda v: setattr(_with_attribute, "value", v)),
    "a read-only view": (
        functools.partial(lambda d, x: x * d["value"], types.MappingProxyType(FACTS)),
        lambda v: FACTS.update(value=v),
    ),
    "the values of a dictionary": (
        functools.partial(lambda d, x: x * sum(d), FACTS.values()),
        lambda v: FACTS.update(value=v),
    ),
    "arguments": (lambda x: x * ARGUMENTS.value, lambda v: setattr(ARGUMENTS, "value", v)),
    "a configuration file": (
        lambda x: x * CONFIG.getfloat("step", "value"),
        lambda v: CONFIG.set("step", "value", str(v)),
    ),
    "a new hook": (LAYER, _hook),
    "a replaced forward": (
        OTHER,
        lambda v: setattr(OTHER, "forward", lambda x: x * v),
    ),
    "an inherited attribute": (lambda x: x * SUB.inherited, lambda v: setattr(Sub, "inherited", v)),
    "the default of an object made in the step": (
        lambda x: x * Made().value,
        lambda v: setattr(Made, "default", v),
    ),
    "a module bound by a partial": (
        functools.partial(lambda m, x: x * getattr(m, "scale", 1.0), SETTINGS),
        lambda v: setattr(SETTINGS, "scale", v),
    ),
    "an option of an optimizer": (
        lambda x: x * OPTIMIZER.param_groups[0]["lr"],
        lambda v: OPTIMIZER.param_groups[0].update(lr=v),
    ),
    "a number that rounding returns": (
        lambda x: x * round(SCALE_OF_OPERATORS),  # type: ignore[call-overload]
        lambda v: setattr(SCALE_OF_OPERATORS, "hidden", v),
    ),
    "the name in an attrgetter": (
        functools.partial(lambda get, x: x * get(SCALE_OF_OPERATORS), attrgetter("other")),
        lambda v: setattr(SCALE_OF_OPERATORS, "other", v),
    ),
    "a context variable": (lambda x: x * VARIABLE.get(), VARIABLE.set),
    "a number of C": (lambda x: x * NUMBER.value, lambda v: setattr(NUMBER, "value", v)),
    "a tensor of a library object": (
        lambda x: x * NORMAL.scale,
        lambda v: setattr(NORMAL, "scale", torch.full((1,), v)),
    ),
}


@pytest.mark.parametrize("name", READS)
def test_what_other_code_changes_is_found_within_one_turn(name: str) -> None:
    """At most one turn of values and containers late, which is short for small functions."""
    step, change = READS[name]
    through, x = graphed(step, backend="tape"), torch.ones(3, 2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert torch.equal(through(x), step(x))
        assert through.graphed.stats().steps_by_mode["FULL"]
        for value in (5.0, 7.0):
            change(value)
            for _ in range(64):
                through(x)
            assert torch.equal(through(x), step(x))


def test_variables_that_the_step_does_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code sets environment variables at any time, and draws random numbers."""
    monkeypatch.setenv("COUNT_OF_A_STEP", "2")
    through = graphed(lambda x: x * len(os.environ["COUNT_OF_A_STEP"]), backend="tape")
    with torch.no_grad():
        for number in range(100):
            monkeypatch.setenv("OF_OTHER_CODE", str(number))
            through(torch.ones(3, 2))
    assert through.graphed.stats().steps_by_mode["FULL"] == 100


# -- steps without state, beside objects with state -----------------------------------------------

NUMBERS = itertools.count()


class Numbered:
    """Numbers its objects; only the constructor and ``loop`` advance iterators."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number, self.scale = next(Numbered.numbers), 2.0

    def step(self, x: Any) -> Any:
        return x * self.scale if isinstance(self, Numbered) else x

    def loop(self) -> None:
        next(NUMBERS)


def test_iterators_that_only_other_methods_advance_do_not_matter() -> None:
    """A constructor or a loop of the owner, which the step does not call, may advance them."""
    step = graphed(Numbered().step, backend="tape")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(step(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert step.graphed.stats().steps_by_mode["FULL"]
