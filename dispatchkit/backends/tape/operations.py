"""Run operations; find the arguments that they write, and their ``out=`` variants."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dispatchkit.backends.tape.steps import LAUNCH_KEYS
from dispatchkit.backends.watching.dispatch_mode import tensors_in
from dispatchkit.backends.watching.host_sync import run_composite

_Tensor = torch.Tensor
_Guard = torch._C._ExcludeDispatchKeyGuard

# Arguments that operations write although their schemas do not mark them as written.
_UNMARKED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm": ("running_mean", "running_var"),
}


def is_written_in_python(func: Any) -> bool:
    """Return whether an operation is a custom operator whose CPU kernel is a Python function."""
    if func.namespace in ("aten", "prims"):
        return False
    name = func._schema.name
    if name in torch._library.custom_ops.OPDEFS:
        return True
    base = name.split("::")[1]
    overload = func._schema.overload_name
    names = {f"{func.namespace}/{base}", f"{func.namespace}/{base}.{overload}"}
    return any(
        f"{full}/{key}" in torch.library._impls
        for full in names
        for key in ("CPU", "CompositeExplicitAutograd")
    )


def run_parts(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite operation so that its component operations reach the mode.

    Custom operators written in Python are treated as composite, because otherwise each replay would
    run their Python code.

    Returns:
        The result, or NotImplemented if the operation is not composite.
    """
    if is_written_in_python(func):
        with mode:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            return func.redispatch(keys, *args, **kwargs)
    return run_composite(mode, func, args, kwargs)


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments that an operation writes."""
    schema = func._schema
    unmarked = _UNMARKED_WRITES.get(schema.name, ())
    if not (schema.is_mutable or unmarked):
        return []
    written: list[torch.Tensor] = []
    for position, argument in enumerate(schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or argument.name in unmarked:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += tensors_in((value,))
    return written


def run_step(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run an operation, and return the called function and its result.

    In-place operations are called through torch's public method or function if possible, which
    takes a third of the time of calling the operator object. If torch rejects the arguments, it
    does so before the operation runs, so the operator object can be called instead.
    """
    name = func._schema.name.split("::")[1]
    if func.namespace == "aten" and name.endswith("_") and not kwargs and args:
        public = getattr(_Tensor if isinstance(args[0], _Tensor) else torch, name, None)
        if public is not None:
            try:
                with _Guard(LAUNCH_KEYS):
                    result = public(*args)
                return public, result if func._schema.returns else None
            except TypeError:
                pass  # for example, because an index of index_put_ is None
    return func, func(*args, **kwargs)


def writing_call(
    func: Any, args: Any, kwargs: Any, fresh: list[tuple[int, torch.Tensor]]
) -> tuple[Any, list[str], tuple[str, ...]]:
    """Find an operation's out variant, which writes the results to out arguments.

    Candidates are tried with the existing results as out arguments, which recomputes the results.

    Returns:
        The function to call, the names of the keyword arguments to pass, and the names of the out
        arguments. If there are no out arguments, the caller must copy the results.
    """
    overload, names = _out_overload(func)
    if overload is None or len(fresh) != len(names):
        return func, list(kwargs), ()
    # The out variant takes dtype, device and layout from the out argument.
    taken = {argument.name for argument in overload._schema.arguments}
    kept = [key for key in kwargs if key in taken]
    keyword_arguments = {key: kwargs[key] for key in kept}
    keyword_arguments |= dict(zip(names, (tensor for _, tensor in fresh), strict=True))
    candidates = [overload]
    public = getattr(torch, func._schema.name.split("::")[1], None)
    if public is not None and names == ("out",):
        candidates.insert(0, public)
    for candidate in candidates:
        try:
            with _Guard(LAUNCH_KEYS):
                candidate(*args, **keyword_arguments)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # unsupported arguments; try the next candidate
        return candidate, kept, names
    return func, list(kwargs), ()


_out_overloads: dict[Any, tuple[Any, tuple[str, ...]]] = {}


def _out_overload(func: Any) -> tuple[Any, tuple[str, ...]]:
    """Return an operation's out variant and the names of its out arguments, or (None, ())."""
    found = _out_overloads.get(func)
    if found is None:
        found = _out_overloads[func] = _find_out_overload(func)
    return found


def _find_out_overload(func: Any) -> tuple[Any, tuple[str, ...]]:
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    dropped = ("dtype", "layout", "device", "pin_memory")
    for name in func.overloadpacket.overloads():
        candidate = getattr(func.overloadpacket, name)
        arguments = candidate._schema.arguments
        out = tuple(argument.name for argument in arguments if argument.is_out)
        rest = [
            (argument.name, str(argument.type)) for argument in arguments if not argument.is_out
        ]
        alike = rest in (wanted, [pair for pair in wanted if pair[0] not in dropped])
        if out and alike and len(out) == len(func._schema.returns):
            return candidate, out
    return None, ()
