"""``explain``: a batch, its decision and the nearest graphs."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.cli.app import run as run_app


def explain(run: Any, *args: str) -> dict[str, Any]:
    done = run("explain", *args, "--json")
    assert done.code == 0, done.err
    answer: dict[str, Any] = json.loads(done.out)
    return answer


def test_a_uniform_batch_gets_the_full_graph_of_the_next_size(run: Any) -> None:
    """Decision, padding and chosen graph are consistent."""
    answer = explain(run, "3", "--num-reqs", "3", "--uniform", "--sizes", "1,2,4,8")
    assert answer["decision"]["mode"] == "FULL"
    assert (answer["decision"]["padded_num_tokens"], answer["decision"]["padding"]) == (4, 1)
    chosen = [each for each in answer["candidates"] if each["chosen"]]
    assert [each["key"] for each in chosen] == [answer["decision"]["key"]]


@pytest.mark.parametrize(("num_reqs", "query_len"), [(4, 2), (2, 4)])
def test_the_tokens_per_request_select_among_several_query_lengths(
    run: Any, num_reqs: int, query_len: int
) -> None:
    """The same number of tokens is a different uniform batch for each number of requests."""
    answer = explain(run, "8", "--num-reqs", str(num_reqs), "--uniform", "--query-lens", "2,4")
    assert (answer["batch"]["uniform"], answer["batch"]["query_len"]) == (True, query_len)


@pytest.mark.parametrize("num_reqs", ["0", "1", "3"])
def test_an_ambiguous_query_length_is_refused(run: Any, num_reqs: str) -> None:
    done = run("explain", "8", "--num-reqs", num_reqs, "--uniform", "--query-lens", "2,4")
    assert done.code == 2
    assert f"--num-reqs {num_reqs} does not select one of the query lengths (2, 4)." in " ".join(
        done.err.split()
    )


def test_a_single_query_length_applies_to_padded_requests(run: Any) -> None:
    """Engines pad requests, so the tokens need not be a multiple of the query length."""
    answer = explain(run, "7", "--num-reqs", "3", "--uniform", "--query-lens", "2")
    assert answer["decision"]["key"] == "FULL tokens=8 reqs=4 uniform=2"


def test_a_ceiling_keeps_full_away(run: Any) -> None:
    """Cascade attention allows at most PIECEWISE."""
    options = ["3", "--num-reqs", "3", "--uniform", "--sizes", "1,2,4,8"]
    answer = explain(run, *options, "--ceiling", "piecewise")
    assert answer["decision"]["mode"] == "PIECEWISE"
    assert "FULL" not in answer["batch"]["allowed_modes"]
    refused = [each for each in answer["candidates"] if each["key"].startswith("FULL")]
    assert {each["why_not"] for each in refused} == {"mode not allowed for this batch"}


def test_a_batch_above_the_largest_size_runs_eager_and_says_why(run: Any) -> None:
    """The answer includes a reason."""
    answer = explain(run, "600", "--max-num-tokens", "1000")
    assert answer["decision"]["key"] is None
    assert answer["decision"]["reason"] == "above_largest_size"
    assert answer["candidates"] == []


def test_a_batch_above_the_limit_is_explained_as_an_error(run: Any) -> None:
    """A step would raise, but the question is answered."""
    args = ["9", "--sizes", "4,8", "--max-num-tokens", "8"]
    answer = explain(run, *args)
    assert answer["decision"]["reason"] == "above_largest_size"
    assert answer["error"].startswith(
        "DescriptorError: num_tokens must be a whole number from 0 to 8"
    )
    shown = run("explain", *args).out
    assert "Raises   DescriptorError: num_tokens" in shown
    assert "Cost" not in shown


def test_a_batch_without_tokens_lists_no_graphs(run: Any) -> None:
    """No graph would run it in any state."""
    answer = explain(run, "0")
    assert (answer["decision"]["reason"], answer["candidates"]) == ("empty_batch", [])
    assert "raph" not in run("explain", "0").out.replace("needs no graph", "")


def test_adapters_are_asked_for_by_their_number(run: Any) -> None:
    """A limit is optional: the batch itself implies one."""
    answer = explain(run, "4", "--loras", "2", "--sizes", "4,8")
    assert answer["batch"]["num_active_loras"] == 2


def test_text_shows_the_same_in_80_columns(run: Any) -> None:
    """For people."""
    done = run("explain", "3", "--num-reqs", "3", "--uniform", "--sizes", "1,2,4,8")
    assert done.code == 0
    assert "replay FULL tokens=4" in done.out
    assert "ready, not preferred" in done.out
    assert "Note     assumes that all declared graphs are captured" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["3", "--policy", "vlm"], "'vllm'"),
        (["3", "--ceiling", "FUL"], "'FULL'"),
        (["3", "--mode", "full_and_piecewis"], "'FULL_AND_PIECEWISE'"),
        (["3", "--sizes", "4,x"], "sizes"),
        (["3", "--sizes", "4,-8"], "sizes"),
        (["3", "--sizes", "4,8", "--max-num-tokens", "6"], "max_num_tokens"),
        (["3", "--sizes", "0,4"], "sizes"),
        (["3", "--sizes", "4,1.5"], "sizes"),
        (["3", "--num-reqs", "4"], "num_reqs"),
        (["3", "--num-reqs", "-1"], "num_reqs"),
        (["3", "--loras", "2", "--max-loras", "1"], "loras"),
        (["3", "--loras", "5000"], "--loras must be a whole number from 0 to 4096, got 5000"),
        (["3", "--query-len", "0"], "query_lens"),
        (["3", "--max-num-tokens", "0"], "max_num_tokens"),
        (["3", "--max-num-seqs", "-4"], "max_num_seqs"),
        (["3", "--all"], "--trace"),
    ],
)
def test_bad_input_is_one_message_and_code_2(run: Any, args: list[str], says: str) -> None:
    """The message names the value and the allowed values; standard output stays empty."""
    done = run("explain", *args, "--json")
    assert done.code == 2
    assert done.out == ""
    assert says in done.err
    assert len(done.err.splitlines()) == 1


def test_sizes_are_put_in_order_and_a_gap_at_the_end_is_warned_about(run: Any) -> None:
    """The warning is a line on standard error; the output is unchanged."""
    done = run("explain", "3", "--sizes", "8,4,4", "--max-num-tokens", "16", "--json")
    assert done.code == 0
    assert json.loads(done.out)["decision"]["padded_num_tokens"] == 4
    assert done.err.startswith("Warning: `sizes` ends at 8")
    assert len(done.err.splitlines()) == 1


TRACE = str(files("dispatchkit.demo") / "data" / "azure_conv_high.csv")


def test_what_stands_behind_a_decision_and_what_it_costs_are_told(run: Any) -> None:
    """The constraint, the nearest graph, and times from the cost model."""
    answer = explain(run, "600", "--max-num-tokens", "1000")
    assert answer["because"].startswith("constraint: ")
    assert answer["because"].endswith("the largest has 512 tokens")
    assert (answer["nearest"], answer["note"]) == (None, None)
    assert answer["cost"]["step_us"] == answer["cost"]["eager_us"] > 0
    assert answer["cost"]["measured"] is False
    answer = explain(run, "3", "--num-reqs", "3", "--uniform", "--sizes", "1,2,64")
    assert answer["because"].startswith("policy: chose this graph")
    assert answer["nearest"] is None
    assert 0 < answer["cost"]["lost_us"] < answer["cost"]["step_us"] < answer["cost"]["eager_us"]
    answer = explain(run, "3", "--mode", "none")
    assert answer["because"] == "configuration: the mode runs this kind of batch eager"


def test_a_trace_is_explained_decision_by_decision(run: Any) -> None:
    """Counts per decision add up to the trace and agree with a simulation."""
    pytest.importorskip("numpy")
    found = explain(run, "--trace", TRACE)
    decisions = found["decisions"]
    assert sum(one["steps"] for one in decisions) == found["steps"]
    simulated = json.loads(run("simulate", TRACE, "--json").out)
    for name in ("modes", "misses", "waste_pct"):
        assert found[name] == simulated[name]
    assert found["time_s"] == pytest.approx(simulated["time_s"])
    eager = [one for one in decisions if one["decision"]["key"] is None]
    assert eager
    assert all(one["because"] for one in eager)


def test_a_trace_in_text_shows_the_costliest_in_80_columns(run: Any) -> None:
    """The output states the number of omitted decisions."""
    pytest.importorskip("numpy")
    done = run("explain", "--trace", TRACE)
    assert done.code == 0
    assert "Most expensive decisions" in done.out
    assert "more decisions; print all with --all or --json." in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert "All decisions" in run("explain", "--trace", TRACE, "--all").out


WORDS = """
--sizes --ceiling --mode --policy --loras --max-loras --uniform --num-reqs --query-len
--max-num-tokens --max-num-seqs --json -- - 0 1 3 8 -1 9999999999999999999999 1.5 nan 1,2,4
4,,8 , x FULL PIECEWISE none vllm vllm@0.11 [red] \u0663 True
"""
words = st.sampled_from(["", " ", *WORDS.split()])


@given(st.lists(words, max_size=6))
def test_no_command_line_ends_in_a_traceback(args: list[str]) -> None:
    """Any input gets an answer or an error; JSON mode prints only JSON."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_app(["explain", *args, "--json"])
    assert code in (0, 2)
    if code:
        assert out.getvalue() == ""
        assert err.getvalue() != ""
    elif "--" not in args:
        assert json.loads(out.getvalue())["batch"]["num_tokens"] >= 0


