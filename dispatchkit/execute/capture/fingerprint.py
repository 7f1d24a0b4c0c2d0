"""Addresses and values that are built into a graph, with their names.

They are recorded at a capture in check mode and compared in each checked step. If static inputs,
parameters or buffers have moved, the graph is wrong even if its results look right. Other
differences, such as a changed number, explain why a result differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from dispatchkit.errors import format_value
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.step.pieces import Piece

_NUMBERS = (bool, int, float, str, type(None), torch.dtype)
_MOST_NAMED = 5


@attrs.frozen
class _Place:
    """Properties of a tensor that usually change if the tensor is replaced."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Facts:
    """The recorded addresses and values of a step.

    Attributes:
        places: Addresses of static inputs, parameters and buffers, by name.
        values: Other tensors, and numbers, strings and dtypes, that the step's functions and
            modules refer to, by name.
    """

    places: Mapping[str, Any]
    values: Mapping[str, Any]


def facts_of(
    pieces: Iterable[Piece], modules: Iterable[torch.nn.Module], buffers: InputBuffers
) -> Facts:
    """Return the current addresses and values of a step."""
    inputs = zip(buffers.inputs.names, buffers.tensors, strict=True)
    places = {f"input {name!r}": _place(tensor) for name, tensor in inputs}
    values: dict[str, Any] = {}
    for number, module in enumerate(modules, 1):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in places:  # two modules have a tensor of this name
                name = f"{name} of module {number}"
            places[name] = _place(tensor)
        for path, one in module.named_modules():
            prefix = f"{path}." if path else ""
            values |= {f"{prefix}{name}": value for name, value in _known(vars(one))}
    for piece in pieces:
        values |= _values_of(piece.fn)
    return Facts(places, values)


def moved(then: Facts, now: Facts) -> str:
    """Describe static inputs, parameters and buffers that were moved, changed or removed."""
    return _words(then.places, now.places)


def changed(then: Facts, now: Facts) -> str:
    """Describe all differences between two records of a step; empty if there are none."""
    return "; ".join(filter(None, (moved(then, now), _words(then.values, now.values))))


def _words(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    found = [
        f"{name} {_change(value, now[name])}" if name in now else f"{name} was removed"
        for name, value in then.items()
        # Identity is compared first, because NaN does not equal itself.
        if now.get(name) is not value and now.get(name) != value
    ]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return "; ".join(found[:_MOST_NAMED]) + more


def _change(then: Any, now: Any) -> str:
    if isinstance(then, _Place) and isinstance(now, _Place):
        if then.address != now.address:
            return "moved"
        return f"changed from {then.dtype} {then.shape} to {now.dtype} {now.shape}"
    was, current = (
        "a tensor" if isinstance(one, _Place) else format_value(one) for one in (then, now)
    )
    return f"changed from {was} to {current}"


def _place(tensor: torch.Tensor) -> _Place:
    # Sparse tensors have no single address, so only their shape and dtype are compared.
    address = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return _Place(address, tuple(tensor.shape), tensor.dtype)


def _known(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tuple(values.items()):
        if isinstance(value, torch.Tensor):
            yield name, _place(value)
        elif isinstance(value, _NUMBERS) and not name.startswith("__"):
            yield name, value


def _values_of(fn: Any) -> dict[str, Any]:
    """Return the tensors, numbers, strings and dtypes that a callable refers to, by name."""
    found: dict[str, Any] = {}
    owner = fn if not hasattr(fn, "__code__") else getattr(fn, "__self__", None)
    if owner is not None and not isinstance(owner, torch.nn.Module):
        found |= _known(getattr(owner, "__dict__", {}))
    code = getattr(fn, "__code__", None)
    if code is None:
        return found
    held = {
        name: cell.cell_contents
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)
        if _is_full(cell)
    }
    named = {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    return found | dict(_known(named)) | dict(_known(held)) | dict(_known(fn.__kwdefaults__ or {}))


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises for an empty cell
    except ValueError:
        return False
    return True
