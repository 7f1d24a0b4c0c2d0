"""Read, compare and restore the entries of each kind of container.

A container is any object with entries that Python code can change: a dictionary, the attributes of
an object, a closure cell, a random generator, the memory of a tensor.
"""

from __future__ import annotations

import array
import configparser
import contextvars
import ctypes
import gc
import io
import itertools
import operator
import os
import pickle
import queue
import random
import sys
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from dispatchkit.execute.step.origins import is_library_module

MISSING: Final = object()
"""Marker for a missing entry."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
#: Attributes that torch sets on every module, such as the dictionaries of hooks and parameters.
_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - {"training"}


def is_same(before: Any, after: Any) -> bool:
    """Return whether two values are the same object or equal plain values.

    Tuples are compared item by item, and bound methods by their function and object.
    """
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, float):
        return bool(before.hex() == after.hex())  # NaN equals NaN, and 0.0 differs from -0.0
    if isinstance(before, (*_PLAIN, _Address, _ByValue, _Contents)):
        return bool(before == after)
    if isinstance(before, types.MethodType):
        return before.__func__ is after.__func__ and before.__self__ is after.__self__
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(is_same, before, after))
    return False


@attrs.frozen(eq=False)
class Kind:
    """Functions that read and write containers of one kind.

    Attributes:
        read: Function that returns the entries of a container by key.
        write: Function that sets an entry, or removes the entry if the value is ``MISSING``; None
            if entries cannot be restored.
        join: Function that returns the path of an entry, given the container's path and the key.
        is_entered: Whether the contents of entries are recorded too.
        get: Function that returns one entry by key, or ``MISSING``; None if reading all entries is
            just as fast.
        views: Function that returns reusable iterables. If they yield the same objects as before,
            the entries are unchanged. If there are no iterables, the entries must be read.
    """

    read: Callable[[Any], Mapping[Any, Any]]
    write: Callable[[Any, Any, Any], None] | None
    join: Callable[[str, Any], str]
    is_entered: bool = True
    get: Callable[[Any, Any], Any] | None = None
    views: Callable[[Any], tuple[Iterable[Any], ...]] = lambda _: ()


def dotted(path: str, key: Any) -> str:
    """Return the path of an attribute."""
    return f"{path}.{key}" if path else str(key)


def _indexed(path: str, key: Any) -> str:
    # repr() would copy a tensor from its device; the state of an optimizer has tensors as keys.
    shown = type(key).__name__ if isinstance(key, torch.Tensor) else repr(key)
    return f"{path}[{shown:.40}]"


def _itself(path: str, _key: Any) -> str:
    return path


def _set_item(target: Any, key: Any, value: Any) -> None:
    if value is not MISSING:
        target[key] = value
    elif dict.__contains__(target, key):
        del target[key]


def _set_in_module(target: Any, key: str, value: Any) -> None:
    """Set or remove an attribute of a module; dictionaries of hooks are cleared, not removed."""
    if value is MISSING and key in _BOOKKEEPING:
        target[key].clear()
    else:
        _set_item(target, key, value)


def _set_at(target: Any, index: int, value: Any) -> None:
    """Set or remove an item; entries are restored in reverse order, so indices stay valid."""
    if value is MISSING:
        del target[index]
    elif index < len(target):
        target[index] = value
    else:
        target.extend([None] * (index - len(target)))
        target.append(value)


def _set_attribute(target: Any, name: str, value: Any) -> None:
    # Bypasses the __setattr__ of frozen classes.
    if value is MISSING:
        object.__delattr__(target, name)
    else:
        object.__setattr__(target, name, value)


def _set_on_class(target: type, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(target, name)
    else:
        setattr(target, name, value)


def read_slots(target: Any) -> dict[str, Any]:
    """Return the values of an object's ``__slots__``, by name; unset slots are left out."""
    found = {}
    for base in type(target).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(target, name):
                found[name] = getattr(target, name)
    return found


