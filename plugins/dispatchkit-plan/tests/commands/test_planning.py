"""``plan`` on the command line: a thin wrapper, so tests cover output and errors."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

TRACE = str(files("dispatchkit.demo") / "data" / "azure_conv_high.csv")


def test_json_is_the_plan_and_nothing_else(run: Any) -> None:
    """The largest size is included and counted, and the curve never rises."""
    done = run("plan", TRACE, "--graphs", "8", "--max-size", "256", "--json")
    assert (done.code, done.err) == (0, "")
    plan = json.loads(done.out)
    assert len(plan["sizes"]) == 8
    assert plan["sizes"][-1] == 256
    assert plan["waste_pct"] == dict(map(tuple, plan["curve"]))[8]
    wastes = [waste for _, waste in plan["curve"]]
    assert wastes == sorted(wastes, reverse=True)
    assert plan["rivals"]["vllm-default"]["graphs"] > 8


def test_a_plan_for_one_half_is_judged_on_the_other(run: Any) -> None:
    """The validation distinguishes decode from mixed steps."""
    done = run("plan", TRACE, "--graphs", "12", "--fit-on", "first-half", "--keyed", "--json")
    plan = json.loads(done.out)
    assert plan["fit_on"] == "first-half"
    assert {family["uniform"] for family in plan["families"]} == {True, False}
    assert sum(len(family["sizes"]) for family in plan["families"]) == 12


def test_text_shows_sizes_rivals_and_warnings_apart(run: Any) -> None:
    """Warnings go to standard error, and the output fits 80 columns."""
    done = run("plan", TRACE, "--graphs", "6", "--keyed")
    assert done.code == 0
    assert "uniform decode: " in done.out
    assert "vllm-default" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "Warning: " in done.err


@pytest.mark.parametrize(
    ("engine", "holds"),
    [("vllm", "cudagraph_capture_sizes"), ("dispatchkit", "DispatchConfig(")],
)
def test_settings_to_paste_are_one_whole_line(run: Any, engine: str, holds: str) -> None:
    """A wrapped line could not be pasted, so the line is not wrapped."""
    done = run("plan", TRACE, "--graphs", "40", "--engine", engine)
    assert len([line for line in done.out.splitlines() if holds in line and "512" in line]) == 1
    settings = json.loads(run("plan", TRACE, "--graphs", "40", "--engine", engine, "--json").out)[
        "settings"
    ]
    assert settings["engine"] == engine


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "graphs"),
        (["--graphs", "0"], "graphs"),
        (["--graphs", "600"], "512"),
        (["--graphs", "8", "--memory-bytes", "100"], "exactly one"),
        (["--memory-bytes", "100"], "bytes_per_graph"),
        (["--graphs", "8", "--max-size", "-1"], "max_size"),
        (["--graphs", "8", "--max-size", "10"], "Raise max_size"),
        (["--graphs", "8", "--engine", "vlm"], "'vllm'"),
        (["--graphs", "8", "--cost-model", "nowhere.json"], "nowhere.json"),
        (["--graphs", "8", "--align", "0"], "align"),
        (["--graphs", "8", "--query-len", "4"], "--engine"),
        (["--graphs", "8", "--bytes-per-graph", "4"], "--memory-bytes"),
        (["--graphs", "8", "--capture-s-per-graph", "1"], "--capture-time-s"),
    ],
)
def test_bad_input_is_a_message_and_code_2(run: Any, args: list[str], says: str) -> None:
    """Nothing is printed to standard output, even with --json."""
    done = run("plan", TRACE, *args, "--json")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert "Traceback" not in done.err


def test_a_torn_trace_is_named_with_its_line(run: Any, tmp_path: Path) -> None:
    """The trace is truncated within a line."""
    path = tmp_path / "torn.csv"
    path.write_text("step,num_tokens,num_reqs\n0,3,3\n1,4")
    done = run("plan", str(path), "--graphs", "2", "--json")
    assert (done.code, done.out) == (2, "")
    assert "torn.csv, line 3" in done.err


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.csv"
    rows = [f"{1 + step % 7},{8 * (1 + step % 5)}" for step in range(60)]
    path.write_text("\n".join(["num_tokens,axis.length", *rows]) + "\n")
    return str(path)


def test_with_an_axis_each_bucket_has_sizes_of_its_own(run: Any, lengths: str) -> None:
    """The arguments of a runner are printed for pasting."""
    asked = ("plan", lengths, "--graphs", "6", "--axis", "length", "--engine", "dispatchkit")
    done = run(*asked)
    assert done.code == 0
    assert "length 40: " in done.out
    assert "policy=GridPolicy({" in done.out
    assert "Warning: The trace is short" in done.err
    plan = json.loads(run(*asked, "--json").out)
    assert sum(len(sizes) for _, sizes in plan["grid"]) == plan["graphs"] <= 6
    assert plan["settings"]["text"].startswith("axes=[Axis('length', (")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--axis", "length", "--keyed", "--graphs", "3"), "--keyed"),
        (("--axis", "length", "--engine", "vllm", "--graphs", "3"), "--engine"),
        (("--axis", "length", "--memory-bytes", "3"), "--memory-bytes"),
        (("--axis", "length"), "--graphs"),
        (("--axis", "width", "--graphs", "3"), "axis.width"),
        (("--max-value", "3", "--graphs", "3"), "--axis"),
    ],
)
def test_what_does_not_go_with_an_axis_is_refused(
    run: Any, lengths: str, extra: tuple[str, ...], says: str
) -> None:
    done = run("plan", lengths, *extra)
    assert done.code != 0
    assert says in done.err


OWN = ("plan", TRACE, "--beside", "128,512", "--cost-model", "lm-decode-h100")


def test_sizes_that_deserve_a_graph_are_listed_with_what_they_save(run: Any) -> None:
    """They have their own budget, and settings contain the other sizes too."""
    asked = (*OWN, "--memory-bytes", "40e6", "--bytes-per-graph", "8e6")
    done = run(*asked, "--engine", "dispatchkit")
    assert (done.code, done.err) == (0, "")
    assert "deserve their own graph in addition to 128, 512" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    plan = json.loads(run(*asked, "--engine", "dispatchkit", "--json").out)
    assert len(plan["own"]) == 5
    assert f"DispatchConfig(sizes=({', '.join(map(str, plan['sizes']))}))" in done.out
    assert sorted([128, 512, *(one["size"] for one in plan["own"])]) == plan["sizes"]
    assert all(f"{one['saved_us'] / 1e3:,.1f} ms" in done.out for one in plan["own"])
    assert plan["settings"]["sizes"] == plan["sizes"]


def test_exact_sizes_alone_name_the_policy_that_serves_them(run: Any) -> None:
    done = run(*OWN[:2], "--max-waste", "0", *OWN[4:], "--graphs", "3")
    assert done.code == 0
    assert "policy `threshold` with max_waste=0" in done.out


def test_without_sizes_to_capture_no_settings_are_printed(run: Any, tmp_path: Path) -> None:
    """Eager is always faster here, so no graph saves time."""
    path = tmp_path / "costs.json"
    model = {"format": "dispatchkit-cost-model", "version": 1, "name": "eager"}
    curves = {"eager_us": [[1, 1.0]], "graph_us": [[1, 2.0], [512, 2.0]]}
    path.write_text(json.dumps({**model, **curves}))
    asked = ("plan", TRACE, "--max-waste", "0", "--graphs", "3", "--cost-model", str(path))
    done = run(*asked, "--engine", "dispatchkit")
    assert (done.code, done.err) == (0, "")
    assert "No additional graph would save time." in done.out
    assert "DispatchConfig" not in done.out


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--graphs", "3", "--keyed"), "--keyed"),
        (("--graphs", "3", "--axis", "length"), "--axis"),
        (("--graphs", "3", "--max-waste", "2"), "max_waste"),
        (("--graphs", "3", "--max-waste", "0", "--engine", "vllm"), "--engine"),
        (("--graphs", "3", "--beside", "8,x"), "--beside"),
        ((), "exactly one"),
    ],
)
def test_what_does_not_go_with_own_sizes_is_refused(
    run: Any, extra: tuple[str, ...], says: str
) -> None:
    done = run(*OWN, *extra)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    without = run(*OWN[:4], "--graphs", "3")
    assert "dispatchkit calibrate" in without.err
