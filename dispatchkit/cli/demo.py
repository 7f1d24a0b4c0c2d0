"""``demo``: replay a real step trace through a small decoder, and show what came of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import Progress, TaskID
from rich.text import Text

from dispatchkit.cli.output import (
    JsonOption,
    console,
    load_installed_plugins,
    mention_problems,
    print_json,
    table,
)
from dispatchkit.errors import BackendUnavailableError

if TYPE_CHECKING:
    from dispatchkit.demo.replay import Progress as Tell
    from dispatchkit.demo.report import DemoReport

MIB = 2**20


def demo(
    policy: Annotated[str, typer.Option(help="The policy that decides.")] = "vllm",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A step trace; by default an excerpt of a real one."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Most steps to run.")] = 300,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="auto, cuda, cuda:1, ... or tape (also cpu), the stand-in on a CPU.",
        ),
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Replay a real trace through a small decoder, eager and dispatched, and compare.

    Exit code 1 if any step computed something else than eager.

    Example: dispatchkit demo --steps 100 --device tape
    """
    try:
        from dispatchkit.demo.replay import DemoOptions, run_demo
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "numpy"):
            raise
        raise BackendUnavailableError(
            f"The demo runs a model, and {error.name} is not installed. "
            "Next: pip install 'dispatchkit[torch]'."
        ) from error
    options = DemoOptions(policy=policy, trace=trace, steps=steps, device=device)
    plugins = load_installed_plugins()
    mention_problems(plugins)
    with _progress() as tell:
        report = run_demo(options, plugins=plugins, progress=tell)
    if as_json:
        print_json(report.to_dict())
    else:
        show(report, console())
    if not report.comparison.is_equal:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Tell]:
    """Show a bar on standard error while it is a terminal; it is gone afterwards."""
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(doing: str, done: int, total: int) -> None:
            if doing not in tasks:
                tasks[doing] = bars.add_task(doing)
            bars.update(tasks[doing], completed=done, total=total)

        yield tell


def show(report: DemoReport, out: Console) -> None:
    """Print a report, readable at 80 columns and without colour."""
    traffic, compared = report.traffic, report.comparison

    def heading(text: str) -> None:
        out.print(Text(f"\n{text}", style="bold"))

    def line(text: str) -> None:
        out.print(Padding(Text(text), (0, 0, 0, 2)))

    heading("What ran")
    line(f"policy   {report.policy} ({report.policy_origin})")
    facts = ", ".join(f"{name} {value}" for name, value in report.device.items())
    line(f"backend  {report.backend}: {facts}")
    line(f"trace    {report.trace}: {len(traffic.steps)} steps, {traffic.num_requests} requests")
    model = report.model
    line(
        f"model    {model['num_layers']} layers, {model['num_heads']} heads of "
        f"{model['head_dim']}, random weights; cache of {model['num_slots']} requests x "
        f"{model['cache_len']} tokens, {model['num_bytes_cache'] / MIB:.1f} MiB"
    )
    if traffic.cut_tokens:
        whole = traffic.num_tokens + traffic.cut_tokens
        line(
            f"cut      {traffic.cut_tokens:,} of {whole:,} tokens, in {traffic.cut_steps} steps: "
            f"prompts longer than {traffic.max_prompt} tokens do not fit the cache"
        )
    if traffic.cut_requests:
        line(f"cut      {traffic.cut_requests:,} places of requests beyond the cache's slots")

    capture = report.capture
    heading("Capture")
    line(
        f"{capture['num_graphs']} graphs in {capture['seconds']:.1f} s, "
        f"{capture['num_bytes'] / MIB:.1f} MiB in their pool, {len(capture['failed'])} failed"
    )
    for key, reason in capture["failed"].items():
        line(f"failed: {key}: {reason}")

    heading("Steps (milliseconds: median per step, warm)")
    rows = [
        [
            row.kind,
            row.mode if row.mode != "NONE" else "eager",
            row.steps,
            f"{row.num_tokens:,}",
            f"{row.padding:,}",
            f"{row.eager_ms:.2f}",
            f"{row.dispatched_ms:.2f}",
            f"{row.eager_ms / row.dispatched_ms:.2f}x",
        ]
        for row in report.times
    ]
    columns = ["Kind", "Runs as", "Steps", "Tokens", "Padding", "Eager", "Ours", "Ratio"]
    out.print(Padding(table(columns, rows, right=range(2, 8)), (0, 0, 0, 2)))
    share = report.padding / (report.num_tokens + report.padding)
    line(
        f"padding: {report.padding:,} of {report.num_tokens + report.padding:,} rows ({share:.1%})"
    )
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.eager_reasons.items())
    line(f"eager steps by reason: {reasons or 'none'}")

    one = report.batch1
    heading("One request decoding alone")
    line(
        f"eager {one.eager_us:.0f} µs, dispatched {one.dispatched_us:.0f} µs per step "
        f"({one.mode}): {one.ratio:.2f}x"
    )

    heading("Same results?")
    verdict = "yes" if compared.is_equal else "NO"
    line(
        f"{verdict}: {len(compared.different)} of {compared.steps} steps differ beyond "
        f"{compared.atol:g} + {compared.rtol:g} x |eager|; largest difference {compared.worst:.2g}"
    )
    for each in compared.different[:5]:
        where = f"step {each.step} ({each.num_tokens} tokens, {each.mode})"
        line(f"differs: {where}, by {each.worst:.2g}")
    line(
        f"final caches {'DIFFER' if compared.caches_differ else 'agree'}; largest difference "
        f"{compared.worst_cache:.2g}"
    )

    heading("What the numbers mean here")
    for sentence in report.meaning():
        line(sentence)
    line(f"({report.seconds:.0f} s in all)")
