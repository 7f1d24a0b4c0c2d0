"""The command ``report``: write an HTML file about a trace, simulations or statistics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from dispatchkit.cli import (
    FORCE_HINT,
    CostModelOption,
    ForceOption,
    JsonOption,
    ModeOption,
    PolicyOption,
    SizesOption,
    console,
    print_json,
    settings_of,
)
from dispatchkit.errors import ConfigError
from dispatchkit.files import check_output

from dispatchkit_plan.commands.accounting import account_of

if TYPE_CHECKING:
    from dispatchkit_plan.report import Report


def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help=(
                "Traffic file that `plan` reads, output of `simulate --json`, or saved live "
                "statistics."
            ),
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; by default report.html, or NAME.svg for a figure.",
            show_default=False,
        ),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Figure, such as `waste`, to write as SVG instead of the whole report.",
        ),
    ] = None,
    policy: PolicyOption = None,
    sizes: SizesOption = None,
    mode: ModeOption = None,
    cost_model: CostModelOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a report of padding, modes, times and reasons as one HTML file.

    The file is self-contained: it needs neither network access nor scripts. It adapts to light and
    dark themes and to narrow screens.

    Example: dispatchkit report trace.csv.gz --policy vllm -o report.html
    """
    from dispatchkit_plan.report import write_report
    from dispatchkit_plan.report.files import read_source

    if output is None:
        # The name of the figure is not validated yet, so it might contain slashes.
        stem = "report" if figure is None else figure.replace("/", "-")
        output = Path(f"{stem}.html" if figure is None else f"{stem}.svg")
    given = {"policy": policy, "sizes": sizes, "mode": mode, "cost_model": cost_model}
    settings = settings_of(given)
    inputs = [source, settings["cost_model"], settings.file]
    check_output(output, inputs=inputs, overwrite=force, hint=FORCE_HINT)
    found = read_source(source)
    if isinstance(found, dict | list):
        made = _of_document(found, source, given)
    else:
        from dispatchkit_plan.costs import load_cost_model
        from dispatchkit_plan.report import report_of_account, waste_plan

        account = account_of(found, settings, load_cost_model(settings["cost_model"]))
        largest = account.config.max_capture_size
        curve = waste_plan(found, largest) if largest else "The configuration has no capture sizes."
        made = report_of_account(account, plan=curve)
    write_report(made, output, figure=figure)
    if as_json:
        tiles = {tile.name: tile.value for tile in made.tiles}
        print_json(
            {
                "output": str(output),
                "title": made.title,
                "figures": [one.name for one in made.figures],
                "tiles": tiles,
            }
        )
    else:
        out = console()
        out.print(Text(made.title, style="bold"))
        out.print(Text(made.summary))
        out.print(Text(f"Written to {output}."))


def _of_document(
    document: dict[str, Any] | list[Any], source: Path, given: dict[str, Any]
) -> Report:
    """Return a report of the simulations or live statistics in a JSON document."""
    from dispatchkit_plan.report import report_of_simulations, report_of_statistics
    from dispatchkit_plan.report.live import STATISTICS_FORMAT

    for name, value in given.items():
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                name,
                value,
                "omitted with a file that already contains the decisions",
                f"Remove {flag}.",
                message=f"{flag} has no effect, because {source} already contains the decisions.",
            )
    if isinstance(document, dict) and document.get("format") == STATISTICS_FORMAT:
        return report_of_statistics(document, source=str(source))
    rows = document if isinstance(document, list) else [document]
    return report_of_simulations(rows, source=str(source))
