"""Run the tests of one vLLM release with dispatchkit's classes, in the folder of the release.

vLLM is imported once, because the import is slow. Each run uses a forked process, because it
replaces the classes that the tests import. Prints one JSON line per run; the exit code is 1 if a
run fails.

usage: release.py RELEASE       (started by ``run.py``, with the sources of the release on the path)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swap import DISPATCHER, Swap

DISPATCH = "tests/v1/cudagraph/test_cudagraph_dispatch.py"
MANAGER = "tests/v1/cudagraph/test_cudagraph_manager.py"


def as_cpu_build(release: str) -> Path:
    """Return a folder with metadata that identifies the sources as a CPU build.

    vLLM determines its platform from the version of its distribution.
    """
    folder = Path("cpu-version").resolve()
    info = folder / f"vllm-{release}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return folder


class Outcomes:
    """A pytest plugin that counts test outcomes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count each test once, and each error in its setup or teardown."""
        if report.when == "call" or not report.passed:
            self.counts["error" if report.failed and report.when != "call" else report.outcome] += 1


def run_tests(test: str, swap: str) -> tuple[bool, dict[str, int]]:
    """Run a test file with replaced classes; return whether it passed, and the outcome counts."""
    outcomes = Outcomes()
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(Path.cwd())]
    # Ignore this repository's settings, which do not define vLLM's markers.
    options += ["-c", os.devnull]
    code = pytest.main([*options, test], plugins=[Swap(swap), outcomes])
    return code == 0 and outcomes.counts["passed"] > 0, dict(outcomes.counts)


def ask(release: str) -> tuple[bool, dict[str, int]]:
    """Run ``agree.py``; return its success, and the numbers of calls and differences."""
    agree: Any = importlib.import_module("agree")
    asked, differing = agree.ask_all(release)
    return asked > 0 == differing, {"asked": asked, "differing": differing}


def in_a_fork(work: Callable[..., tuple[bool, dict[str, int]]], *args: str) -> Any:
    """Call ``work`` in a fork; return its result (or the exit code) and its printed output."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryFile() as printed:

        def call() -> None:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            answers.put(work(*args))

        fork = context.Process(target=call)
        fork.start()
        fork.join()
        found = (False, {"exit": fork.exitcode}) if answers.empty() else answers.get()
        printed.seek(0)
        return *found, printed.read().decode(errors="replace")


def main() -> int:
    """Run the release's tests, and ``agree.py`` if policies can run in the release."""
    release = sys.argv[1]
    if Path(MANAGER).is_file():  # these tests require a platform that vLLM recognizes
        sys.path.append(str(as_cpu_build(release)))
    with contextlib.redirect_stdout(sys.stderr):  # makes vLLM's logger write to stderr
        importlib.import_module(DISPATCHER)
    # Releases before 0.12 have another interface, which does not support policies.
    is_served = not release.startswith("0.11.")
    runs: list[tuple[Any, ...]] = [(ask, release)] if is_served else []
    if Path(DISPATCH).is_file():
        runs += [(run_tests, DISPATCH, swap) for swap in ("facade", "engine")[: 1 + is_served]]
    if Path(MANAGER).is_file():
        runs.append((run_tests, MANAGER, "engine"))
    passed = True
    for work, *args in runs:
        ok, counts, printed = in_a_fork(work, *args)
        passed &= ok
        what = {"test": "agree.py"}
        if work is run_tests:
            what = {"test": Path(args[0]).name, "swap": args[1]}
        sys.stdout.write(json.dumps({"release": release, **what, "ok": ok, **counts}) + "\n")
        sys.stdout.flush()
        if not ok:
            sys.stderr.write(printed[-4000:] + "\n")
    return not passed


if __name__ == "__main__":
    sys.exit(main())
