"""Mutation testing of what decides: change one thing, see whether a test notices.

    python scripts/mutate.py --every 5 --results mutants.jsonl

Every mutant is one small change to one file of dispatch/, registry/ or keys/ (a comparison, a
constant, a condition, an operator, a return, a statement left out). The tests of the three rooms
run on it in a process of their own, forked from one that has pytest loaded already, and stop at
the first failure. Nothing is written into the source. What survives is a missing test, or a
change that no caller can see: docs/reference/mutation.md lists those, each with the reason.

An own mutator, since the published ones start pytest anew for each mutant or rewrite the
checkout, and then want hours for what this does in minutes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib.abc
import importlib.util
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("keys", "registry", "dispatch")
#: The tests of the file itself come first, since most mutants die there; then all of these.
OWN = {
    "batch": "tests/keys/test_batch.py",
    "capture_sizes": "tests/keys/test_capture_sizes.py",
    "config": "tests/keys/test_config.py",
    "modes": "tests/keys/test_modes.py",
    "entry": "tests/registry",
    "registry": "tests/registry",
}
DISPATCHER = "tests/dispatch/test_dispatcher.py"
ALL = ("tests/keys", "tests/registry", "tests/dispatch", "tests/testing/test_policy_kit.py")
#: Slow here, and each with a quicker test of the same promise.
LEFT_OUT = ("test_hundred_thousand_keys", "another_process", "loads_no_torch")
SECONDS = 120

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


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], ast.Module]]]:
    """Yield every mutant of a module as (line, what was changed, function that makes it)."""

    def make(index: int, number: int) -> ast.Module:
        twin = copy.deepcopy(tree)
        _changes(_places(twin)[index])[number][1]()
        return ast.fix_missing_locations(twin)

    for index, node in enumerate(_places(tree)):
        for number, (what, _) in enumerate(_changes(node)):
            yield getattr(node, "lineno", 0), what, functools.partial(make, index, number)


def _places(tree: ast.Module) -> list[ast.AST]:
    """The nodes of a module in order, without annotations and texts: no test is about those."""
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
    """The changes that can be made in place to a node: (words, function that makes it)."""
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


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed tree, and everything else as always."""

    def __init__(self, module: str, path: Path, tree: ast.Module) -> None:
        self.module, self.path, self.tree = module, path, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        packages = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=packages
        )
        return spec

    def exec_module(self, module: Any) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)  # noqa: S102 - its task


def survives(
    module: str, path: Path, tree: ast.Module, tests: tuple[str, ...], *, verbose: bool = False
) -> str:
    """Run tests on a mutant in a fork: "killed", "survived" or "timeout"."""
    import pytest

    child = os.fork()
    if child == 0:
        if not verbose:
            with open(os.devnull, "w") as nothing:  # noqa: PTH123 - a descriptor is wanted
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
        # Of the processor, not of the clock: a busy machine kills no mutant.
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        code = 1
        try:
            sys.meta_path.insert(0, _Finder(module, path, tree))
            deselect = " and ".join(f"not {name}" for name in LEFT_OUT)
            code = int(
                pytest.main(
                    [
                        "-x",
                        "-q",
                        "-p",
                        "no:cacheprovider",
                        "-p",
                        "no:xdist",
                        "-p",
                        "no:timeout",
                        "-W",
                        "ignore::pytest.PytestAssertRewriteWarning",
                        "-m",
                        "not slow and not gpu",
                        "-k",
                        deselect,
                        *tests,
                    ]
                )
            )
        except BaseException:  # noqa: BLE001 - told, and the fork ends
            traceback.print_exc()
            code = int(pytest.ExitCode.INTERNAL_ERROR)
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "timeout"
    code = os.WEXITSTATUS(status)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        raise SystemExit(f"pytest ended with {pytest.ExitCode(code)!r} on {path}.")
    return "survived" if code == 0 else "killed"


def main() -> None:
    """Make every mutant asked for, test it, write one line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="take each n-th mutant only")
    parser.add_argument("--start", type=int, default=0, help="begin with this one")
    parser.add_argument("--only", default="", help="files whose path holds this text")
    parser.add_argument("--results", type=Path, help="file that gets a JSON line for each")
    parser.add_argument("--again", action="store_true", help="repeat the survivors in --results")
    parser.add_argument("--trusted", action="store_true", help="do not run the tests as they are")
    parser.add_argument("--count", action="store_true", help="say how many there are, and stop")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))  # this checkout, wherever an installed one lies
    import hypothesis.stateful  # loaded once, for every fork
    import pytest  # noqa: F401

    # The first failure is enough: nothing is shrunk.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=20,
        phases=phases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"

    results: dict[str, dict[str, Any]] = {}
    if chosen.results is not None and chosen.results.exists():
        for line in chosen.results.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            results[entry["id"]] = entry
    number = 0
    if not chosen.count and not chosen.trusted:
        path = ROOT / "dispatchkit" / "keys" / "batch.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if survives("dispatchkit.keys.batch", path, tree, ALL, verbose=True) != "survived":
            raise SystemExit("The tests fail without any mutant: nothing can be said.")
    for room in ROOMS:
        for path in sorted((ROOT / "dispatchkit" / room).glob("*.py")):
            relative = path.relative_to(ROOT)
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            seen: dict[str, int] = {}
            for line, what, make in mutants(ast.parse(path.read_text(encoding="utf-8"))):
                number += 1
                if chosen.only not in str(relative) or (number - chosen.start) % chosen.every:
                    continue
                # Named by its words, not its line: results outlive edits elsewhere in a file.
                seen[what] = seen.get(what, -1) + 1
                name = f"{relative}: {what} #{seen[what]}"
                before = results.get(name)
                if chosen.count:
                    continue
                if before is not None and not (chosen.again and before["result"] == "survived"):
                    continue
                start, tree = time.monotonic(), make()
                result = survives(module, path, tree, (OWN.get(path.stem, DISPATCHER),))
                if result == "survived":
                    result = survives(module, path, tree, ALL)
                entry = {
                    "id": name,
                    "line": line,
                    "result": result,
                    "seconds": round(time.monotonic() - start, 1),
                }
                results[name] = entry
                if chosen.results is not None:
                    with chosen.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(entry) + "\n")
                if entry["result"] != "killed":
                    print(f"{relative}:{line}: {entry['result']}: {what}", flush=True)
    counts = [entry["result"] for entry in results.values()]
    told = ", ".join(f"{counts.count(each)} {each}" for each in sorted(set(counts)))
    print(f"{number} mutants in all; tested: {told or 'none'}")


if __name__ == "__main__":
    main()
