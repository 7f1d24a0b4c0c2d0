"""Split models into graph and eager pieces, directly or in a ``torch.compile`` backend.

Names are imported on first use, so importing this package does not import Dynamo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.lazy import lazy_names

if TYPE_CHECKING:
    from dispatchkit_compile.facts import BatchFacts, batch_facts
    from dispatchkit_compile.rules import SplitRules
    from dispatchkit_compile.split import split_module
    from dispatchkit_compile.torch_compile import (
        Backend,
        CompiledGraph,
        CompiledModel,
        CompiledStats,
        CompileOptions,
        PlainReason,
        backend,
        compile,  # noqa: A004 - named like torch.compile
        compiled_graphs,
    )

__version__ = "0.1.0"

_LAZY_NAMES = {
    "Backend": "torch_compile",
    "BatchFacts": "facts",
    "CompileOptions": "torch_compile",
    "CompiledGraph": "torch_compile",
    "CompiledModel": "torch_compile",
    "CompiledStats": "torch_compile",
    "PlainReason": "torch_compile",
    "SplitRules": "rules",
    "backend": "torch_compile",
    "batch_facts": "facts",
    "compile": "torch_compile",
    "compiled_graphs": "torch_compile",
    "split_module": "split",
}

__all__ = [
    "Backend",
    "BatchFacts",
    "CompileOptions",
    "CompiledGraph",
    "CompiledModel",
    "CompiledStats",
    "PlainReason",
    "SplitRules",
    "backend",
    "batch_facts",
    "compile",
    "compiled_graphs",
    "split_module",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY_NAMES)
