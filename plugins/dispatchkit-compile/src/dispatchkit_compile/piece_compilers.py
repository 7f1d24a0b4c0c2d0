"""Compilers of graph pieces, applied before capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import fx

__all__ = ["PieceCompiler", "piece_compiler"]

PieceCompiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def piece_compiler(compiler: Any) -> PieceCompiler | None:
    """Return the compiler selected by the option ``piece_compiler``."""
    if not isinstance(compiler, str):
        return cast("PieceCompiler | None", compiler)
    if compiler == "inductor":
        return _compile_with_inductor
    from torch._dynamo import lookup_backend

    return cast("PieceCompiler", lookup_backend(compiler))


def _compile_with_inductor(piece: fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
    """Return a piece compiled by inductor for dynamic shapes."""
    from torch._inductor import standalone_compile

    compiled: Callable[..., Any] = standalone_compile(piece, fakes, dynamic_shapes="from_graph")
    return compiled
