"""Mutation testing of what decides: change one thing, see whether a test notices.

    python scripts/mutate.py --sample 300 --results mutants.jsonl

Every mutant is one small change to one file of dispatch/, registry/ or keys/ (a comparison, a
constant, a condition, an operator, a return, a statement left out). The tests run once unchanged,
to learn which of them reach which function. Then each mutant gets a process of its own, forked
from one that has collected the tests already; there the function's code is exchanged, and the
tests that reach it run, the module's own first and the quick ones of those before the slow, until
one fails. What takes effect while modules are loaded is imported changed instead, and all
tests of the rooms run on it; so is what survived of functions that run while tests are collected.
Nothing is written into the source. What survives is a missing test, or a change that no caller can
see: docs/reference/mutation.md lists those, each with the reason.

An own mutator, since the published ones start pytest anew for each mutant or rewrite the
checkout, and then want hours for what this does in minutes.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import attrs
import hypothesis
import hypothesis.stateful  # loaded once, for every fork
import pytest
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "dispatchkit")
ROOMS = ("keys", "registry", "dispatch")
#: The tests of the file itself come first, since most mutants die there.
OWN = {
    "keys/axes.py": "tests/keys/test_axes.py",
    "keys/batch.py": "tests/keys/test_batch.py",
    "keys/capture_sizes.py": "tests/keys/test_capture_sizes.py",
    "keys/config.py": "tests/keys/test_config.py",
    "keys/modes.py": "tests/keys/test_modes.py",
    "registry/entry.py": "tests/registry/",
    "registry/registry.py": "tests/registry/",
    "dispatch/acceptance.py": "tests/dispatch/test_acceptance.py",
    "dispatch/axes.py": "tests/dispatch/test_axes.py",
    "dispatch/cells.py": "tests/dispatch/test_cells.py",
    "dispatch/decision.py": "tests/dispatch/test_decision.py",
    "dispatch/epochs.py": "tests/dispatch/test_epochs.py",
    "dispatch/explain.py": "tests/dispatch/test_explain.py",
    "dispatch/lanes.py": "tests/dispatch/test_lanes.py",
    "dispatch/table.py": "tests/dispatch/test_table.py",
}
DISPATCHER = "tests/dispatch/test_dispatcher.py"
ALL = (
    "tests/keys",
    "tests/registry",
    "tests/dispatch",
    "tests/testing/test_policy_kit.py",
    "tests/testing/test_lane_policy_kit.py",
)
#: Slow here, and each with a quicker test of the same promise; or in a process of its own, which
#: would import the module unchanged.
LEFT_OUT = (
    "test_hundred_thousand_keys",
    "another_process",
    "loads_no_torch",
    "without_hypothesis",
)
#: What the kit says of correct policies is asked. The tests that it finds faulty ones are about the
#: kit, and take half of the time.
LEFT_OUT_OF_KIT = "test_policy_kit.py::test_"
ANEW = 77  # exit status: the code cannot be exchanged

Function = tuple[str, str, int]  # file, qualified name, first line


@attrs.frozen
class Task:
    """A mutant of a file, and the name that its result is kept under."""

    name: str
    path: Path
    mutant: Mutant

    @property
    def function(self) -> Function | None:
        """The function it is in."""
        function = self.mutant.function
        return None if function is None else (str(self.path), *function)


@attrs.frozen
class Reached:
    """What a test calls, and how long it takes."""

    test: str
    seconds: float
    functions: frozenset[Function]


# -- which tests reach what ------------------------------------------------------------------


class Recorder:
    """Notes which functions of the rooms each test calls, and which are called outside tests."""

    def __init__(self) -> None:
        self.outside: set[Function] = set()
        self.tests: list[tuple[str, float, list[Function]]] = []
        self._now = self.outside

    def note(self, frame: Any, event: str, argument: object) -> None:
        """The profile function."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self._now.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note the calls of one test."""
        self._now = set()
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.tests.append((item.nodeid, time.process_time() - start, [*self._now]))
            self._now = self.outside


def record(target: Path) -> None:
    """Run all tests as they are, and write what they reach."""
    recorder = Recorder()
    threading.setprofile(recorder.note)
    sys.setprofile(recorder.note)
    code = run_pytest(Selection(), recorder)
    sys.setprofile(None)
    if code != pytest.ExitCode.OK:
        raise SystemExit("The tests fail without any mutant: nothing can be said.")
    target.write_text(json.dumps({"tests": recorder.tests, "outside": [*recorder.outside]}))


