"""Small changes that mutation testing makes to a module; `mutate.py` tests them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any

import attrs

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
}


@attrs.frozen
class Mutant:
    """A change to a module.

    Attributes:
        line: Line of the change.
        what: Description of the change.
        function: Qualified name and first line of the outermost function with the change; None if
            the change takes effect when the module is loaded.
        tree: Unchanged module.
        place: Index of the node, and index of the change of this node.
    """

    line: int
    what: str
    function: tuple[str, int] | None
    tree: ast.Module = attrs.field(repr=False)
    place: tuple[int, int]

    def make(self) -> ast.Module:
        """Return the changed module."""
        twin = copy.deepcopy(self.tree)
        index, number = self.place
        _changes(_places(twin)[index])[number][1]()
        return ast.fix_missing_locations(twin)


def mutants(tree: ast.Module) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    functions = dict(_functions(tree))
    for index, node in enumerate(_places(tree)):
        for number, (what, _) in enumerate(_changes(node)):
            line = getattr(node, "lineno", 0)
            yield Mutant(line, what, functions.get(id(node)), tree, (index, number))


def _functions(
    node: ast.AST, inside: tuple[str, ...] = ()
) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield the id of every node in a function's body, and the function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
            name = ".".join([*inside, child.name])
            for statement in child.body:
                for each in ast.walk(statement):
                    yield id(each), (name, first)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, (*inside, child.name))
        else:
            yield from _functions(child, inside)


def _places(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of a module in order, without annotations and f-strings."""
    left_alone: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            parts = [node.returns]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            parts = [node.annotation]
        elif isinstance(node, ast.JoinedStr) or _is_for_types(node):
            parts = [node]
        for part in parts:
            if part is not None:
                left_alone.update(map(id, ast.walk(part)))
    return [node for node in ast.walk(tree) if id(node) not in left_alone]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes(node: ast.AST) -> list[tuple[str, Any]]:
    """Return the possible changes of a node: (description, function that makes it)."""
    found: list[tuple[str, Any]] = []

    def change(what: str, name: str, value: Any) -> None:
        found.append((what, lambda: setattr(node, name, value)))

    match node:
        case ast.Compare():
            for number, operator in enumerate(node.ops):
                other = _COMPARISONS[type(operator)]
                ops = [*node.ops]
                ops[number] = other()
                change(f"{ast.unparse(node)}: {other.__name__}", "ops", ops)
        case ast.BoolOp():
            flipped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            change(f"{ast.unparse(node)}: {type(flipped).__name__}", "op", flipped)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            change(
                f"{ast.unparse(node)}: {_OPERATORS[type(node.op)].__name__}",
                "op",
                _OPERATORS[type(node.op)](),
            )
        case ast.Constant() if node.value is True or node.value is False:
            change(f"{node.value} -> {not node.value}", "value", not node.value)
        case ast.Constant() if type(node.value) is int:
            change(f"{node.value} -> {node.value + 1}", "value", node.value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            if not isinstance(node.test, (ast.Compare, ast.Constant)):
                negated = ast.UnaryOp(ast.Not(), node.test)
                change(f"not ({ast.unparse(node.test)})", "test", negated)
        case ast.Return() if node.value is not None and not _is_none(node.value):
            change(f"return None for {ast.unparse(node.value)}", "value", ast.Constant(None))
        case ast.Break():
            found.append(("break -> continue", lambda: _turn_into(node, ast.Continue())))
        case ast.Continue():
            found.append(("continue -> break", lambda: _turn_into(node, ast.Break())))
        case ast.Expr(value=ast.Call()) | ast.Raise():
            found.append((f"left out: {ast.unparse(node)}", lambda: _turn_into(node, ast.Pass())))
    return found


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _turn_into(node: ast.AST, other: ast.AST) -> None:
    other = ast.copy_location(other, node)
    node.__class__ = other.__class__  # type: ignore[assignment]
    for name in ("value", "exc", "cause"):
        node.__dict__.pop(name, None)
