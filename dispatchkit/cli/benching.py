"""``bench``: run the benchmark scripts of a checkout."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from dispatchkit.cli.output import JsonOption, console, print_json, print_stderr, progress, table
from dispatchkit.errors import BackendUnavailableError, UnknownNameError


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Benchmarks to run; all by default.", show_default=False
        ),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", metavar="", help="List the benchmarks without running them.")
    ] = False,
    checkout: Annotated[
        Path | None,
        typer.Option(
            "--checkout",
            metavar="FOLDER",
            help="Root folder of the checkout, which contains bench/; by default, the checkout "
            "that dispatchkit is imported from.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the benchmarks of a checkout of dispatchkit, each in a separate process.

    Each benchmark prints its results as lines of JSON; --json collects them in one document.
    Exit code 1 if a benchmark fails.

    Example: dispatchkit bench decision
    """
    scripts = find_scripts(checkout)
    for name in names or ():
        if name not in scripts:
            raise UnknownNameError("benchmark", name, scripts)
    chosen = list(dict.fromkeys(names or scripts))
    if list_only:
        _list({name: scripts[name] for name in chosen}, as_json)
        return
    results: list[dict[str, Any]] = []
    failed = []
    with progress() as show_progress:
        for index, name in enumerate(chosen):
            show_progress("benchmarks", index, len(chosen))
            done = subprocess.run(
                [sys.executable, str(scripts[name])],
                stdout=subprocess.PIPE,
                encoding="utf-8",
                check=False,
            )
            lines = [_parsed(line) for line in done.stdout.splitlines() if line.strip()]
            results += [{"benchmark": name, **line} for line in lines]
            if not as_json:
                console().print(Text(f"\n{name}", style="bold"))
                print(done.stdout, end="")
            if done.returncode:
                failed.append(name)
                cause = (
                    f"failed with exit code {done.returncode}"
                    if done.returncode > 0
                    else f"was stopped by signal {-done.returncode}"
                )
                where = "" if checkout is None else f" --checkout {shlex.quote(str(checkout))}"
                print_stderr(
                    f"Benchmark {name!r} {cause}. Next: correct its error, then run "
                    f"`dispatchkit bench {name}{where}`."
                )
    if as_json:
        print_json({"ok": not failed, "failed": failed, "results": results})
    if failed:
        raise typer.Exit(1)


def find_scripts(checkout: Path | None) -> dict[str, Path]:
    """Return the benchmark scripts of a checkout, by name.

    Raises:
        BackendUnavailableError: The checkout has no benchmarks, or there is no checkout.
    """
    root = checkout or Path(__file__).resolve().parents[2]
    folder = root / "bench"
    found: list[Path] = []
    # In site-packages, the folder bench may belong to another package.
    if checkout is not None or (root / "pyproject.toml").is_file():
        found = sorted(folder.glob("*.py"))
    scripts = {path.stem: path for path in found if not path.stem.startswith("_")}
    if not scripts:
        if checkout is not None:
            raise BackendUnavailableError(
                f"{folder} contains no benchmarks. Next: pass the root folder of a clone of the "
                "repository to --checkout."
            )
        raise BackendUnavailableError(
            f"{folder} contains no benchmarks; installed packages do not include them. "
            "Next: clone the repository, then run `dispatchkit bench --checkout FOLDER`."
        )
    return scripts


def _list(scripts: dict[str, Path], as_json: bool) -> None:
    rows = {name: _summary(path) for name, path in scripts.items()}
    if as_json:
        print_json([{"benchmark": name, "summary": text} for name, text in rows.items()])
    else:
        console().print(table(["Benchmark", "Summary"], list(rows.items())))


def _summary(path: Path) -> str:
    """Return the first line of a script's docstring, without running the script."""
    import ast

    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _parsed(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {"text": line}
    return value if isinstance(value, dict) else {"value": value}
