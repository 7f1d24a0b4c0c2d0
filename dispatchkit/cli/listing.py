"""``policies`` and ``plugins``: list the installed policies and plugins."""

from __future__ import annotations

from typing import Any

import typer

from dispatchkit.cli.options import load_installed_plugins
from dispatchkit.cli.output import (
    JsonOption,
    console,
    print_json,
    print_stderr,
    report_skipped_plugins,
    table,
)
from dispatchkit.distributions import DEFAULT_POLICY, distribution_of
from dispatchkit.plugins import PluginState


def policies(as_json: JsonOption = False) -> None:
    """List the installed policies."""
    plugins = load_installed_plugins()
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "distribution": registered.origin.distribution,
            "version": registered.origin.version,
            "origin": str(registered.origin),
            "summary": registered.summary,
        }
        for name, registered in sorted(plugins.policies.items())
    ]
    report_skipped_plugins(plugins)
    if as_json:
        print_json(rows)
    elif rows:
        cells = [[row["name"], row["distribution"], row["version"], row["summary"]] for row in rows]
        console().print(table(["Policy", "Distribution", "Version", "Summary"], cells))
    if not rows:
        if any(info.state is not PluginState.LOADED for info in plugins.describe()):
            print_stderr(
                "No policy is loaded. Next: run `dispatchkit plugins` to list the skipped plugins."
            )
        else:
            default = distribution_of("policy", DEFAULT_POLICY)
            print_stderr(
                f"No policy is installed. Next: pip install {default}, which provides the default "
                "policy."
            )
        raise typer.Exit(1)


def plugins(as_json: JsonOption = False) -> None:
    """List all plugins, and show the names that each provides or why it was skipped.

    Exit code 1 if a plugin could not be loaded.
    """
    loaded = load_installed_plugins()
    infos = loaded.describe()
    if as_json:
        print_json([info.as_dict() for info in infos])
    else:
        out = console()
        out.print(
            table(
                ["Plugin", "Version", "State", "Provides"],
                [
                    [info.name, info.version, info.state, ", ".join(info.registers) or None]
                    for info in infos
                ],
            )
        )
        for info in infos:
            if info.reason:
                out.print(f"\n{info.name} ({info.origin}), {info.state}:\n  {info.reason}")
    if loaded.problems:
        raise typer.Exit(1)
