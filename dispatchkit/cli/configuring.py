"""``config show``: show every setting with its value and source."""

from __future__ import annotations

import typer
from rich.text import Text

from dispatchkit.cli.options import (
    AxesOption,
    BackendOption,
    CostModelOption,
    MaxLorasOption,
    MaxNumSeqsOption,
    MaxNumTokensOption,
    ModeOption,
    PolicyOption,
    QueryLensOption,
    SizesOption,
    settings_of,
)
from dispatchkit.cli.output import JsonOption, console, print_json, table
from dispatchkit.settings import Settings, shown

config: typer.Typer = typer.Typer(help="Show settings and their sources.", no_args_is_help=False)


@config.command("show")
def show_config(
    policy: PolicyOption = None,
    sizes: SizesOption = None,
    mode: ModeOption = None,
    max_num_tokens: MaxNumTokensOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    query_lens: QueryLensOption = None,
    max_loras: MaxLorasOption = None,
    axes: AxesOption = None,
    device: BackendOption = None,
    cost_model: CostModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every setting with its value and source.

    Settings come from the table tool.dispatchkit of the nearest pyproject.toml,
    the environment (DISPATCHKIT_POLICY, ...) and the command line. Each of these
    sources overrides the sources before it.

    Example: dispatchkit --set lazy=true config show --policy vllm
    """
    settings = settings_of(
        {
            "policy": policy,
            "sizes": sizes,
            "mode": mode,
            "max_num_tokens": max_num_tokens,
            "max_num_seqs": max_num_seqs,
            "query_lens": query_lens,
            "max_loras": max_loras,
            "axes": axes,
            "backend": device,
            "cost_model": cost_model,
        }
    )
    settings.dispatch_config()  # raises if two settings contradict each other
    if as_json:
        file = None if settings.file is None else str(settings.file)
        print_json({"file": file, "settings": settings.rows()})
        return
    out = console()
    out.print(Text(f"File: {settings.file or 'no pyproject.toml with [tool.dispatchkit]'}\n"))
    rows = []
    for row in settings.rows():
        value = row["derived"] if row["value"] is None else shown(row["value"])
        rows.append([row["setting"], value, _short(row["source"], settings)])
        rows += [
            ["", f"overrides {shown(each['value'])}", _short(each["source"], settings)]
            for each in row["overrides"]
        ]
    out.print(table(["Setting", "Value", "From"], rows))


def _short(source: str, settings: Settings) -> str:
    """Return a source without the path of the settings file, which the command prints above."""
    return source.replace(f"{settings.file} ", "") if settings.file is not None else source
