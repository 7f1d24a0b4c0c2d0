"""Run the tests of one release of vLLM on dispatchkit's classes, in the release's own folder.

vLLM takes long to import, so it is imported once; each run is a fork, since each puts other
classes where the tests import them from. One JSON line for each run; exit code 1 if one fails.

usage: release.py RELEASE       (by ``run.py``, with the release's sources in front of the path)
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
    """Return a folder that lets the sources pass for a CPU build.

    vLLM looks its platform up in the version of the distribution that it came in.
    """
    folder = Path("cpu-version").resolve()
    info = folder / f"vllm-{release}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return folder


class Outcomes:
    """A pytest plugin that counts what became of the tests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once, and each error around one."""
        if report.when == "call" or not report.passed:
            self.counts["error" if report.failed and report.when != "call" else report.outcome] += 1


def run_tests(test: str, swap: str) -> tuple[bool, dict[str, int]]:
    """Run one file of tests in one way; return whether all that ran passed, and counts."""
    outcomes = Outcomes()
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(Path.cwd())]
    # Not this repository's settings, which know none of vLLM's markers.
    options += ["-c", os.devnull]
    code = pytest.main([*options, test], plugins=[Swap(swap), outcomes])
    return code == 0 and outcomes.counts["passed"] > 0, dict(outcomes.counts)


def ask(release: str) -> tuple[bool, dict[str, int]]:
    """Ask the class, its facade and the policy the same; return whether all agree, and counts."""
    agree: Any = importlib.import_module("agree")
    asked, differing = agree.ask_all(release)
    return asked > 0 == differing, {"asked": asked, "differing": differing}


def in_a_fork(work: Callable[..., tuple[bool, dict[str, int]]], *args: str) -> Any:
    """Call ``work`` in a fork; return what it returns, or its exit code, and what it printed."""
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
    """Run everything that this release has."""
    release = sys.argv[1]
    if Path(MANAGER).is_file():  # its tests need a platform
        sys.path.append(str(as_cpu_build(release)))
    with contextlib.redirect_stdout(sys.stderr):  # where vLLM's logger writes from then on
        importlib.import_module(DISPATCHER)
    # Before 0.12 the interface is another one, which does not support policies.
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
