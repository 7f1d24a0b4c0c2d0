"""Flatten results: pytree containers, and objects that contain tensors.

A result may contain any value. Dataclasses, caches and other plain objects that contain tensors are
flattened like containers. Each replay returns new objects, unless the step itself returns the same
object every time. An object without tensors is a single leaf.
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

# Immutable types, functions and modules: every replay may return the same object.
_IMMUTABLE: Final = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.nn.Module),
)
_BUILTIN_BASES: Final = (dict, list, types.SimpleNamespace)
_LIBRARIES: Final = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy"}


@attrs.frozen
class _Object:
    """A flattened object.

    Attributes:
        cls: Class of the object.
        names: Names of the object's attributes.
        inside: Structure of a list that contains the object's items, if any, and then its attribute
            values.
        own: The object itself if the step keeps it and returns it every time, otherwise None.
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
    """The containers and objects from which a result is rebuilt.

    Attributes:
        spec: Containers that are registered with torch's pytree.
        objects: Index and structure of each leaf of ``spec`` that is a flattened object.
    """

    spec: TreeSpec
    objects: tuple[tuple[int, _Object], ...] = ()

    def build(self, leaves: Sequence[Any]) -> Any:
        """Build a result from its leaves."""
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
        """Return ``build``, or a faster equivalent for simple structures."""
        spec = self.spec
        if self.objects:
            return self.build
        if spec.is_leaf():
            return lambda leaves: leaves[0]
        if spec.num_nodes == 1 + spec.num_leaves:  # no nested containers
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
        """The number of leaves."""
        inside = sum(one.inside.num_leaves - 1 for _, one in self.objects)
        return int(self.spec.num_leaves) + inside

    @property
    def is_leaf(self) -> bool:
        """Whether the result is a single leaf."""
        return not self.objects and bool(self.spec.is_leaf())

    @property
    def is_flat_tuple(self) -> bool:
        """Whether the result is a tuple without nested containers."""
        spec = self.spec
        is_flat = spec.num_nodes == 1 + spec.num_leaves
        return not self.objects and spec.type is tuple and bool(is_flat)

    def with_kept_objects(self, one: Any, other: Any) -> Structure:
        """Compare two results, and return this structure with kept objects marked.

        If both results contain the same object, the step keeps that object.
        """
        if not self.objects:
            return self
        ones, others = _tree(one)[0], _tree(other)[0]
        objects = []
        for index, found in self.objects:
            if ones[index] is others[index]:
                objects.append((index, attrs.evolve(found, own=ones[index])))
            else:
                inside = found.inside.with_kept_objects(
                    _contents(ones[index]), _contents(others[index])
                )
                objects.append((index, attrs.evolve(found, inside=inside)))
        return attrs.evolve(self, objects=tuple(objects))

    def kept_leaves(self) -> Iterator[bool]:
        """Yield, for each leaf, whether it belongs to an object that the step keeps."""
        objects = dict(self.objects)
        for index in range(self.spec.num_leaves):
            found = objects.get(index)
            if found is None:
                yield False
            elif found.own is not None:
                yield from [True] * found.inside.num_leaves
            else:
                yield from found.inside.kept_leaves()

    def __str__(self) -> str:
        inside = "".join(f", {one.cls.__name__}{one.names}" for _, one in self.objects)
        return f"{self.spec}{inside}"


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a result.

    ``structure.build(leaves)`` is the inverse.
    """
    return _flatten(value, ())


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a result."""
    return _flatten(value, ())[0]


def _flatten(value: Any, around: tuple[int, ...]) -> tuple[list[Any], Structure]:
    found, spec = _tree(value)
    leaves: list[Any] = []
    objects = []
    for index, leaf in enumerate(found):
        if isinstance(leaf, torch.Tensor) or not _is_flattened(leaf, around):
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
    # torch.Size is kept as a leaf, because torch's pytree would rebuild it as a plain tuple.
    return tree_flatten(value, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


def _is_flattened(value: Any, around: tuple[int, ...]) -> bool:
    """Return whether an object is plain and not nested in itself."""
    cls: Any = type(value)
    if isinstance(value, _IMMUTABLE) or callable(value) or id(value) in around:
        return False
    if dataclasses.is_dataclass(cls) or attrs.has(cls) or isinstance(value, _BUILTIN_BASES):
        return True
    is_library = (cls.__module__ or "").partition(".")[0] in _LIBRARIES
    # A class that defines __reduce__ may have state besides its attributes. Flattening would lose
    # that state.
    is_plain = cls.__reduce__ is object.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__
    return not is_library and is_plain and _base_of(cls) is object


def _base_of(cls: type) -> type:
    """Return the builtin base class whose ``__new__`` creates instances of a class."""
    for base in cls.__mro__:
        if base in _BUILTIN_BASES:
            return base
        if base.__flags__ & (1 << 9) == 0 and base is not object:  # defined in C (not a heap type)
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
    """Return the items of an object, if any, followed by its attribute values."""
    items: list[Any] = []
    if isinstance(value, dict):
        items = [dict(value.items())]
    elif isinstance(value, list):
        items = [list(value)]
    return [*items, *(getattr(value, name) for name in _names(value))]


# -- values other than tensors ------------------------------------------------------


def is_same_value(one: Any, other: Any) -> bool:
    """Return whether two values have the same type and are equal.

    Floats and numpy arrays are compared exactly: NaN equals NaN, and 0.0 differs from -0.0.
    """
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
    except Exception:  # noqa: BLE001 - values that cannot be compared count as different
        return False


def is_immutable(value: Any) -> bool:
    """Return whether every replay may return the same object for a value."""
    if isinstance(value, frozenset):
        return all(map(is_immutable, value))
    return isinstance(value, _IMMUTABLE)


def own_value(value: Any) -> Any:
    """Return a deep copy, which the caller may modify without affecting later results."""
    return copy.deepcopy(value)
