"""Update docs/reading.md: line counts, and the summary of each file.

Usage: scripts/reading.py. The order of files is kept. A new file is added after the last file of
    its folder; move it to its place by hand. Deleted files are removed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reading.md"
PACKAGE = ROOT / "dispatchkit"
ENTRY = re.compile(r"- `([\w/]+\.py)` \(([\d,]+)\): .*")
HEADING = re.compile(r"(## .*) \(([\d,]+) lines\)")
TOTAL = re.compile(r"([\d,]+) lines of Python")
#: Parts of the core distribution that are not counted as core.
BESIDE = ("__main__", "cli/", "demo/", "testing/")


@functools.cache
def files() -> dict[str, tuple[int, str]]:
    """Return the number of lines and the first docstring paragraph of each file, by path."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # Parsing whole files would take as long as all else together.
        beginning = text.partition("\nfrom __future__ import")[0]
        summary = (ast.get_docstring(ast.parse(beginning)) or "").partition("\n\n")[0]
        found[str(path.relative_to(PACKAGE))] = len(text.splitlines()), summary.replace("\n", " ")
    return found


def rewritten(page: str) -> str:
    """Return the updated page."""
    there = files()
    lines = [line for line in page.splitlines() if _name(line) is None or _name(line) in there]
    for name in sorted(set(there) - {_name(line) for line in lines}):
        folder = name.rpartition("/")[0]
        of_folder = [
            at for at, line in enumerate(lines) if (_name(line) or "/").rpartition("/")[0] == folder
        ]
        lines.insert(1 + (of_folder or [len(lines) - 1])[-1], f"- `{name}` (0): ")
    sections: Counter[str] = Counter()
    heading = ""
    for line in lines:
        heading = line if line.startswith("## ") else heading
        sections[heading] += there[name][0] if (name := _name(line)) else 0
    core = [count for name, (count, _) in there.items() if not name.startswith(BESIDE)]
    for at, line in enumerate(lines):
        if name := _name(line):
            count, summary = there[name]
            lines[at] = f"- `{name}` ({_count(ENTRY, line, 2, count)}): {summary}"
        elif HEADING.fullmatch(line):
            count_now = _count(HEADING, line, 2, sections[line])
            lines[at] = HEADING.sub(rf"\1 ({count_now} lines)", line)
        elif TOTAL.search(line):
            total = _count(TOTAL, line, 1, sum(core))
            lines[at] = TOTAL.sub(f"{total} lines of Python", line)
    return "\n".join(lines) + "\n"


def _name(line: str) -> str | None:
    entry = ENTRY.fullmatch(line)
    return None if entry is None else entry[1]


def _count(pattern: re.Pattern[str], line: str, group: int, now: int) -> str:
    """Return a count rounded to tens, or the existing count if it is close.

    The counts are only for planning, and small edits should not make the page out of date.
    """
    found = pattern.search(line)
    written = found[group] if found else "0"
    if written != "0" and abs(int(written.replace(",", "")) - now) <= max(20, 0.1 * now):
        return written
    return f"{max(10, round(now, -1)):,}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
