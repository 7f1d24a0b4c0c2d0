"""The command ``simulate``: run a trace under policies and limits, without a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dispatchkit.cli import (
    AxesOption,
    CostModelOption,
    JsonOption,
    ModeOption,
    SizesOption,
    TraceArgument,
    console,
    load_installed_plugins,
    policy_name,
    print_json,
    progress,
    report_skipped_plugins,
    settings_of,
    table,
)
from dispatchkit.errors import ConfigError, counted

from dispatchkit_plan.commands.accounting import config_for, note_unused_axes

if TYPE_CHECKING:
    from dispatchkit_plan import RankSimulation, Simulation

#: A row of the table: its name, and a function that returns the cell for a simulation.
_Line = tuple[str, Callable[[Any], str]]

_STEPS_BY_MODE: list[_Line] = [
    ("FULL", lambda one: f"{one.modes['FULL']:,}"),
    ("PIECEWISE", lambda one: f"{one.modes['PIECEWISE']:,}"),
    ("eager", lambda one: f"{one.modes['NONE']:,}"),
]


def simulate(
    trace: TraceArgument,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Policy to simulate; repeat the option to compare several policies.",
            show_default=False,
        ),
    ] = None,
    sizes: SizesOption = None,
    mode: ModeOption = None,
    axes: AxesOption = None,
    max_graphs: Annotated[
        str | None,
        typer.Option("--max-graphs", metavar="N", help="Maximum number of live graphs per lane."),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-bytes", metavar="N", help="Maximum memory of live graphs per lane, in bytes."
        ),
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            "--eviction",
            metavar="WHICH",
            help=(
                "Graph to evict first. lru: the least recently used; benefit: the graph with the "
                "fewest replays relative to its capture size."
            ),
        ),
    ] = None,
    capture_after: Annotated[
        str | None,
        typer.Option(
            "--capture-after",
            metavar="N",
            help="Capture the graph of a key on the Nth step that needs it.",
        ),
    ] = None,
    lanes: Annotated[
        int,
        typer.Option(
            "--lanes", metavar="N", help="Number of lanes; the steps are assigned to them in turn."
        ),
    ] = 1,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks",
            metavar="N",
            help="Number of ranks; consecutive steps of the trace, one per rank, run together.",
        ),
    ] = 1,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", help="Random seed for the noise of the simulated measurements."
        ),
    ] = 0,
    cost_model: CostModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how a trace would run under a policy: modes, padding, time, memory.

    Several policies are shown side by side. `dispatchkit report` reads the output of --json.

    Example: dispatchkit simulate trace.csv.gz --policy vllm --policy adaptive
    """
    given = {
        "sizes": sizes,
        "mode": mode,
        "axes": axes,
        "max_graphs": max_graphs,
        "max_bytes": max_bytes,
        "eviction": eviction,
        "capture_after": capture_after,
        "cost_model": cost_model,
    }
    settings = settings_of(given)
    from dispatchkit_plan import Scenario, simulate_ranks
    from dispatchkit_plan import simulate as run_scenario
    from dispatchkit_plan.traffic import read_steps

    rows = read_steps(trace)
    config = config_for(rows, settings)
    note_unused_axes(rows, config)
    plugins = load_installed_plugins(settings)
    report_skipped_plugins(plugins)
    names = list(dict.fromkeys(policy or [policy_name(settings, plugins, config)]))
    options = settings["policy_options"]
    sampling = settings.chosen("runner").get("sample_every")
    if options and len(names) > 1:
        raise ConfigError(
            "policy_options",
            options,
            "omitted if several policies are compared",
            "Simulate each policy separately, or remove the setting.",
        )
    scenarios = [
        Scenario(
            policy=name,
            policy_options=options,
            max_graphs=settings["max_graphs"],
            max_bytes=settings["max_bytes"],
            eviction=settings["eviction"],
            capture_after=settings["capture_after"],
            lanes=lanes,
            cost_model=settings["cost_model"],
            seed=seed,
            config=config,
            label=name,
            rows_independent=settings["rows_independent"],
            **({} if sampling is None else {"sample_every": sampling}),
        )
        for name in names
    ]
    found: list[Any] = []
    with progress() as report_progress:
        for index, scenario in enumerate(scenarios):
            report_progress("simulating", index, len(scenarios))
            if ranks == 1:
                found.append(run_scenario(rows, scenario, plugins=plugins))
            else:
                found.append(simulate_ranks(rows, ranks, scenario, plugins=plugins))
    if as_json:
        values = [one.to_json() for one in found]
        print_json(values[0] if len(values) == 1 else values)
    elif ranks == 1:
        show(found, trace, console())
    else:
        show_ranks(found, trace, console())


