"""The examples run under torchrun, as their docstrings state."""

from __future__ import annotations

import re

import pytest
from launched import torchrun

pytestmark = pytest.mark.slow


def run(*arguments):
    pytest.importorskip("torch")
    pytest.importorskip("dispatchkit_vllm")
    report = torchrun(*arguments)
    return dict(re.findall(r"rank (\d): steps by mode (\{.*?\})", report)), report


def test_the_data_parallel_example_runs():
    """Both ranks run the same modes, and the leader's table is sent."""
    pytest.importorskip("dispatchkit_adaptive")
    steps, report = run("examples/ranks/data_parallel.py", "--learn")
    assert set(steps) == {"0", "1"}
    assert steps["0"] == steps["1"]
    assert ", 0 tables received" not in report


def test_the_tensor_parallel_example_runs():
    """Only checks exchange data."""
    steps, report = run("examples/ranks/tensor_parallel.py")
    assert set(steps) == {"0", "1"}
    assert report.count(", 2 exchanges between ranks") == 2
