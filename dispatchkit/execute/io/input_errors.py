"""Raise errors for invalid inputs of a call; calls that pass the fast checks skip this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dispatchkit.errors import InputError, counted, did_you_mean, format_value
from dispatchkit.execute.io.host_arrays import array_dtype, carrier_of, numpy_module
from dispatchkit.execute.io.static_input import StaticInput

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

#: Arguments of a call besides its inputs.
CALL_OPTIONS = ("num_reqs", "uniform", "loras", "ceiling")


def bind_or_raise(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the arguments of a call in declared order.

    Raises:
        InputError: An input is missing, unknown or given twice.
    """
    listing = ", ".join(names)
    if len(args) > len(names):
        raise InputError(
            "",
            f"The call has {len(args)} positional inputs, but the runner has only "
            f"{counted(len(names), 'input')}. Pass each input once: {listing}.",
        )
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            hint = did_you_mean(name, (*names, *CALL_OPTIONS))
            raise InputError(name, f"Unknown input {name!r}. The inputs are: {listing}.{hint}")
        if name in given:
            raise InputError(
                name,
                f"Input {name!r} is given by position and by keyword. Pass it only once.",
            )
        given[name] = value
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(
            missing[0],
            f"Missing input{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}. Pass every "
            f"input: {listing}.",
        )
    return [given[name] for name in names]


def unsupported_kind(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that cannot be copied into a static buffer; empty if it can."""
    if type(tensor) not in _PLAIN_TYPES:
        return f"a tensor of type {type(tensor).__name__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta:
        return "a tensor on the meta device"
    return "" if tensor.layout is torch.strided else f"a {tensor.layout} tensor"


def _conversion(tensor: torch.Tensor) -> str:
    """Return the method call that converts a tensor of an unsupported kind."""
    if tensor.is_nested:
        return "to_padded_tensor(0)"
    if type(tensor) not in _PLAIN_TYPES:
        return "as_subclass(torch.Tensor)"
    return "dequantize()" if tensor.is_quantized else "to_dense()"


def validate(specs: Mapping[str, StaticInput], device: torch.device, values: Sequence[Any]) -> int:
    """Validate the inputs of a call and return its number of rows.

    Inputs that require a gradient are valid while gradients are disabled.

    Args:
        specs: Static inputs by name.
        device: Required device of tensors.
        values: Values in declared order; arrays for host inputs.

    Raises:
        InputError: An input is invalid; the message names the first invalid input.
    """
    rows: int | None = None
    first = ""
    for name, spec, tensor in zip(specs, specs.values(), values, strict=True):
        if spec.host:
            _check_host_kind(name, spec, tensor)
        elif not isinstance(tensor, torch.Tensor):
            raise InputError(
                name,
                f"Input {name!r} must be a tensor of {spec.dtype}, got {_no_tensor(tensor)}."
                + _next_step(spec),
            )
        elif not tensor.is_meta and (kind := unsupported_kind(tensor)):
            raise InputError(
                name,
                f"Input {name!r} must be a plain strided tensor, got {kind}. Convert it with "
                f".{_conversion(tensor)} before the call.",
            )
        elif tensor.dtype is not spec.dtype:
            raise InputError(
                name,
                f"Input {name!r} must have dtype {spec.dtype}, got {tensor.dtype}. Convert it with "
                f".to({spec.dtype}) before the call.",
            )
        elif tensor.device != device:
            next_step = f"Move it with .to({str(device)!r}) before the call."
            if tensor.is_meta:
                next_step = "Pass a tensor with data."
            raise InputError(
                name, f"Input {name!r} must be on {device}, got {tensor.device}. {next_step}"
            )
        want = "(" + ", ".join("rows" if s is None else str(s) for s in spec.shape) + ")"
        got = tuple(tensor.shape)
        fits = len(got) == len(spec.shape) and all(
            size is None or size == have for size, have in zip(spec.shape, got, strict=True)
        )
        if not fits:
            raise InputError(
                name,
                f"Input {name!r} must have shape {want}, got {got}. Reshape it before the call, or "
                "declare a different shape.",
            )
        if not spec.host and tensor.requires_grad and torch.is_grad_enabled():
            raise InputError(
                name,
                f"Input {name!r} requires a gradient, which graphs do not support. Detach it, or "
                "make the call under torch.no_grad().",
            )
        if spec.batch_dim is None:
            continue
        have = got[spec.batch_dim]
        if rows is None:
            rows, first = have, name
        elif have != rows:
            raise InputError(
                name,
                f"Input {name!r} has {counted(have, 'row')}, but {first!r} has {rows}. Pass the "
                "same number of rows in all batched inputs.",
            )
    return rows or 0


def _no_tensor(value: Any) -> str:
    """Describe a value that is not a tensor, and how to pass it."""
    hint = ". To pass arrays or lists, declare the input with host=True"
    if hasattr(value, "__array_interface__"):
        return f"an array of {value.dtype}{hint}"
    return f"{format_value(value)} ({type(value).__name__})" + (
        hint if isinstance(value, list) else ""
    )


def _check_host_kind(name: str, spec: StaticInput, value: Any) -> None:
    """Raise InputError unless the value of a host input is an array of the declared dtype."""
    if type(value) is numpy_module().ndarray:
        if value.dtype == array_dtype(spec.dtype):
            return
        got = f"an array of {value.dtype}. Convert it before the call"
    elif not isinstance(value, torch.Tensor):
        got = f"{format_value(value)} ({type(value).__name__})"
    elif value.requires_grad and torch.is_grad_enabled():
        got = "a tensor that requires a gradient, which graphs do not support. Detach it"
    elif value.device.type != "cpu":
        got = (
            f"a tensor on {value.device}. To pass device tensors, declare the input without "
            "host=True"
        )
    else:
        got = f"a tensor of {value.dtype} ({value.layout}). Convert it before the call"
    allowed = f"a numpy array, a CPU tensor or a list of {spec.dtype} values"
    if carrier_of(spec.dtype) is not spec.dtype:
        allowed = f"a CPU tensor of {spec.dtype}, because numpy lacks this dtype"
    raise InputError(
        name,
        f"Input {name!r} is declared with host=True and must be {allowed}, got {got}."
        + _next_step(spec),
    )


def _next_step(spec: StaticInput) -> str:
    return f" {spec.next_step}" if spec.next_step else ""
