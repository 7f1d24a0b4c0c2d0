"""Commands in README and docs for newcomers exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()


def commands(text: str) -> list[str]:
    """Return the commands in fenced console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def targets() -> set[str]:
    """Return the Makefile's targets from its help."""
    return set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, flags=re.MULTILINE))


def test_readme_shows_both_set_up_commands_with_their_plain_twins() -> None:
    """Two commands suffice; without make, pip does the same."""
    typed = commands(README)
    assert "make demo" in typed
    assert "make test" in typed
    twins = [line for line in typed if line.startswith("python3 -m venv .venv && ")]
    assert len(twins) == 2
    assert all("-m pip install -r requirements-dev.txt" in line for line in twins)
    assert twins[0].endswith("-m dispatchkit demo")
    marks = re.search(
        r"^test:.*\n\t@\$\(VENV_PY\) scripts/shares.py \$\(WORKERS\) (-m \"[^\"]+\")",
        MAKEFILE,
        flags=re.MULTILINE,
    )
    assert marks is not None
    assert twins[1].endswith(f"-m pytest {marks[1]}")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/development.md", ".ci/run"])
def test_every_make_target_named_exists(page: str) -> None:
    """Newcomers would meet a failing command first."""
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`make ([a-z-]+)", text))
    for steps in re.findall(r"^step((?: [a-z][a-z-]*)+)", text, re.MULTILINE):
        named |= set(steps.split())
    named |= {line.split("make ")[1].split()[0] for line in commands(text) if "make " in line}
    assert named
    assert named <= targets()


def test_every_relative_link_of_the_readme_leads_somewhere() -> None:
    """Readers find other pages by links."""
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_figure_of_the_readmes_tables_is_one_of_the_measurements() -> None:
    """Figures are measured in one place with their command; the README only repeats them."""
    pages = (ROOT / "docs" / "measurements").glob("*.md")
    measured = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
    figures = [cell for cell in cells if re.fullmatch(r"[\d.,]+×?", cell)]
    assert len(figures) > 10
    there = {cell.strip() for line in measured.splitlines() for cell in line.split("|")}
    assert [figure for figure in figures if figure not in there] == []


def test_the_page_for_operators_explains_every_reason() -> None:
    """For any reason in a counter, operators find its meaning and remedy."""
    from dispatchkit import Reason

    page = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    explained = set(re.findall(r"`([a-z_]+)`", rows))
    assert {str(reason) for reason in Reason} - explained == {"hit"}
