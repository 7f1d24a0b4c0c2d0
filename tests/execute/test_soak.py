"""The soak of scripts/soak.py, short; and it finds what is planted for it."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

pytest.importorskip("torch")
for plugin in ("adaptive", "composite", "multistream", "threshold", "vllm"):
    pytest.importorskip(f"dispatchkit_{plugin}")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"
pytestmark = pytest.mark.slow


@pytest.fixture
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = logging.getLogger("dispatchkit").level
    yield module
    logging.getLogger("dispatchkit").setLevel(before)


def test_everything_at_once_gives_eager_results_with_faults_at_random(soak):
    """Each step once, each eager one with a reason, the budget kept, resources flat."""
    told = soak.run(2000, seed=0, every=12)
    assert told["steps"] + told["raised"] == 2000
    for count in ("captures", "capture_failures", "replay_failures", "evictions", "storms"):
        assert told[count] > 0, told
    for fault in ("policy raised", "observer raised", "event: swap", "event: replace"):
        assert told["happened"][fault] > 0, told
    assert told["by_mode"].keys() == {"NONE", "PIECEWISE", "FULL"}


@pytest.mark.parametrize("fault", ["skips a launch", "launches twice", "keeps a graph"])
def test_planted_fault_ends_the_run(soak, monkeypatch, fault):
    graph = soak.FaultyGraph
    launch = graph.replay
    changed = {
        "skips a launch": ("replay", lambda self: None),
        "launches twice": ("replay", lambda self: (launch(self), launch(self))),
        "keeps a graph": ("release", lambda self: self.graph.release()),
    }[fault]
    monkeypatch.setattr(graph, *changed)
    with pytest.raises(soak.SoakError):
        soak.run(300, seed=0, every=12)
