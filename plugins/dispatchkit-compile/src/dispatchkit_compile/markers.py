"""Marks in a model's plain code that say where it is to be split; elsewhere they do nothing.

They are operators without arguments and results, so that a tracer notes where they were
called. Run eagerly, or compiled by something that does not know them, they vanish.
"""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["eager_region", "graph_break"]

# Held for the life of the process: an operator goes away with its library.
_LIBRARY = torch.library.Library("dispatchkit", "DEF")
for _name in ("graph_break", "eager_begin", "eager_end"):
    _LIBRARY.define(f"{_name}() -> ()")
    _LIBRARY.impl(_name, lambda: None, "CompositeExplicitAutograd")

#: Qualified names of the operators, as a traced graph has them.
BREAK = "dispatchkit::graph_break"
REGION_BEGIN = "dispatchkit::eager_begin"
REGION_END = "dispatchkit::eager_end"


def graph_break() -> None:
    """End a graph piece here and begin the next one; nothing runs eager for it."""
    torch.ops.dispatchkit.graph_break()


class eager_region:  # noqa: N801 - used like a statement: `with eager_region():`
    """Mark what a ``with`` block holds as a piece that runs eager between graphs.

    In FULL the block is part of the one graph, as everything is.
    """

    def __enter__(self) -> None:
        torch.ops.dispatchkit.eager_begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.ops.dispatchkit.eager_end()
