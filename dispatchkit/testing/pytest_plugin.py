"""What pytest loads by its entry point: a marker for the tests of each kit.

``pytest -m dispatchkit_policy`` runs the kits for policies alone, ``-m "not dispatchkit_backend"``
leaves out those for backends. The markers are put on where tests are collected, so that a kit
needs nothing of this: without the entry point its tests run as well, unmarked.
"""

from __future__ import annotations

from typing import Any

#: Class of the kit -> (marker, what it marks).
KITS = {
    "PolicyTests": ("dispatchkit_policy", "dispatchkit's kit for policies"),
    "LanePolicyTests": ("dispatchkit_lane_policy", "dispatchkit's kit for lane policies"),
    "BackendTests": ("dispatchkit_backend", "dispatchkit's kit for backends"),
    "RunnerTests": ("dispatchkit_runner", "dispatchkit's kit for what runs in a GraphRunner"),
}


def pytest_configure(config: Any) -> None:
    """Make the markers known, also to ``--strict-markers``."""
    for marker, text in KITS.values():
        config.addinivalue_line("markers", f"{marker}: {text}")


def pytest_itemcollected(item: Any) -> None:
    """Mark a test whose class comes of a kit."""
    for base in getattr(getattr(item, "cls", None), "__mro__", ()):
        if base.__name__ in KITS and base.__module__.startswith("dispatchkit.testing."):
            item.add_marker(KITS[base.__name__][0])
