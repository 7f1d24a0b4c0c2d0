"""The command ``plan``: find capture sizes for a trace. Requires numpy, but not torch."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dispatchkit.cli import (
    JsonOption,
    TraceArgument,
    console,
    print_json,
    print_stderr,
    progress,
    table,
)
from dispatchkit.errors import ConfigError, counted
from dispatchkit.keys import check_counts

if TYPE_CHECKING:
    from dispatchkit_plan import EngineSettings, GridPlan, OwnSizesPlan, Plan


class FitOn(enum.StrEnum):
    """Which steps of a trace to plan on."""

    ALL = "all"
    FIRST_HALF = "first-half"


def plan(
    trace: TraceArgument,
    graphs: Annotated[
        int | None,
        typer.Option(
            "--graphs",
            metavar="N",
            help="Maximum number of graphs; with --beside, of additional graphs.",
        ),
    ] = None,
    memory_bytes: Annotated[
        float | None,
        typer.Option(
            "--memory-bytes",
            metavar="BYTES",
            help="Maximum memory of the graphs, instead of --graphs.",
        ),
    ] = None,
    capture_time_s: Annotated[
        float | None,
        typer.Option(
            "--capture-time-s",
            metavar="SECONDS",
            help="Maximum total capture time, instead of --graphs.",
        ),
    ] = None,
    bytes_per_graph: Annotated[
        float | None,
        typer.Option(
            "--bytes-per-graph",
            metavar="BYTES",
            help="Memory of each graph, for --memory-bytes; by default, taken from --cost-model.",
        ),
    ] = None,
    capture_s_per_graph: Annotated[
        float | None,
        typer.Option(
            "--capture-s-per-graph",
            metavar="SECONDS",
            help="Time of each capture, for --capture-time-s; by default, taken from --cost-model.",
        ),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            "--max-size",
            metavar="N",
            help=(
                "Largest size, which is always captured and counts as a graph; by default, 512, or "
                "with --axis, the size of the largest step. With --beside or --max-waste, N is "
                "only a limit: larger steps are ignored. The default is then the largest of all "
                "graph sizes in the cost model and --beside."
            ),
            show_default=False,
        ),
    ] = None,
    fit_on: Annotated[
        FitOn,
        typer.Option(
            "--fit-on",
            metavar="WHICH",
            help=(
                "Steps to plan on: all or first-half. A plan for the first half is judged on the "
                "second half."
            ),
        ),
    ] = FitOn.ALL,
    keyed: Annotated[
        bool,
        typer.Option("--keyed", metavar="", help="Plan uniform decode and mixed steps separately."),
    ] = False,
    align: Annotated[
        int, typer.Option("--align", metavar="N", help="Capture only multiples of N tokens.")
    ] = 1,
    axis: Annotated[
        str | None,
        typer.Option(
            "--axis",
            metavar="NAME",
            help="Also plan buckets of this axis, each with its own sizes.",
        ),
    ] = None,
    max_value: Annotated[
        int | None,
        typer.Option(
            "--max-value",
            metavar="N",
            help="Largest bucket of --axis; by default, the largest value in the trace.",
            show_default=False,
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            "--beside",
            metavar="A,B,...",
            help="Sizes that already have a graph; plan additional sizes whose graphs save time.",
        ),
    ] = None,
    max_waste: Annotated[
        float | None,
        typer.Option(
            "--max-waste",
            metavar="SHARE",
            help=(
                "Plan for the policy `threshold`: a step runs eager if more than this share of its "
                "graph would be padding. With 0, only steps of a captured size are replayed."
            ),
        ),
    ] = None,
    cost_model: Annotated[
        str | None,
        typer.Option(
            "--cost-model",
            metavar="NAME|FILE",
            help="Minimize time according to this cost model instead of minimizing padding.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help=(
                "Engine to print settings for: dispatchkit, vllm, sglang, sglang-legacy, "
                "tensorrt-llm."
            ),
        ),
    ] = None,
    query_len: Annotated[
        int | None,
        typer.Option(
            "--query-len",
            metavar="N",
            help="Number of tokens per request in decode steps, for --engine; 1 by default.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best capture sizes for a trace, and compare them with well-known lists.

    Example: dispatchkit plan trace.csv.gz --graphs 24 --fit-on first-half
    """
    for flag, given, needs, needed in (
        ("--query-len", query_len, "--engine", engine),
        ("--max-value", max_value, "--axis", axis),
        ("--bytes-per-graph", bytes_per_graph, "--memory-bytes", memory_bytes),
        ("--capture-s-per-graph", capture_s_per_graph, "--capture-time-s", capture_time_s),
    ):
        if given is not None and needed is None:
            raise ConfigError(
                flag,
                given,
                f"omitted without {needs}",
                f"Add {needs}, or remove {flag}.",
                message=f"{flag} has no effect without {needs}.",
            )
    from dispatchkit.observe import StepTrace

    from dispatchkit_plan import emit, load_cost_model, plan_grid, plan_own_sizes, plan_sizes
    from dispatchkit_plan.traffic import read_workload

    with progress() as report_progress:
        report_progress("reading the trace", 0, 1)
        workload = read_workload(trace)
        report_progress("reading the trace", 1, 1)
    model = None if cost_model is None else load_cost_model(cost_model)
    halves: Literal["all", "first-half"] = "all" if fit_on is FitOn.ALL else "first-half"
    if beside is not None or max_waste is not None:
        _check_omitted(
            "with --beside" if beside is not None else "with --max-waste",
            ("--axis", axis is not None),
            ("--keyed", keyed),
            ("--align", align != 1),
            ("--capture-time-s", capture_time_s is not None),
        )
        if max_waste is not None and engine not in (None, "dispatchkit"):
            raise ConfigError(
                "--engine",
                engine,
                "'dispatchkit' with --max-waste",
                "Other engines do not limit padding.",
            )
        if model is None:
            flag = "--beside" if beside is not None else "--max-waste"
            raise ConfigError(
                "--cost-model",
                None,
                f"given with {flag}",
                "Whether a graph saves time cannot be derived from padding. Run `dispatchkit "
                "calibrate`, then add --cost-model costs.json.",
            )
        own = plan_own_sizes(
            workload,
            cost_model=model,
            beside=check_counts([size for size in (beside or "").split(",") if size], "--beside"),
            max_waste=1.0 if max_waste is None else max_waste,
            graphs=graphs,
            memory_bytes=memory_bytes,
            bytes_per_graph=bytes_per_graph,
            max_size=max_size,
            fit_on=halves,
        )
        settings = (
            None
            if engine is None or not own.sizes
            else emit(own.sizes, engine, query_len=1 if query_len is None else query_len)
        )
        _print_own_sizes(own, settings, as_json=as_json)
        return
    if axis is not None:
        _check_omitted(
            "with --axis",
            ("--keyed", keyed),
            ("--align", align != 1),
            ("--memory-bytes", memory_bytes is not None),
            ("--capture-time-s", capture_time_s is not None),
        )
        if engine not in (None, "dispatchkit"):
            raise ConfigError(
                "--engine",
                engine,
                "'dispatchkit' with --axis",
                "Other engines have no axes.",
            )
        if not isinstance(workload, StepTrace):
            raise ConfigError(
                "--axis",
                axis,
                "omitted with a file of counts",
                "Use a step trace.",
                message="--axis requires a trace with axes, but a file of counts has no axes.",
            )
        if graphs is None:
            raise ConfigError(
                "--graphs", None, "given with --axis", "Add --graphs 24, for example."
            )
        grid = plan_grid(
            workload,
            axis,
            graphs=graphs,
            max_size=max_size,
            max_value=max_value,
            fit_on=halves,
            cost_model=model,
        )
        _print_grid(grid, with_settings=engine is not None, as_json=as_json)
        return
    made = plan_sizes(
        workload,
        graphs=graphs,
        memory_bytes=memory_bytes,
        capture_time_s=capture_time_s,
        bytes_per_graph=bytes_per_graph,
        capture_s_per_graph=capture_s_per_graph,
        max_size=512 if max_size is None else max_size,
        fit_on=halves,
        keyed=keyed,
        align=align,
        cost_model=model,
    )
    settings = (
        None
        if engine is None
        else emit(made, engine, query_len=1 if query_len is None else query_len)
    )
    if as_json:
        value: dict[str, Any] = made.to_json()
        if settings is not None:
            value["settings"] = settings.to_json()
        print_json(value)
        return
    show(made, console())
    if settings is not None:
        show_settings(settings, console())
    for warning in made.warnings:
        print_stderr(f"Warning: {warning}")


