"""Names that packages load on first use."""

from __future__ import annotations

import sys

import pytest

from dispatchkit import observe, plugins


@pytest.mark.parametrize("package", [observe, plugins])
def test_every_public_name_is_listed_and_found_and_others_are_refused(package) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        _ = package.x


def test_a_name_is_looked_up_once(monkeypatch) -> None:
    monkeypatch.delitem(vars(observe), "Timeline", raising=False)
    found = observe.Timeline
    assert vars(sys.modules["dispatchkit.observe"])["Timeline"] is found
