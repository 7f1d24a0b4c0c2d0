"""Record, compare and restore the Python state that a step reaches.

A graph replays kernels but no Python. A step that assigns an attribute, increments a counter,
appends to a list or rebinds a global may therefore compute other results in a replay than in an
eager run. A warmup on dummy rows would also change this state. Before a run, ``PythonState``
records every container that the step reaches. ``changes`` returns the changed entries that the
step's code refers to, and ``records.restore`` restores them.

A walk through the objects of the step finds the containers. It starts at the modules of the step,
the object that a method is bound to, closure cells, default arguments, and arguments bound by
``partial``. It also starts at what the code names: globals, and attributes of Python modules. From
each object, it follows attributes, ``__slots__``, items of containers, attributes of script
modules, and names in the methods of user-defined classes. It does not enter code of the standard
library, torch, numpy or attrs. Of objects from these libraries, it records containers, buffers,
random generators, and public attributes with plain values or tensors. It does not record the state
of opaque objects, such as locks and ``queue.SimpleQueue``, or state in files and other processes.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from dispatchkit.execute.step.code_names import (
    constructors,
    functions_of,
    methods_of,
    names_called,
    names_in,
    names_of_getter,
)
from dispatchkit.execute.step.container_kinds import (
    DATA,
    ENVIRONMENT,
    GRADIENT,
    ITERATOR,
    MISSING,
    NUMPY_BITS,
    NUMPY_GENERATOR,
    NUMPY_RANDOM,
    RANDOM,
    TORCH_GENERATOR,
    TUPLE,
    Globals,
    is_plain,
    place_of,
)
from dispatchkit.execute.step.origins import is_installed, is_library
from dispatchkit.execute.step.records import NAMED, Container, Entry, Node, Record, is_named
from dispatchkit.execute.step.walk import FUNCTIONS, ModulesNamed, parts_of

#: Maximum number of recorded containers. The walk is breadth-first and visits objects before
#: classes, so containers near the step are recorded first.
MAX_CONTAINERS: Final = 50_000

#: Methods that operators and statements call without naming them.
_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        "getattr getattribute getitem missing contains iter next len bool enter exit get set "
        "index int float hash eq ne lt le gt ge neg pos abs invert add sub mul matmul truediv "
        "floordiv mod pow radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow iadd isub imul "
        "imatmul itruediv and or xor lshift rshift torch_function array class_getitem setitem "
        "delitem reversed round floor ceil trunc complex divmod rdivmod rand ror rxor rlshift "
        "rrshift iand ior ixor ilshift irshift ipow imod ifloordiv copy deepcopy await aiter "
        "anext aenter aexit instancecheck subclasscheck"
    ).split()
)
#: Methods that run when an object is called.
_CALLS = frozenset({"forward", "__call__"})
#: Attributes that torch reads when a module is called, so the module's class need not name them.
_ALWAYS_READ = frozenset({"training"}) | {
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, OrderedDict)
}
#: Code that contains one of these names may access any attribute by a computed name.
_DYNAMIC = frozenset({"setattr", "__setattr__", "__dict__", "vars"})
#: Kinds whose entries may change between steps without affecting graphs: steps advance iterators
#: and random generators, and other code sets environment variables that the step does not read.
_UNWATCHED = (
    ITERATOR,
    RANDOM,
    NUMPY_BITS,
    NUMPY_GENERATOR,
    NUMPY_RANDOM,
    TORCH_GENERATOR,
    ENVIRONMENT,
)


class PythonState:
    """The Python values that a step reaches, recorded when this object is created.

    Args:
        roots: Callables and objects where the walk starts, by their names in reports.
        is_excluded: Function that returns whether the walk skips an object; None means never.

    Attributes:
        modules: Modules that the step reaches.
        tensors: Tensors that the step reaches.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, is_excluded: Callable[[Any], bool] | None = None
    ) -> None:
        self.modules: list[torch.nn.Module] = []
        self._tensors_found: list[Node] = []
        # The memory of the tensors; held only during a run, so that it can be freed later.
        self._data: list[torch.Tensor] = []
        self._records: list[Record] = []
        self._callables: dict[int, Any] = {}
        self._kept: list[Any] = []
        self._classes: set[type] = set()
        # Classes of objects that the step may call directly, not only through a method.
        self._called: set[type] = set()
        # User-defined classes, by the code that refers to them and may create instances.
        self._created: dict[types.CodeType | None, set[type]] = {}
        self._names: set[str] | None = None
        self._codes: set[types.CodeType | None] = {None}
        self._values_read: tuple[Entry, ...] | None = None
        self._records_of: dict[int, list[Record]] = {}
        # Objects that the step reaches other than through an attribute (roots, cells, globals,
        # classes), with the code that refers to them.
        self._roots: dict[int, set[types.CodeType | None]] = {}
        # Identities of the objects that an entry wraps, such as those bound by a method or by
        # ``partial``. The keys are the identities of the entries.
        self._bound: dict[int, list[int]] = {}
        queue: deque[Node] = deque(Node(one, name, "", None) for name, one in roots.items())
        # Classes, and values reached only through their code, come last, because the code of a
        # library names most of the library.
        classes: deque[Node] = deque()
        modules = ModulesNamed()
        while (queue or classes or modules) and len(self._records) < MAX_CONTAINERS:
            if not queue:
                queue.extend(modules.take(of_class=False))
            if not (queue or classes):
                classes.extend(modules.take(of_class=True))
            is_of_class = not queue
            found = classes.popleft() if is_of_class else queue.popleft()
            if is_plain(found.value):
                continue
            if is_excluded is not None and is_excluded(found.value):
                continue
            self._note_use(found)
            if id(found.value) in self._records_of:
                continue
            records = self._records_of[id(found.value)] = []
            self._kept.append(found.value)  # so that identities are not reused
            if not isinstance(found.value, type):
                self._classes.add(type(found.value))
            if isinstance(found.value, torch.nn.Module):
                self.modules.append(found.value)
            elif isinstance(found.value, torch.Tensor):
                self._tensors_found.append(found)
            for part in parts_of(found):
                inside: Iterable[Node] = (part,) if isinstance(part, Node) else part.inside()
                if isinstance(part, Node) and part.is_entry:
                    self._bound.setdefault(id(found.value), []).append(id(part.value))
                if isinstance(part, Record):
                    part.holder, part.is_of_class = found.value, is_of_class
                    records.append(part)
                    self._records.append(part)
                for one in inside:
                    of_class = is_of_class or isinstance(one.value, type)
                    if isinstance(one.value, Globals) and one.value.is_imported:
                        modules.add(one, of_class=of_class)
                    else:
                        (classes if of_class else queue).append(one)
        self._seen = [*itertools.chain.from_iterable(one.seen for one in self._records)]
        self._views = [view for one in self._records for view in one.views]
        self.tensors: list[torch.Tensor] = [one.value for one in self._tensors_found]
        self._places = [*map(place_of, self.tensors)]

    def _note_use(self, found: Node) -> None:
        """Record how the step may use an object; called whenever the walk finds the object."""
        value, code = found.value, getattr(found.site, "__code__", None)
        if isinstance(value, Globals) and value.is_imported:  # any code may have named the module
            code = None
        if not found.is_entry:
            self._roots.setdefault(id(value), set()).add(code)
        if isinstance(value, type):
            if not (found.is_owner or is_library(value)):
                self._classes.update((value, type(value)))
                if not is_installed(value):
                    self._created.setdefault(code, set()).add(value)
        elif isinstance(value, FUNCTIONS):
            if not found.is_method:
                self._callables[id(value)] = value
        elif not found.is_owner:
            self._called.add(type(value))

    @contextmanager
    def data_held(self) -> Iterator[None]:
        """Keep the memory of the tensors alive, so that it can be restored."""
        self._data = [one.detach() for one in self.tensors]
        try:
            yield
        finally:
            self._data = []

    def changes(self) -> tuple[Entry, ...]:
        """Return the changed entries that the step's code refers to, nearest to the step first.

        Other entries do not count. The owner of the step may hold objects for other purposes, and
        another thread may change these objects.
        """
        found = tuple(self._changed())
        return self._read_by_step(found) if found else ()

    def values_read(self) -> tuple[Entry, ...]:
        """Return the entries that can change and that the step's code may read."""
        if self._values_read is None:
            reads_gradients = not self._names_read().isdisjoint({"grad", "backward", *_DYNAMIC})
            unread = _UNWATCHED if reads_gradients else (*_UNWATCHED, GRADIENT)
            self._values_read = self._read_by_step(
                Entry(record, key)
                for record in self._records
                if record.kind not in unread
                for key, value in record.saved.items()
                if record.kind is not TUPLE or not is_plain(value)
            )
        return self._values_read

    def iterators_read(self) -> tuple[Entry, ...]:
        """Return the iterators that the step's code refers to."""
        found = [Entry(one, "") for one in self._records if one.kind is ITERATOR]
        iterators = self._read_by_step(found) if found else ()
        if not iterators or self._names_read() & _DYNAMIC:
            return iterators
        # Other methods of the step's owner may advance their own iterators.
        reached = self._reached({one for one, codes in self._roots.items() if codes & self._codes})
        return tuple(one for one in iterators if id(one.record.holder) in reached)

    def names_read(self) -> frozenset[str]:
        """Return the names in the step's code and in the functions that this code names."""
        return frozenset(self._names_read())

    def containers_read(self) -> tuple[Container, ...]:
        """Return the containers that can grow and that the step's code may read."""
        names = self._names_read()
        is_any = bool(names & _DYNAMIC)
        reached = self._reached()
        return tuple(
            Container(record, None if is_any or record.kind not in NAMED else names)
            for record in self._records
            if record.can_grow and (is_any or id(record.holder) in reached)
        )

    def is_current(self) -> bool:
        """Return whether no entry has changed."""
        return not any(True for _ in self._changed())

    def _changed(self) -> Iterator[Entry]:
        """Yield all changed entries, whether or not the step reads them."""
        now = [*itertools.chain.from_iterable(self._views)]
        is_seen = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        for record in self._records:
            if not (is_seen and record.views):
                yield from record.changes()
        for number, (tensor, place) in enumerate(zip(self.tensors, self._places, strict=True)):
            if place_of(tensor) != place:
                record = Record(DATA, self._tensors_found[number])
                record.saved = {"data": self._data[number] if self._data else MISSING}
                yield Entry(record, "data")

    def _read_by_step(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Return the entries that the step's code refers to by name.

        The names in a function's code lead to further functions. Methods that ``forward`` does not
        name, directly or indirectly, are excluded, as is everything that only these methods read.
        For example, the loop of a server is excluded.
        """
        names = self._names_read()
        if names & _DYNAMIC:  # the code may access any attribute by a computed name
            return tuple(entries)
        reached = self._reached()
        return tuple(
            entry
            for entry in entries
            if id(entry.record.holder) in reached and is_named(entry.record, entry.key, names)
        )

    def _reached(self, roots: Iterable[int] | None = None) -> set[int]:
        """Return the identities of the objects that the step reaches by name from the roots."""
        names = self._names_read()
        reached = set(self._roots if roots is None else roots)
        waiting = list(reached)
        while waiting:
            holder = waiting.pop()
            found = list(self._bound.get(holder, ()))
            for record in self._records_of.get(holder, ()):
                found += (id(v) for key, v in record.saved.items() if is_named(record, key, names))
            for one in found:
                if one in self._records_of and one not in reached:
                    reached.add(one)
                    waiting.append(one)
        return reached

    def _names_read(self) -> set[str]:
        if self._names is None:
            self._names = self._find_names()
        return self._names

    def _find_names(self) -> set[str]:
        codes: set[types.CodeType] = set()
        methods: dict[str, set[types.CodeType]] = {}
        for cls in self._classes:
            for name, fn in methods_of(cls):
                methods.setdefault(name, set()).add(fn.__code__)
                if name in _OPERATORS and not is_library(fn):
                    codes.add(fn.__code__)
        # A callable in a closure, a global or an attribute may be called under any name.
        codes |= {fn.__code__ for one in self._callables.values() for fn in functions_of(one)}
        found = set(_ALWAYS_READ).union(*map(names_of_getter, self._kept))
        for cls in self._called:
            codes |= {fn.__code__ for name, fn in methods_of(cls) if name in _CALLS}
        waiting = list(found)
        while codes or waiting:
            new = codes or methods.pop(waiting.pop(), set())
            codes = set()
            for code in new - self._codes:
                self._codes.add(code)
                names = names_in(code)
                waiting.extend(names - found)
                found |= names
                for cls in self._created.get(code, ()):
                    if cls.__name__ in names_called(code):
                        codes |= constructors(cls)
        return found | _CALLS
