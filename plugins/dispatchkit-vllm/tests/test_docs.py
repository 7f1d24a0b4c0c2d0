"""The documented tables match the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatchkit.dispatch import TRAITS

from dispatchkit_vllm import DIALECTS, Loras

PAGE = Path(__file__).resolve().parents[3] / "docs" / "dialects.md"


def tables() -> list[list[list[str]]]:
    """Return the page's tables as rows of cells, without ruling lines."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text().splitlines():
        if line.startswith("|"):
            cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            if not set(cells[0]) <= {"-"}:
                found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def table_with(column: str) -> list[list[str]]:
    return next(table for table in tables() if column in table[0])


def test_every_dialect_is_documented():
    assert {row[0] for row in table_with("stands for")[1:]} == set(DIALECTS)


def test_claimed_traits_are_the_documented_ones():
    head, *rows = table_with("smallest_bucket")
    assert set(head[1:]) == TRAITS
    documented = {
        row[0]: {trait for trait, cell in zip(head[1:], row[1:], strict=True) if cell == "yes"}
        for row in rows
    }
    assert documented == {name: set(dialect.traits) for name, dialect in DIALECTS.items()}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("adapters", lambda dialect: WORDS[dialect.loras]),
        (
            "keys contain the number of requests",
            lambda dialect: "yes" if dialect.names_requests else "no",
        ),
    ],
)
def test_documented_variations_are_the_data(column, value):
    head, *rows = table_with("stands for")
    place = head.index(column)
    assert {row[0]: row[place] for row in rows} == {
        name: value(dialect) for name, dialect in DIALECTS.items()
    }


WORDS = {
    Loras.NONE: "none",
    Loras.FLAG: "flag",
    Loras.EVERY_COUNT: "every count",
    Loras.CASES: "cases",
    Loras.CASES_CLAMPED: "cases, clamped",
}
