"""A trace, its account and its simulations, for tests of reports."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("dispatchkit_vllm")

TRACE = str(files("dispatchkit.demo") / "data" / "azure_conv_high.csv")


@pytest.fixture(scope="session")
def trace() -> Any:
    """Read an excerpt of a real trace."""
    from dispatchkit.observe.trace import read_trace

    return read_trace(TRACE)


@pytest.fixture(scope="session")
def plugins() -> Any:
    """Load only the plugin of the default policy."""
    from dispatchkit import load_plugins

    return load_plugins(allow=["vllm"], environ={})


@pytest.fixture(scope="session")
def account(trace: Any, plugins: Any) -> Any:
    """Account for the trace under the default policy."""
    from dispatchkit import Dispatcher
    from dispatchkit.observe import trace_config

    from dispatchkit_plan import load_cost_model
    from dispatchkit_plan.report import account_for

    dispatcher = Dispatcher(plugins.create_policy("vllm"), trace_config(trace), lazy=True)
    return account_for(trace, dispatcher, load_cost_model("lm-decode-h100"))


@pytest.fixture(scope="session")
def simulations(trace: Any, plugins: Any) -> Any:
    """Simulate the trace under three lists of sizes."""
    from dispatchkit_plan import Scenario, simulate_all

    scenarios = [
        Scenario(label="default"),
        Scenario(sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512), label="powers of two"),
        Scenario(max_graphs=4, label="four graphs"),
    ]
    return simulate_all(trace, scenarios, plugins=plugins)


def statistics_of_a_runner() -> dict[str, Any]:
    """Return saved statistics: two samples of a runner and the arms of an adaptive policy."""
    full = "FULL tokens=8 reqs=8 uniform=1"

    def sample(factor: int) -> dict[str, Any]:
        return {
            "steps": 100 * factor,
            "steps_by_mode": {"NONE": 10 * factor, "PIECEWISE": 30, "FULL": 90 * factor - 30},
            "hits": {full: 60 * factor, "PIECEWISE tokens=64": 30},
            "hit_tokens": {full: 400 * factor, "PIECEWISE tokens=64": 1500},
            "eager_by_reason": {"above_largest_size": 9 * factor, "capture_failed": factor},
            "real_tokens": 9000 * factor,
            "padded_tokens": 9900 * factor,
            "captures": 12,
            "capture_failures": 1,
            "replay_failures": 0,
            "evictions": 2,
            "failed_steps": 0,
        }

    arms = [
        {"arm": "FULL tokens=8", "samples": 20, "median_us": 90.0, "error": 0.01},
        {"arm": "eager", "samples": 3, "median_us": 410.0, "error": 0.2},
        {"arm": "FULL tokens=16", "samples": 0, "median_us": None, "error": 1.0},
    ]
    return {
        "format": "dispatchkit-statistics",
        "version": 1,
        "policy": "adaptive",
        "samples": [sample(1), sample(2)],
        "arms": [{"sizes": [5, 8], "base": "x", "arms": arms}],
    }


@pytest.fixture(scope="session")
def make_statistics() -> Callable[[], dict[str, Any]]:
    """Return a factory of saved statistics."""
    return statistics_of_a_runner


@pytest.fixture
def statistics() -> dict[str, Any]:
    """Return saved statistics of a runner."""
    return statistics_of_a_runner()
