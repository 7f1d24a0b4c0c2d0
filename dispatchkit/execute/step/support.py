"""Levels of capture support that operators and modules declare.

An attention kernel that reads lengths on the host can never be captured. A kernel that plans its
work on the host can be captured only for uniform batches. The level of an operator is declared
under the operator's name. A module class declares its level in the attribute ``cudagraph_support``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from dispatchkit.errors import ConfigError
from dispatchkit.execute.step.pieces import Piece
from dispatchkit.keys.modes import AttentionSupport, CUDAGraphMode, ModeResolution, resolve_mode

__all__ = [
    "ModeDowngradeWarning",
    "declare_support",
    "limited_support",
    "mode_for_pieces",
    "warn_of_downgrade",
]

_declared: dict[str, AttentionSupport] = {}


class ModeDowngradeWarning(RuntimeWarning):
    """The requested mode is not supported; a lower mode is used."""


def declare_support(op: Any, level: AttentionSupport | str) -> None:
    """Declare the batches for which an operator may run inside a captured graph.

    Models are split automatically at operators whose level is below ALWAYS.

    Args:
        op: Operator, or its qualified name such as ``"vllm::attention"``.
        level: ALWAYS, UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE or NEVER.

    Raises:
        ConfigError: ``op`` is neither an operator nor a qualified name.
        UnknownNameError: ``level`` is not the name of an ``AttentionSupport``.
    """
    _declared[_qualified_name(op)] = AttentionSupport.parse(level)


def breaking_names() -> frozenset[str]:
    """Return the qualified names of operators whose declared level is below ALWAYS."""
    always = AttentionSupport.ALWAYS
    return frozenset(name for name, level in _declared.items() if level is not always)


def limited_support(
    op: str | None, module_types: Iterable[type]
) -> tuple[AttentionSupport, str] | None:
    """Return the lowest level declared for an operator and its enclosing modules.

    Returns:
        The level and the name of the operator or class that declares it, or None if no level is
        declared.
    """
    found: list[tuple[AttentionSupport, str]] = []
    if op is not None and op in _declared:
        found.append((_declared[op], op))
    for kind in module_types:
        level = getattr(kind, "cudagraph_support", None)
        if level is not None:
            found.append((AttentionSupport.parse(level), kind.__name__))
    return min(found, default=None)


def mode_for_pieces(
    pieces: Iterable[Piece],
    mode: CUDAGraphMode | str = CUDAGraphMode.FULL_AND_PIECEWISE,
    *,
    query_len: int = 1,
    captures: bool = True,
) -> ModeResolution:
    """Return the supported mode that is closest to the requested mode.

    Args:
        pieces: All pieces of the step.
        mode: Requested mode.
        query_len: Tokens per request of a uniform decode batch.
        captures: Whether the backend can capture graphs.

    Raises:
        ConfigError: FULL is requested for mixed batches, but a piece cannot be captured.
    """
    pieces = list(pieces)
    asked = CUDAGraphMode.parse(mode)
    if not captures and asked is not CUDAGraphMode.NONE:
        return ModeResolution(
            CUDAGraphMode.NONE, (f"{asked} -> NONE: the backend does not capture graphs",)
        )
    level = min((piece.support for piece in pieces), default=AttentionSupport.ALWAYS)
    limits = {piece.limited_by or piece.name for piece in pieces if piece.support is level}
    return resolve_mode(
        asked,
        level,
        query_len=query_len,
        splits_attention=any(not piece.is_graph for piece in pieces),
        rounds_sizes=False,
        limited_by=", ".join(sorted(limits)),
    )


def warn_of_downgrade(resolution: ModeResolution) -> None:
    """Warn if the mode differs from the requested mode."""
    if resolution.reasons:
        text = (
            f"Mode {'; '.join(resolution.reasons)}. Set mode={str(resolution.mode)!r} to request "
            "the lower mode without this warning."
        )
        warnings.warn(text, ModeDowngradeWarning, stacklevel=3)


def _qualified_name(op: Any) -> str:
    if isinstance(op, str) and "::" in op:
        return op.strip()
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, torch._ops.OpOverload):
        return str(op._schema.name)
    if isinstance(op, CustomOpDef):
        return str(op._qualname)
    raise ConfigError("op", op, "an operator, or a name with a namespace, such as 'my::op'")
