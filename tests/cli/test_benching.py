"""``bench``: scripts of a checkout, found, run, gathered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with two benchmarks, one of which fails."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "_common.py").write_text("")
    (folder / "good.py").write_text('"""Counts.\n\nMore."""\nprint(\'{"name": "a", "ns": 3}\')\n')
    (folder / "bad.py").write_text('"""Fails."""\nprint("words")\nraise SystemExit(7)\n')
    return tmp_path


def test_they_are_listed_without_being_run(run: Any, checkout: Path) -> None:
    """By the first line of what they say of themselves."""
    done = run("bench", "--list", "--checkout", str(checkout), "--json")
    assert json.loads(done.out) == [
        {"benchmark": "bad", "summary": "Fails."},
        {"benchmark": "good", "summary": "Counts."},
    ]


def test_results_are_gathered(run: Any, checkout: Path) -> None:
    """One JSON document of all lines."""
    done = run("bench", "good", "--checkout", str(checkout), "--json")
    assert done.code == 0
    assert json.loads(done.out)["results"] == [{"benchmark": "good", "name": "a", "ns": 3}]


def test_one_that_fails_is_exit_code_1(run: Any, checkout: Path) -> None:
    """The others run all the same."""
    done = run("bench", "--checkout", str(checkout), "--json")
    found = json.loads(done.out)
    assert (done.code, found["ok"], found["failed"]) == (1, False, ["bad"])
    assert len(found["results"]) == 2


def test_bad_input_says_what_is_needed(run: Any, checkout: Path, tmp_path: Path) -> None:
    """A name that is none, a folder that is no checkout."""
    done = run("bench", "god", "--checkout", str(checkout))
    assert done.code == 2
    assert "'good'" in done.err
    done = run("bench", "--checkout", str(tmp_path / "bench"))
    assert done.code == 2
    assert "clone" in done.err


def test_those_of_this_checkout_are_found(run: Any) -> None:
    """Without being told where they are."""
    names = {row["benchmark"] for row in json.loads(run("bench", "--list", "--json").out)}
    assert "decision" in names