def _check_omitted(why: str, *flags: tuple[str, bool]) -> None:
    """Raise ``ConfigError`` if a flag that this kind of plan rejects is set."""
    for flag, is_given in flags:
        if is_given:
            raise ConfigError(
                flag,
                "given",
                f"omitted {why}",
                "Remove one of the two options.",
                message=f"{flag} cannot be combined {why}.",
            )


def show(made: Plan, out: Console) -> None:
    """Print a plan, formatted for 80 columns."""
    graphs = counted(made.num_graphs, "graph")
    largest = max(made.sizes)
    out.print(Text(f"Sizes to capture ({graphs}, up to {counted(largest, 'token')})", style="bold"))
    for family in made.families:
        listed = ", ".join(map(str, family.sizes))
        label = _kind(family.uniform, family.num_active_loras)
        text = f"{label}: {listed}" if label else listed
        out.print(Padding(Text(text), (0, 0, 0, 2), expand=False))
    over = f"{made.num_steps_over / made.num_steps:.1%} of these steps"
    beyond = f"{over} exceed the largest size and run eager"
    if largest > made.max_size:  # the plan has a graph at the token budget
        beyond = f"{over} exceed {made.max_size} tokens and are not included in the padding"
    out.print(
        Text(
            f"\nPadding is {made.waste_pct:.2f}% of the real tokens, judged on {made.judged_on} "
            f"({counted(made.num_steps, 'step')}); {beyond}."
        )
    )
    if made.objective != "padding":
        out.print(Text(_minimized(made)))
    if made.future is not None:
        out.print(
            Text(
                f"For later traffic (padding {made.future.waste_pct:.2f}% on these steps): "
                f"{', '.join(map(str, made.future.sizes))}"
            )
        )
    if made.token_budget is not None:
        out.print(Text(f"Size {made.token_budget.size}: {made.token_budget.reason}"))
    rows = [
        [
            name,
            rival.num_graphs,
            f"{rival.waste_pct:.2f}%",
            rival.matched_by if rival.matched_by is not None else "not reached",
        ]
        for name, rival in made.rivals.items()
    ]
    out.print()
    columns = ["Known list", "Graphs", "Padding", "Planned graphs for the same padding"]
    out.print(table(columns, rows, right=[1, 2, 3]))


