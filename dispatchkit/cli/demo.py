"""``demo``: run a real step trace through a small decoder, and show the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dispatchkit.cli.options import (
    BackendOption,
    ModeOption,
    PolicyOption,
    SizesOption,
    load_installed_plugins,
    settings_of,
)
from dispatchkit.cli.output import (
    JsonOption,
    console,
    print_json,
    progress,
    report_skipped_plugins,
    table,
)
from dispatchkit.demo.traffic import DEFAULT_STEPS
from dispatchkit.errors import BackendUnavailableError, counted

if TYPE_CHECKING:
    from dispatchkit.demo.report import DemoReport

MIB = 2**20
MAX_SHOWN = 3  # maximum number of failed captures to show, and of differing steps


def demo(
    policy: PolicyOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Step trace to replay; by default, an excerpt of a real trace.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Maximum number of steps to run.")
    ] = DEFAULT_STEPS,
    sizes: SizesOption = None,
    mode: ModeOption = None,
    device: BackendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a real trace through a small decoder, and compare eager and dispatched steps.

    Exit code 1 if the results of a step or the final caches differ from those of the eager run. All
    runner settings apply (`dispatchkit config show` lists them). Limits that are not given are
    derived from the trace.

    Example: dispatchkit demo --steps 100 --device tape

    Example: dispatchkit --set lazy=true --set max_graphs=8 demo --steps 100
    """
    try:
        from dispatchkit.demo.replay import DemoOptions, run_demo
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "numpy"):
            raise
        raise BackendUnavailableError(
            f"The demo needs {error.name}, which is not installed. "
            "Next: pip install 'dispatchkit[torch]'."
        ) from error
    settings = settings_of({"policy": policy, "sizes": sizes, "mode": mode, "backend": device})
    options = DemoOptions(settings=settings, trace=trace, steps=steps)
    plugins = load_installed_plugins(settings)
    report_skipped_plugins(plugins)
    with progress() as show_progress:
        report = run_demo(options, plugins=plugins, progress=show_progress)
    if as_json:
        print_json(report.to_dict())
    else:
        show(report, console())
    if not report.comparison.is_equal:
        raise typer.Exit(1)


def show(report: DemoReport, out: Console) -> None:
    """Print a report that fits 80 columns and is readable without color."""
    _heading(out, "What ran")
    _indented(out, _facts(report))
    _heading(out, "Capture")
    _indented(out, *_capture_lines(report))
    _heading(out, "Steps (median milliseconds per step, after a warmup)")
    _indented(out, _times(report), *_step_lines(report))
    _heading(out, "Decoding a single request")
    one = report.batch1
    _indented(
        out,
        f"eager {one.eager_us:.0f} µs, dispatched {one.dispatched_us:.0f} µs per step "
        f"({_runs_as(one.mode)}): {one.ratio:.2f}x",
    )
    _heading(out, "Same results?")
    _indented(out, *_comparison_lines(report))
    _heading(out, "What the numbers mean here")
    _indented(out, *report.meaning(), f"(total time {report.seconds:.0f} s)")


def _heading(out: Console, text: str) -> None:
    out.print(Text(f"\n{text}", style="bold"))


def _indented(out: Console, *parts: RenderableType) -> None:
    for part in parts:
        out.print(
            Padding(Text(part) if isinstance(part, str) else part, (0, 0, 0, 2), expand=False)
        )


def _runs_as(mode: str) -> str:
    return "eager" if mode == "NONE" else mode


