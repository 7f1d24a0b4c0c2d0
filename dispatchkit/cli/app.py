"""The command-line application: its commands and error handling.

``run`` handles all commands, including plugin commands. Errors of dispatchkit and of the operating
system, incorrect command lines, and a lack of memory result in one message on stderr and exit code
2. Any other exception is a bug in dispatchkit or a plugin, and its traceback is printed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dispatchkit._version import __version__
from dispatchkit.cli.benching import bench
from dispatchkit.cli.configuring import config
from dispatchkit.cli.demo import demo
from dispatchkit.cli.doctor import doctor
from dispatchkit.cli.endings import STOPPED
from dispatchkit.cli.explaining import explain_batch
from dispatchkit.cli.listing import plugins, policies
from dispatchkit.cli.new_policy import new_policy
from dispatchkit.cli.options import COMMON, load_installed_plugins
from dispatchkit.cli.output import print_stderr
from dispatchkit.cli.recording import record
from dispatchkit.distributions import distribution_of, install_hint
from dispatchkit.errors import (
    DispatchkitError,
    MissingDistributionError,
    UnknownNameError,
    format_value,
)
from dispatchkit.keys import CaptureSizeWarning

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet

BAD_INPUT = 2
PIPE_CLOSED = 141

# Exception classes for incorrect command lines, from click, or from the copy of click in newer
# versions of typer.
UsageError: Any = typer.BadParameter.__mro__[1]
ClickException: Any = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """The group of all commands; plugin commands are looked up on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, for help and completion."""
        own = super().list_commands(ctx)
        plugins = self._plugins()
        if plugins is None:
            return own
        for name in sorted(plugins.commands):
            if name in self.commands:
                print_stderr(
                    f"Command {name!r} ({plugins.commands[name].origin}) is skipped: "
                    "dispatchkit already has a command with this name. Next: rename the plugin's "
                    "command."
                )
            elif self._plugin_command(plugins, name) is not None:
                own.append(name)
        return own

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; plugins are loaded only if the command is not built in."""
        command = super().get_command(ctx, cmd_name)
        if command is None and (plugins := self._plugins()) is not None:
            command = self._plugin_command(plugins, cmd_name)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the requested command; an unknown name raises an error with suggestions."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            plugins = self._plugins()
            known = install_hint if plugins is None else plugins.hint
            hint = known("command", name)
            if distribution_of("command", name) is not None:
                raise MissingDistributionError(f"The command {name!r} is not available. {hint}")
            raise UnknownNameError("command", name, self.list_commands(ctx), hint)
        return super().resolve_command(ctx, args)

    def _plugins(self) -> PluginSet | None:
        """Load and return the plugins; if loading fails, print the error and return None."""
        try:
            return load_installed_plugins()
        except DispatchkitError as error:
            print_stderr(f"Plugin commands are skipped: {error}")  # help must still work
            return None

    def _plugin_command(self, plugins: PluginSet, name: str) -> Any:
        """Return a plugin's command, or None if it is missing or broken."""
        of, made = self.__dict__.get("_made", (None, {}))
        if of is not plugins:
            made = {}
            self.__dict__["_made"] = plugins, made
        if name not in made and name in plugins.commands:
            registered = plugins.commands[name]
            try:
                single = typer.Typer(add_completion=False, rich_markup_mode="rich")
                function = plugins.create_command(name)
                summary = registered.summary or None
                text = help_of(function) or summary
                single.command(name, help=text, short_help=summary)(function)
                made[name] = typer.main.get_command(single)
            # typer raises exceptions of many classes for unsupported signatures.
            except Exception as error:  # noqa: BLE001
                print_stderr(
                    f"Command {name!r} ({registered.origin}) is skipped: {str(error).rstrip('.')}. "
                    "Next: correct the command, or block its plugin with "
                    f"DISPATCHKIT_DISABLE={registered.origin.plugin}."
                )
                made[name] = None
        return made.get(name)

    def invoke(self, ctx: Any) -> None:
        """Run a command; convert Ctrl-C and a closed output pipe to exit codes."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("always", category=CaptureSizeWarning)
                warnings.showwarning = _show_warning
                super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt as error:
            print_stderr("Stopped.")
            raise typer.Exit(STOPPED) from error
        except BrokenPipeError as error:
            _discard_stdout()
            raise typer.Exit(PIPE_CLOSED) from error


def _discard_stdout() -> None:
    """Redirect stdout to the null device if flushing fails, so that Python can flush it at exit."""
    with contextlib.suppress(OSError, ValueError):  # stdout may have no file descriptor
        number = sys.stdout.fileno()
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


class Group(TyperGroup):
    """A command with subcommands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the requested subcommand; an unknown name raises an error with suggestions."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise UnknownNameError("command", f"{ctx.info_name} {args[0]}", self._whole(ctx))
        return super().resolve_command(ctx, args)

    def _whole(self, ctx: Any) -> list[str]:
        return [f"{ctx.info_name} {name}" for name in self.commands]


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """Print a warning as one line, without its source location."""
    print_stderr(f"Warning: {message}")