def _print_own_sizes(made: OwnSizesPlan, settings: EngineSettings | None, *, as_json: bool) -> None:
    if as_json:
        value = made.to_json()
        if settings is not None:
            value["settings"] = settings.to_json()
        print_json(value)
        return
    out = console()
    beside = f" in addition to {', '.join(map(str, made.beside))}" if made.beside else ""
    out.print(Text(f"Sizes that deserve their own graph{beside}", style="bold"))
    rows = [
        [
            one.size,
            f"{one.num_steps:,}",
            f"{one.saved_us / 1e3:,.1f} ms",
            "" if one.num_bytes is None else f"{one.num_bytes / 2**20:,.1f} MiB",
        ]
        for one in made.own
    ]
    if rows:
        out.print(table(["Size", "Steps", "Saves", "Memory"], rows, right=[0, 1, 2, 3]))
    else:
        out.print("No additional graph would save time.")
    over = made.num_steps_over / made.num_steps
    time = f"{made.before_us / 1e3:,.1f} ms"
    if rows:
        time += (
            f" without these graphs, {made.after_us / 1e3:,.1f} ms with them "
            f"({made.saved_pct:.1f}% less)"
        )
    out.print()
    out.print(
        f"{made.objective[0].upper()}{made.objective[1:]}: {time}. Judged on {made.judged_on} "
        f"({counted(made.num_steps, 'step')}); {over:.1%} of these steps are too large to be "
        "considered."
    )
    if made.max_waste < 1 and made.sizes:
        out.print(
            f"The sizes are planned for the policy `threshold` with max_waste={made.max_waste:g}."
        )
    if settings is not None:
        show_settings(settings, out)
    for warning in made.warnings:
        print_stderr(f"Warning: {warning}")