def order(tests: Iterable[Reached], path: Path) -> list[str]:
    """Return tests of a file's mutant: its own first, and the quick before the slow."""
    own = OWN.get(f"{path.parent.name}/{path.name}", DISPATCHER)
    ranked = sorted(tests, key=lambda one: (not one.test.startswith(own), one.seconds))
    return [one.test for one in ranked]


# -- one mutant ------------------------------------------------------------------------------


class Selection:
    """Takes the tests asked for, in their order; all that are quick where none are named."""

    def __init__(self, chosen: list[str] | None = None) -> None:
        self.chosen = chosen

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop and sort."""
        left_out = (*LEFT_OUT, LEFT_OUT_OF_KIT)
        kept = [one for one in items if not any(word in one.nodeid for word in left_out)]
        if self.chosen is not None:
            place = {name: number for number, name in enumerate(self.chosen)}
            kept = sorted(
                (one for one in kept if one.nodeid in place), key=lambda one: place[one.nodeid]
            )
        items[:] = kept


class StopsAtOnce:
    """Ends the process at the first failure."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Leave no time for tracebacks and teardown."""
        if report.failed:
            os._exit(pytest.ExitCode.TESTS_FAILED)


class Exchanger:
    """In place of the tests: each task's function is exchanged in a fork, and tests run there."""

    def __init__(
        self,
        tasks: list[Task],
        tests: list[Reached],
        outside: set[Function],
        told: Callable[[Task, str, float], None],
    ) -> None:
        self.tasks, self.outside, self.told = tasks, outside, told
        self.tests: dict[Function, list[Reached]] = {}
        for one in tests:
            for function in one.functions:
                self.tests.setdefault(function, []).append(one)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Test all mutants."""
        items = {item.nodeid: item for item in session.items}
        live: dict[Function, list[FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType):
                code = one.__code__
                key = (code.co_filename, code.co_qualname, code.co_firstlineno)
                live.setdefault(key, []).append(one)

        for task in self.tasks:
            if task.function is None:
                continue
            reached = self.tests.get(task.function, [])
            chosen = [items[name] for name in order(reached, task.path)]

            def run(task: Task = task, chosen: list[pytest.Item] = chosen) -> int:
                code = compile(task.mutant.make(), str(task.path), "exec")
                new = next(one for one in codes(code) if same(one, task.function))
                try:
                    for function in live[task.function]:
                        function.__code__ = new
                except (KeyError, ValueError):  # not alive by itself; other free variables
                    return ANEW
                session.config.pluginmanager.register(StopsAtOnce())
                for item in chosen:
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
                return pytest.ExitCode.OK

            start = time.monotonic()
            result = forked(run, sum(one.seconds for one in reached))
            # A function that runs while tests are collected may have left a trace there.
            if result != "anew" and not (result == "survived" and task.function in self.outside):
                self.told(task, result, time.monotonic() - start)
        return True


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield all code objects in one."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def same(code: CodeType, function: Function | None) -> bool:
    """Return whether a code object is that of a function."""
    return (code.co_filename, code.co_qualname, code.co_firstlineno) == function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed tree, and everything else as always."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        module = path.relative_to(ROOT).with_suffix("")
        self.module = ".".join(module.parts).removesuffix(".__init__")
        self.path, self.tree = path, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Answer for the one module."""
        if name != self.module:
            return None
        packages = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=packages
        )

    def exec_module(self, module: Any) -> None:
        """Run the changed tree as the module."""
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)  # noqa: S102 - its task


def imported(task: Task, tests: list[Reached]) -> str:
    """Return what tests say about a mutant that is imported."""

    def run() -> int:
        finder = Finder(task.path, task.mutant.make())
        sys.meta_path.insert(0, finder)
        # Now: dispatchkit is a plugin of pytest's too, whose own importer would go first.
        importlib.import_module(finder.module)
        selection = Selection(order(tests, task.path))
        return run_pytest(selection, StopsAtOnce())

    return forked(run, sum(one.seconds for one in tests))


def run_pytest(*plugins: object) -> int:
    """Run pytest on the rooms' tests, with plugins of ours."""
    arguments = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not gpu"]
    return int(pytest.main([*arguments, *ALL], plugins=[*plugins]))


