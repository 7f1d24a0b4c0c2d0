"""Output of commands: console, tables, JSON and a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dispatchkit.plugins import Origin, PluginSet

ShowProgress = Callable[[str, int, int], None]

JsonOption = Annotated[
    bool,
    # Without a metavar, some versions of typer show flags as if they had a value.
    typer.Option("--json", metavar="", help="Print only JSON on standard output."),
]


ForceOption = Annotated[
    bool, typer.Option("--force", metavar="", help="Overwrite an existing output file.")
]
FORCE_HINT = "Next: choose another name, or use --force to overwrite it."


def console() -> Console:
    """Return a console that writes to standard output, with styles only on a terminal."""
    return Console(highlight=False, markup=False, soft_wrap=False)


def print_stderr(message: str) -> None:
    """Print a message on standard error."""
    print(message, file=sys.stderr)


def print_json(value: Any) -> None:
    """Print JSON on standard output; escape non-ASCII text if the output cannot encode it."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    print(text)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()
) -> Table:
    """Return a borderless table whose text columns wrap to fit the console.

    Args:
        columns: Column headers.
        rows: Cells of each row; None is shown as a dash.
        right: Indices of right-aligned columns, which contain numbers.
    """
    made = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        is_figure = index in right
        made.add_column(
            column,
            justify="right" if is_figure else "left",
            no_wrap=is_figure,
            overflow="fold",
        )
    for row in rows:
        # Text objects, because rich would replace emoji codes such as `:gear:` in a string.
        made.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    return made


@contextmanager
def progress() -> Iterator[ShowProgress]:
    """Show a temporary progress bar if standard error is a terminal.

    Yields:
        A function that updates the bar; its arguments are the activity, the completed amount and
        the total.
    """
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show_progress(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bars.add_task(doing)
            bars.update(tasks[doing], completed=done, total=total)

        yield show_progress


def short_origin(origin: Origin) -> str:
    """Return an origin's distribution and version; without a distribution, its full text."""
    if origin.distribution is None:
        return str(origin)
    return " ".join(filter(None, (origin.distribution, origin.version)))


def report_skipped_plugins(plugins: PluginSet) -> None:
    """Report skipped plugins on standard error."""
    if plugins.problems:
        names = ", ".join(dict.fromkeys(problem.origin.plugin for problem in plugins.problems))
        print_stderr(
            f"Skipped plugins: {names}. Next: run `dispatchkit plugins` to show the reasons."
        )
