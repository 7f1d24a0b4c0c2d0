"""``calibrate``: a thin wrapper around the measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("dispatchkit_vllm")

MODULE = """
import torch
from dispatchkit import GraphRunner, StaticInput

def make():
    weight = torch.ones(4, 4)
    inputs = {"x": StaticInput((None, 4), "float32")}
    return GraphRunner(lambda x: x @ weight, inputs, sizes=[1, 2], backend="tape")

def none():
    return 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_model.py").write_text(MODULE)


def test_a_model_of_this_folder_becomes_a_cost_model(run: Any, tmp_path: Path) -> None:
    """Other commands can read it."""
    from dispatchkit_plan import load_cost_model

    done = run(
        *["calibrate", "--model", "small_model:make", "--samples", "2", "-o", "costs.json"],
        "--json",
    )
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["output"] == "costs.json"
    model = load_cost_model(tmp_path / "costs.json")
    assert [size for size, _ in model.graph_us.points] == [1, 2]
    text = run("explain", "2", "--sizes", "1,2", "--cost-model", "costs.json")
    assert text.code == 0, text.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "small_model"], "module:function"),
        (["--model", "small_model:mak"], "mak"),
        (["--model", "small_model:none"], "GraphRunner"),
        (["--model", "no_such_module:x"], "no_such_module"),
        (["--model", "small_model:make", "--pace", "slow"], "queued"),
        (["--model", "small_model:make", "--samples", "0"], "samples"),
        (["--model", "small_model:make", "--sizes", "x"], "sizes"),
        (["-o", "no/folder/costs.json"], "output must be"),
    ],
)
def test_bad_input_is_code_2(run: Any, args: list[str], says: str, tmp_path: Path) -> None:
    done = run("calibrate", *args, "--json")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert not (tmp_path / "costs.json").exists()
