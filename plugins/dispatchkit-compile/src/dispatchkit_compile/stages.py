"""The callable of one piece of a split step."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_unflatten

from dispatchkit.execute import declare_bookkeeping

from dispatchkit_compile.rules import function_name, op_name
from dispatchkit_compile.tracing import Input, Role, Size

__all__ = ["COMPILED_CODE", "Stage", "source_of"]

#: Location reported if a compiled piece raises, because the failed operation is unknown.
COMPILED_CODE = "the compiled code"


def source_of(role: Role) -> tuple[str, Any]:
    """Return the source from which a piece reads an argument of the graph."""
    if isinstance(role, Input):
        return "input", role.name
    if isinstance(role, Size):
        return "size", (role.name, role.dim)
    return "held", role.index


@declare_bookkeeping
class Stage:
    """The callable of a piece.

    It gathers the arguments, runs the operations, and returns the values that later pieces need, or
    the step's result if it is the last piece.

    Args:
        name: Name of the piece in messages.
        module: The operations of the piece.
        run: The operations as a callable, compiled or not.
        held: List from which the piece reads weights, buffers and caches in each run.
        is_first: Whether this is the first piece, which receives no values from another piece.

    Attributes:
        arguments: The source of each argument of ``run``.
        returns: The source of each returned value.
        spec: The structure of the step's result in the last piece; None in other pieces.
        unused_inputs: Inputs of the step that no piece reads; the first piece accepts them.
        failed_at: The operation that raised last, with its line in the user's code; empty if none
            raised.
    """

    module: torch.fx.GraphModule
    run: Callable[..., Any]
    held: list[torch.Tensor]

    def __init__(
        self,
        name: str,
        module: fx.GraphModule,
        run: Callable[..., Any],
        held: list[torch.Tensor],
        *,
        is_first: bool,
    ) -> None:
        self.__name__ = name
        self.module, self.run, self.held, self._is_first = module, run, held, is_first
        self.arguments: list[tuple[str, Any]] = []
        self.returns: list[tuple[str, Any]] = []
        self.spec: Any = None
        self.unused_inputs: tuple[str, ...] = ()
        self.failed_at: str = ""

    def inputs(self) -> list[str]:
        """Return the names of the step's inputs that this piece accepts."""
        names = dict.fromkeys(self.unused_inputs)
        for kind, what in (*self.arguments, *self.returns):
            if kind in ("input", "size"):
                names[what if kind == "input" else what[0]] = None
        return list(names)

    def set_signature(self) -> Stage:
        """Set ``__signature__``, from which the runner reads the parameters."""
        kinds = inspect.Parameter
        parameters = [] if self._is_first else [kinds("carried", kinds.POSITIONAL_ONLY)]
        parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in self.inputs()]
        self.__signature__: inspect.Signature = inspect.Signature(parameters)
        return self

    def __call__(self, carried: tuple[Any, ...] = (), /, **inputs: torch.Tensor) -> Any:
        """Run the piece on the previous piece's values and the step's inputs."""
        arguments = [self._value(kind, what, carried, (), inputs) for kind, what in self.arguments]
        try:
            made = self.run(*arguments)
        except Exception as error:
            self.failed_at = locate_error(error, self.module)
            error.add_note(f"In {self.__name__}: {self.failed_at}")
            raise
        values = [self._value(kind, what, carried, made, inputs) for kind, what in self.returns]
        return tuple(values) if self.spec is None else tree_unflatten(values, self.spec)

    def _value(
        self,
        kind: str,
        what: Any,
        carried: Sequence[Any],
        made: Sequence[Any],
        inputs: Mapping[str, torch.Tensor],
    ) -> Any:
        if kind == "carried":
            return carried[what]
        if kind == "made":
            return made[what]
        if kind == "held":
            return self.held[what]
        if kind == "input":
            return inputs[what]
        if kind == "size":
            return inputs[what[0]].shape[what[1]]
        return what

    def __repr__(self) -> str:
        return f"<piece {self.__name__}>"


def locate_error(error: BaseException, module: fx.GraphModule) -> str:
    """Return the operation at which a piece failed, with its line in the user's code."""
    code = getattr(module.forward, "__code__", None)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    if trace is None:
        return COMPILED_CODE
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
    name = line.partition(" ")[0].rstrip(":;")
    for node in module.graph.nodes:
        if node.name == name:
            stack = str(node.meta.get("stack_trace") or "").strip().splitlines()
            where = next((one.strip() for one in reversed(stack) if "File" in one), line)
            return f"{op_name(node) or function_name(node)} ({where})"
    return line
