"""Modules that `import dispatchkit` loads, measured in a subprocess."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "hypothesis", "pytest", "typer", "rich")
ON_FIRST_PLUGIN_USE = ("pluggy", "importlib.metadata")


def loaded_by(statement: str) -> set[str]:
    """Return the names that a statement adds to a bare interpreter's sys.modules."""
    code = (
        "import sys, json; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    # -S gives a bare interpreter; `site` and .pth files of editable installs load modules too.
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Return everything that `import dispatchkit` loads."""
    return loaded_by("import dispatchkit")


def test_the_probe_sees_what_an_import_loads() -> None:
    """Otherwise the tests below would pass with a probe that detects nothing."""
    assert "pluggy" in loaded_by("import pluggy")


@pytest.mark.parametrize("name", HEAVY)
def test_import_loads_nothing_heavy(loaded: set[str], name: str) -> None:
    """Import time is part of the interface: decisions must be cheap to use anywhere."""
    assert name not in loaded


@pytest.mark.parametrize("name", ON_FIRST_PLUGIN_USE)
def test_import_leaves_discovery_to_the_first_plugin_use(loaded: set[str], name: str) -> None:
    """Discovering plugins costs more than the rest of the import."""
    assert name not in loaded


def test_import_loads_no_plugin(loaded: set[str]) -> None:
    """Plugins load on demand, so a broken one cannot break the import."""
    assert "dispatchkit" in loaded
    assert {name for name in loaded if name.startswith("dispatchkit_")} == set()
