"""The application: its commands, and what becomes of errors.

Every command is run by ``Commands.invoke``, those of plugins too, so that one place decides:
an error that dispatchkit raises on purpose is one message on stderr and exit code 2; anything
else keeps its traceback, since it is a defect of ours or of a plugin.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dispatchkit import __version__
from dispatchkit.cli.demo import demo
from dispatchkit.cli.doctor import doctor
from dispatchkit.cli.explaining import explain_batch
from dispatchkit.cli.listing import plugins, policies
from dispatchkit.cli.output import complain, load_installed_plugins
from dispatchkit.cli.planning import plan
from dispatchkit.errors import DispatchkitError
from dispatchkit.keys import CaptureSizeWarning

STOPPED = 130
READER_GONE = 141


class Commands(TyperGroup):
    """The group of all commands; those of plugins are looked up when they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, for help and completion."""
        self._add_plugin_commands()
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; only one that is not built in makes plugins load."""
        if args and args[0] not in self.commands:
            self._add_plugin_commands()
        return super().resolve_command(ctx, args)

    def _add_plugin_commands(self) -> None:
        for name, registered in load_installed_plugins().commands.items():
            if name in self.commands:
                if name not in self._added:
                    complain(
                        f"Command {name!r} of {registered.origin} is left out: dispatchkit has "
                        "a command of that name."
                    )
                continue
            single = typer.Typer(add_completion=False)
            single.command(name, help=registered.spec.help or None)(registered.spec.callback)
            self.commands[name] = typer.main.get_command(single)
            self._added.add(name)

    @property
    def _added(self) -> set[str]:
        names: set[str] = self.__dict__.setdefault("_plugin_commands", set())
        return names

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn what may be expected to go wrong into a line and a code."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("always", category=CaptureSizeWarning)
                warnings.showwarning = _show_warning
                result = super().invoke(ctx)
            sys.stdout.flush()
        except DispatchkitError as error:
            notes = getattr(error, "__notes__", [])
            complain(" ".join([str(error), *notes]))
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            complain("Stopped.")
            raise typer.Exit(STOPPED) from error
        except BrokenPipeError as error:
            # Python flushes stdout once more on exit, and would complain about it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(READER_GONE) from error
        return result


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """Show a warning as a line; whoever types a command has no use for a source line."""
    complain(f"Warning: {message}")


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Decide which captured CUDA graph serves a batch, and see why.",
    epilog="Exit codes: 0 done, 1 done and found wanting, 2 bad input.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dispatchkit {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command("demo")(demo)
app.command("policies")(policies)
app.command("plugins")(plugins)
app.command("explain")(explain_batch)
app.command("plan")(plan)
app.command("doctor")(doctor)


def run(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        args: Words after the program's name; those of the process by default.
    """
    # Not app(): that would install typer's own hook for unexpected exceptions.
    command = typer.main.get_command(app)
    try:
        command(args=None if args is None else list(args), prog_name="dispatchkit")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        return STOPPED
    return 0
