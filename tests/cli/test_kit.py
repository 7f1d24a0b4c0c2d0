"""The kit for commands of plugins: the page's example works, and broken commands are contained."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from dispatchkit import cli, distributions
from dispatchkit.hookspecs import CommandSpec, hookimpl

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "command.md"


def plugin(*specs: CommandSpec) -> object:
    @hookimpl
    def dispatchkit_register_commands() -> list[CommandSpec]:
        return list(specs)

    return types.SimpleNamespace(dispatchkit_register_commands=dispatchkit_register_commands)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write and import the modules that the page shows; return the plugin."""
    if not PAGE.exists():
        pytest.skip("the page is not beside the tests")
    blocks = re.findall(r"```python\n# (\S+)/(\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    modules = {}
    for package, name, source in blocks:
        module = types.ModuleType(f"{package}.{name}")
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, f"{package}/{name}.py", "exec"), vars(module))  # noqa: S102
        modules[name] = module
    return modules["plugin"]


def test_the_command_of_the_page_is_a_command(
    run: Any, plugins_with: Any, page: Any, tmp_path: Path
) -> None:
    plugins_with(peak=page)
    trace = tmp_path / "trace.csv"
    trace.write_text("num_tokens\n3\n12\n7\n")
    assert "Show the largest steps" in run("--help").out
    assert "--top" in run("peak", "-h").out
    assert "Example: dispatchkit peak" in run("peak", "--help").out
    done = run("peak", str(trace), "--top", "2")
    assert (done.code, done.out.split(), done.err) == (0, "Rank Tokens 1 12 2 7".split(), "")
    assert run("peak", str(trace), "--json").out.split() == ["[", "12,", "7,", "3", "]"]
    assert run("peak", str(trace), "--top", "9").err == "The trace has only 3 steps.\n"
    done = run("peak", str(trace), "--top", "0")
    assert (done.code, done.out, done.err) == (2, "", "--top must be 1 or more, got 0.\n")


def test_every_name_of_the_kit_is_there() -> None:
    assert [name for name in cli.__all__ if getattr(cli, name, None) is None] == []
    assert set(cli._LAZY_NAMES) | {"main"} == set(cli.__all__)


def test_the_kit_is_imported_without_typer() -> None:
    code = "import sys, dispatchkit.cli; print({'typer', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_command_is_loaded_when_it_is_asked_for(run: Any, plugins_with: Any) -> None:
    loaded = []

    def load(name: str) -> Any:
        def factory() -> Any:
            loaded.append(name)
            return lambda: print(name)

        return factory

    plugins_with(mine=plugin(CommandSpec("one", load("one")), CommandSpec("two", load("two"))))
    assert run("policies").code == 0
    assert loaded == []
    assert run("two").out == "two\n"
    assert loaded == ["two"]


def crash() -> Any:
    raise ZeroDivisionError("a defect")


def unreadable() -> Any:
    def command(value: Annotated[str, typer.Option(), typer.Argument()]) -> None: ...

    return command


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (crash, "the factory of command 'bad' raised ZeroDivisionError"),
        (lambda: None, "the factory of command 'bad' returned None"),
        (lambda: 3, "the factory of command 'bad' returned 3"),
        (unreadable, "value"),
    ],
)
def test_a_command_that_cannot_be_loaded_is_left_out_and_named(
    factory: Any, says: str, run: Any, plugins_with: Any
) -> None:
    good = CommandSpec("good", lambda: lambda: print("fine"), summary="Still there")
    plugins_with(mine=plugin(CommandSpec("bad", factory), good))
    done = run("--help")
    assert done.code == 0
    assert "Still there" in done.out
    assert "Command 'bad' (passed in as 'mine') is skipped" in done.err
    assert says in done.err
    assert "block its plugin with DISPATCHKIT_DISABLE=mine." in done.err
    assert run("good").out == "fine\n"
    done = run("bad")
    assert (done.code, done.out) == (2, "")
    assert says in done.err or "command must be one of" in done.err


def test_an_unknown_command_says_which_distribution_brings_it(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {**distributions.DISTRIBUTIONS, "command": {"foretell": "dispatchkit-foretell"}}
    monkeypatch.setattr(distributions, "DISTRIBUTIONS", table)
    done = run("foretell", "--all")
    assert (done.code, done.out) == (2, "")
    assert "Run: pip install dispatchkit-foretell." in done.err
    assert "pip install" not in run("preview").err


def test_a_command_of_a_plugin_that_is_not_loaded_names_the_plugin(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin is installed, so the message must not suggest installing it."""
    pytest.importorskip("dispatchkit_plan")
    monkeypatch.setenv("DISPATCHKIT_PLUGINS", "vllm")
    done = run("simulate", "trace.csv")
    assert (done.code, done.out) == (2, "")
    assert "The command 'simulate' is not available. Plugin 'plan'" in done.err
    assert done.err.count("Plugin '") == 1, "others that are not loaded do not bring it"
    assert "pip install" not in done.err


def test_a_python_name_says_which_distribution_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import dispatchkit

    table = {**distributions.DISTRIBUTIONS, "attribute": {"Foreteller": "dispatchkit-foretell"}}
    monkeypatch.setattr(distributions, "DISTRIBUTIONS", table)
    with pytest.raises(ImportError, match="Run: pip install dispatchkit-foretell"):
        from dispatchkit import Foreteller  # noqa: F401
    with pytest.raises(ImportError, match=r"dispatchkit\.Foreteller needs dispatchkit-foretell"):
        _ = dispatchkit.Foreteller
    assert not hasattr(dispatchkit, "Foretelle")
