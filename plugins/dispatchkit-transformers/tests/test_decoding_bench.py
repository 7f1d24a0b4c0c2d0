"""The benchmark of decoding: counts, plans, and failing cases."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
# Loading the library takes longer than all other quick tests of a worker together.
pytestmark = pytest.mark.slow
BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    import decoding

    return decoding


def arguments(bench: ModuleType, **changed: Any) -> argparse.Namespace:
    asked = {
        "trace": bench.TRACE, "trace_steps": 1000, "graphs": 12, "most": 128, "length": 64,
        "rounds": 4, "skip": [], "compile": False, "fill_cache": False, "eager_steps": None,
        "parts": ["trace", "fixed"], "batches": [1, 8, 64], "dynamic": "batch",
    }  # fmt: skip
    return argparse.Namespace(**{**asked, **changed})


def test_tuning_is_counted_once_and_not_within_a_compilation(bench):
    from _compile_time import _counted, compile_time
    from torch._guards import CompileContext, CompileId, compile_context

    inner = _counted(sum)
    outer = _counted(lambda values: inner(values) + 1)
    start = compile_time()
    assert outer([1, 2]) == 4
    outside = compile_time().since(start)
    with compile_context(CompileContext(CompileId(frame_id=0, frame_compile_id=0))):
        assert outer([1, 2]) == 4
    assert compile_time().since(start) == outside
    assert outside.tuning > 0
    assert outside.total == outside.compiling + outside.tuning


def test_fewer_planned_sizes_pad_less_than_the_usual_ones(bench):
    args = arguments(bench)
    usual = [1, 2, 4, *range(8, 129, 8)]
    planned = bench.planned_sizes(args)
    assert len(planned) == 12 < len(usual)

    def padded(sizes: list[int]) -> float:
        return statistics.mean(
            min(size for size in sizes if size >= rows) for rows in bench.trace_sizes(args)
        )

    assert padded(planned) < 0.9 * padded(usual)


def steps_of(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> dict[str, Any]:
    """Return four cases that record their calls, one of which fails."""

    def case_of(name: str) -> Any:
        def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            if name == "graphs":
                raise RuntimeError("no graph")
            return tokens

        return lambda model, args: bench.Case(name, run)

    cases = {name: case_of(name) for name in ("eager", "graphs", "raw graphs", "graphs, compiled")}
    monkeypatch.setattr(bench, "CASES", cases)
    monkeypatch.setattr(bench, "selected_cases", lambda args, *parts: list(cases))
    return cases


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_case_that_fails_has_a_line_and_the_others_go_on(bench, monkeypatch, capsys):
    calls: list[str] = []
    steps_of(bench, monkeypatch, calls)
    args = arguments(bench, trace_steps=5, eager_steps=2)
    session = bench.Session(bench.Lines("none"), SimpleNamespace(), args)
    session.trace()
    rows = printed(capsys)
    assert [(row["case"], row["traffic"]) for row in rows] == [
        ("eager", "trace of 5"),
        ("graphs", "trace of 5"),
        ("raw graphs", "trace of 5"),
        ("graphs, compiled", "trace of 5"),
        ("raw graphs", "trace of 5, again"),
        ("graphs, compiled", "trace of 5, again"),
    ]
    assert rows[1]["error"] == "RuntimeError: no graph"
    assert [row.get("n_steps") for row in rows] == [2, None, 5, 5, 5, 5]
    assert [row["n"] for row in rows[4:]] == [2, 2]
    assert session.lines.failed == ["graphs"]
    ran = ["raw graphs"] * 5 + ["graphs, compiled"] * 5
    assert calls == ["eager"] * 2 + ["graphs"] + 3 * ran


def test_a_case_of_the_trace_is_the_one_of_the_fixed_batches(bench, monkeypatch, capsys):
    cases = steps_of(bench, monkeypatch, [])
    made: list[str] = []
    for name, make in cases.items():
        cases[name] = lambda *given, name=name, make=make: made.append(name) or make(*given)
    args = arguments(bench, trace_steps=5, batches=[1, 8], steps=2)
    session = bench.Session(bench.Lines("none"), SimpleNamespace(), args)
    session.trace()
    session.fixed()
    # The failed case is created again for the next part.
    assert made == [*cases, "graphs"]
    session.lines.summary()
    rows = printed(capsys)
    assert {row["model"] for row in rows} == {"none"}
    traffic = ["trace of 5", "trace of 5, again", "batch 1", "batch 8"]
    assert list(dict.fromkeys(row["traffic"] for row in rows)) == [*traffic, "all"]
    assert rows[-1]["case"] == "summary"
    for name in traffic:
        assert rows[-1][name]["best"] == "graphs, compiled"
        assert {"times eager", "times raw graphs"} < set(rows[-1][name])


def test_what_the_aims_are_about_is_read_off_the_lines(bench):
    from _decoding_lines import compared

    known = {"eager": 8.0, "raw graphs": 2.0, "graphs": 2.5, "graphs, compiled": 1.0}
    assert compared({**known, "reduce-overhead": 2.0, "default": 4.0, "graphs, other": 0.5}) == {
        "best": "graphs, other", "ms": 0.5, "times eager": 16.0, "times raw graphs": 4.0,
        "times default": 8.0, "times reduce-overhead": 4.0, "plain to raw": 0.8,
        "compiled to rival": 2.0,
    }  # fmt: skip
    assert compared({"eager": 8.0}) == {}


def test_only_sizes_that_are_measured_are_captured(bench):
    from _decoding_sizes import measured_sizes

    assert measured_sizes(arguments(bench, parts=["fixed"])) == [1, 8, 64]
    assert measured_sizes(arguments(bench, parts=["trace"])) == [8, 16, 24, 32]
    assert measured_sizes(arguments(bench, parts=["calls"], batches=[3], most=3)) == [3]


def test_one_size_of_each_kind_is_compiled_for(bench):
    from _decoding_sizes import evenly, sizes_to_compile

    first = bench.trace_sizes(arguments(bench))[0]
    assert sizes_to_compile(arguments(bench), "reduce-overhead") == [first, 1]
    assert sizes_to_compile(arguments(bench), "default") == [1]
    assert sizes_to_compile(arguments(bench), bench.OWN_PLANNED) == [first]
    assert sizes_to_compile(arguments(bench, parts=["fixed"]), "reduce-overhead") == [1, 8]
    every = sizes_to_compile(arguments(bench, dynamic="auto"), "reduce-overhead")
    assert every == [*dict.fromkeys([*bench.trace_sizes(arguments(bench)), 1, 8, 64])]
    assert evenly(range(10), 3) == [1, 5, 8]
    assert evenly(range(3), 4) == [0, 1, 2]
