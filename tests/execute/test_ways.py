"""The page on the design lists the functions on the stack of a call."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest

torch = pytest.importorskip("torch")

import dispatchkit  # noqa: E402
from dispatchkit import CellUpdate, Decision, GraphRunner, RunnerOptions, StaticInput  # noqa: E402
from dispatchkit.backends.tape.backend import TapeBackend  # noqa: E402
from dispatchkit.backends.tape.graph import TapeGraph  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# The imported package: the source tree or an installed wheel.
PACKAGE = Path(dispatchkit.__file__).resolve().parent


def listed(way: str) -> list[list[str]]:
    """Return the page's lists of ``file: function`` for a way."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    passage = page.partition(f"### The path of {way}\n")[2].partition("\n#")[0]
    lists: list[list[str]] = []
    for number, name in re.findall(r"^(\d+)\. `([\w/]+\.py: \w+)`", passage, re.MULTILINE):
        if number == "1":
            lists.append([])
        lists[-1].append(name)
    return lists


def stack_at(call: Callable[[], object], reached: CodeType) -> list[str]:
    """Return this package's functions on the stack where a call enters another package."""
    stacks: list[list[str]] = []

    def follow(frame, event, argument):
        if event != "call" or frame.f_code is not reached:
            return
        stack = []
        while (frame := frame.f_back) is not None:
            path = Path(frame.f_code.co_filename).resolve()
            if path.is_relative_to(PACKAGE):
                stack.append(f"{path.relative_to(PACKAGE).as_posix()}: {frame.f_code.co_name}")
        stacks.append(stack[::-1])

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert len(stacks) == 1
    return stacks[0]


class Learning(OneBucketPolicy):
    """Requests a measurement of every step."""

    def decide(self, batch, graphs):
        found = super().decide(batch, graphs)
        return Decision(found.mode, found.key, found.reason, timed=True)

    def observe(self, outcome) -> list[CellUpdate]:
        return []


def make(**settings) -> GraphRunner:
    inputs = {"x": StaticInput((None, 2), torch.float32)}
    settings = {"sizes": (2, 4), "mode": "FULL", "backend": "tape", **settings}
    return GraphRunner(lambda x: x + 1, inputs, **settings)


ROWS = torch.ones(3, 2)


def test_a_replay():
    direct, by_the_graph = listed("a replay")
    runner = make()
    runner.capture()
    runner(ROWS)
    assert stack_at(lambda: runner(ROWS), TapeGraph.replay.__code__) == by_the_graph
    assert direct == by_the_graph[:2]  # the remaining functions belong to the device; see tests/gpu
    assert len(by_the_graph) <= 8


def test_a_lazy_capture():
    (way,) = listed("a lazy capture")
    runner = make(lazy=True)
    assert stack_at(lambda: runner(ROWS), TapeBackend.capture.__code__) == way
    assert len(way) + 5 <= 15  # functions of a backend


def test_an_outcome():
    (way,) = listed("an outcome")
    runner = make(policy=Learning(), options=RunnerOptions(sample_every=1))
    runner.capture()
    for _ in range(3):
        runner(ROWS)
    assert stack_at(lambda: runner(ROWS), Learning.observe.__code__) == way
    assert len(way) <= 8
