"""The names that `dispatchkit` itself exports, loaded on first use."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import dispatchkit
from dispatchkit.distributions import DISTRIBUTIONS

ROOT = Path(__file__).resolve().parents[2]
# Packages that run steps import torch; their names resolve only if it is installed.
NEEDS_TORCH = {name for name, room in dispatchkit._LAZY_NAMES.items() if room.startswith("execute")}


@pytest.mark.parametrize("name", sorted({*dispatchkit.__all__, *dispatchkit._LAZY_NAMES}))
def test_every_exported_name_is_found_in_its_room(name: str) -> None:
    """A wrong lazy export would fail only for a user."""
    if name in NEEDS_TORCH:
        pytest.importorskip("torch")
    assert name in dispatchkit.__all__
    assert name in dispatchkit._LAZY_NAMES
    assert getattr(dispatchkit, name) is not None
    assert name in dir(dispatchkit)


@pytest.mark.parametrize(("name", "distribution"), sorted(DISTRIBUTIONS["attribute"].items()))
def test_a_name_of_another_distribution_is_the_one_of_its_package(
    name: str, distribution: str
) -> None:
    """Code that imports a name from here keeps working after it has left the core."""
    pytest.importorskip("torch")
    package = pytest.importorskip(distribution.replace("-", "_"))
    assert getattr(dispatchkit, name) is getattr(package, name)
    assert name not in dispatchkit.__all__  # `import *` works without the distribution


def test_an_unknown_name_is_an_attribute_error() -> None:
    """`hasattr` and `from dispatchkit import x` rely on it."""
    with pytest.raises(AttributeError, match="no_such_name"):
        dispatchkit.no_such_name  # noqa: B018  (the access is the test)


def test_version_is_the_distributions() -> None:
    """Package and metadata have one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dispatchkit.__version__ == project["version"]
