"""What the benchmark of decoding counts, plans and does with a case that fails."""

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
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    import decoding

    monkeypatch.setattr(decoding, "_failed", [])
    return decoding


def arguments(bench: ModuleType, **changed: Any) -> argparse.Namespace:
    asked = {
        "trace": bench.TRACE, "trace_steps": 1000, "graphs": 12, "most": 128, "length": 64,
        "rounds": 2, "skip": [], "compile": False, "fill_cache": False,
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


def test_a_case_that_fails_has_a_line_and_the_others_go_on(bench, monkeypatch, capsys):
    calls: list[str] = []

    def case_of(name: str) -> Any:
        def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            if name == "graphs":
                raise RuntimeError("no graph")
            return tokens

        return lambda model, args: bench.Case(name, run)

    cases = {name: case_of(name) for name in ("eager", "graphs", "raw graphs")}
    monkeypatch.setattr(bench, "CASES", cases)
    monkeypatch.setattr(bench, "wanted", lambda args, of_trace: list(cases))
    bench.trace("none", SimpleNamespace(), arguments(bench, trace_steps=5))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["case"], row["traffic"]) for row in rows] == [
        ("eager", "trace of 5"),
        ("graphs", "trace of 5"),
        ("raw graphs", "trace of 5"),
        ("raw graphs", "trace of 5, again"),
    ]
    assert rows[1]["error"] == "RuntimeError: no graph"
    assert rows[3]["n"] == 2
    assert bench._failed == ["graphs"]
    assert calls == ["eager"] * 5 + ["graphs"] + ["raw graphs"] * 15
