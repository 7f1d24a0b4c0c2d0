"""Fixture that runs the command line with this distribution's plugins and the default policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

pytest.importorskip("typer", minversion="0.20")
pytest.importorskip("dispatchkit_vllm")


@attrs.frozen
class Outcome:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """Run a command in this process; unexpected exceptions propagate.

    The working directory is empty, so that no ``pyproject.toml`` is read.
    """
    from dispatchkit.cli import run as run_app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("DISPATCHKIT_PLUGINS", "vllm,plan")
    monkeypatch.delenv("DISPATCHKIT_DISABLE", raising=False)

    def call(*args: str) -> Outcome:
        capsys.readouterr()
        code = run_app(args)
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call
