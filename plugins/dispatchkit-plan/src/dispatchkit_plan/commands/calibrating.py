"""The command ``calibrate``: measure a step on this device and write a cost model file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text

from dispatchkit.cli import (
    FORCE_HINT,
    ForceOption,
    JsonOption,
    console,
    print_json,
    progress,
    settings_of,
    table,
)
from dispatchkit.errors import BackendUnavailableError
from dispatchkit.files import check_output

if TYPE_CHECKING:
    from dispatchkit_plan.calibration.calibrate import Pace


def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Cost model file to write.")
    ] = Path("costs.json"),
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODULE:FUNCTION",
            help="Function that returns a GraphRunner; by default, the decoder of the demo.",
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes", metavar="A,B,...", help="Sizes to measure; by default, the runner's sizes."
        ),
    ] = None,
    pace: Annotated[
        str,
        typer.Option(
            "--pace",
            metavar="PACE",
            help="When to launch a step. queued: at once; waited: after the previous step ends.",
        ),
    ] = "queued",
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Number of samples per size and mode.")
    ] = 7,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="TEXT",
            help="Name of the cost model; by default, the names of the step and the device.",
        ),
    ] = "",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a step eager and replayed at each size, and write a cost model.

    Pass the file to `plan`, `simulate`, `explain` and `report` with --cost-model.

    Example: dispatchkit calibrate --model my_module:make_runner -o costs.json
    """
    from dispatchkit_plan import save_cost_model

    settings = settings_of({"sizes": sizes})
    chosen = settings["sizes"]
    check_output(output, inputs=[settings.file], overwrite=force, hint=FORCE_HINT)
    try:
        from dispatchkit_plan.calibration.calibrate import DEFAULT_MODEL, load_runner
        from dispatchkit_plan.calibration.calibrate import calibrate as measure
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "numpy"):
            raise
        raise BackendUnavailableError(
            f"Calibration runs a model, but {error.name} is not installed. Run: pip install "
            "'dispatchkit[torch]'."
        ) from error
    runner = load_runner(DEFAULT_MODEL if model is None else model, folder=Path.cwd())
    with progress() as report_progress:
        made = measure(
            runner,
            sizes=chosen,
            pace=cast("Pace", pace),  # calibrate validates it
            samples=samples,
            name=name,
            progress=lambda done, total: report_progress("measuring", done, total),
        )
    save_cost_model(made, output)
    if as_json:
        print_json({"output": str(output), **made.to_json()})
        return
    out = console()
    out.print(Text(made.name, style="bold"))
    rows = [
        [size, f"{made.eager_us(size):,.0f}", f"{us:,.0f}", f"{made.eager_us(size) / us:.2f}x"]
        for size, us in made.graph_us.points
        if us
    ]
    out.print(table(["Tokens", "Eager µs", "Graph µs", "Speedup"], rows, right=[0, 1, 2, 3]))
    out.print(Text(made.source))
    out.print(Text(f"Written to {output}."))
