"""Test kits for your own policies and backends; they need ``dispatchkit[testing]``.

To test a policy, subclass ``PolicyTests``::

    from dispatchkit.testing import PolicyTests

    class TestHalfFull(PolicyTests):
        def make_policy(self):
            return HalfFull()

Without pytest, use ``print(run_policy_conformance(HalfFull))``. ``LanePolicyTests`` and
``run_lane_policy_conformance`` test lane policies, ``BackendTests`` tests backends,
``InputTransportTests`` tests input transports, and ``RunnerTests`` tests a policy, backend or step
in a GraphRunner. ``SmallestPolicy`` and ``OneBucketPolicy`` are simple policies for tests of other
components.

Each name is imported on first use, so using one kit does not import the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatchkit.testing.backend_tests import BackendTests
    from dispatchkit.testing.cases import Case
    from dispatchkit.testing.conformance import (
        Finding,
        Verdict,
        run_lane_policy_conformance,
        run_policy_conformance,
    )
    from dispatchkit.testing.input_transport_tests import InputTransportTests
    from dispatchkit.testing.lane_policy_tests import LanePolicyTests, SampleLane
    from dispatchkit.testing.machine import DispatcherMachine
    from dispatchkit.testing.policy_tests import PolicyTests
    from dispatchkit.testing.runner_tests import RunnerTests
    from dispatchkit.testing.samples import graph_view, make_batch
    from dispatchkit.testing.smallest import OneBucketPolicy, SmallestPolicy
    from dispatchkit.testing.strategies import (
        Change,
        apply_change,
        batches,
        changes,
        configs,
        graph_keys,
        registries,
        sample_batch,
    )

_LAZY_NAMES = {
    "BackendTests": "backend_tests",
    "Case": "cases",
    "Change": "strategies",
    "DispatcherMachine": "machine",
    "Finding": "conformance",
    "LanePolicyTests": "lane_policy_tests",
    "InputTransportTests": "input_transport_tests",
    "OneBucketPolicy": "smallest",
    "PolicyTests": "policy_tests",
    "RunnerTests": "runner_tests",
    "SampleLane": "lane_policy_tests",
    "SmallestPolicy": "smallest",
    "Verdict": "conformance",
    "apply_change": "strategies",
    "batches": "strategies",
    "changes": "strategies",
    "configs": "strategies",
    "graph_keys": "strategies",
    "graph_view": "samples",
    "make_batch": "samples",
    "registries": "strategies",
    "sample_batch": "strategies",
    "run_lane_policy_conformance": "conformance",
    "run_policy_conformance": "conformance",
}

__all__ = [
    "BackendTests",
    "Case",
    "Change",
    "DispatcherMachine",
    "Finding",
    "InputTransportTests",
    "LanePolicyTests",
    "OneBucketPolicy",
    "PolicyTests",
    "RunnerTests",
    "SampleLane",
    "SmallestPolicy",
    "Verdict",
    "apply_change",
    "batches",
    "changes",
    "configs",
    "graph_keys",
    "graph_view",
    "make_batch",
    "registries",
    "run_lane_policy_conformance",
    "run_policy_conformance",
    "sample_batch",
]


def __getattr__(name: str) -> Any:
    module = _LAZY_NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name in {"hypothesis", "pytest"}:
            error.add_note(
                f"dispatchkit.testing requires {error.name}. Run: pip install "
                "'dispatchkit[testing]'"
            )
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
