"""Create the report of one or more simulations from their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dispatchkit.errors import ConfigError, counted

from dispatchkit_plan.report.charts import Band, Bars, Line, Lines
from dispatchkit_plan.report.from_account import MIN_WASTE, MODE_NAMES
from dispatchkit_plan.report.page import Figure, MissingFigure, Report, Table, Tile

__all__ = ["report_of_simulations"]

_NUMBERS = (
    "num_steps",
    "real_tokens",
    "padding_tokens",
    "num_graphs",
    "captures",
    "evictions",
    "time_s",
    "eager_time_s",
)
_OPTIONAL_NUMBERS = ("capture_time_s", "memory_bytes")
_PRINTED = "as printed by `dispatchkit simulate --json` without --ranks"
_REASON_COLORS = ("eager", "padding", "other", "piecewise", "full")


def report_of_simulations(rows: Sequence[Mapping[str, Any]], *, source: str) -> Report:
    """Return the report of one or more simulations of a trace.

    Args:
        rows: Results of ``Simulation.to_json``, one per simulation.
        source: Name of the trace, or of the file with the simulations.

    Raises:
        ConfigError: There are no rows, or a row is not the JSON of a simulation.
    """
    checked = [_checked(row, source) for row in rows]
    if not checked:
        raise ConfigError(
            source,
            [],
            "a list of at least one simulation",
            "Save the output of `dispatchkit simulate TRACE --json`.",
            message=f"{source} contains no simulations.",
        )
    best = min(checked, key=lambda row: row["time_s"])
    first = checked[0]
    speed = best["eager_time_s"] / best["time_s"] if best["time_s"] else 1.0
    notes = []
    for note in dict.fromkeys(note for row in checked for note in row["notes"]):
        of = [row["label"] for row in checked if note in row["notes"]]
        notes.append(note if len(of) == len(checked) else f"{', '.join(of)}: {note}")
    *others, last = [row["label"] for row in checked]
    several = bool(others)
    names = f"{', '.join(others)} and {last}" if several else last
    the_same = "the same " if several else ""
    return Report(
        title=f"Simulation results: {source}",
        summary=(
            f"{names} {'were' if several else 'was'} simulated on {the_same}"
            f"{counted(first['num_steps'], 'step')}, without a device."
            + (f" {best['label']} has the shortest device time." if several else "")
        ),
        facts=(
            ("Scenarios", str(len(checked))),
            ("Cost model", ", ".join(dict.fromkeys(str(row["cost_model"]) for row in checked))),
        ),
        tiles=(
            Tile("Steps", f"{first['num_steps']:,}", "in each scenario" if several else ""),
            Tile(
                "Device time",
                f"{best['time_s']:.3g} s",
                f"{best['label']}, the shortest" if several else best["label"],
            ),
            Tile("Speed vs. eager", f"{speed:.2f}x", f"eager takes {best['eager_time_s']:.3g} s"),
            Tile("Padding", f"{best['waste_pct']:.2f}%", f"of the real tokens ({best['label']})"),
        ),
        figures=(
            _modes(checked),
            _time(checked),
            _waste(checked),
            _reasons(checked),
            MissingFigure(
                "padding",
                "Padding by size",
                "A simulation records only totals. `dispatchkit report TRACE` shows the padding "
                "of each size, and the runtime modes over time.",
            ),
        ),
        tables=(_table(checked),),
        notes=tuple(notes),
    )


def _checked(row: Any, source: str) -> dict[str, Any]:
    """Return a validated row with defaults for missing optional fields."""
    if not isinstance(row, Mapping):
        raise ConfigError(source, row, f"the JSON of a simulation, {_PRINTED}")
    made = dict(row)
    for name in _OPTIONAL_NUMBERS:
        if made.setdefault(name, None) is not None:
            _check_number(made[name], f"{source}: {name}")
    for name in _NUMBERS:
        _check_number(made.get(name), f"{source}: {name}")
    for name in ("modes", "misses"):
        counts = made.get(name)
        if not isinstance(counts, Mapping) or not all(
            isinstance(value, int) and 0 <= value < 10**18 for value in counts.values()
        ):
            raise ConfigError(
                f"{source}: {name}",
                counts,
                f"an object whose values are non-negative integers, {_PRINTED}",
            )
    made["label"] = str(made.get("label") or made.get("policy") or "?")
    made["cost_model"] = str(made.get("cost_model", "?"))
    notes = made.get("notes")
    made["notes"] = [str(note) for note in notes] if isinstance(notes, list) else []
    real = made["real_tokens"]
    made["waste_pct"] = 100.0 * made["padding_tokens"] / real if real else 0.0
    return made


def _check_number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ConfigError(where, value, f"a non-negative number below 1e18, {_PRINTED}")


def _modes(rows: Sequence[Mapping[str, Any]]) -> Figure:
    bands = []
    for row in rows:
        total = row["num_steps"] or 1
        parts = tuple(
            (css, count / total, f"{name} {counted(count, 'step')}")
            for mode, (name, css) in MODE_NAMES.items()
            for count in [row["modes"].get(mode, 0)]
        )
        hit = 1.0 - row["modes"].get("NONE", 0) / total
        bands.append(Band(row["label"], parts, f"{hit:.1%} replayed"))
    return Figure(
        "modes",
        "Runtime modes",
        "Share of the steps in each runtime mode, for each scenario.",
        Bars(
            label="Runtime modes",
            bands=tuple(bands),
            colors=tuple((css, name) for name, css in MODE_NAMES.values()),
        ),
    )


def _time(rows: Sequence[Mapping[str, Any]]) -> Figure:
    bands = [
        Band(
            row["label"],
            (("full", row["time_s"], f"{row['time_s']:.4g} s"),),
            f"{row['time_s']:.3g} s, {row['eager_time_s'] / row['time_s']:.2f}x"
            if row["time_s"]
            else "0 s",
        )
        for row in rows
    ]
    slowest = max(row["eager_time_s"] for row in rows)
    eager = Band("all eager", (("eager", slowest, f"{slowest:.4g} s"),), f"{slowest:.3g} s")
    return Figure(
        "times",
        "Time of the whole trace",
        "Device time of the trace according to the cost model, for each scenario and if all steps "
        "ran eager. The factors are speedups over eager.",
        Bars(label="Time of the whole trace", bands=(*bands, eager)),
    )


def _waste(rows: Sequence[Mapping[str, Any]]) -> Figure:
    def point(row: Mapping[str, Any]) -> tuple[float, float]:
        # Every captured graph that was not evicted is live at the end.
        held = max(0.0, row["captures"] - row["evictions"])
        return held, max(row["waste_pct"], MIN_WASTE)

    return Figure(
        "waste",
        "Padding against number of graphs",
        "Padding as a percentage of the real tokens, against the number of live graphs (captured "
        "and not evicted) at the end of each scenario. All modes and kinds of batches are counted "
        "together.",
        Lines(
            label="Padding against number of graphs",
            lines=tuple(
                Line(
                    row["label"],
                    "eager" if row["label"] == "vllm" else "piecewise",
                    (point(row),),
                    marked=True,
                )
                for row in rows
            ),
            x_label="live graphs at the end",
            y_label="padding",
            unit="%",
        ),
    )


def _reasons(rows: Sequence[Mapping[str, Any]]) -> Figure | MissingFigure:
    names = list(dict.fromkeys(reason for row in rows for reason in row["misses"]))
    if not names:
        return MissingFigure("reasons", "Reasons for eager steps", "No step ran eager.")
    css = {name: _REASON_COLORS[i % len(_REASON_COLORS)] for i, name in enumerate(names)}
    bands = tuple(
        Band(
            row["label"],
            tuple(
                (
                    css[name],
                    float(row["misses"].get(name, 0)),
                    f"{row['misses'].get(name, 0):,} {name}",
                )
                for name in names
            ),
            f"{sum(row['misses'].values()):,} eager",
        )
        for row in rows
    )
    table = Table(
        ("Scenario", *map(str, names)),
        tuple(
            (row["label"], *(f"{row['misses'].get(name, 0):,}" for name in names)) for row in rows
        ),
        tuple(range(1, len(names) + 1)),
    )
    return Figure(
        "reasons",
        "Reasons for eager steps",
        "Number of eager steps by reason. A bar of full width stands for all steps.",
        Bars(
            label="Reasons for eager steps",
            bands=bands,
            whole=float(max(row["num_steps"] for row in rows)),
            colors=tuple((css[name], str(name)) for name in names),
        ),
        table,
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str, Table]:
    def optional(value: Any, form: str) -> str:
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return form.format(value) if known else "-"

    cells = tuple(
        (
            row["label"],
            f"{row['time_s']:.4g}",
            f"{row['eager_time_s'] / row['time_s']:.2f}x" if row["time_s"] else "-",
            f"{row['waste_pct']:.2f}%",
            f"{row['num_graphs']:,}",
            f"{row['captures']:,}",
            f"{row['evictions']:,}",
            optional(row.get("capture_time_s"), "{:.3g}"),
            optional(row.get("memory_bytes"), "{:,}"),
        )
        for row in rows
    )
    columns = (
        "Scenario",
        "Time (s)",
        "Speedup",
        "Padding",
        "Graphs",
        "Captures",
        "Evictions",
        "Capture (s)",
        "Memory (bytes)",
    )
    table = Table(columns, cells, tuple(range(1, len(columns))))
    return "Scenarios", "Totals of each scenario.", table
