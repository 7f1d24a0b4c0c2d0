"""``simulate`` on the command line: a thin wrapper, so tests cover output and errors."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

TRACE = str(files("dispatchkit.demo") / "data" / "azure_conv_high.csv")


def test_json_is_what_the_library_says(run: Any) -> None:
    """A single policy gives a single object."""
    from dispatchkit.observe.trace import read_trace

    from dispatchkit_plan import Scenario
    from dispatchkit_plan import simulate as in_python

    done = run("simulate", TRACE, "--policy", "vllm", "--sizes", "8,64,512", "--json")
    assert done.code == 0, done.err
    trace = read_trace(TRACE)
    expected = in_python(trace, Scenario(policy="vllm", sizes=(8, 64, 512))).to_json()
    assert json.loads(done.out) == json.loads(json.dumps(expected))


def test_several_policies_stand_side_by_side(run: Any) -> None:
    """JSON has a list, text has columns."""
    args = ["simulate", TRACE, "--policy", "vllm", "--policy", "vllm@0.11"]
    assert [row["label"] for row in json.loads(run(*args, "--json").out)] == ["vllm", "vllm@0.11"]
    done = run(*args)
    assert "vllm@0.11" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_ranks_say_what_they_lose_to_each_other(run: Any) -> None:
    """Results equal the library's, and the table fits a terminal."""
    args = ["simulate", TRACE, "--policy", "vllm", "--ranks", "4"]
    found = json.loads(run(*args, "--json").out)
    assert found["ranks"] == 4
    assert found["slowest_s"] > 0 < found["rank_padding"]
    done = run(*args)
    assert "lost to the slowest" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_a_budget_makes_captures_and_evictions(run: Any) -> None:
    """Options of the runner have the same meaning here."""
    done = run("simulate", TRACE, "--max-graphs", "2", "--eviction", "benefit", "--json")
    found = json.loads(done.out)
    assert found["evictions"] > 0
    assert found["captures"] == found["evictions"] + 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--policy", "vlm"], "'vllm'"),
        (["--cost-model", "nowhere.json"], "nowhere.json"),
        (["--max-graphs", "0"], "max_graphs"),
        (["--max-bytes", "1000"], "graph_bytes"),
        (["--eviction", "fifo"], "benefit, lru"),
        (["--lanes", "0"], "lanes"),
        (["--ranks", "0"], "ranks"),
        (["--sizes", "4,x"], "sizes"),
        (["--mode", "FUL"], "'FULL'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run: Any, args: list[str], says: str) -> None:
    """Nothing is printed to standard output, even with --json."""
    done = run("simulate", TRACE, *args, "--json")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(done.err.splitlines()) == 1


def test_a_bad_trace_is_named(run: Any, tmp_path: Path) -> None:
    """The error names its line."""
    path = tmp_path / "bad.csv"
    path.write_text("num_tokens\n3\n-1\n")
    done = run("simulate", str(path), "--json")
    assert (done.code, done.out) == (2, "")
    assert "bad.csv, line 3" in done.err
