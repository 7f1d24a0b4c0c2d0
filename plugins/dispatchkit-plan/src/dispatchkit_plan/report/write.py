"""Write a report of a trace, simulations or live statistics to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dispatchkit
from dispatchkit.errors import ConfigError
from dispatchkit.files import write_whole

from dispatchkit_plan.report.account import Account
from dispatchkit_plan.report.from_account import report_of_account
from dispatchkit_plan.report.from_simulations import report_of_simulations
from dispatchkit_plan.report.live import LiveStatistics, report_of_statistics
from dispatchkit_plan.report.page import Report, render
from dispatchkit_plan.report.picture import figure_of, render_figure

if TYPE_CHECKING:
    from dispatchkit_plan import Simulation

__all__ = ["as_report", "write_report"]


def as_report(source: Report | Account | LiveStatistics | Sequence[Simulation]) -> Report:
    """Return a given report, or create the report of an account, statistics or simulations.

    Raises:
        ConfigError: The source has the wrong type.
    """
    if isinstance(source, Report):
        return source
    if isinstance(source, Account):
        return report_of_account(
            source,
            plan="An account contains no plan. Pass `plan=waste_plan(trace, max_size)` to "
            "report_of_account.",
        )
    if isinstance(source, LiveStatistics):
        return report_of_statistics(source.to_json(), source="a live runner")
    is_list = isinstance(source, list | tuple) and bool(source)
    if is_list and all(hasattr(one, "to_json") for one in source):
        return report_of_simulations([one.to_json() for one in source], source="a trace")
    raise ConfigError(
        "source",
        source,
        "a Report, an Account, LiveStatistics or a non-empty list of simulations",
        "For a trace, pass the result of account_for or simulate_all.",
    )


def write_report(
    source: Report | Account | LiveStatistics | Sequence[Simulation],
    path: str | os.PathLike[str],
    *,
    figure: str | None = None,
) -> None:
    """Write a report as one HTML file, or one of its figures as SVG.

    The file is written completely or not at all.

    Args:
        source: Account, live statistics, simulations, or a finished report.
        path: File to write.
        figure: Name of the figure to write, such as ``"waste"``; None for the whole report.

    Raises:
        ConfigError: The file cannot be written, the source is not supported, or the report does not
            have the figure.
    """
    report = as_report(source)
    if figure is None:
        write_whole(path, render(report, version=dispatchkit.__version__))
    else:
        write_whole(path, render_figure(figure_of(report, figure)))
