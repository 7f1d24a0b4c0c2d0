"""The wheels contain what they should and work without a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import os, sys
from hatchling.build import build_wheel
for source in sys.argv[2:]:
    os.chdir(source)
    build_wheel(sys.argv[1])
"""
SOURCES = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def run(*command: str, **options: object) -> str:
    """Run a command and return its output; on failure show both streams."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build the wheels of core and plugins in one process, by the hooks that pip calls."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-c", BUILD, str(out), *map(str, SOURCES))
    return sorted(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with the wheels installed and no checkout."""
    target = tmp_path_factory.mktemp("site with a space")
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-index", "--no-deps"]
    run(*pip, "--target", str(target), *map(str, wheels))
    # Dependencies of the wheels come from this environment; -S skips its .pth files, and so the
    # editable install of this checkout.
    path = os.pathsep.join([str(target), sysconfig.get_paths()["purelib"]])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHOME"}
    return {**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "TARGET": str(target)}


def test_one_wheel_for_each_distribution(wheels: list[Path]) -> None:
    """Core and plugins are published separately."""
    names = {wheel.name.split("-")[0] for wheel in wheels}
    assert names == {"dispatchkit", *(path.name.replace("-", "_") for path in SOURCES[1:])}


def test_wheels_hold_their_package_and_nothing_else(wheels: list[Path]) -> None:
    """The core's wheel contains no tests, benchmarks or plugins."""
    for wheel in wheels:
        name = wheel.name.split("-")[0]
        members = zipfile.ZipFile(wheel).namelist()
        tops = {member.split("/")[0] for member in members}
        assert tops == {name, next(top for top in tops if top.endswith(".dist-info"))}
        assert any(member.endswith("/licenses/LICENSE") for member in members)
        assert f"{name}/py.typed" in members


def test_core_wheel_holds_the_demo_trace(wheels: list[Path]) -> None:
    """`dispatchkit demo` works without a checkout."""
    core = next(wheel for wheel in wheels if wheel.name.startswith("dispatchkit-"))
    data = [name for name in zipfile.ZipFile(core).namelist() if "demo/data/" in name]
    assert any(".csv" in name for name in data), data


def test_installed_wheels_find_their_policies(installed: dict[str, str], tmp_path: Path) -> None:
    """Names resolve to policies by entry points, not by the checkout."""
    pytest.importorskip("typer", minversion="0.20")
    python = [sys.executable, "-S"]
    where = run(
        *python,
        "-c",
        "import dispatchkit; print(dispatchkit.__file__)",
        env=installed,
        cwd=tmp_path,
    )
    assert Path(where.strip()).is_relative_to(installed["TARGET"])
    listed = json.loads(
        run(*python, "-m", "dispatchkit", "policies", "--json", env=installed, cwd=tmp_path)
    )
    rows = listed["policies"] if isinstance(listed, dict) else listed
    origins = {row["name"]: row["distribution"] for row in rows}
    assert "dispatchkit-vllm" in origins["vllm"]