def _read_class(target: type) -> dict[str, Any]:
    """Return the data attributes of a class, without nested classes, descriptors and dunders."""
    return {
        name: value
        for name, value in vars(target).items()
        if not name.startswith(("__", "_abc_"))
        and not isinstance(value, type)
        and not hasattr(type(value), "__get__")
    }


def _read_methods(target: type) -> dict[str, Any]:
    """Return the methods and properties of a class."""
    return {
        name: value
        for name, value in vars(target).items()
        if isinstance(value, (types.FunctionType, property, classmethod, staticmethod))
    }


def _read_cell(target: types.CellType) -> dict[str, Any]:
    try:
        return {"": target.cell_contents}
    except ValueError:  # an empty cell
        return {}


def _get_cell(target: types.CellType, _key: Any) -> Any:
    try:
        return target.cell_contents
    except ValueError:
        return MISSING


def _write_cell(target: types.CellType, _key: Any, value: Any) -> None:
    if value is MISSING:
        del target.cell_contents
    else:
        target.cell_contents = value


@attrs.frozen
class Globals:
    """A module's globals, limited to the names in a function's code.

    Attributes:
        values: All globals of the module.
        names: Names in the code of the function.
        is_imported: Whether the function refers to the module by name, and is not defined in it.
    """

    values: dict[str, Any]
    names: frozenset[str]
    is_imported: bool = False

    def read(self) -> dict[str, Any]:
        """Return the globals by name, without modules."""
        return {
            name: self.values[name]
            for name in self.names & self.values.keys()
            if not isinstance(self.values[name], types.ModuleType)
        }


