"""The step: one function, or a list of pieces each marked graph or eager.

The first piece is called with the static inputs in its signature, as keywords; a later piece is
called with the previous piece's result and the static inputs in its signature. In FULL, the
composition is one graph. In PIECEWISE, each graph piece is a separate graph, and each eager piece
runs between them, on padded tensors. In NONE, everything runs eager at the exact size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.errors import ConfigError
from dispatchkit.execute.step.modules import held_modules
from dispatchkit.keys.modes import AttentionSupport


@attrs.frozen
class Piece:
    """One part of a step.

    Attributes:
        fn: The function.
        is_graph: It may be captured; otherwise it always runs eager.
        names: Static inputs that it gets as keywords.
        support: The batches for which it may be captured inside a FULL graph.
        limited_by: The operator or module that limits these batches.
    """

    fn: Callable[..., Any]
    is_graph: bool
    names: tuple[str, ...] = ()
    support: AttentionSupport = AttentionSupport.ALWAYS
    limited_by: str = ""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def pick(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that this piece gets."""
        return {name: inputs[name] for name in self.names}


@attrs.frozen
class SlotPiece(Piece):
    """A part of a step that gets the rows of its slots.

    Attributes:
        slots: The input of slots.
        rows_of: Returns the value that replaces it.
    """

    slots: str = ""
    rows_of: Callable[[torch.Tensor], Any] = attrs.field(kw_only=True)

    def pick(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that this piece gets, with rows instead of slots."""
        given = super().pick(inputs)
        given[self.slots] = self.rows_of(given[self.slots])
        return given


def graph_piece(fn: Callable[..., Any]) -> Piece:
    """Mark a part of a step that may be captured."""
    return Piece(fn, is_graph=True)


def eager_piece(
    fn: Callable[..., Any], *, support: AttentionSupport | str = AttentionSupport.ALWAYS
) -> Piece:
    """Mark a part of a step that is never captured in PIECEWISE, such as attention.

    Args:
        fn: The function.
        support: The batches for which it may be captured inside a FULL graph.

    Raises:
        UnknownNameError: There is no level of support of that name.
    """
    level = AttentionSupport.parse(support)
    piece = Piece(fn, is_graph=False, support=level)
    return attrs.evolve(piece, limited_by="" if level is AttentionSupport.ALWAYS else piece.name)


class Step:
    """A runner's step: pieces with the inputs that each takes.

    Args:
        step: A function, a module, or a list of marked pieces.
        names: Static inputs by name.
        row_count: Name of the input that tells the true row count; not among ``names``.
        axes: Names of axes; the step need not take them.
        in_segments: A step that is not a list is captured in segments in PIECEWISE.
        slots: The input of slots, and a function that returns the step's rows.

    Attributes:
        in_segments: It is captured in segments.
        can_split: It can run in PIECEWISE.

    Raises:
        ConfigError: A piece is not marked, needs an undeclared input, or an input is not used by
            any piece.
    """

    def __init__(
        self,
        step: Any,
        names: Sequence[str],
        row_count: str | None = None,
        axes: Sequence[str] = (),
        *,
        in_segments: bool = False,
        slots: tuple[str, Callable[[torch.Tensor], Any]] | None = None,
    ) -> None:
        is_list = isinstance(step, (list, tuple))
        self.in_segments: bool = in_segments and not is_list
        self.can_split: bool = is_list or in_segments
        given = list(step) if is_list else [graph_piece(step)]
        known = [*names, *([row_count] if row_count else [])]
        if row_count in (*names, *axes):
            raise ConfigError(
                "row_count",
                row_count,
                "a name that no input or axis has",
                "The runner provides it itself, so an input of this name would never reach the "
                "step.",
            )
        if not given:
            raise ConfigError("step", step, "a function or a list of at least one piece")
        for index, piece in enumerate(given):
            if not isinstance(piece, Piece):
                raise ConfigError(
                    f"step[{index}]", piece, "marked: graph_piece(fn) or eager_piece(fn)"
                )
        if is_list and not any(piece.is_graph for piece in given):
            raise ConfigError("step", step, "a list with at least one graph_piece")
        self.pieces: tuple[Piece, ...] = tuple(
            attrs.evolve(piece, names=_names_taken(piece, [*known, *axes], is_first=index == 0))
            for index, piece in enumerate(given)
        )
        if slots is not None:
            self.pieces = tuple(_given_rows(piece, *slots) for piece in self.pieces)
        taken = {name for piece in self.pieces for name in piece.names}
        idle = [name for name in known if name not in taken]
        if idle:
            raise ConfigError(
                "inputs",
                idle,
                "named by the step's signature",
                f"It takes: {', '.join(sorted(taken)) or 'none'}.",
            )

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Modules that are pieces, own pieces as methods, or are named in their code."""
        found = [module for piece in self.pieces for module in held_modules(piece.fn)]
        return list({id(module): module for module in found}.values())

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run all pieces eager, in order."""
        first, *rest = self.pieces
        value = first.fn(**first.pick(inputs))
        for piece in rest:
            value = piece.fn(value, **piece.pick(inputs))
        return value


def _given_rows(piece: Piece, slots: str, rows_of: Callable[[torch.Tensor], Any]) -> Piece:
    """Return a piece that gets the rows of its slots, if it takes them."""
    if slots not in piece.names:
        return piece
    return SlotPiece(**attrs.asdict(piece, recurse=False), slots=slots, rows_of=rows_of)


def _names_taken(piece: Piece, known: Sequence[str], *, is_first: bool) -> tuple[str, ...]:
    """Return the known names in a piece's signature."""
    fn = piece.fn
    if not callable(fn):
        raise ConfigError("step", fn, "callable")
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        return tuple(known) if is_first else ()  # a builtin without a signature
    parameters = list(signature.parameters.values())
    if not is_first:
        if not parameters or parameters[0].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise ConfigError(
                f"piece {piece.name!r}",
                str(signature),
                "a function whose first parameter is the previous piece's result",
            )
        if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            parameters = parameters[1:]
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return tuple(known)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    usable = {one.name for one in parameters if one.kind in by_keyword}
    required = [
        one.name
        for one in parameters
        if one.default is inspect.Parameter.empty
        and one.kind is not inspect.Parameter.VAR_POSITIONAL
        and not (one.kind in by_keyword and one.name in known)
    ]
    if required:
        raise ConfigError(
            "inputs",
            list(known),
            f"declared for every parameter that {piece.name!r} needs; missing: "
            f"{', '.join(required)}",
        )
    return tuple(name for name in known if name in usable)
