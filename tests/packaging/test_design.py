"""The page on the design names every package, and only existing files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
PACKAGE = ROOT / "dispatchkit"


def test_every_room_is_in_the_table() -> None:
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    files = {path.name for path in PACKAGE.glob("[a-z]*.py")}
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert sorted((rooms | files) - set(re.findall(r"`([\w./]+)`", table))) == []


def test_every_file_to_read_is_there() -> None:
    passage = PAGE.partition("## Where to begin reading")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w*/]+\.py)`", passage)
    assert len(named) > 15
    for name in named:
        assert any((PACKAGE / room / name).exists() for room in ("", "execute")), name
