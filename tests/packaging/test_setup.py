"""If a requirement is missing, set-up prints one line with the next step, never a traceback."""

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
    """Copy the files that set-up reads to a folder with a space in its path and no .venv."""
    folder = tmp_path / "a fresh clone"
    (folder / "scripts").mkdir(parents=True)
    for name in ("Makefile", "requirements-dev.txt", "pyproject.toml", "scripts/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def python_that(tmp_path: Path, script: str) -> Path:
    """Write a stand-in for an interpreter at a path with a space."""
    path = tmp_path / "other python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def complaint(checkout: Path, python: Path | str, **variables: str) -> str:
    """Run `make test`, which must fail, and return set-up's single line."""
    # Set-up must not see variables that make or pip set for this test run.
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
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1, done.stderr
    assert "Traceback" not in done.stdout
    assert not (checkout / ".venv" / ".ready").exists()
    return said[0]


def test_no_python_at_all(checkout: Path) -> None:
    """The line has the tried name, the required version, and how to use another."""
    line = complaint(checkout, "python-that-is-nowhere")
    assert "there is no 'python-that-is-nowhere'" in line
    assert "Python 3.11 or newer" in line
    assert "make PY=" in line


def test_python_too_old(checkout: Path, tmp_path: Path) -> None:
    """The line has the found and the required version."""
    old = python_that(tmp_path, 'test "$1" = --version && echo Python 3.9.2 && exit 0; exit 1')
    line = complaint(checkout, old)
    assert "is Python 3.9.2, 3.11 or newer is needed" in line
    assert "make PY=" in line


def test_python_without_venv_module(checkout: Path, tmp_path: Path) -> None:
    """Debian ships Python without it; the line names the package to install."""
    bare = python_that(
        tmp_path, f'case "$*" in *ensurepip*) exit 1;; esac; exec "{sys.executable}" "$@"'
    )
    line = complaint(checkout, bare)
    assert "has no venv module" in line
    assert "apt-get install python3-venv" in line


@pytest.mark.slow
def test_no_network(checkout: Path) -> None:
    """pip's own output is long; the line states the next step and where that output is."""
    line = complaint(
        checkout,
        sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_NO_CACHE_DIR="1",
    )
    assert "reached no package index" in line
    assert "PIP_INDEX_URL" in line
    assert (checkout / ".venv" / "setup.log").stat().st_size > 0