AXES = ["--axes", "length=16,64; kind=1,3 exact"]


def test_values_of_axes_pick_the_graph(run: Any) -> None:
    """Buckets of axes are part of batch, key and reason."""
    answer = explain(run, "3", "--sizes", "4,8", *AXES, "--value", "length=20", "--value", "kind=3")
    assert answer["batch"]["axes"] == {"length": 64, "kind": 3}
    assert answer["decision"]["key"].endswith("tokens=4 axes=64,3")
    answer = explain(run, "3", "--sizes", "4,8", *AXES, "--value", "length=20", "--value", "kind=2")
    assert answer["batch"]["axes"] == {"length": 64, "kind": None}
    assert answer["decision"]["reason"] == "outside_axis"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--value", "length=20"], "length"),
        (["--value", "length=20", "--value", "kind"], "AXIS=N"),
        (["--value", "length=20", "--value", "kind=-1"], "AXIS=N"),
        (["--value", "length=20", "--value", "kind=1", "--value", "kind=1"], "AXIS=N"),
        (["--value", "length=20", "--value", "depth=1"], "depth"),
    ],
)
def test_values_that_fit_no_axis_are_refused(run: Any, args: list[str], says: str) -> None:
    """One line and exit code 2."""
    done = run("explain", "3", *AXES, *args)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert run("explain", "3", "--value", "length=20").code == 2


def test_without_dispatchkit_plan_a_batch_has_no_cost_and_the_rest_says_what_to_install(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dispatchkit_plan", None)  # as if not installed
    assert explain(run, "3", "--sizes", "4,8")["cost"] is None
    text = run("explain", "3", "--sizes", "4,8")
    assert text.code == 0
    assert "Cost" not in text.out
    for args in (["3", "--cost-model", "mlp-h100"], ["--trace", TRACE]):
        done = run("explain", *args)
        assert (done.code, done.out) == (2, "")
        assert "Run: pip install dispatchkit-plan." in done.err