class _Address:
    """A tensor of a script module, compared by memory because each read returns a new object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._place = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Address) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)


class _ByValue:
    """A container of a script module, compared by value because each read returns a copy."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._content = _content_of(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByValue) and is_same(self._content, other._content)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _content_of(value: Any) -> Any:
    """Replace containers with tuples, and tensors with their addresses."""
    if isinstance(value, torch.Tensor):
        return _Address(value)
    if isinstance(value, dict):
        return tuple((_content_of(key), _content_of(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_content_of, value))
    return value


def address_of(value: Any) -> int | None:
    """Return the data address of a strided tensor; None for anything else."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.data_ptr()
    except (RuntimeError, ValueError):  # no memory, as in a wrapper subclass or a lazy parameter
        return None


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the address and layout of a tensor."""
    address = address_of(tensor)
    return (address, tensor.shape) if address is None else (address, tensor.shape, tensor.stride())


def _write_data(target: torch.Tensor, _key: Any, value: Any) -> None:
    if value is not MISSING:
        target.data = value


def _readable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Address(value)
    return _ByValue(value) if isinstance(value, (dict, list, tuple)) else value


def _read_script(target: Any) -> dict[str, Any]:
    read = target._c.getattr
    known: Any = getattr(target, "_concrete_type", None)
    if known is None:  # a frozen module
        known = torch._C.ConcreteModuleType.from_jit_type(target._c._type())
    return {name: _readable(read(name)) for name in known.get_attributes()}


def _write_script(target: Any, name: str, value: Any) -> None:
    if isinstance(value, _Address):
        value = value.tensor
    elif isinstance(value, _ByValue):
        value = value.value
    target._c.setattr(name, value)


def _read_module(held: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module that are not bookkeeping, and its hooks."""
    return {name: one for name, one in held.items() if name not in _BOOKKEEPING or _is_hooks(one)}


def _is_hooks(value: Any) -> bool:
    return isinstance(value, OrderedDict) and bool(value)


def _get_item(target: Any, key: Any) -> Any:
    return dict.get(target, key, MISSING)


def _get_at(target: Any, index: int) -> Any:
    return target[index] if index < len(target) else MISSING


def _get_attribute(target: Any, name: str) -> Any:
    return getattr(target, name, MISSING)


@attrs.frozen
class _LazyMap:
    """An iterable that calls ``map`` each time it is iterated."""

    get: Callable[..., Any]
    arguments: tuple[Iterable[Any], ...]

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, *self.arguments)


def _read_dict(target: Any) -> dict[Any, Any]:
    # Bypasses the item access of subclasses, which may create a new object on each read.
    return dict.copy(target) if type(target) is dict else dict(mapping(target).items(target))


def _read_public(target: dict[str, Any]) -> dict[str, Any]:
    """Return the public attributes of a library object that are plain values or tensors."""
    return {
        name: value
        for name, value in target.items()
        if not name.startswith("_") and (is_plain(value) or isinstance(value, torch.Tensor))
    }


def mapping(target: Any) -> Any:
    """Return the class whose methods read a dictionary in the order of its keys."""
    return OrderedDict if isinstance(target, OrderedDict) else dict


def _read_sequence(target: Any) -> dict[int, Any]:
    base: Any = next(one for one in (list, deque, tuple, frozenset) if isinstance(target, one))
    return dict(enumerate(base.__iter__(target)))


def _views_of_dict(target: Any) -> tuple[Iterable[Any], ...]:
    # Bypasses the item access of subclasses.
    base = mapping(target)
    return base.keys(target), base.values(target)


def _views_of_module(held: dict[str, Any]) -> tuple[Iterable[Any], ...]:
    hooks = [one for name, one in held.items() if name in _BOOKKEEPING and type(one) is OrderedDict]
    return *_views_of_dict(held), *hooks


def _views_of_sequence(target: Any) -> tuple[Iterable[Any], ...]:
    return (target,) if type(target) in (list, deque) else ()


def _views_of_class(target: type) -> tuple[Iterable[Any], ...]:
    return vars(target).keys(), vars(target).values()


def _views_of_globals(target: Globals) -> tuple[Iterable[Any], ...]:
    return (_LazyMap(target.values.get, (target.names, itertools.repeat(MISSING))),)


MAPPING = Kind(_read_dict, _set_item, _indexed, get=_get_item, views=_views_of_dict)
ATTRIBUTES = Kind(lambda one: one, _set_item, dotted, get=_get_item, views=_views_of_dict)
LIBRARY_ATTRIBUTES = Kind(
    _read_public, _set_item, dotted, is_entered=False, get=_get_item, views=_views_of_dict
)
#: Parameters, buffers or submodules of a module.
MEMBER = Kind(lambda one: one, _set_item, dotted, get=_get_item, views=_views_of_dict)
MODULE = Kind(_read_module, _set_in_module, dotted, get=_get_item, views=_views_of_module)
SEQUENCE = Kind(_read_sequence, _set_at, _indexed, get=_get_at, views=_views_of_sequence)
# A tuple is immutable, so its items need no comparison.
TUPLE = Kind(_read_sequence, None, _indexed, views=lambda _: ((),))
SLOTS = Kind(read_slots, _set_attribute, dotted, get=_get_attribute)
CLASS = Kind(_read_class, _set_on_class, dotted, get=_get_attribute, views=_views_of_class)
#: Other code may replace the methods of a class. ``PythonState`` examines their code separately.
METHODS = Kind(_read_methods, _set_on_class, dotted, is_entered=False, views=_views_of_class)
CELL = Kind(
    _read_cell,
    _write_cell,
    _itself,
    get=_get_cell,
    views=lambda one: (_LazyMap(_get_cell, ((one,), ("",))),),
)
GLOBALS = Kind(
    Globals.read,
    lambda one, key, value: _set_item(one.values, key, value),
    dotted,
    views=_views_of_globals,
)
#: The memory of a tensor, which ``.data = ...``, ``set_`` and ``resize_`` replace.
DATA = Kind(lambda one: {"data": one.detach()}, _write_data, dotted, is_entered=False)
#: A numpy array of Python objects.
OBJECTS = Kind(
    lambda one: dict(enumerate(one.flat)),
    lambda one, index, value: operator.setitem(one.flat, index, value),
    _indexed,
)
SCRIPT = Kind(_read_script, _write_script, dotted, is_entered=False)


class _Contents:
    """The contents of an object, compared by value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Contents) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]  # the contents may be unhashable


