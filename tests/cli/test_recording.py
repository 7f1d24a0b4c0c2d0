"""``record``: runs a script and writes its batches as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
from dispatchkit import Dispatcher, DispatchConfig, load_plugins
print("words of the script", sys.argv[1:])
policy = load_plugins().create_policy("vllm")
dispatcher = Dispatcher(policy, DispatchConfig(max_num_tokens=8), lazy=True)
dispatcher.dispatch(3, 3, 1)
dispatcher.dispatch(7, 2)
dispatcher.dispatch(5)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "serve.py"
    path.write_text(SCRIPT)
    return path


def test_every_batch_is_a_step(run: Any, tmp_path: Path, script: Path) -> None:
    """Steps are in order; the script's output goes to standard error."""
    from dispatchkit.observe.trace import read_trace

    path = tmp_path / "trace.csv.gz"
    done = run("record", str(path), str(script), "--port", "80", "--json")
    # Options after the script belong to the script.
    assert "words of the script ['--port', '80', '--json']" in done.err
    assert done.code == 0, done.err
    # Compare without white space, because long paths wrap at the screen's width.
    assert "".join(done.out.split()) == f"3stepswrittento{path}."
    trace = read_trace(path)
    assert list(trace.column("num_tokens")) == [3, 7, 5]
    assert list(trace.column("num_reqs")) == [3, 2, 1]
    assert list(trace.column("uniform_decode")) == [1, 0, 0]


def test_json_comes_before_the_script(run: Any, tmp_path: Path, script: Path) -> None:
    """Nothing else is on standard output."""
    path = tmp_path / "trace.jsonl"
    done = run("record", "--json", str(path), str(script))
    assert json.loads(done.out) == {
        "output": str(path),
        "steps": 3,
        "exit_code": 0,
        "stopped": False,
    }


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(3)", 1, "exit code 3"),
        ("sys.exit('words')", 1, "exit code 1"),
        ("raise KeyboardInterrupt", 130, "Stopped."),
    ],
)
def test_how_the_script_ends_is_told_and_the_trace_is_whole(
    run: Any, tmp_path: Path, script: Path, end: str, code: int, says: str
) -> None:
    """Servers end by Ctrl-C; steps until then must be recorded."""
    from dispatchkit.observe.trace import read_trace

    script.write_text(SCRIPT + end)
    path = tmp_path / "trace.csv"
    done = run("record", str(path), str(script))
    assert done.code == code
    assert says in done.err
    assert len(read_trace(path)) == 3


def test_a_script_that_raises_keeps_its_traceback_and_its_steps(
    run: Any, tmp_path: Path, script: Path
) -> None:
    """It is a defect of the script, not bad input; the traceback has no frames of the command."""
    from dispatchkit.observe.trace import read_trace

    script.write_text(SCRIPT + "try:\n    1 / 0\nexcept ValueError:\n    pass\n")
    done = run("record", str(tmp_path / "trace.csv"), str(script))
    assert done.code == 1
    assert "ZeroDivisionError" in done.err
    assert f'File "{script}", line 11' in done.err
    assert "runpy" not in done.err
    assert "recording.py" not in done.err
    assert len(read_trace(tmp_path / "trace.csv")) == 3
    assert [each.name for each in tmp_path.glob("trace*")] == ["trace.csv"]


def test_dispatch_is_as_before_afterwards(run: Any, tmp_path: Path, script: Path) -> None:
    """Recording ends with the command."""
    from dispatchkit.dispatch import Dispatcher

    before = Dispatcher.dispatch
    run("record", str(tmp_path / "trace.csv"), str(script))
    assert Dispatcher.dispatch is before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trace.csv", "nowhere.py"], "nowhere.py"),
        (["no/folder/trace.csv", "empty.py"], "output must be"),
        (["trace.csv", "empty.py"], "dispatched no batch"),
        (["trace.csv", "-m"], "a module"),
        (["trace.csv"], "SCRIPT"),
    ],
)
def test_bad_input_is_code_2(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("pass\n")
    done = run("record", *args)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert not (tmp_path / "trace.csv").exists()


AXES_SCRIPT = """
from dispatchkit import Axis, Dispatcher, DispatchConfig, load_plugins
policy = load_plugins().create_policy("vllm")
config = DispatchConfig(max_num_tokens=8, axes=[Axis("length", (16, 64))], max_loras=1)
dispatcher = Dispatcher(policy, config, lazy=True)
dispatcher.dispatch(3, 3, 1, config.variant(1, length=40))
Dispatcher(policy, DispatchConfig(max_num_tokens=8), lazy=True).dispatch(5)
dispatcher.dispatch(7, 2, 0, config.variant(0, length=99))
"""


def test_values_of_axes_are_recorded_and_simulated(run: Any, tmp_path: Path) -> None:
    """Steps of a runner with other axes are reported, because the trace cannot hold them."""
    path, script = tmp_path / "trace.csv", tmp_path / "serve.py"
    script.write_text(AXES_SCRIPT)
    done = run("record", str(path), str(script))
    assert done.code == 0, done.err
    assert "omitted 1 step whose axes (none) differ from those of the first step" in done.err
    lines = [line.split(",") for line in path.read_text().splitlines()]
    assert [line[-2:] for line in lines] == [
        ["num_active_loras", "axis.length"],
        ["1", "40"],
        ["0", "99"],
    ]
    options = ["--axes", "length=16,64", "--json"]
    found = json.loads(run("simulate", str(path), *options).out)
    assert found["misses"] == {"outside_axis": 1}
    done = run("explain", "--trace", str(path), *options)
    assert [one["batch"]["axes"] for one in json.loads(done.out)["decisions"]] == [
        {"length": None},
        {"length": 64},
    ]
    done = run("simulate", str(path), "--json")
    assert "values of length in" in done.err
    done = run("simulate", str(path), "--axes", "width=16")
    assert done.code == 2
    assert "'axis.width'" in done.err
    done = run("plan", str(path), "--graphs", "2", "--max-size", "8", "--json")
    assert any("ignores the axis length" in one for one in json.loads(done.out)["warnings"])


ODD_SCRIPT = """
from dispatchkit import Axis, Dispatcher, DispatchConfig, load_plugins
policy = load_plugins().create_policy("vllm")
config = DispatchConfig(
    max_num_tokens=8, query_lens=2, varlen_decode=True, axes=[Axis("length", (16, 64))]
)
dispatcher = Dispatcher(policy, config, lazy=True)
dispatcher.dispatch(3, 3, 0, config.variant(0, length=2**40))
for uniform in range(3):
    for tokens, reqs in ((7, 3), (1, 1), (4, 2), (0, 0)):
        dispatcher.dispatch(tokens, reqs, uniform)
"""


def test_whatever_can_be_dispatched_is_recorded(run: Any, tmp_path: Path) -> None:
    """Recording does not change a script, for any batches."""
    from dispatchkit.observe.trace import MAX_COUNT, read_trace

    path, script = tmp_path / "trace.csv", tmp_path / "serve.py"
    script.write_text(ODD_SCRIPT)
    done = run("record", str(path), str(script))
    assert done.code == 0, done.err
    trace = read_trace(path)
    assert list(trace.column("num_tokens")) == [3, *([7, 1, 4, 0] * 3)]
    assert trace.column("axis.length")[0] == MAX_COUNT
    assert [step.num_tokens for step in trace if step.uniform_decode and step.num_tokens] == [4]
