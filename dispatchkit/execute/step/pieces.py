"""The step of a runner: a callable, or a list of pieces marked as graph or eager pieces.

Each piece receives the static inputs in its signature as keyword arguments. Every piece but the
first also receives the result of the previous piece as its first argument. In FULL, one graph
contains all pieces. In PIECEWISE, each graph piece has its own graph, and eager pieces run between
the graphs, on padded tensors. In NONE, all pieces run eager at the exact size.
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
        fn: Function that the piece calls.
        is_graph: Whether PIECEWISE captures the piece; if not, the piece runs eager there.
        names: Static inputs that the piece receives as keyword arguments.
        support: Batches for which the piece may be captured inside a FULL graph.
        limited_by: Name of what limits ``support``, such as an operator; empty if nothing does.
    """

    fn: Callable[..., Any]
    is_graph: bool
    names: tuple[str, ...] = ()
    support: AttentionSupport = AttentionSupport.ALWAYS
    limited_by: str = ""

    @property
    def name(self) -> str:
        """The name of the function or class, for messages."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def pick(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that this piece receives."""
        return {name: inputs[name] for name in self.names}


@attrs.frozen
class SlotPiece(Piece):
    """A piece that receives the rows of the step's slots.

    Attributes:
        slots: Name of the input that contains the slots.
        rows_of: Function that returns the rows, given the slots.
    """

    slots: str = ""
    rows_of: Callable[[torch.Tensor], Any] = attrs.field(kw_only=True)

    def pick(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that this piece receives, with the slots replaced by their rows."""
        given = super().pick(inputs)
        given[self.slots] = self.rows_of(given[self.slots])
        return given


def graph_piece(fn: Callable[..., Any]) -> Piece:
    """Mark a function as a graph piece, which PIECEWISE captures in a separate graph."""
    return Piece(fn, is_graph=True)


def eager_piece(
    fn: Callable[..., Any], *, support: AttentionSupport | str = AttentionSupport.ALWAYS
) -> Piece:
    """Mark a function, such as attention, as an eager piece, which runs eager in PIECEWISE.

    Args:
        fn: Function to mark.
        support: Batches for which the piece may be captured inside a FULL graph.

    Raises:
        UnknownNameError: ``support`` is not the name of an ``AttentionSupport``.
    """
    level = AttentionSupport.parse(support)
    piece = Piece(fn, is_graph=False, support=level)
    return attrs.evolve(piece, limited_by="" if level is AttentionSupport.ALWAYS else piece.name)


class Step:
    """The step of a runner: its pieces, and the inputs that each piece receives.

    Args:
        step: Function, module, or list of marked pieces.
        names: Names of the static inputs.
        row_count: Name of the input that contains the number of real rows; not one of ``names``.
        axes: Names of axes, which the step may omit from its signature.
        in_segments: Whether a step that is not a list is captured in segments in PIECEWISE.
        slots: Name of the input that contains the slots, and a function that returns their rows.

    Attributes:
        in_segments: Whether the step is captured in segments.
        can_split: Whether the step can run in PIECEWISE mode.

    Raises:
        ConfigError: The list is empty or has no graph piece, a piece is not marked or needs an
            undeclared input, an input is unused, or ``row_count`` is one of the other names.
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
                "The runner passes the number of rows under this name. Choose another name, or "
                "remove the declared input or axis.",
            )
        if not given:
            raise ConfigError("step", step, "a callable, or a list with at least one piece")
        for index, piece in enumerate(given):
            if not isinstance(piece, Piece):
                raise ConfigError(
                    f"step[{index}]", piece, "marked with graph_piece(fn) or eager_piece(fn)"
                )
        if is_list and not any(piece.is_graph for piece in given):
            hint = "Use graph_piece(fn) for the pieces that may be captured."
            raise ConfigError("step", step, "a list with at least one graph_piece", hint)
        self.pieces: tuple[Piece, ...] = tuple(
            attrs.evolve(
                piece,
                names=_accepted_names(
                    piece,
                    [*known, *axes],
                    setting=f"step[{index}]" if is_list else "step",
                    is_first=index == 0,
                ),
            )
            for index, piece in enumerate(given)
        )
        if slots is not None:
            self.pieces = tuple(_with_rows(piece, *slots) for piece in self.pieces)
        taken = {name for piece in self.pieces for name in piece.names}
        idle = [name for name in known if name not in taken]
        if row_count in idle:
            raise ConfigError(
                "row_count",
                row_count,
                "a parameter of the step",
                "Add this parameter to the step, or omit row_count.",
            )
        if idle:
            them = "it" if len(idle) == 1 else "them"
            raise ConfigError(
                "inputs",
                idle,
                "parameters of the step",
                f"Remove {them} from the inputs, or add {them} to the parameters of the step.",
            )

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that the pieces refer to, including pieces that are modules."""
        found = [module for piece in self.pieces for module in held_modules(piece.fn)]
        return list({id(module): module for module in found}.values())

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run all pieces eager, in order."""
        first, *rest = self.pieces
        value = first.fn(**first.pick(inputs))
        for piece in rest:
            value = piece.fn(value, **piece.pick(inputs))
        return value


def _with_rows(piece: Piece, slots: str, rows_of: Callable[[torch.Tensor], Any]) -> Piece:
    """Return a ``SlotPiece`` if a piece receives the slots, otherwise the piece itself."""
    if slots not in piece.names:
        return piece
    return SlotPiece(**attrs.asdict(piece, recurse=False), slots=slots, rows_of=rows_of)


def _accepted_names(
    piece: Piece, known: Sequence[str], *, setting: str, is_first: bool
) -> tuple[str, ...]:
    """Return the known names that a piece accepts as keyword arguments."""
    fn = piece.fn
    if not callable(fn):
        raise ConfigError(setting, fn, "callable")
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
                "a function whose first parameter receives the result of the previous piece",
            )
        if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            parameters = parameters[1:]
    positional = [
        one.name
        for one in parameters
        if one.kind is inspect.Parameter.POSITIONAL_ONLY and one.default is inspect.Parameter.empty
    ]
    if positional:
        names = ", ".join(positional if is_first else ["value", *positional])
        raise ConfigError(
            f"parameters of {piece.name!r}",
            str(signature),
            "accepted by keyword",
            f"Inputs are passed by keyword, so wrap the function as `lambda {names}: fn({names})`.",
        )
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return tuple(known)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    usable = {one.name for one in parameters if one.kind in by_keyword}
    missing = [
        one.name
        for one in parameters
        if one.default is inspect.Parameter.empty
        and one.kind is not inspect.Parameter.VAR_POSITIONAL
        and one.name not in known
    ]
    if missing:
        raise ConfigError(
            "inputs",
            list(known),
            f"declared for each required parameter of {piece.name!r}",
            f"Also declare: {', '.join(missing)}.",
        )
    return tuple(name for name in known if name in usable)