def help_of(command: Callable[..., None]) -> str:
    """Return a command's docstring as help text, with each paragraph on one line."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app: typer.Typer = typer.Typer(
    cls=Commands,
    help="Decide which captured CUDA graph runs a batch, and explain why.",
    epilog=(
        "Exit codes: 0 success, 1 a check failed, 2 bad input, 130 stopped by Ctrl-C, 141 the "
        "output pipe was closed, 143 terminated."
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    invoke_without_command=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dispatchkit {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    ctx: typer.Context,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Read settings from this TOML file instead of the nearest pyproject.toml.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a setting; `dispatchkit config show` lists all settings.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    COMMON.config_file, COMMON.sets = config_file, tuple(sets or ())
    if ctx.invoked_subcommand is None:
        with contextlib.redirect_stdout(sys.stderr):
            text = ctx.get_help()
        print_stderr(text or "Choose one of these commands.")
        raise typer.Exit(BAD_INPUT)


app.command("demo", help=help_of(demo))(demo)
app.command("policies", help=help_of(policies))(policies)
app.command("plugins", help=help_of(plugins))(plugins)
app.command("explain", help=help_of(explain_batch))(explain_batch)
# All arguments after the script, including options, are passed to the script.
app.command("record", help=help_of(record), context_settings={"allow_interspersed_args": False})(
    record
)
app.command("bench", help=help_of(bench))(bench)
app.command("doctor", help=help_of(doctor))(doctor)
app.command("new-policy", help=help_of(new_policy))(new_policy)
app.add_typer(config, name="config", cls=Group)


@functools.cache
def _command() -> Any:
    # Calling app() would install typer's exception hook.
    return typer.main.get_command(app)


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        args: Arguments without the program name; by default ``sys.argv[1:]``.
    """
    COMMON.config_file, COMMON.sets = None, ()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # Instead of failing, escape characters that the terminal cannot encode.
            stream.reconfigure(errors="backslashreplace")
    command = _command()
    try:
        code = command.main(
            args=None if args is None else list(args),
            prog_name="dispatchkit",
            standalone_mode=False,
        )
    except DispatchkitError as error:
        _print_error(error)
        return BAD_INPUT
    except ClickException as error:
        _print_error(_reworded(error, sys.argv[1:] if args is None else args))
        return BAD_INPUT
    except typer.Abort:
        print_stderr("Stopped.")
        return STOPPED
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        _discard_stdout()
        return PIPE_CLOSED
    except OSError as error:
        _discard_stdout()
        if error.errno == errno.ENOSPC:
            print_stderr(
                "The output device is full, so the output is incomplete. Next: free space and "
                "run the command again."
            )
        else:
            # An error of the operating system, not a bug in dispatchkit.
            where = f"{error.filename}: " if error.filename is not None else ""
            print_stderr(f"{where}{error.strerror or error}.")
        return BAD_INPUT
    except MemoryError:
        print_stderr("Not enough memory. Next: use smaller sizes or a shorter trace.")
        return BAD_INPUT
    except SystemExit as done:  # raised by completion and by plugin commands
        if isinstance(done.__context__, BrokenPipeError):  # raised by rich, with exit code 1
            return PIPE_CLOSED
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return code if isinstance(code, int) else 0


#: Allowed values by the type names of click (``integer``) and typer (``int``).
_ALLOWED: dict[str, str] = {
    "int": "a whole number",
    "integer": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "boolean": "true or false",
}
_NOT_VALID: re.Pattern[str] = re.compile(r"'(?P<value>.*)' is not a valid (?P<type>\w+)")


def _with_value(error: Any, text: str) -> str:
    """Return the message of a usage error, with the given and the allowed values.

    Some versions of typer validate with pydantic, others with click. Only click's messages include
    the value.
    """
    details = getattr(error.__cause__ or error.__context__, "errors", None)
    name = text.partition("'")[2].partition("'")[0]
    if callable(details) and (found := details()):
        kind, given = str(found[0].get("type", "")).partition("_")[0], found[0].get("input")
    elif plain := _NOT_VALID.search(text.partition(": ")[2]):
        kind, given = plain["type"], plain["value"]
    else:
        return text
    shown = format_value(given)
    if kind in _ALLOWED and name:
        return f"{name} must be {_ALLOWED[kind]}, got {shown}"
    text = text.replace("Value error, ", "")
    return text if shown in text else f"{text}, got {shown}"


def _print_error(error: Exception) -> None:
    """Print an error and its notes as one line."""
    print_stderr(" ".join([str(error), *getattr(error, "__notes__", [])]))


def _reworded(error: Any, args: Sequence[str]) -> Exception:
    """Return a usage error in the wording of dispatchkit's errors.

    Args:
        error: The error of click or typer.
        args: The arguments of the command line.
    """
    ctx = getattr(error, "ctx", None)
    if ctx is not None and type(error).__name__ == "NoSuchOption":
        params = ctx.command.get_params(ctx)
        flags = {flag for one in params for flag in one.opts}
        known = [flag for flag in flags if flag.startswith("-")]
        has_count = any(one.param_type_name == "argument" and one.metavar == "N" for one in params)
        if has_count and error.option_name[1:2].isdigit():
            # Click reports only the first digit of a negative number.
            given = next(one for one in args if one.startswith(error.option_name))
            refused: Exception = UsageError(f"N must be at least 0, got {given}.")
            return refused
        hint = ""
        before = ctx.find_root().command
        if any(error.option_name in one.opts for one in before.get_params(ctx.find_root())):
            hint = f"Put the option before the command: dispatchkit {error.option_name} ..."
        return UnknownNameError("option", error.option_name, known, hint)
    text = _with_value(error, " ".join(error.format_message().split()).removesuffix("."))
    hint = f" Next: {ctx.command_path} --help." if ctx is not None else ""
    made: Exception = UsageError(f"{text}.{hint}")
    return made
