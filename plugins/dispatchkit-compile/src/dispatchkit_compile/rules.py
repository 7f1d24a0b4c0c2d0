"""Rules that select the operators, modules and functions to split a step at."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import CustomOpDef

from dispatchkit.errors import ConfigError, UnknownNameError, nearest_names
from dispatchkit.execute import limited_support
from dispatchkit.keys import AttentionSupport

__all__ = ["SplitRules", "function_name", "node_support", "op_name"]


_KINDS = "operators, module paths, module classes and functions"


class SplitRules:
    """Rules that select the operations to run eager between graphs.

    Args:
        at: Operators, module classes and functions, as objects or names, and paths of modules.

    Attributes:
        given: The rules that were passed as ``at``.

    Raises:
        ConfigError: A rule is not an operator, module path, module class or function.
    """

    def __init__(self, at: Iterable[Any] = ()) -> None:
        if isinstance(at, str) or not isinstance(at, Iterable):
            raise ConfigError("at", at, f"a list of {_KINDS}")
        self.given: tuple[Any, ...] = tuple(at)
        self._rules = [_rule(one, index) for index, one in enumerate(self.given)]
        self._used: set[int] = set()

    def match(self, node: fx.Node) -> bool:
        """Return whether an operation must run eager."""
        found = False
        for index, rule in enumerate(self._rules):
            if rule(node):
                self._used.add(index)
                found = True
        return found or node_support(node)[0] < AttentionSupport.ALWAYS

    def require_all_used(self, graph: fx.GraphModule) -> None:
        """Check that every rule matched an operation.

        Raises:
            UnknownNameError: A rule is a name, but neither a torch operator nor a module or
                function of the step has this name; the error suggests similar names.
            ConfigError: A rule is an object or the name of a torch operator, but no operation of
                the step matches the rule.
        """
        for index, one in enumerate(self.given):
            if index in self._used:
                continue
            names = _names_in(graph)
            if isinstance(one, str) and not ("::" in one and _op_exists(one)):
                near = nearest_names(one, torch._C._dispatch_get_all_op_names())
                near += nearest_names(one, filter(None, map(function_name, graph.graph.nodes)))
                raise UnknownNameError("split point", one, {*names, *near})
            found = ", ".join(sorted(names)) or "only torch operators"
            raise ConfigError(
                "at",
                str(one),
                "operations of the step",
                f"Remove the rule. The step contains {found}.",
                message=f"No operation of the step matches the rule {str(one)!r} of `at`.",
            )


def op_name(node: fx.Node) -> str | None:
    """Return the qualified name of a node's operator, or None if the node calls no operator."""
    target = node.target
    # Graphs of Dynamo contain overload packets; graphs of other tracers contain overloads.
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    return None


def node_support(node: fx.Node) -> tuple[AttentionSupport, str]:
    """Return the support level of a node, and the operator or module class that limits it."""
    name = op_name(node)
    found = limited_support(name, [kind for _, kind in _modules_of(node)])
    return found if found is not None else (AttentionSupport.ALWAYS, "")


def _rule(one: Any, index: int) -> Callable[[fx.Node], bool]:
    if isinstance(one, str):
        if "::" in one:
            wanted = one.strip()
            return lambda node: op_name(node) in (wanted, wanted.rpartition(".")[0] or wanted)
        return lambda node: (
            function_name(node) == one
            or any(
                _path_fits(path, one) or kind.__name__ == one for path, kind in _modules_of(node)
            )
        )
    if isinstance(one, torch._ops.OpOverloadPacket):
        return lambda node: op_name(node) == one._qualified_op_name
    if isinstance(one, torch._ops.OpOverload):
        return lambda node: op_name(node) == one._schema.name
    if isinstance(one, CustomOpDef):
        return lambda node: op_name(node) == one._qualname
    if isinstance(one, type) and issubclass(one, torch.nn.Module):
        return lambda node: any(issubclass(kind, one) for _, kind in _modules_of(node))
    if callable(one) and not isinstance(one, (type, torch.nn.Module)):
        return lambda node: node.target is one
    raise ConfigError(
        f"at[{index}]",
        one,
        "an operator, a module path, a module class or a function",
        "Pass a module as its path in the model, such as 'layers.*.attention'.",
    )


def function_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _path_fits(path: str, pattern: str) -> bool:
    words = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(words[start:]), pattern) for start in range(len(words)))


_ROOT = re.compile(r"^[A-Z]\['[^']*'\]\.?")
_MEMBER = re.compile(r"\['?([^'\]]+)'?\]")


def _modules_of(node: fx.Node) -> Iterator[tuple[str, type]]:
    """Yield the path and class of each module that contains a node, outermost first."""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        if isinstance(kind, type):
            plain = _ROOT.sub("", str(path)).replace("._modules", "")
            yield _MEMBER.sub(r".\1", plain).lstrip("."), kind


def _op_exists(name: str) -> bool:
    known = torch._C._dispatch_get_all_op_names()
    return name in known or any(one.startswith(name + ".") for one in known)


def _names_in(graph: fx.GraphModule) -> set[str]:
    """Return the names of the custom operators and modules in a graph."""
    names: set[str] = set()
    for node in graph.graph.nodes:
        name = op_name(node)
        if name is not None and not name.startswith(("aten::", "dispatchkit::")):
            names.add(name)
        names |= {path for path, _ in _modules_of(node) if path}
    return names
