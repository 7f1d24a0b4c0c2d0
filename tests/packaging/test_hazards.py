"""The pages on hazards name existing tests, each of which states its requirement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "hazards").glob("*.md")}
#: An entry: the hazard in bold, the remedy, a line break, its tests.
ENTRY = re.compile(
    r"^- \*\*(?P<hazard>[^*]+)\*\*\s+(?P<done>.+?)\\\n  Tests: (?P<tests>.+?)\.$",
    re.MULTILINE | re.DOTALL,
)
ENTRIES = [entry for page in PAGES.values() for entry in ENTRY.finditer(page)]
NAME = re.compile(r"`(test_\w+)(?:\[[^`]*\])?`")
PLACES = (
    "tests/**/test_*.py",
    "tests/**/*_cases.py",
    "plugins/*/tests/**/test_*.py",
    "dispatchkit/testing/*.py",
)


#: A function, and the quotes of its docstring if it has one.
FUNCTION = re.compile(r'^ *def (test_\w+)\([^)]*\)[^:]*:\n(?P<words> +r?""")?', re.MULTILINE)


@pytest.fixture(scope="module")
def known() -> dict[str, list[tuple[bool, bool]]]:
    """Return each test's functions: whether for a device, and whether documented."""
    found: dict[str, list[tuple[bool, bool]]] = {}
    for path in (path for place in PLACES for path in ROOT.glob(place)):
        is_gpu = path.parent.name == "gpu"
        for function in FUNCTION.finditer(path.read_text()):
            has_words = function["words"] is not None
            found.setdefault(function[1], []).append((is_gpu, has_words))
    return found


def test_every_test_that_the_pages_name_exists_and_says_what_it_requires(known) -> None:
    named = set(NAME.findall("".join(PAGES.values())))
    assert len(named) > 120
    assert sorted(named - known.keys()) == []
    assert sorted(name for name in named if not all(words for _, words in known[name])) == []


def test_every_hazard_has_an_answer_and_a_test() -> None:
    bullets = {
        name: len(re.findall(r"^- \*\*", page, re.MULTILINE)) for name, page in PAGES.items()
    }
    answered = {
        name: sum("- **" not in entry["done"] for entry in ENTRY.finditer(page))
        for name, page in PAGES.items()
    }
    assert answered == bullets
    assert sum(bullets.values()) > 120
    assert [entry["hazard"] for entry in ENTRIES if not NAME.search(entry["tests"])] == []


def test_every_page_of_hazards_has_a_row_of_the_summary() -> None:
    summary = (ROOT / "docs" / "hazards.md").read_text()
    linked = set(re.findall(r"^\| \[[^]]+\]\(hazards/(\w+)\.md\) \|", summary, re.MULTILINE))
    assert linked == PAGES.keys()


def test_tests_that_are_said_to_need_a_device_do_and_the_others_run_anywhere(known) -> None:
    for entry in ENTRIES:
        anywhere, _, device = entry["tests"].partition("gpu:")
        for names, wanted in ((NAME.findall(anywhere), False), (NAME.findall(device), True)):
            assert [name for name in names if wanted not in dict(known[name])] == []
