"""What `import dispatchkit` loads; a subprocess looks, since this one has loaded much already."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "hypothesis", "pytest", "typer", "rich")
ON_FIRST_PLUGIN_USE = ("pluggy", "importlib.metadata")


def loaded_by(statement: str) -> set[str]:
    """Names in sys.modules that a statement added to a bare interpreter's."""
    code = (
        "import sys, json; before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    # -S: a bare interpreter; `site` and the .pth files of editable installs load modules too.
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
    """Everything that `import dispatchkit` loads."""
    return loaded_by("import dispatchkit")


def test_the_probe_sees_what_an_import_loads() -> None:
    """Without this, the tests below would pass on a probe that sees nothing."""
    assert "pluggy" in loaded_by("import pluggy")


@pytest.mark.parametrize("name", HEAVY)
def test_import_loads_nothing_heavy(loaded: set[str], name: str) -> None:
    """Import time is part of the interface: decisions must stay cheap to reach anywhere."""
    assert name not in loaded


@pytest.mark.parametrize("name", ON_FIRST_PLUGIN_USE)
def test_import_leaves_discovery_to_the_first_plugin_use(loaded: set[str], name: str) -> None:
    """Looking for plugins costs more than the rest of the import together."""
    assert name not in loaded


def test_import_loads_no_plugin(loaded: set[str]) -> None:
    """A plugin loads when it is asked for, so a broken one cannot break the import."""
    assert "dispatchkit" in loaded
    assert {name for name in loaded if name.startswith("dispatchkit_")} == set()
