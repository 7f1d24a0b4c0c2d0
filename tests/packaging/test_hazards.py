"""The page on hazards names tests that exist, and each of them says what must hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "hazards.md").read_text()
ROW = re.compile(r"^\|(?P<hazard>[^|]+)\|(?P<done>[^|]+)\|(?P<tests>.+)\|$", re.MULTILINE)
NAME = re.compile(r"`(test_\w+)(?:\[[^`]*\])?`")
PLACES = (
    "tests/**/test_*.py",
    "tests/**/*_cases.py",
    "plugins/*/tests/**/test_*.py",
    "dispatchkit/testing/*.py",
)


@pytest.fixture(scope="module")
def known() -> dict[str, list[tuple[bool, bool]]]:
    """For each name on the page and each function of it: is it for a device, has it a docstring."""
    named = set(NAME.findall(PAGE))
    found: dict[str, list[tuple[bool, bool]]] = {}
    for path in (path for place in PLACES for path in ROOT.glob(place)):
        source = path.read_text()
        if named.isdisjoint(re.findall(r"def (test_\w+)", source)):
            continue  # not worth parsing
        is_gpu = path.parent.name == "gpu"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name in named:
                has_words = ast.get_docstring(node) is not None
                found.setdefault(node.name, []).append((is_gpu, has_words))
    return found


def test_every_test_that_the_page_names_exists_and_says_what_it_requires(known) -> None:
    named = set(NAME.findall(PAGE))
    assert len(named) > 120
    assert sorted(named - known.keys()) == []
    assert sorted(name for name in named if not all(words for _, words in known[name])) == []


def test_every_hazard_has_an_answer_and_a_test() -> None:
    rows = [row for row in ROW.finditer(PAGE) if row["hazard"].strip() not in ("hazard", "---")]
    assert len(rows) > 60
    assert [row["hazard"] for row in rows if not NAME.search(row["tests"])] == []
    assert [row["hazard"] for row in rows if not row["done"].strip()] == []


def test_tests_that_are_said_to_need_a_device_do_and_the_others_run_anywhere(known) -> None:
    for row in ROW.finditer(PAGE):
        anywhere, _, device = row["tests"].partition("gpu:")
        for names, wanted in ((NAME.findall(anywhere), False), (NAME.findall(device), True)):
            assert [name for name in names if wanted not in dict(known[name])] == []
