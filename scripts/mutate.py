"""Mutation testing of the code that decides: make one change, and check whether a test fails.

    python scripts/mutate.py --sample 300 --results mutants.jsonl

Every mutant is one small change to a file of dispatch/, registry/ or keys/ (a comparison, a
constant, a condition, an operator, a return value, a removed statement). The tests first run
unchanged, to record the functions that each test reaches. Then each mutant gets a process, forked
from one that has already collected the tests. That process replaces the code of the function and
runs the tests that reach the function until a test fails: tests of the module first, fast tests
before slow tests. For changes that take effect while modules are loaded, the changed module is
imported instead, and all tests of the folders run. Surviving mutants of functions that run during
collection are tested in the same way. The source is never written. A survivor indicates a missing
test, or a change that no caller can observe; docs/reference/mutation.md lists such changes with
their reasons.

Published mutation testing tools start pytest again for each mutant or rewrite the checkout, and
need hours where this script needs minutes.
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
import hypothesis.stateful  # loaded once for all forks
import pytest
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
ROOT_PACKAGE = str(ROOT / "dispatchkit")
PACKAGES = ("keys", "registry", "dispatch")
#: The tests of a file run first, because they kill most mutants.
TESTS_OF_FILE = {
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
#: Tests that are slow here and have a faster equivalent, or that import the module unchanged in
#: another process.
EXCLUDED_TESTS = (
    "test_hundred_thousand_keys",
    "another_process",
    "loads_no_torch",
    "without_hypothesis",
)
#: Tests of the kit itself with faulty policies, which take half of the time. The kit's tests of
#: correct policies run.
EXCLUDED_KIT_TESTS = "test_policy_kit.py::test_"
NOT_REPLACEABLE = 77  # exit status if the code cannot be replaced

Function = tuple[str, str, int]  # file, qualified name, first line


@attrs.frozen
class Task:
    """A mutant of a file, and the name under which its result is stored."""

    name: str
    path: Path
    mutant: Mutant

    @property
    def function(self) -> Function | None:
        """The function that contains the change."""
        function = self.mutant.function
        return None if function is None else (str(self.path), *function)


@attrs.frozen
class TestReach:
    """The functions that a test calls, and the duration of the test."""

    test: str
    seconds: float
    functions: frozenset[Function]


# -- functions that tests reach --------------------------------------------------------------


class CallRecorder:
    """Pytest plugin that records the functions called by each test and outside of tests."""

    def __init__(self) -> None:
        self.outside: set[Function] = set()
        self.tests: list[tuple[str, float, list[Function]]] = []
        self._now = self.outside

    def note(self, frame: Any, event: str, argument: object) -> None:
        """Record a call, as the profile function."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT_PACKAGE):
            self._now.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record the calls and the duration of one test."""
        self._now = set()
        start = time.process_time()
        try:
            return (yield)
        finally:
            self.tests.append((item.nodeid, time.process_time() - start, [*self._now]))
            self._now = self.outside


def record(target: Path) -> None:
    """Run all tests unchanged, and write the functions that they reach."""
    recorder = CallRecorder()
    threading.setprofile(recorder.note)
    sys.setprofile(recorder.note)
    code = run_pytest(TestSelection(), recorder)
    sys.setprofile(None)
    if code != pytest.ExitCode.OK:
        raise SystemExit("The tests fail without mutants; fix them first.")
    target.write_text(json.dumps({"tests": recorder.tests, "outside": [*recorder.outside]}))


def order(tests: Iterable[TestReach], path: Path) -> list[str]:
    """Return the tests for a mutant: those of its file first, fast tests before slow tests."""
    own = TESTS_OF_FILE.get(f"{path.parent.name}/{path.name}", DISPATCHER)
    ranked = sorted(tests, key=lambda one: (not one.test.startswith(own), one.seconds))
    return [one.test for one in ranked]


# -- one mutant ------------------------------------------------------------------------------


class TestSelection:
    """Pytest plugin that selects and orders the given tests; by default, all fast tests."""

    def __init__(self, chosen: list[str] | None = None) -> None:
        self.chosen = chosen

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remove and sort tests."""
        excluded = (*EXCLUDED_TESTS, EXCLUDED_KIT_TESTS)
        kept = [one for one in items if not any(word in one.nodeid for word in excluded)]
        if self.chosen is not None:
            place = {name: number for number, name in enumerate(self.chosen)}
            kept = sorted(
                (one for one in kept if one.nodeid in place), key=lambda one: place[one.nodeid]
            )
        items[:] = kept


class FailFast:
    """Pytest plugin that ends the process at the first failure."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Exit without tracebacks or teardown."""
        if report.failed:
            os._exit(pytest.ExitCode.TESTS_FAILED)


