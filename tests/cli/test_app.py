"""The command line as a whole: exit codes, streams, errors, plugin commands."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer

from dispatchkit import __version__
from dispatchkit.errors import ConfigError
from dispatchkit.hookspecs import CommandSpec, hookimpl

COMMANDS = [
    *["demo", "policies", "plugins", "explain", "plan", "simulate", "calibrate", "record"],
    *["bench", "report", "doctor", "new-policy"],
]


def command_plugin(name: str, callback: Any) -> object:
    """Return a plugin with one command."""

    @hookimpl
    def dispatchkit_register_commands() -> list[CommandSpec]:
        return [CommandSpec(name, lambda: callback, summary="From a plugin")]

    return types.SimpleNamespace(dispatchkit_register_commands=dispatchkit_register_commands)


def test_version_is_one_line_and_loads_no_plugin(run: Any) -> None:
    """For scripts."""
    done = run("--version")
    assert (done.code, done.out, done.err) == (0, f"dispatchkit {__version__}\n", "")


def test_help_lists_every_command_within_80_columns(run: Any) -> None:
    """Lines fit narrow terminals and contain no colour codes."""
    done = run("--help")
    assert done.code == 0
    assert [name for name in [*COMMANDS, "config"] if f" {name} " not in done.out] == []
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(run: Any, command: str) -> None:
    """Help has at least one sentence and the options."""
    done = run(command, "--help")
    assert done.code == 0
    assert "--json" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["polices"], "'policies'"),
        (["policies", "--jsn"], "--json"),
        (["explain"], "N"),
        (["explain", "many"], "'many'"),
        (["explain", "3", "--num-reqs", "1.5"], "--num-reqs must be a whole number, got '1.5'"),
        (["plan", "x", "--memory-bytes", "lots"], "got 'lots'"),
        (["plan", "x", "--fit-on", "half"], "'half'"),
        (["demo", "--steps", "few"], "--steps"),
        (["doctor", "extra"], "extra"),
    ],
)
def test_a_wrong_command_line_is_bad_input(run: Any, args: list[str], says: str) -> None:
    """Exit code 2, the nearest name if any, and nothing on standard output."""
    done = run(*args)
    assert done.code == 2
    assert done.out == ""
    assert says in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("'1.5' is not a valid integer.", "-n must be a whole number, got '1.5'."),
        ("'1.5' is not a valid int.", "-n must be a whole number, got '1.5'."),
        ("'lots' is not a valid float.", "-n must be a number, got 'lots'."),
        ("'it''s' is not a valid boolean.", "-n must be true or false, got"),
        ("'x' is not one of 'a', 'b'.", "Invalid value for '-n': 'x' is not one of 'a', 'b'."),
    ],
)
def test_a_wrong_value_is_told_alike_whichever_version_reads_it(said: str, wanted: str) -> None:
    """Versions of click and typer word the error differently."""
    from dispatchkit.cli.app import _reworded

    error = typer.BadParameter(said, param_hint="'-n'")
    assert _reworded(error, []).format_message().startswith(wanted)


def test_a_command_of_a_plugin_is_a_command(run: Any, plugins_with: Any) -> None:
    """Its annotations become options, and its help is listed."""

    def greet(name: str, loud: bool = False) -> None:
        print(name.upper() if loud else name)

    plugins_with(mine=command_plugin("greet", greet))
    assert run("greet", "you", "--loud").out == "YOU\n"
    assert "From a plugin" in run("--help").out
    assert "'greet'" in run("gret").err


def test_a_plugin_cannot_replace_a_command(run: Any, plugins_with: Any) -> None:
    """The command is omitted with a message, and the built-in one still runs."""
    plugins_with(mine=command_plugin("doctor", lambda: print("hijacked")))
    done = run("--help")
    assert "'doctor'" in done.err
    assert "mine" in done.err
    assert "From a plugin" not in done.out


def test_an_error_on_purpose_is_one_message_and_an_unexpected_one_keeps_its_traceback(
    run: Any, plugins_with: Any
) -> None:
    """Bad input causes a message; a defect causes a traceback that can be reported."""

    def refuse() -> None:
        error = ConfigError("size", -1, "positive")
        error.add_note("Raised by the plugin.")
        raise error

    def crash() -> None:
        raise ZeroDivisionError("a defect")

    plugins_with(one=command_plugin("refuse", refuse), two=command_plugin("crash", crash))
    done = run("refuse")
    assert (done.code, done.out) == (2, "")
    assert done.err == "size must be positive, got -1. Raised by the plugin.\n"
    with pytest.raises(ZeroDivisionError, match="a defect"):
        run("crash")


def test_ctrl_c_in_a_command_ends_with_130(run: Any, plugins_with: Any) -> None:

    def wait() -> None:
        raise KeyboardInterrupt

    plugins_with(one=command_plugin("wait", wait))
    done = run("wait")
    assert (done.code, done.out, done.err) == (130, "", "Stopped.\n")


@pytest.mark.parametrize(
    "words",
    [
        ["policies", "--json"],
        pytest.param(["config", "show"], marks=pytest.mark.slow),
        pytest.param(["--help"], marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_goes_away_is_no_traceback(words: list[str]) -> None:
    """``dispatchkit policies | head -0`` ends quietly with its own exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dispatchkit", *words],
            stdout=writer,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            check=False,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.slow