def forked(run: Callable[[], int], seconds: float) -> str:
    """Run in a fork, in silence: "killed", "survived", "timeout" or "anew".

    Args:
        run: Returns pytest's exit status.
        seconds: What the tests take without a mutant.
    """
    child = os.fork()
    if child == 0:
        silence()
        # Of the processor: a busy machine kills no mutant. The alarm is for locks never released.
        limit = int(20 + 4 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        signal.alarm(10 * limit)
        status = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            status = run()
        except BaseException:  # noqa: BLE001 - a mutant may raise anything, anywhere
            status = int(pytest.ExitCode.TESTS_FAILED)
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "timeout"
    code = os.WEXITSTATUS(status)
    if code == ANEW:
        return "anew"
    return "survived" if code == pytest.ExitCode.OK else "killed"


def silence() -> None:
    """Send what is printed from here on nowhere."""
    with open(os.devnull, "w") as nothing:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def apart(run: Callable[[], object], *, quiet: bool) -> None:
    """Run in a fork, so that this process stays as it is; end if it fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if quiet:
                keep = os.dup(1)
                silence()
                sys.stdout = os.fdopen(keep, "w", buffering=1)
            run()
            status = 0
        except BaseException:  # noqa: BLE001 - told, and the fork ends
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("Mutation testing stopped: see above.")


# -- all of them -----------------------------------------------------------------------------


def tasks() -> list[Task]:
    """Return all mutants there are.

    Named by their words, not their lines: results outlive edits elsewhere in a file.
    """
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / "dispatchkit" / room).glob("*.py")):
            seen: Counter[str] = Counter()
            for mutant in mutants(ast.parse(path.read_text(encoding="utf-8"))):
                name = f"{path.relative_to(ROOT)}: {mutant.what} #{seen[mutant.what]}"
                seen[mutant.what] += 1
                found.append(Task(name, path, mutant))
    return found


def main() -> None:
    """Make the mutants asked for, test each, write one line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="take that many at random, of all files")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="names (file and change) that hold this text")
    parser.add_argument("--results", type=Path, help="file that gets a JSON line for each")
    parser.add_argument("--again", action="store_true", help="repeat the survivors in --results")
    parser.add_argument("--count", action="store_true", help="say how many there are, and stop")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))  # this checkout, wherever an installed one lies
    everything = tasks()
    if chosen.count:
        print(f"{len(everything)} mutants")
        return
    # The first failure is enough: nothing is shrunk.
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=20,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"

    with tempfile.TemporaryDirectory() as folder:
        results = chosen.results or Path(folder, "results")
        wanted = [task for task in everything if chosen.only in task.name]
        random.Random(chosen.seed).shuffle(wanted)
        wanted = wanted[: chosen.sample]
        before = read(results)
        again = {"survived"} if chosen.again else set()
        left = [task for task in wanted if before.get(task.name) in {None, *again}]
        test(left, results, Path(folder, "reached"))
        report(wanted, read(results))


def read(results: Path) -> dict[str, str]:
    """Return the last result of each mutant in a file."""
    if not results.exists():
        return {}
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return {line["id"]: line["result"] for line in lines}


def test(wanted: list[Task], results: Path, reached: Path) -> None:
    """Test mutants, and add a line to the results for each."""

    def told(task: Task, result: str, seconds: float) -> None:
        entry = {"id": task.name, "line": task.mutant.line, "result": result}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "seconds": round(seconds, 2)}) + "\n")
        if result != "killed":
            print(f"{task.mutant.line}: {result}: {task.name}", flush=True)

    apart(lambda: record(reached), quiet=False)
    found = json.loads(reached.read_text())
    outside = {tuple(each) for each in found["outside"]}
    tests = [Reached(*each[:2], frozenset(map(tuple, each[2]))) for each in found["tests"]]
    exchanger = Exchanger(wanted, tests, outside, told)
    results.touch()
    start_at = results.stat().st_size
    apart(lambda: run_pytest(Selection(), exchanger), quiet=True)
    with results.open(encoding="utf-8") as file:
        file.seek(start_at)
        done = {json.loads(line)["id"] for line in file}
    for task in wanted:
        if task.name not in done:
            start = time.monotonic()
            told(task, imported(task, tests), time.monotonic() - start)


def report(wanted: list[Task], results: dict[str, str]) -> None:
    """Print how many of each room were killed."""
    for room in ROOMS:
        counts = Counter(
            results.get(task.name, "not run") for task in wanted if task.path.parent.name == room
        )
        print(f"{room}/: " + ", ".join(f"{number} {what}" for what, number in counts.items()))


if __name__ == "__main__":
    main()