def _facts(report: DemoReport) -> Table:
    """Return a table that describes the run, including omitted parts of the trace."""
    traffic, model = report.traffic, report.model
    distribution = report.policy_origin.partition(", entry point")[0]
    device = ", ".join(f"{name} {value}" for name, value in report.device.items())
    sizes = (
        f"{model['num_layers']} layers, {model['num_heads']} heads of width {model['head_dim']}, "
        f"random weights; cache of {model['num_slots']} requests x {model['cache_len']} "
        f"tokens, {model['num_bytes_cache'] / MIB:.1f} MiB"
    )
    rows = [
        ("policy", f"{report.policy} ({distribution})"),
        ("backend", f"{report.backend}: {device}"),
        (
            "trace",
            (
                f"{report.trace}; {counted(len(traffic.steps), 'step')}, "
                f"{counted(traffic.num_requests, 'request')}"
            ),
        ),
        ("model", sizes),
    ]
    if traffic.cut_tokens:
        whole = traffic.num_tokens + traffic.cut_tokens
        cut = (
            f"{traffic.cut_tokens:,} of {whole:,} tokens, in "
            f"{counted(traffic.cut_steps, 'step')}, because of the demo's limits, such as "
            f"{counted(traffic.max_prompt, 'token')} per prompt"
        )
        rows.append(("omitted", cut))
    if traffic.cut_requests:
        rows.append(
            (
                "omitted",
                (
                    f"{counted(traffic.cut_requests, 'request')} (counted once per step), because "
                    "of the demo's limits, such as "
                    f"{counted(model['num_slots'], 'request')} per step"
                ),
            )
        )
    grid = Table.grid(padding=(0, 2, 0, 0))
    for label, text in rows:
        grid.add_row(Text(label), Text(text))
    return grid


def _capture_lines(report: DemoReport) -> Iterator[str]:
    capture = report.capture
    failed = capture["failed"]
    when = "on first use" if capture["lazy"] else f"in {capture['seconds']:.1f} s"
    yield (
        f"{counted(capture['num_graphs'], 'graph')} captured {when}, "
        f"{capture['num_bytes'] / MIB:.1f} MiB in total; {counted(len(failed), 'capture')} failed"
    )
    for key, reason in list(failed.items())[:MAX_SHOWN]:
        yield f"failed: {key}: {reason}"
    if len(failed) > MAX_SHOWN:
        yield f"{len(failed) - MAX_SHOWN} more failed; --json lists all of them"


def _times(report: DemoReport) -> Table:
    rows = [
        [
            row.kind,
            _runs_as(row.mode),
            row.steps,
            f"{row.num_tokens:,}",
            f"{row.padding:,}",
            f"{row.eager_ms:.2f}",
            f"{row.dispatched_ms:.2f}",
            f"{row.eager_ms / row.dispatched_ms:.2f}x",
        ]
        for row in report.times
    ]
    columns = ["Kind", "Runs as", "Steps", "Tokens", "Padding", "Eager", "Dispatched", "Ratio"]
    return table(columns, rows, right=range(2, 8))


def _step_lines(report: DemoReport) -> Iterator[str]:
    real = sum(row.num_tokens for row in report.times if row.mode != "NONE")
    share = report.padding / real if real else 0.0
    yield f"padding: {counted(report.padding, 'token')}, {share:.1%} of the real tokens in replays"
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.eager_reasons.items())
    yield f"eager steps by reason: {reasons or 'none'}"


def _comparison_lines(report: DemoReport) -> Iterator[str]:
    compared = report.comparison
    num_different = len(compared.different)
    differ = "differs" if 1 in (num_different, compared.steps) else "differ"
    yield (
        f"{'yes' if compared.is_equal else 'NO'}: {num_different} of "
        f"{counted(compared.steps, 'step')} {differ} by more than {compared.atol:g} + "
        f"{compared.rtol:g} x |eager|; largest difference {compared.worst:.2g}"
    )
    for each in compared.different[:MAX_SHOWN]:
        where = f"step {each.step} ({counted(each.num_tokens, 'token')}, {_runs_as(each.mode)})"
        yield f"differs: {where}, by {each.worst:.2g}"
    yield (
        f"final caches {'DIFFER' if compared.caches_differ else 'agree'}; largest difference "
        f"{compared.worst_cache:.2g}"
    )
