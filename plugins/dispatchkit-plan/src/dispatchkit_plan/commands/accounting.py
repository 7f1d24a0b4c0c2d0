"""The option ``explain --trace``, and functions shared with other commands."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dispatchkit.cli import console, dispatcher_of, print_json, print_stderr, progress, table
from dispatchkit.errors import counted
from dispatchkit.keys import CaptureSizeWarning, DispatchConfig
from dispatchkit.observe import StepTrace, trace_config
from dispatchkit.settings import Settings

from dispatchkit_plan.costs import CostModel, load_cost_model
from dispatchkit_plan.report.account import Account, AccountedDecision, account_for
from dispatchkit_plan.report.from_account import brief_sizes
from dispatchkit_plan.traffic import read_steps

MAX_SHOWN = 15


def explain_trace(path: Path, settings: Settings, *, show_all: bool, as_json: bool) -> None:
    """Print the decisions for a trace, for ``dispatchkit explain --trace``.

    Args:
        path: Path of any file that ``read_steps`` accepts.
        settings: Policy, sizes, limits and cost model.
        show_all: Whether to print all decisions, instead of only the most expensive ones.
        as_json: Whether to print JSON instead of tables.
    """
    account = account_of(read_steps(path), settings, load_cost_model(settings["cost_model"]))
    if as_json:
        print_json(account_as_dict(account))
    else:
        show_account(account, console(), None if show_all else MAX_SHOWN)


def account_of(rows: StepTrace, settings: Settings, model: CostModel) -> Account:
    """Return the account of a trace under the selected policy, and show a progress bar."""
    config = config_for(rows, settings)
    note_unused_axes(rows, config)
    dispatcher = dispatcher_of(settings, config)
    with progress() as report_progress:
        return account_for(rows, dispatcher, model, progress=report_progress)


def config_for(rows: StepTrace, settings: Settings) -> DispatchConfig:
    """Return the configuration from the settings, with missing values derived from the trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)  # dispatch_config warns below
        fitting = trace_config(rows, sizes=settings["sizes"])
    return settings.dispatch_config(
        max_num_tokens=fitting.max_num_tokens,
        max_num_seqs=fitting.max_num_seqs,
        query_lens=fitting.query_lens,
        max_loras=fitting.max_loras,
    )


def note_unused_axes(rows: StepTrace, config: DispatchConfig) -> None:
    """Print a note if a trace has values of axes that the settings do not declare."""
    unused = [name for name in rows.axes if name not in [axis.name for axis in config.axes]]
    if unused:
        print_stderr(
            f"Note: The values of {' and '.join(unused)} in {rows.source} are ignored. To use "
            "them, declare buckets in the `axes` setting."
        )


def show_account(account: Account, out: Console, limit: int | None) -> None:
    """Print an account of a trace, formatted for 80 columns."""
    speed = account.eager_time_s / account.time_s if account.time_s else 1.0
    out.print(Text(f"Trace    {account.source}, {counted(account.num_steps, 'step')}"))
    out.print(Text(f"Policy   {account.policy}, {counted(account.num_graphs, 'graph')}"))
    config = account.config
    out.print(Text(f"Sizes    {brief_sizes(config.sizes)}; mode {config.mode}"))
    out.print(
        Text(
            f"Cost     {account.time_s:.4g} s under {account.cost_model}, {speed:.2f} times "
            f"as fast as eager; padding {account.waste_pct:.2f}%"
        )
    )
    rows, reasons = [], {}
    for (mode, reason), group in account.by(
        lambda one: (one.decision.mode.name, str(one.decision.reason))
    ).items():
        steps = sum(one.steps for one in group)
        runs_as = "eager" if mode == "NONE" else mode
        seconds = sum(one.total_us for one in group) / 1e6
        lost = sum(one.lost_us for one in group) / 1e6
        rows.append([runs_as, reason, f"{steps:,}", f"{seconds:.3f}", f"{lost:.3f}"])
        reasons[reason] = account.explain(group[0]).because
    out.print()
    columns = ["Runs as", "Reason", "Steps", "Seconds", "Lost (s)"]
    out.print(table(columns, rows, right=[2, 3, 4]))
    out.print()
    for reason, because in reasons.items():
        out.print(Text(f"{reason}: {because}"))
    shown = account.decisions[:limit]
    title = "All decisions" if len(shown) == len(account.decisions) else "Most expensive decisions"
    out.print(
        Text(
            f"\n{title} (lost: additional time compared with a graph of the exact size)",
            style="bold",
        )
    )
    cells = [_decision_cells(account, one) for one in shown]
    columns = ["Tokens", "Steps", "Runs as", "Pad", "ms", "Lost ms", "Nearest graph"]
    out.print(table(columns, cells, right=[0, 1, 3, 4, 5]))
    if len(shown) < len(account.decisions):
        rest = len(account.decisions) - len(shown)
        out.print(Text(f"{counted(rest, 'more decision')}; print all with --all or --json."))


def _decision_cells(account: Account, one: AccountedDecision) -> list[str]:
    answer = account.explain(one)
    runs_as = "eager"
    if one.decision.key is not None:
        axes = one.decision.key.descriptor.axes
        at = f" at {','.join(map(str, axes))}" if axes else ""
        sizes = "+".join(str(key.num_tokens) for key in one.decision.keys)
        runs_as = f"{one.decision.mode} {sizes}{at}"
    return [
        str(one.num_tokens),
        f"{one.steps:,}",
        runs_as,
        str(one.decision.padding),
        f"{one.total_us / 1e3:,.1f}",
        f"{one.lost_us / 1e3:,.1f}",
        answer.nearest or "-",
    ]


def account_as_dict(account: Account) -> dict[str, Any]:
    """Return the decisions for a trace as JSON values."""
    return {
        "trace": account.source,
        "policy": account.policy,
        "steps": account.num_steps,
        "modes": account.modes(),
        "misses": account.misses(),
        "graphs": account.num_graphs,
        "waste_pct": round(account.waste_pct, 4),
        "cost_model": account.cost_model,
        "time_s": account.time_s,
        "eager_time_s": account.eager_time_s,
        "decisions": [
            {
                **account.explain(one).to_json(),
                "steps": one.steps,
            }
            for one in account.decisions
        ],
    }
