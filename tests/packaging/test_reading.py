"""The reading page lists every file once, in a chosen order, with its current summary."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")

_spec = importlib.util.spec_from_file_location("reading", ROOT / "scripts" / "reading.py")
assert _spec is not None
assert _spec.loader is not None
reading = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reading)


def entries(page: str) -> list[str]:
    return [line for line in page.splitlines() if reading.ENTRY.fullmatch(line)]


def test_the_page_is_up_to_date() -> None:
    """If not, run `make reading` and move new files to their places."""
    assert reading.rewritten(PAGE) == PAGE
    names = [reading.ENTRY.fullmatch(line)[1] for line in entries(PAGE)]
    assert sorted(names) == sorted(reading.files())


def test_what_is_out_of_date_is_seen() -> None:
    """An extra or missing file, a wrong count or a wrong summary is corrected."""
    first, second = entries(PAGE)[:2]
    for wrong in (
        PAGE.replace(first, f"{first}\n- `keys/gone.py` (10): It was here."),
        PAGE.replace(second, second.partition("(")[0] + "(990): " + second.partition(": ")[2]),
        PAGE.replace(first, first.partition(": ")[0] + ": Something else."),
    ):
        assert wrong != PAGE
        assert reading.rewritten(wrong) == PAGE
    *_, tape = (line for line in entries(PAGE) if "`backends/tape/" in line)  # last of its folder
    assert reading.rewritten(PAGE.replace(f"{tape}\n", "")) == PAGE


def test_what_comes_with_the_core_is_read_after_it() -> None:
    core, beside = PAGE.split("## Outside the core", 1)
    for part, is_beside in ((core, False), (beside, True)):
        names = [reading.ENTRY.fullmatch(line)[1] for line in entries(part)]
        assert [name for name in names if name.startswith(reading.BESIDE) is not is_beside] == []
