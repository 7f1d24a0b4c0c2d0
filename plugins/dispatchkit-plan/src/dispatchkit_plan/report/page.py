"""A report as one HTML file without scripts or network; light and dark, desktop and phone."""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

from dispatchkit_plan.report.charts import Chart, text
from dispatchkit_plan.report.style import PAGE

__all__ = ["Figure", "MissingFigure", "Report", "Table", "Tile", "render"]

_WIDE = (540.0, 320.0)
_NARROW = (330.0, 290.0)
_MAX_CELL = 300
_LONG_CELL = 44
_CODE = re.compile("`([^`<>]+)`")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@attrs.frozen
class Tile:
    """One number that matters.

    Attributes:
        name: What it is.
        value: The number, as text.
        note: What it means, in a few words.
    """

    name: str
    value: str
    note: str = ""


@attrs.frozen
class Table:
    """Numbers as rows.

    Attributes:
        columns: Headers.
        rows: Cells, as text.
        right: Numbers of the columns that hold figures.
        total: Rows there would be, where some are left out.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    total: int | None = None


@attrs.frozen
class Figure:
    """A plot with what to see in it, and its numbers.

    Attributes:
        name: Identifier, of letters and hyphens.
        title: What is shown.
        caption: What to see in it, a sentence or two.
        chart: The plot.
        table: Its numbers.
    """

    name: str
    title: str
    caption: str
    chart: Chart
    table: Table | None = None


@attrs.frozen
class MissingFigure:
    """A plot that cannot be drawn from what is there.

    Attributes:
        name: Identifier, as a Figure's.
        title: What would be shown.
        why: What is missing, and how to get it.
    """

    name: str
    title: str
    why: str


@attrs.frozen(kw_only=True)
class Report:
    """All that a page shows.

    Attributes:
        title: What it is about.
        summary: One or two sentences: what came out.
        facts: (what, value) pairs: what it rests on.
        tiles: The numbers that matter.
        figures: The plots.
        tables: (title, caption, table) below the plots.
        notes: What to know before relying on it.
    """

    title: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    tiles: tuple[Tile, ...]
    figures: tuple[Figure | MissingFigure, ...]
    tables: tuple[tuple[str, str, Table], ...] = ()
    notes: tuple[str, ...] = ()


def render(report: Report, *, version: str) -> str:
    """Return a report as HTML.

    Args:
        report: What to show; all its text is escaped.
        version: Version of dispatchkit, for the foot of the page.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            # Nothing but the page itself is ever loaded or run, whatever the data holds.
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{text(report.title)}</title>",
            f"<style>{PAGE}</style>",
            "</head>",
            "<body>",
            *_body(report),
            f"<footer>Made by dispatchkit {text(version)}; one file, no network.</footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def prose(value: str) -> str:
    """Return a sentence as HTML: escaped, what stands between backticks as code."""
    return _CODE.sub(r"<code>\1</code>", text(value))


def _body(report: Report) -> Iterable[str]:
    yield f"<header><h1>{text(report.title)}</h1>"
    yield f'<p class="summary">{prose(report.summary)}</p><dl>'
    for what, value in report.facts:
        yield f"<div><dt>{text(what)}</dt><dd>{text(value)}</dd></div>"
    yield "</dl></header><main>"
    if report.tiles:
        yield '<section class="tiles" aria-label="Key figures">'
        for tile in report.tiles:
            yield (
                f'<div class="tile"><span class="what">{text(tile.name)}</span>'
                f'<strong>{text(tile.value)}</strong><span class="note">{text(tile.note)}</span>'
                "</div>"
            )
        yield "</section>"
    yield '<section class="figures">'
    # Missing figures come last, one per row.
    for figure in sorted(report.figures, key=lambda one: isinstance(one, MissingFigure)):
        yield from _missing(figure) if isinstance(figure, MissingFigure) else _figure(figure)
    yield "</section>"
    for title, caption, table in report.tables:
        yield f'<section class="card"><h2>{text(title)}</h2><p>{prose(caption)}</p>'
        yield f"{_table(table)}</section>"
    if report.notes:
        yield '<section class="card"><h2>Notes on these numbers</h2><ul>'
        yield from (f"<li>{prose(note)}</li>" for note in report.notes)
        yield "</ul></section>"
    yield "</main>"


def _figure(figure: Figure) -> Iterable[str]:
    yield f'<figure class="card" id="{text(figure.name)}"><h2>{text(figure.title)}</h2>'
    yield f"<figcaption>{prose(figure.caption)}</figcaption>"
    legend = figure.chart.legend()
    if legend:
        yield '<ul class="legend">'
        yield from (
            f'<li><span class="swatch {text(css)}"></span>{text(name)}</li>' for css, name in legend
        )
        yield "</ul>"
    yield f'<div class="plot wide">{figure.chart.draw(*_WIDE)}</div>'
    yield f'<div class="plot narrow">{figure.chart.draw(*_NARROW)}</div>'
    if figure.table is not None:
        yield f"<details><summary>Numbers</summary>{_table(figure.table)}</details>"
    yield "</figure>"


def _missing(figure: MissingFigure) -> Iterable[str]:
    yield (
        f'<section class="card missing" id="{text(figure.name)}"><h2>{text(figure.title)}</h2>'
        f"<p>{prose(figure.why)}</p></section>"
    )


def _table(table: Table) -> str:
    def cell(tag: str, index: int, value: str) -> str:
        css = ' class="right"' if index in table.right else ""
        if len(value) > _MAX_CELL:
            value = value[: _MAX_CELL - 1] + "…"
        if len(value) > _LONG_CELL and not css:
            css = ' class="long"'
        return f"<{tag}{css}>{text(value)}</{tag}>"

    head = "".join(cell("th", index, name) for index, name in enumerate(table.columns))
    rows = "".join(
        "<tr>" + "".join(cell("td", index, value) for index, value in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    left_out = (table.total or 0) - len(table.rows)
    more = f'<p class="note">{left_out:,} more rows are left out.</p>' if left_out > 0 else ""
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}"
    )
