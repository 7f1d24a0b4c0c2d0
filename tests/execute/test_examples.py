"""Every program of examples/ that needs one process runs and prints what its text promises."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Return the output of an example."""

    def run_example(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def test_an_engines_loop_replays_every_step(run):
    said = run("engine_loop.py")
    assert re.search(r"^(\d+) steps: 0 NONE, 0 PIECEWISE, \1 FULL", said, flags=re.MULTILINE)


def test_an_audio_model_has_an_axis_of_frames(run):
    said = run("audio_lengths.py")
    assert "30 steps: 0 NONE, 0 PIECEWISE, 30 FULL" in said
    assert float(said.split()[-1]) < 1e-5


def test_callers_of_a_voice_detector_have_state_of_their_own(run):
    said = run("streaming_vad.py", "--callers", "30", "--slots", "20", "--seconds", "0.2")
    assert "30 callers with " in said
    assert "up to 20 at a time, 6 hops each" in said
    assert re.search(r"^\d+ steps, of which 0 ran eager$", said, flags=re.MULTILINE)
    assert float(said.split()[-1]) < 1e-4


@pytest.mark.slow
def test_a_server_of_a_transformers_model_follows_a_trace(run):
    pytest.importorskip("transformers")
    said = run("transformers_server.py", "--steps", "40")
    assert "40 steps, " in said
    moved = re.search(r"^(\d+) cache rows moved", said, flags=re.MULTILINE)
    assert int(moved[1]) > 0
    assert re.search(r"^[2-9] graphs captured, 0 eager steps$", said, flags=re.MULTILINE)
    assert "axes=24" in said
    assert "axes=40" in said


@pytest.mark.slow
def test_a_whisper_server_encodes_and_decodes_clips_that_come_and_go(run):
    pytest.importorskip("transformers")
    said = run("whisper_server.py", "--steps", "40", "--slots", "4", "--check", "3")
    clips, tokens = map(int, re.search(r"^(\d+) clips, (\d+) tokens, ", said).groups())
    assert tokens > 4 * clips > 4 * 4
    calls = re.search(r"^encoder: (\d+) calls, (\d+) replayed$", said, flags=re.MULTILINE)
    assert calls[1] == calls[2]
    moved = re.search(
        r"^decoder: \d+ steps, [2-9] graphs captured, (\d+) cache rows moved$", said, re.MULTILINE
    )
    assert int(moved[1]) > 0
    assert re.search(r"^eager steps by reason: none; prompts: ", said, flags=re.MULTILINE)
    assert said.endswith("clips with the same tokens as generate(): 3 of 3\n")
