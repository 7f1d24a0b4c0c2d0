"""``scripts/setup.sh`` reports a missing requirement in one line with the next step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the files of setup, a space in its path, and no .venv."""
    folder = tmp_path / "a fresh clone"
    (folder / "scripts").mkdir(parents=True)
    for name in ("Makefile", "requirements-dev.txt", "pyproject.toml", "scripts/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def fake_python(tmp_path: Path, script: str) -> Path:
    """Return a script that replaces the interpreter, at a path with a space."""
    path = tmp_path / "other python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def setup_error(checkout: Path, python: Path | str, **variables: str) -> str:
    """Run `make test`, which must fail, and return the error of setup, one line."""
    # Exclude settings of the make or pip that runs these tests.
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", "test", f"PY={python}"],
        cwd=checkout,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stdout
    assert not (checkout / ".venv" / ".ready").exists()
    return errors[0]


def test_no_python_at_all(checkout: Path) -> None:
    """The error has the given name, the required version, and the way to give another name."""
    line = setup_error(checkout, "python-that-is-nowhere")
    assert "'python-that-is-nowhere' was not found" in line
    assert "Python 3.11 or newer" in line
    assert "make PY=" in line


def test_python_too_old(checkout: Path, tmp_path: Path) -> None:
    """The error has the found and the required version."""
    old = fake_python(tmp_path, 'test "$1" = --version && echo Python 3.9.2 && exit 0; exit 1')
    line = setup_error(checkout, old)
    assert "is Python 3.9.2, but 3.11 or newer is required" in line
    assert "make PY=" in line


def test_python_without_venv_module(checkout: Path, tmp_path: Path) -> None:
    """The error names the Debian package that contains the module."""
    bare = fake_python(
        tmp_path, f'case "$*" in *ensurepip*) exit 1;; esac; exec "{sys.executable}" "$@"'
    )
    line = setup_error(checkout, bare)
    assert "has no venv module" in line
    assert "apt-get install python3-venv" in line


@pytest.mark.slow
def test_no_network(checkout: Path) -> None:
    """The error names the next step and the log of pip."""
    line = setup_error(
        checkout,
        sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_NO_CACHE_DIR="1",
    )
    assert "could not reach a package index" in line
    assert "PIP_INDEX_URL" in line
    assert (checkout / ".venv" / "setup.log").stat().st_size > 0