def _whole(read: Callable[[Any], Any], write: Callable[[Any, Any], Any] | None) -> Kind:
    """Return a kind whose objects are compared and restored as a whole."""
    put = None if write is None else (lambda one, _key, saved: write(one, saved.value))
    return Kind(lambda one: {"": _Contents(read(one))}, put, _itself, is_entered=False)


def _put_set(target: set[Any], value: frozenset[Any]) -> None:
    target.clear()
    target.update(value)


def _put_bytes(target: Any, value: bytes) -> None:
    if isinstance(target, bytearray):
        target[:] = value
    elif isinstance(target, array.array):
        target[:] = array.array(target.typecode, value)
    else:
        memoryview(target).cast("B")[:] = value


def _set_variable(target: Any, name: str, value: Any) -> None:
    if value is MISSING:
        del target[name]
    else:
        target[name] = value


def _put_stream(target: Any, value: tuple[Any, int]) -> None:
    contents, position = value
    target.seek(0)
    target.truncate()
    target.write(contents)
    target.seek(position)


def _read_context(target: contextvars.ContextVar[Any]) -> dict[str, Any]:
    try:
        return {"": target.get()}
    except LookupError:  # the variable has neither a value nor a default
        return {}


def _write_context(target: contextvars.ContextVar[Any], _key: Any, value: Any) -> None:
    if value is not MISSING:  # a variable can be unset only by the code that set it
        target.set(value)


def _read_wrapped(target: Any) -> dict[str, Any]:
    """Return the attributes that hold the state of an object whose class is in ``_WRAPPERS``."""
    names = [name for kind, name in _WRAPPERS if isinstance(target, kind)]
    return {name: getattr(target, name) for name in names if hasattr(target, name)}


def _iterator(one: Any) -> Any:
    """Return a representation of an iterator's position, without advancing the iterator.

    The ``repr`` of ``count`` and ``repeat`` contains their position. The position of other
    ``itertools`` objects follows from the iterators and values that they refer to. Internal
    counters are not accessible. An advance of a ``cycle`` after its first pass, of a ``tee``
    iterator, or of ``product``, ``permutations`` or ``combinations`` over equal values is therefore
    not detected.
    """
    if isinstance(one, types.GeneratorType):
        frame = one.gi_frame
        if frame is None:
            return "finished"
        held = tuple(v if is_plain(v) else id(v) for v in frame.f_locals.values())
        return repr((frame.f_lasti, held))
    if type(one).__module__ == "itertools":  # __reduce__ of itertools objects is deprecated
        return repr((repr(one), _held_by_iterator(gc.get_referents(one))))
    if type(one).__module__ != "builtins":
        return ""
    return repr([part if is_plain(part) else id(part) for part in one.__reduce__()[1:]])


def _held_by_iterator(values: Iterable[Any]) -> list[Any]:
    """Describe the referents of an iterator; the result changes when the iterator advances."""
    return [
        value
        if is_plain(value)
        else _iterator(value)
        if _is_iterator(value)
        # Not by iteration: zip_longest puts null pointers into its tuple.
        else _held_by_iterator(gc.get_referents(value))
        if isinstance(value, tuple)
        else (id(value), len(value))
        if isinstance(value, list)
        else id(value)
        for value in values
    ]


