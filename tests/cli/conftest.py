"""A way to run the command line in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("typer", minversion="0.20")
pytest.importorskip("rich")


class Outcome:
    """Exit code and what went to the two streams."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture(autouse=True)
def _known_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load the plugins of the default policy and of planning, whatever else is installed here."""
    from dispatchkit.cli import options

    monkeypatch.setenv("DISPATCHKIT_PLUGINS", "vllm,plan")
    monkeypatch.delenv("DISPATCHKIT_DISABLE", raising=False)
    options.forget_plugins()
    yield
    options.forget_plugins()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command line in this process; unexpected exceptions come through."""
    from dispatchkit.cli.app import run as run_app

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args: str) -> Outcome:
        capsys.readouterr()
        code = run_app(args)
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@pytest.fixture
def plugins_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the command line find plugin objects besides the installed ones."""
    from dispatchkit import plugins as plugins_module
    from dispatchkit.cli import options

    load = plugins_module.load_plugins

    def use(**objects: object) -> None:
        monkeypatch.setattr(
            plugins_module, "load_plugins", lambda **options: load(extra=objects.items(), **options)
        )
        options.forget_plugins()

    return use
