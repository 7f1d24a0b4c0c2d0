"""``demo`` on the command line: output, exit codes and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("dispatchkit_vllm")

HEADER = "num_tokens,num_reqs,max_query_len,uniform_decode\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "3,3,1,1\n3,3,1,1\n9,4,6,0\n4,4,1,1\n")
    return str(path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure a decoder small enough for tests of the output."""
    from dispatchkit.demo import replay
    from dispatchkit.demo.decoder import DecoderShape

    shape = DecoderShape(num_layers=1, num_heads=2, head_dim=8, cache_len=16, vocab=32)
    monkeypatch.setattr(replay, "TAPE_SHAPE", shape)


@pytest.mark.usefixtures("small")
def test_text_is_readable_at_80_columns_and_without_colour(run: Any, trace: str) -> None:
    """All results fit on one page."""
    done = run("demo", "--trace", trace, "--device", "tape")
    assert done.code == 0, done.err
    for part in (
        "Capture",
        "FULL",
        "PIECEWISE",
        "padding",
        "eager steps by reason",
        "do not predict times on a GPU",
    ):
        assert part in done.out
    assert "0 of 4 steps differ" in done.out.replace("\n  ", " ")
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out


@pytest.mark.usefixtures("small")
def test_json_is_all_that_json_mode_prints(run: Any, trace: str) -> None:
    """No progress bar, no notes, no second document."""
    done = run("demo", "--trace", trace, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["ok"] is True
    assert report["backend"] == "tape"
    assert set(report["batch1"]) == {"eager_us", "dispatched_us", "mode", "ratio"}
    assert done.err == ""


@pytest.mark.slow_except("False")
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.usefixtures("small")
def test_a_wrong_result_is_exit_code_1(
    run: Any, trace: str, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """Text names the wrong steps; JSON mode still prints only JSON."""
    from dispatchkit.demo.decoder import Decoder

    plain = Decoder.step

    def off(self: Decoder, cache: Any) -> Any:
        step = plain(self, cache)
        return lambda tokens, positions, slots: step(tokens, positions, slots) + 0.1

    monkeypatch.setattr(Decoder, "step", off)
    done = run("demo", "--trace", trace, "--device", "tape", *["--json"][:as_json])
    assert done.code == 1
    if as_json:
        assert json.loads(done.out)["ok"] is False
    else:
        assert "4 of 4 steps differ" in done.out
        assert "differs: step 0" in done.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--policy", "vlm", "--device", "tape"], "'vllm'"),
        (["--device", "gpu"], "auto, cpu, cuda, tape"),
        (["--steps", "-1"], "at least 1"),
        (["--steps", "0"], "at least 1"),
        (["--sizes", "4,x"], "sizes"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--trace", "."], "folder"),
    ],
)
def test_bad_input_is_one_message_and_code_2(run: Any, args: list[str], says: str) -> None:
    """Nothing is printed to standard output, even with --json."""
    done = run("demo", *args, "--json")
    assert done.code == 2
    assert done.out == ""
    assert says in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEADER + "3,3,1,1\n9,4", "line 3"),
        (HEADER.replace("num_reqs", "num_req") + "3,3,1,1\n", "'num_reqs'"),
        ("num_tokens\n3\n", "num_reqs"),
        (HEADER + "-3,3,1,1\n", "line 2"),
        (HEADER, "no steps"),
        ("", "empty"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(run: Any, tmp_path: Path, text: str, says: str) -> None:
    """Traces are truncated, misspelt or empty, or lack columns, or have impossible values."""
    path = tmp_path / "bad.csv"
    path.write_text(text)
    done = run("demo", "--trace", str(path), "--json")
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_without_torch_it_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line states the next step."""
    for name in [name for name in sys.modules if name.startswith("dispatchkit.demo.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run("demo")
    assert (done.code, done.out) == (2, "")
    assert "pip install 'dispatchkit[torch]'" in done.err