def _print_grid(made: GridPlan, *, with_settings: bool, as_json: bool) -> None:
    from dispatchkit_plan.emitters import emit_grid

    settings = emit_grid(made) if with_settings else None
    if as_json:
        value: dict[str, Any] = made.to_json()
        if settings is not None:
            value["settings"] = settings.to_json()
        print_json(value)
        return
    out = console()
    graphs = counted(made.num_graphs, "graph")
    title = (
        f"Sizes to capture for each bucket of {made.axis} ({graphs}, up to "
        f"{counted(made.max_size, 'row')})"
    )
    out.print(Text(title, style="bold"))
    _print_rows(made, out)
    over, product = made.num_steps_over / made.num_steps, made.product
    out.print()
    out.print(
        f"Padding is {made.waste_pct:.2f}% of the real work (rows x {made.axis}), judged on "
        f"{made.judged_on} ({counted(made.num_steps, 'step')}); {over:.1%} of these steps "
        "exceed the largest size or bucket and run eager."
    )
    out.print(
        f"If sizes and buckets are planned separately, padding is {product.waste_pct:.2f}% with "
        f"{counted(len(product.sizes), 'size')} x {counted(len(product.buckets), 'bucket')} "
        f"({counted(product.num_graphs, 'graph')})."
    )
    if made.objective != "padding":
        out.print(_minimized(made))
    if made.gap_pct:
        out.print(
            f"The plan is at most {made.gap_pct:.2f}% above the optimum for the planning steps."
        )
    if made.future is not None:
        out.print()
        out.print(f"For later traffic (padding {made.future.waste_pct:.2f}% on these steps):")
        _print_rows(made.future, out)
    if settings is not None:
        show_settings(settings, out)
    for warning in made.warnings:
        print_stderr(f"Warning: {warning}")


def _print_rows(made: GridPlan, out: Console) -> None:
    width = len(str(max(made.grid)))
    for bucket, sizes in made.grid.items():
        text = f"{made.axis} {bucket:>{width}}: {', '.join(map(str, sizes))}"
        out.print(Padding(Text(text), (0, 0, 0, 2), expand=False))


def _minimized(made: Plan | GridPlan) -> str:
    return (
        f"The plan minimizes {made.objective}. The predicted time is {made.excess_pct:.2f}% higher "
        "than with graphs of exact sizes."
    )


def _kind(uniform: bool | None, num_active_loras: int | None) -> str:
    words = {None: "", True: "uniform decode", False: "mixed"}[uniform]
    if num_active_loras is None:
        return words
    return f"{words or 'any kind'}, {counted(num_active_loras, 'adapter')}"


def show_settings(settings: EngineSettings, out: Console) -> None:
    """Print an engine's settings, ready to paste."""
    out.print(Text(f"\nFor {settings.engine} (sizes count {settings.means})", style="bold"))
    print(settings.text)  # not wrapped, so that it can be pasted
    for note in settings.notes:
        out.print(Text(note))
    out.print(Text(f"Format: {settings.source}"))