def show(found: list[Simulation], trace: Path, out: Console) -> None:
    """Print simulations side by side, formatted for 80 columns."""
    first = found[0]
    out.print(
        Text(
            f"{trace}: {counted(first.num_steps, 'step')}; costs from {first.cost_model}",
            style="bold",
        )
    )
    lines: list[_Line] = [
        ("graphs", lambda one: f"{one.num_graphs:,}"),
        *_STEPS_BY_MODE,
        ("hit rate", lambda one: f"{one.hit_rate:.1%}"),
        ("padding", lambda one: f"{one.waste_pct:.2f}%"),
        ("captures", lambda one: f"{one.captures:,}"),
        ("evictions", lambda one: f"{one.evictions:,}"),
        ("steps measured", lambda one: f"{one.measured:,}"),
        ("policy errors", lambda one: f"{one.policy_errors:,}"),
        ("device time", lambda one: f"{one.time_s:.4g} s"),
        ("all eager", lambda one: f"{one.eager_time_s:.4g} s"),
        ("busiest lane", lambda one: f"{one.busiest_lane_s:.4g} s"),
        ("capture time", lambda one: _known(one.capture_time_s, "{:.4g} s")),
        ("graph memory", lambda one: _known(one.memory_bytes, "{:,} bytes")),
    ]
    lines += map(_eager_for, dict.fromkeys(reason for one in found for reason in one.misses))
    _show_side_by_side(found, lines, out)


def show_ranks(found: list[RankSimulation], trace: Path, out: Console) -> None:
    """Print simulations of ranks side by side, formatted for 80 columns."""
    first = found[0]
    title = (
        f"{trace}: {counted(first.num_steps, 'step')} on {counted(first.ranks, 'rank')}; costs from"
    )
    out.print(Text(f"{title} {first.cost_model}", style="bold"))

    def share(seconds: float, one: RankSimulation) -> str:
        return f"{seconds:.4g} s ({seconds / one.time_s:.1%})"

    lines: list[_Line] = [
        *_STEPS_BY_MODE,
        ("mode changed by other ranks", lambda one: f"{one.changed_modes:,}"),
        ("padding to largest rank", lambda one: f"{one.rank_padding / one.real_tokens:.1%}"),
        ("padding to graph sizes", lambda one: f"{one.graph_padding / one.real_tokens:.1%}"),
        ("time of each rank", lambda one: f"{one.time_s:.4g} s"),
        ("own steps", lambda one: share(one.own_s, one)),
        ("lost to the slowest rank", lambda one: share(one.slowest_s, one)),
        ("lost to agreed size and mode", lambda one: share(one.padding_s, one)),
        ("lost to the exchange", lambda one: share(one.exchange_s, one)),
    ]
    _show_side_by_side(found, lines, out)


def _show_side_by_side(
    found: Sequence[Simulation | RankSimulation], lines: list[_Line], out: Console
) -> None:
    """Print a column for each simulation, followed by all notes."""
    columns = ["", *(one.label for one in found)]
    rows = [[name, *(value(one) for one in found)] for name, value in lines]
    out.print(table(columns, rows, right=range(1, len(columns))))
    for note in dict.fromkeys(note for one in found for note in one.notes):
        out.print(Text(f"Note: {note}"))


def _eager_for(reason: str) -> _Line:
    return f"eager: {reason}", lambda one: f"{one.misses.get(reason, 0):,}"


def _known(value: float | None, form: str) -> str:
    return "unknown" if value is None else form.format(value)
