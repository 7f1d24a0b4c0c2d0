"""A short run of scripts/soak.py, which must detect planted faults."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("torch")
for plugin in ("adaptive", "composite", "multistream", "threshold", "vllm"):
    pytest.importorskip(f"dispatchkit_{plugin}")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.slow


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("soak")
    before = logging.getLogger("dispatchkit").level
    yield module
    logging.getLogger("dispatchkit").setLevel(before)


def test_everything_at_once_gives_eager_results_with_faults_at_random(soak):
    """Each step runs once, eager steps have a reason, and budget and resources stay constant.

    Faults end soon, so that replays are tested.
    """
    told = soak.run(1200, seed=0, every=8)
    assert told["steps"] + told["raised"] == 1200
    assert told["replayed"] > 0.6, told
    for count in ("captures", "capture_failures", "replay_failures", "evictions", "storms"):
        assert told[count] > 0, told
    for fault in ("capture failed", "launch refused", "policy raised", "observer raised"):
        assert told["happened"][fault] > 0, told
    for event in set(soak.EVENTS):
        assert told["happened"][f"event: {event}"] > 0, told
    assert told["by_mode"].keys() == {"NONE", "PIECEWISE", "FULL"}
    assert told["lanes"]["by_mode"]["FULL"] > 0, told


def test_many_steps_and_swaps_leave_resources_flat(soak, is_nightly):
    """A long run: 6,000 steps, and a million in the nightly profile."""
    steps = 1_000_000 if is_nightly else 6_000
    told = soak.run(steps, seed=0, every=16)
    assert told["steps"] + told["raised"] == steps
    assert told["replayed"] > 0.8, told
    assert told["swaps"] > steps // 125, told


@pytest.mark.parametrize("fault", ["skips a launch", "launches twice", "keeps a graph"])
def test_planted_fault_ends_the_run_and_tells_where_it_stood(soak, monkeypatch, capsys, fault):
    graph = importlib.import_module("soak_parts").FaultyGraph
    launch = graph.replay
    changed = {
        "skips a launch": ("replay", lambda self: None),
        "launches twice": ("replay", lambda self: (launch(self), launch(self))),
        "keeps a graph": ("release", lambda self: self.graph.release()),
    }[fault]
    monkeypatch.setattr(graph, *changed)
    with pytest.raises(soak.SoakError):
        soak.run(200, seed=0, every=12)
    told = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert told["seed"] == 0
    assert told["recent"]
    assert {"steps", "budget", "bytes", "graphs", "stats"} <= told.keys()
