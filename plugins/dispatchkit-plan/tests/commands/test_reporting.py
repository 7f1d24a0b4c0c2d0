"""``report`` on the command line: inputs, outputs and errors."""

from __future__ import annotations

import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("numpy")

TRACE = str(files("dispatchkit.demo") / "data" / "azure_conv_high.csv")


def test_a_trace_becomes_a_page(run: Any, tmp_path: Path) -> None:
    """It has all figures, and a JSON summary."""
    path = tmp_path / "page.html"
    done = run("report", TRACE, "-o", str(path), "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["figures"] == ["padding", "tokens", "modes", "waste", "times", "reasons"]
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "vLLM default" in page
    assert list(tmp_path.iterdir()) == [path]


def test_one_figure_is_written_alone(run: Any, tmp_path: Path) -> None:
    """The figure is an SVG document that loads nothing; unknown figures are refused."""
    path = tmp_path / "waste.svg"
    done = run("report", TRACE, "--figure", "waste", "-o", str(path))
    assert done.code == 0, done.err
    picture = ET.fromstring(path.read_text(encoding="utf-8"))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [one.text for one in picture.iter() if one.tag.endswith("}text")]
    assert texts[:2] == ["Padding against number of graphs", "best sizes for this traffic"]
    assert "prefers-color-scheme:dark" in path.read_text(encoding="utf-8")
    named = {value for one in picture.iter() for name, value in one.items() if "href" in name}
    assert named == set()
    path.unlink()
    refused = run("report", TRACE, "--figure", "wast", "-o", str(path))
    assert refused.code == 2
    assert (
        "modes, padding, reasons, times, tokens, waste, got 'wast'. Did you mean 'waste'?"
        in refused.err
    )
    assert not path.exists()


def test_a_figure_without_a_file_of_its_own_is_no_page(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("report", TRACE, "--figure", "padding").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["padding.svg"]


def test_the_picture_of_the_pages_is_what_its_command_draws(run: Any, tmp_path: Path) -> None:
    """The picture thereby shows the current planner."""
    root = Path(__file__).parents[4]
    page = (root / "docs" / "how-to" / "plan.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ dispatchkit (report .*--figure.*)$", page, flags=re.MULTILINE)
    words = [word.replace("tests/data", str(root / "tests" / "data")) for word in line.split()]
    words[words.index("-o") + 1] = str(tmp_path / "waste.svg")
    assert run(*words).code == 0
    drawn = (tmp_path / "waste.svg").read_text(encoding="utf-8")
    assert drawn == (root / "docs" / "waste.svg").read_text(encoding="utf-8")


def test_simulations_become_a_page(run: Any, tmp_path: Path) -> None:
    """The input is the output of `simulate --json` for one policy or several."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(run("simulate", TRACE, "--json").out)
    two.write_text(
        run("simulate", TRACE, "--policy", "vllm", "--policy", "vllm@0.11", "--json").out
    )
    for source in (one, two):
        path = source.with_suffix(".html")
        assert run("report", str(source), "-o", str(path)).code == 0
    assert "vllm@0.11" in two.with_suffix(".html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("[]", "contains no simulations"),
        ("[1]", "a simulation"),
        ('{"label": "x"}', "num_steps"),
        ('{"num_steps": -1}', "num_steps"),
        ('{"format": "dispatchkit-statistics"}', "version"),
        ('{"format": "dispatchkit-statistics", "version": 1}', "samples"),
        ('{"format": "dispatchkit-statistics", "version": 1, "samples": [3]}', "an object"),
        ('{"format": "dispatchkit-statistics", "version": 1, "samples": [{}]}', "steps"),
        ("num_tokens\n3\nx\n", "line 3"),
        ("[" * 5000, "num_tokens"),
    ],
)
def test_what_is_none_of_these_is_refused(run: Any, tmp_path: Path, text: str, says: str) -> None:
    """The error names the file, and nothing is written."""
    source, page = tmp_path / "source", tmp_path / "page.html"
    source.write_text(text)
    done = run("report", str(source), "-o", str(page), "--json")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(done.err.splitlines()) == 1
    assert not page.exists()


def test_options_that_decide_are_refused_where_it_is_decided(run: Any, tmp_path: Path) -> None:
    """A simulation already has its policy."""
    source = tmp_path / "one.json"
    source.write_text(run("simulate", TRACE, "--json").out)
    done = run("report", str(source), "--policy", "vllm", "-o", str(tmp_path / "page.html"))
    assert done.code == 2
    assert "already contains the decisions" in done.err


@pytest.mark.parametrize("where", ["no/such/folder/page.html", "."])
def test_a_path_that_cannot_be_written_is_told_before_the_work(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The source is not read."""
    monkeypatch.chdir(tmp_path)
    done = run("report", "nowhere.csv", "-o", where)
    assert done.code == 2
    assert "output must be" in done.err
    assert "nowhere" not in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_told(run: Any, tmp_path: Path) -> None:
    """The error is one line."""
    tmp_path.chmod(0o500)
    done = run("report", TRACE, "-o", str(tmp_path / "page.html"))
    assert done.code == 2
    assert "can be written" in done.err


def test_ctrl_c_leaves_nothing_half_written(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During writing, the existing file is kept."""
    path = tmp_path / "page.html"
    path.write_text("before")
    replace = Path.replace

    def stop(self: Path, target: Any) -> Any:
        if self.name.endswith(".part"):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stop)
    done = run("report", TRACE, "-o", str(path), "--force")
    assert (done.code, done.err) == (130, "Stopped.\n")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "before"