def _is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator, but not one that the user wrote in Python.

    For the user's own iterators, attributes are recorded instead. The result is False for files,
    which are not recorded.
    """
    if not isinstance(value, Iterator) or isinstance(value, io.IOBase):
        return False
    advance: Any = type(value).__next__
    is_python = isinstance(advance, types.FunctionType)
    return not is_python or is_library_module(advance.__module__)


#: Library classes written in Python, and the attributes that hold their state.
_WRAPPERS: tuple[tuple[type, str], ...] = (
    (UserDict, "data"),
    (UserList, "data"),
    (ChainMap, "maps"),
    (weakref.WeakKeyDictionary, "data"),
    (weakref.WeakValueDictionary, "data"),
    (weakref.WeakSet, "data"),
    (queue.Queue, "queue"),
    (configparser.RawConfigParser, "_sections"),
    (configparser.RawConfigParser, "_defaults"),
    (torch.optim.Optimizer, "state"),
    (torch.optim.Optimizer, "param_groups"),
    (torch.optim.lr_scheduler.LRScheduler, "_last_lr"),
)
_SET = _whole(frozenset, _put_set)
_BYTES = _whole(bytes, _put_bytes)
ITERATOR = _whole(_iterator, None)
ENVIRONMENT = Kind(dict, _set_variable, _indexed, is_entered=False)
_STREAM = _whole(lambda one: (one.getvalue(), one.tell()), _put_stream)
_CONTEXT = Kind(_read_context, _write_context, _itself)
_WRAPPED = Kind(_read_wrapped, setattr, dotted)
RANDOM = _whole(random.Random.getstate, random.Random.setstate)
GRADIENT = Kind(
    lambda one: {"grad": one.grad},
    lambda one, _, value: setattr(one, "grad", value),
    dotted,
    get=_get_attribute,
    views=lambda one: (_LazyMap(getattr, ((one,), ("grad",))),),
)


# The states contain arrays, so their pickles are compared: == on arrays returns an array.
NUMPY_GENERATOR = _whole(
    lambda one: pickle.dumps(one.bit_generator.state),
    lambda one, saved: setattr(one.bit_generator, "state", pickle.loads(saved)),  # noqa: S301
)
NUMPY_BITS = _whole(
    lambda one: pickle.dumps(one.state),
    lambda one, saved: setattr(one, "state", pickle.loads(saved)),  # noqa: S301
)
NUMPY_RANDOM = _whole(
    lambda one: pickle.dumps(one.get_state()),
    lambda one, saved: one.set_state(pickle.loads(saved)),  # noqa: S301
)
TORCH_GENERATOR = _whole(
    lambda one: one.get_state().numpy().tobytes(),
    lambda one, saved: one.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8)),
)


def _numpy_kind(value: Any) -> Kind | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return NUMPY_GENERATOR
    if isinstance(value, numpy.random.RandomState):
        return NUMPY_RANDOM
    if isinstance(value, numpy.random.BitGenerator):
        return NUMPY_BITS
    if isinstance(value, numpy.ndarray) and value.dtype == object:
        return OBJECTS
    if isinstance(value, numpy.ndarray):
        return _whole(
            lambda one: one.tobytes(),
            lambda one, saved: numpy.copyto(
                one, numpy.frombuffer(saved, one.dtype).reshape(one.shape)
            ),
        )
    return None


_KINDS: tuple[tuple[Any, Kind], ...] = (
    (dict, MAPPING),
    ((list, deque), SEQUENCE),
    (set, _SET),
    ((tuple, frozenset), TUPLE),
    ((bytearray, array.array), _BYTES),
    ((ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union), _BYTES),
    (random.Random, RANDOM),
    (contextvars.ContextVar, _CONTEXT),
    (type(os.environ), ENVIRONMENT),
    (tuple(kind for kind, _ in _WRAPPERS), _WRAPPED),
)


def kind_of(value: Any) -> Kind | None:
    """Return the kind of container that an object is; None if it has only attributes."""
    if isinstance(value, types.FunctionType):  # the most common objects first
        return None
    if isinstance(value, torch.Tensor):
        has_gradient = value.is_leaf and (value.requires_grad or value.grad is not None)
        return GRADIENT if has_gradient else None
    for types_, kind in _KINDS:
        if isinstance(value, types_):
            return kind
    if isinstance(value, torch.Generator):
        return TORCH_GENERATOR
    if _is_iterator(value):
        return ITERATOR
    if isinstance(value, memoryview) and not value.readonly and value.c_contiguous:
        return _BYTES
    if isinstance(value, (io.StringIO, io.BytesIO)) and not value.closed:
        return _STREAM
    return _numpy_kind(value)


def is_plain(value: Any) -> bool:
    """Return whether a value has a type in ``_PLAIN``; these types are deeply immutable."""
    return isinstance(value, _PLAIN)