def test_ctrl_c_of_a_real_process_ends_with_130(tmp_path: Path) -> None:
    """The process receives SIGINT while it waits for input."""
    pytest.importorskip("numpy")  # otherwise the command would end before it opens the trace
    fifo = tmp_path / "trace.csv"
    os.mkfifo(fifo)
    # A script's background processes ignore SIGINT and would pass that on.
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('dispatchkit', run_name='__main__', alter_sys=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "plan", str(fifo), "--graphs", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        writer = os.open(fifo, os.O_WRONLY)  # returns when the command has opened its trace
        try:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        finally:
            os.close(writer)
    assert (process.returncode, out, err) == (130, "", "Stopped.\n")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(package: str) -> None:
    """The core can be installed alone; its command then names the missing extra."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "sys.argv = ['dispatchkit', 'policies']\n"
        "from dispatchkit.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "pip install 'dispatchkit[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_importing_the_command_line_loads_no_typer() -> None:
    code = "import sys, dispatchkit.cli; print({'typer', 'rich', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout == "set()\n"


def test_an_old_typer_is_one_line_that_says_so(tmp_path: Path) -> None:
    """An older typer loses arguments with a newer click."""
    (tmp_path / "typer.py").write_text('__version__ = "0.16.1"\n')
    done = subprocess.run(
        [sys.executable, "-m", "dispatchkit", "policies"],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "typer 0.20 or newer, but 0.16.1 is installed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_command_shows_the_help_and_is_bad_input(run: Any) -> None:
    """A script must notice that nothing was done."""
    done = run()
    assert (done.code, done.out) == (2, "")
    assert "explain" in done.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["config", "sho"], "'config show'"),
        (["config"], "dispatchkit config --help"),
        (["--sett", "x"], "'--set'"),
        (["explain", "-12"], "N must be at least 0, got -12."),
        (["bench", "-3"], "option must be one of"),
        (["explain", "3", "--loras", "-1"], "--loras must be a whole number from 0 to 4096"),
        (["explain", "3", "--set", "x"], "before the command: dispatchkit --set ..."),
        (["explain", "3", "--polcy", "x"], "'--policy'"),
        (["explain"], "--trace"),
        (["explain", "3", "--trace", "x.csv"], "cannot be combined with --trace, which explains"),
        (["explain", "--trace", "x.csv", "--uniform"], "--uniform"),
    ],
)
def test_a_mistake_is_one_line(run: Any, args: list[str], says: str) -> None:
    """Errors of the command line name the value, the allowed values and the nearest names."""
    done = run(*args)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(done.err.splitlines()) == 1


def test_full_device_is_told_in_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dispatchkit.cli.listing.print_json", full)
    monkeypatch.setattr("dispatchkit.cli.app._discard_stdout", lambda: None)
    done = run("policies", "--json")
    assert (done.code, done.out) == (2, "")
    assert "The output device is full" in done.err
