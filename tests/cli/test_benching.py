"""``bench``: finds and runs the scripts of a checkout and collects results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dispatchkit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(dispatchkit.__file__).resolve().parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with two benchmarks, one of which fails."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "_common.py").write_text("")
    (folder / "good.py").write_text('"""Counts.\n\nMore."""\nprint(\'{"name": "a", "ns": 3}\')\n')
    (folder / "bad.py").write_text('"""Fails."""\nprint("words")\nraise SystemExit(7)\n')
    return tmp_path


def test_they_are_listed_without_being_run(run: Any, checkout: Path) -> None:
    """Each is listed with the first line of its docstring."""
    done = run("bench", "--list", "--checkout", str(checkout), "--json")
    assert json.loads(done.out) == [
        {"benchmark": "bad", "summary": "Fails."},
        {"benchmark": "good", "summary": "Counts."},
    ]


def test_results_are_gathered(run: Any, checkout: Path) -> None:
    """The output is one JSON document with all result lines."""
    done = run("bench", "good", "--checkout", str(checkout), "--json")
    assert done.code == 0
    assert json.loads(done.out)["results"] == [{"benchmark": "good", "name": "a", "ns": 3}]


def test_one_that_fails_is_exit_code_1(run: Any, checkout: Path) -> None:
    """The others run nevertheless."""
    done = run("bench", "--checkout", str(checkout), "--json")
    found = json.loads(done.out)
    assert (done.code, found["ok"], found["failed"]) == (1, False, ["bad"])
    assert len(found["results"]) == 2
    assert "'bad' failed with exit code 7" in done.err
    assert f"`dispatchkit bench bad --checkout {checkout}`" in done.err


def test_one_that_is_killed_is_named_with_the_signal(run: Any, checkout: Path) -> None:
    (checkout / "bench" / "bad.py").write_text("import os, signal; os.kill(os.getpid(), 9)\n")
    done = run("bench", "bad", "--checkout", str(checkout))
    assert (done.code, "'bad' was stopped by signal 9" in done.err) == (1, True)


def test_bad_input_says_what_is_needed(run: Any, checkout: Path, tmp_path: Path) -> None:
    """An unknown name, or a folder that is not a checkout."""
    done = run("bench", "god", "--checkout", str(checkout))
    assert done.code == 2
    assert "'good'" in done.err
    done = run("bench", "--checkout", str(tmp_path / "bench"))
    assert done.code == 2
    assert "pass the root folder of a clone" in done.err


def test_those_of_this_checkout_are_found(run: Any) -> None:
    """No path is needed if the package runs from the checkout."""
    where = [] if PACKAGE.parent == ROOT else ["--checkout", str(ROOT)]
    done = run("bench", "--list", "--json", *where)
    assert "decision" in {row["benchmark"] for row in json.loads(done.out)}


def test_an_installed_package_has_none(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another package's folder named bench is not run either."""
    from dispatchkit.cli import benching

    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "foreign.py").write_text("raise SystemExit(7)\n")
    file = tmp_path / "dispatchkit" / "cli" / "benching.py"
    monkeypatch.setattr(benching, "__file__", str(file))
    done = run("bench", "--json")
    assert (done.code, done.out) == (2, "")
    assert "--checkout FOLDER" in done.err
