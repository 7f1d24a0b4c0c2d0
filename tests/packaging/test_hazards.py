"""The page on hazards names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "hazards.md").read_text()
    named = set(re.findall(r"`(test_\w+)(?:\[[^`]*\])?`", page))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    sources += "\n".join(path.read_text() for path in (ROOT / "dispatchkit/testing").glob("*.py"))
    known = set(re.findall(r"def (test_\w+)", sources))
    assert len(named) > 40
    assert sorted(named - known) == []
