"""vLLM's iteration-details lines are read as steps from any log that contains them."""

from __future__ import annotations

import pytest

from dispatchkit.observe import StepTrace

from dispatchkit_plan.traffic import read_workload

OLD = (
    "INFO 11-29 [core.py:349] Iteration({}): {} context requests, {} context tokens, "
    "{} generation requests, {} generation tokens, iteration elapsed time: {} ms"
)
NEW = (
    "(EngineCore pid=7) INFO [loggers.py:183] Engine 000: "
    + OLD.partition("] ")[2]
    + "{}, GPU KV cache usage: 3.1%"
)
STEPS = [(1, 100, 0, 0), (0, 0, 5, 5), (2, 30, 5, 5), (0, 0, 4, 12), (0, 0, 0, 0)]


def log(form: str, *, dummy: str = "") -> str:
    lines = [
        form.format(index, *facts, f"{index}.50", dummy if index == 1 else "")
        for index, facts in enumerate(STEPS)
    ]
    return "INFO starting, with | bars |\n" + "\nWARNING other\n".join(lines) + "\n"


@pytest.mark.parametrize("form", [OLD, NEW], ids=["0.14", "0.26"])
def test_lines_are_steps(form, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(log(form))
    trace = read_workload(path)
    assert isinstance(trace, StepTrace)
    assert list(trace.column("num_tokens")) == [100, 5, 35, 12]
    assert list(trace.column("num_reqs")) == [1, 5, 7, 4]
    assert list(trace.column("uniform_decode")) == [0, 1, 0, 0]
    assert list(trace.column("t_s")) == pytest.approx([0, 0.0005, 0.002, 0.0045])


def test_dummy_iterations_are_left_out(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(log(NEW, dummy=" (dummy)"))
    assert list(read_workload(path).column("num_tokens")) == [100, 35, 12]


def test_a_log_with_both_is_read_by_its_steps(tmp_path):
    table = (
        "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |\n"
        "| 5 | 8 | 3 | FULL | 40 |\n"
    )
    path = tmp_path / "server.log"
    path.write_text(log(OLD) + table)
    assert isinstance(read_workload(path), StepTrace)


@pytest.mark.parametrize("first", [OLD.format(0, *STEPS[1], "5.00"), '{"level": "info"}'])
def test_whatever_a_log_begins_with(first, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(f"{first}\n{log(OLD)}")
    assert list(read_workload(path).column("num_tokens"))[-4:] == [100, 5, 35, 12]
