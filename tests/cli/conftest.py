"""Fixture that runs the command line in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", minversion="0.20")
pytest.importorskip("rich")


class Outcome:
    """Exit code and output of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture(autouse=True)
def _known_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the plugins of the default policy and of planning."""
    monkeypatch.setenv("DISPATCHKIT_PLUGINS", "vllm,plan")
    monkeypatch.delenv("DISPATCHKIT_DISABLE", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command line in this process; unexpected exceptions propagate.

    The working directory is empty, so that no ``pyproject.toml`` is read.
    """
    from dispatchkit.cli.app import run as run_app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args: str) -> Outcome:
        capsys.readouterr()
        code = run_app(args)
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@pytest.fixture
def plugins_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Register plugin objects in addition to the installed plugins."""
    from dispatchkit import plugins as plugins_module
    from dispatchkit.cli import options

    load = plugins_module.load_plugins

    def use(**objects: object) -> None:
        monkeypatch.setattr(
            plugins_module, "load_plugins", lambda **options: load(extra=objects.items(), **options)
        )
        options.forget_plugins()

    yield use
    options.forget_plugins()