class MutantRunner:
    """Pytest plugin that runs each mutant in a fork with the function's code replaced."""

    def __init__(
        self,
        tasks: list[Task],
        tests: list[TestReach],
        outside: set[Function],
        on_result: Callable[[Task, str, float], None],
    ) -> None:
        self.tasks, self.outside, self.on_result = tasks, outside, on_result
        self.tests: dict[Function, list[TestReach]] = {}
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
                except (KeyError, ValueError):  # no such function, or other free variables
                    return NOT_REPLACEABLE
                session.config.pluginmanager.register(FailFast())
                for item in chosen:
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
                return pytest.ExitCode.OK

            start = time.monotonic()
            result = test_in_fork(run, sum(one.seconds for one in reached))
            # A function that runs during collection may have had an effect before it was replaced.
            if result != "not replaceable" and not (
                result == "survived" and task.function in self.outside
            ):
                self.on_result(task, result, time.monotonic() - start)
        return True


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield all code objects nested in a code object."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def same(code: CodeType, function: Function | None) -> bool:
    """Return whether a code object belongs to a function."""
    return (code.co_filename, code.co_qualname, code.co_firstlineno) == function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of one module from a changed tree."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        module = path.relative_to(ROOT).with_suffix("")
        self.module = ".".join(module.parts).removesuffix(".__init__")
        self.path, self.tree = path, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for the changed module."""
        if name != self.module:
            return None
        packages = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=packages
        )

    def exec_module(self, module: Any) -> None:
        """Run the changed tree as the module."""
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)  # noqa: S102 - its task


def imported(task: Task, tests: list[TestReach]) -> str:
    """Return the result of a mutant that is imported."""

    def run() -> int:
        finder = Finder(task.path, task.mutant.make())
        sys.meta_path.insert(0, finder)
        # Import the module now: pytest would use another importer, because dispatchkit is a plugin.
        importlib.import_module(finder.module)
        selection = TestSelection(order(tests, task.path))
        return run_pytest(selection, FailFast())

    return test_in_fork(run, sum(one.seconds for one in tests))


def run_pytest(*plugins: object) -> int:
    """Run pytest on the tests of the mutated folders, with additional plugins."""
    arguments = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow and not gpu"]
    return int(pytest.main([*arguments, *ALL], plugins=[*plugins]))


def test_in_fork(run: Callable[[], int], seconds: float) -> str:
    """Run in a fork without output; return "killed", "survived", "timeout" or "not replaceable".

    Args:
        run: Function that returns pytest's exit status.
        seconds: Duration of the tests without a mutant.
    """
    child = os.fork()
    if child == 0:
        silence()
        # Limit CPU time, so that a busy machine kills no mutant. The alarm is for deadlocks.
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
    if code == NOT_REPLACEABLE:
        return "not replaceable"
    return "survived" if code == pytest.ExitCode.OK else "killed"


def silence() -> None:
    """Redirect all further output to the null device."""
    with open(os.devnull, "w") as nothing:  # noqa: PTH123 - a file descriptor is needed
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def in_fork(run: Callable[[], object], *, quiet: bool) -> None:
    """Run in a fork, to keep this process unchanged; exit if it fails."""
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
        except BaseException:  # noqa: BLE001 - printed, and the fork exits
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("Mutation testing stopped; see the traceback above.")


# -- all mutants -----------------------------------------------------------------------------


def tasks() -> list[Task]:
    """Return all possible mutants.

    Their names do not contain line numbers, so results stay valid after edits elsewhere in a file.
    """
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / "dispatchkit" / package).glob("*.py")):
            seen: Counter[str] = Counter()
            for mutant in mutants(ast.parse(path.read_text(encoding="utf-8"))):
                name = f"{path.relative_to(ROOT)}: {mutant.what} #{seen[mutant.what]}"
                seen[mutant.what] += 1
                found.append(Task(name, path, mutant))
    return found


def main() -> None:
    """Create the selected mutants, test each, and write one line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="number of random mutants, from all files")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--only",
        default="",
        help="test only mutants whose name (file and change) contains this text",
    )
    parser.add_argument(
        "--results", type=Path, help="file to which a JSON line per mutant is appended"
    )
    parser.add_argument("--again", action="store_true", help="repeat the survivors in --results")
    parser.add_argument("--count", action="store_true", help="print the number of mutants and exit")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))  # use this checkout, not an installed package
    everything = tasks()
    if chosen.count:
        print(f"{len(everything)} mutants")
        return
    # The first failure is enough, so examples are not shrunk.
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
        selected = [task for task in everything if chosen.only in task.name]
        random.Random(chosen.seed).shuffle(selected)
        selected = selected[: chosen.sample]
        before = read(results)
        again = {"survived"} if chosen.again else set()
        left = [task for task in selected if before.get(task.name) in {None, *again}]
        test(left, results, Path(folder, "reached"))
        report(selected, read(results))


def read(results: Path) -> dict[str, str]:
    """Return the last result of each mutant in a file."""
    if not results.exists():
        return {}
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return {line["id"]: line["result"] for line in lines}


def test(selected: list[Task], results: Path, reached: Path) -> None:
    """Test mutants, and add a line to the results for each."""

    def on_result(task: Task, result: str, seconds: float) -> None:
        entry = {"id": task.name, "line": task.mutant.line, "result": result}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**entry, "seconds": round(seconds, 2)}) + "\n")
        if result != "killed":
            print(f"{task.mutant.line}: {result}: {task.name}", flush=True)

    in_fork(lambda: record(reached), quiet=False)
    found = json.loads(reached.read_text())
    outside = {tuple(each) for each in found["outside"]}
    tests = [TestReach(*each[:2], frozenset(map(tuple, each[2]))) for each in found["tests"]]
    runner = MutantRunner(selected, tests, outside, on_result)
    results.touch()
    start_at = results.stat().st_size
    in_fork(lambda: run_pytest(TestSelection(), runner), quiet=True)
    with results.open(encoding="utf-8") as file:
        file.seek(start_at)
        done = {json.loads(line)["id"] for line in file}
    for task in selected:
        if task.name not in done:
            start = time.monotonic()
            on_result(task, imported(task, tests), time.monotonic() - start)


def report(selected: list[Task], results: dict[str, str]) -> None:
    """Print the number of mutants with each result, by folder."""
    for package in PACKAGES:
        counts = Counter(
            results.get(task.name, "not run")
            for task in selected
            if task.path.parent.name == package
        )
        print(f"{package}/: " + ", ".join(f"{number} {what}" for what, number in counts.items()))


if __name__ == "__main__":
    main()
