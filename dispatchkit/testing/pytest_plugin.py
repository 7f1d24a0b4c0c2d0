"""pytest plugin that marks the tests of each kit.

``pytest -m dispatchkit_policy`` runs only the kit for policies, and ``pytest -m "not
dispatchkit_backend"`` skips the kit for backends. Markers are added at collection, so the kits do
not depend on this plugin.
"""

from __future__ import annotations

from typing import Any

#: Marker and its description, by the class name of the kit.
KITS = {
    "PolicyTests": ("dispatchkit_policy", "dispatchkit's kit for policies"),
    "LanePolicyTests": ("dispatchkit_lane_policy", "dispatchkit's kit for lane policies"),
    "BackendTests": ("dispatchkit_backend", "dispatchkit's kit for backends"),
    "InputTransportTests": (
        "dispatchkit_input_transport",
        "dispatchkit's kit for the transports that copy inputs into the graphs of a backend",
    ),
    "RunnerTests": (
        "dispatchkit_runner",
        "dispatchkit's kit for a GraphRunner with your own policy, backend or step",
    ),
}


def pytest_configure(config: Any) -> None:
    """Register the markers, as ``--strict-markers`` requires."""
    for marker, text in KITS.values():
        config.addinivalue_line("markers", f"{marker}: {text}")


def pytest_itemcollected(item: Any) -> None:
    """Mark a test whose class inherits from a kit."""
    for base in getattr(getattr(item, "cls", None), "__mro__", ()):
        if base.__name__ in KITS and base.__module__.startswith("dispatchkit.testing."):
            item.add_marker(KITS[base.__name__][0])
