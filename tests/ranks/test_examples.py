"""The examples run under torchrun, as their heads say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
STANDALONE = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(*arguments):
    pytest.importorskip("torch")
    pytest.importorskip("dispatchkit_vllm")
    done = subprocess.run(
        [*STANDALONE, "--nproc-per-node", "2", *arguments],
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(re.findall(r"rank (\d): steps (\{.*?\})", done.stdout)), done.stdout


def test_the_data_parallel_example_runs():
    """Both ranks run the same modes, and the leader's table travels."""
    pytest.importorskip("dispatchkit_adaptive")
    steps, told = run("examples/ranks/data_parallel.py", "--learn")
    assert set(steps) == {"0", "1"}
    assert steps["0"] == steps["1"]
    assert "tables from the leader 0" not in told


def test_the_tensor_parallel_example_runs():
    """Nothing is exchanged but at the checks."""
    steps, told = run("examples/ranks/tensor_parallel.py")
    assert set(steps) == {"0", "1"}
    assert told.count("exchanges 2,") == 2
