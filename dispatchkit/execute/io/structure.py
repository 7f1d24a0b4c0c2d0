"""Results in leaves: containers that torch's pytree knows, and objects that hold tensors.

Beside tensors a result may hold any value. Dataclasses, caches and other plain objects with tensors
inside are taken apart like containers, and a replay returns new ones. What holds no tensor is one
leaf, whatever it is.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from dispatchkit.execute.io.tree import tree_flatten

# What can be returned again and again, since nobody can change it.
_IMMUTABLE: Final = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.nn.Module),
)
_BUILTIN_BASES: Final = (dict, list, types.SimpleNamespace)
_LIBRARIES: Final = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy"}


@attrs.frozen
class _Object:
    """An object that is taken apart.

    Attributes:
        cls: Its class.
        names: Names of its attributes.
        inside: The structure of a list of what it holds: items of its own, then attributes.
        own: What to return in place of a new one: an object that the step keeps.
    """

    cls: type
    names: tuple[str, ...]
    inside: Structure
    own: Any = attrs.field(default=None, eq=False)

    def build(self, leaves: Sequence[Any]) -> Any:
        if self.own is not None:
            return self.own
        values = self.inside.build(leaves)
        base: Any = _base_of(self.cls)
        made = base.__new__(self.cls)
        if base is dict:
            dict.update(made, values.pop(0))
        elif base is list:
            list.extend(made, values.pop(0))
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(made, name, value)
        return made


@attrs.frozen
class Structure:
    """How leaves make up a result.

    Attributes:
        spec: The containers that torch's pytree knows.
        objects: What is taken apart among the leaves of those, by index.
    """

    spec: TreeSpec
    objects: tuple[tuple[int, _Object], ...] = ()

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return a result made of leaves."""
        if not self.objects:
            return tree_unflatten(leaves, self.spec)
        whole: list[Any] = []
        at = 0
        objects = dict(self.objects)
        for index in range(self.spec.num_leaves):
            found = objects.get(index)
            number = 1 if found is None else found.inside.num_leaves
            part = leaves[at : at + number]
            whole.append(part[0] if found is None else found.build(part))
            at += number
        return tree_unflatten(whole, self.spec)

    def builder(self) -> Callable[[list[Any]], Any]:
        """Return ``build``, or what is quicker for a tensor, a tuple, a list and a dictionary."""
        spec = self.spec
        if self.objects:
            return self.build
        if spec.is_leaf():
            return lambda leaves: leaves[0]
        if spec.num_nodes == 1 + spec.num_leaves:  # flat: no container inside
            if spec.type is tuple:
                return tuple
            if spec.type is list:
                return list
            if spec.type is dict:
                names = list(spec.context)
                return lambda leaves: dict(zip(names, leaves, strict=True))
        return self.build

    @property
    def num_leaves(self) -> int:
        """How many leaves there are."""
        inside = sum(one.inside.num_leaves - 1 for _, one in self.objects)
        return int(self.spec.num_leaves) + inside

    @property
    def is_leaf(self) -> bool:
        """Whether a result is one leaf."""
        return not self.objects and bool(self.spec.is_leaf())

    @property
    def is_flat_tuple(self) -> bool:
        """Whether a result is a tuple of leaves."""
        spec = self.spec
        is_flat = spec.num_nodes == 1 + spec.num_leaves
        return not self.objects and spec.type is tuple and bool(is_flat)

    def keeping(self, one: Any, other: Any) -> Structure:
        """Return the same for steps that return objects of their own, by two results of it.

        An object that is one and the same in both results is what the step keeps.
        """
        if not self.objects:
            return self
        ones, others = _tree(one)[0], _tree(other)[0]
        objects = []
        for index, found in self.objects:
            if ones[index] is others[index]:
                objects.append((index, attrs.evolve(found, own=ones[index])))
            else:
                inside = found.inside.keeping(_contents(ones[index]), _contents(others[index]))
                objects.append((index, attrs.evolve(found, inside=inside)))
        return attrs.evolve(self, objects=tuple(objects))

    def kept(self) -> Iterator[bool]:
        """Yield for each leaf whether it lies in an object that the step keeps."""
        objects = dict(self.objects)
        for index in range(self.spec.num_leaves):
            found = objects.get(index)
            if found is None:
                yield False
            elif found.own is not None:
                yield from [True] * found.inside.num_leaves
            else:
                yield from found.inside.kept()

    def __str__(self) -> str:
        inside = "".join(f", {one.cls.__name__}{one.names}" for _, one in self.objects)
        return f"{self.spec}{inside}"


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a result, and how they make it up: ``structure.build(leaves)``."""
    return _flatten(value, ())


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a result."""
    return _flatten(value, ())[0]


def _flatten(value: Any, around: tuple[int, ...]) -> tuple[list[Any], Structure]:
    found, spec = _tree(value)
    leaves: list[Any] = []
    objects = []
    for index, leaf in enumerate(found):
        if isinstance(leaf, torch.Tensor) or not _is_opened(leaf, around):
            leaves.append(leaf)
            continue
        names, contents = _names(leaf), _contents(leaf)
        inner, structure = _flatten(contents, (*around, id(leaf)))
        if not any(isinstance(one, torch.Tensor) for one in inner):
            leaves.append(leaf)
            continue
        leaves += inner
        objects.append((index, _Object(type(leaf), names, structure)))
    return leaves, Structure(spec, tuple(objects))


def _tree(value: Any) -> tuple[list[Any], TreeSpec]:
    # A size is a value: torch makes a plain tuple of one that it puts together again.
    return tree_flatten(value, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _is_opened(value: Any, around: tuple[int, ...]) -> bool:
    """Return whether an object may be taken apart: a plain one, not within itself."""
    cls: Any = type(value)
    if isinstance(value, _IMMUTABLE) or callable(value) or id(value) in around:
        return False
    if dataclasses.is_dataclass(cls) or attrs.has(cls) or isinstance(value, _BUILTIN_BASES):
        return True
    is_library = (cls.__module__ or "").partition(".")[0] in _LIBRARIES
    # An object with a state that is not its attributes would be made by halves.
    is_plain = cls.__reduce__ is object.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__
    return not is_library and is_plain and _base_of(cls) is object


def _base_of(cls: type) -> type:
    """Return the builtin class that makes an object of a class."""
    for base in cls.__mro__:
        if base in _BUILTIN_BASES:
            return base
        if base.__flags__ & (1 << 9) == 0 and base is not object:  # not made by Python code
            return base
    return object


def _names(value: Any) -> tuple[str, ...]:
    slots = [
        name
        for base in type(value).__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
        and not name.startswith("__")
        and hasattr(value, name)
    ]
    return (*getattr(value, "__dict__", ()), *slots)


def _contents(value: Any) -> list[Any]:
    """Return what an object holds: its items, where it has some, and its attributes."""
    items: list[Any] = []
    if isinstance(value, dict):
        items = [dict(value.items())]
    elif isinstance(value, list):
        items = [list(value)]
    return [*items, *(getattr(value, name) for name in _names(value))]


# -- values beside tensors ------------------------------------------------------------------------


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal, of one type, and nan is equal to itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, (numpy.ndarray, numpy.generic)):
        if one.dtype == object:
            return False
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - what cannot be compared is not the same
        return False


def is_immutable(value: Any) -> bool:
    """Return whether a value may be handed out again and again."""
    if isinstance(value, frozenset):
        return all(map(is_immutable, value))
    return isinstance(value, _IMMUTABLE)


def own_value(value: Any) -> Any:
    """Return a value that the caller may change without changing the next result."""
    return copy.deepcopy(value)
