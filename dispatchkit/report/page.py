"""A report as one HTML file: no script, no font, no network; light and dark, desk and phone."""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

from dispatchkit.report.charts import Chart, text

__all__ = ["Figure", "Missing", "Report", "Table", "Tile", "render"]

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
class Missing:
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
    figures: tuple[Figure | Missing, ...]
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
            f"<style>{_STYLE}</style>",
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
    # What cannot be drawn comes last, and takes a line each.
    for figure in sorted(report.figures, key=lambda one: isinstance(one, Missing)):
        yield from _missing(figure) if isinstance(figure, Missing) else _figure(figure)
    yield "</section>"
    for title, caption, table in report.tables:
        yield f'<section class="card"><h2>{text(title)}</h2><p>{prose(caption)}</p>'
        yield f"{_table(table)}</section>"
    if report.notes:
        yield '<section class="card"><h2>What to know about these numbers</h2><ul>'
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


def _missing(figure: Missing) -> Iterable[str]:
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


_LIGHT = """
--page:#f4f5f7;--card:#fff;--ink:#1a1f26;--soft:#56606c;--line:#e2e5ea;--edge:#d8dce2;
--full:#2a66c8;--piecewise:#12937f;--eager:#d9622b;--padding:#e3a72f;--other:#7b61c4;
--track:#eef0f3;--shade:rgba(20,30,45,.16);
"""
_DARK = """
--page:#0e1116;--card:#171b22;--ink:#e7ebf0;--soft:#9aa6b4;--line:#29303a;--edge:#262d37;
--full:#5f96f2;--piecewise:#37bda6;--eager:#f08650;--padding:#d9a53e;--other:#a78bf0;
--track:#20262f;--shade:rgba(0,0,0,.6);
"""
_STYLE = f"""
:root{{{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}}
header,main,footer{{max-width:1200px;margin:0 auto;padding:0 20px}}
header{{padding-top:30px}}
h1{{font-size:26px;line-height:1.25;margin:0 0 6px;font-weight:650;letter-spacing:-.01em;
overflow-wrap:anywhere}}
h2{{font-size:16px;line-height:1.3;margin:0 0 4px;font-weight:620}}
p{{margin:0 0 10px}}
.summary{{font-size:17px;max-width:76ch;color:var(--ink)}}
dl{{display:flex;flex-wrap:wrap;gap:4px 28px;margin:0 0 18px;color:var(--soft);font-size:14px}}
dl div{{display:flex;gap:7px;min-width:0}}
dt{{flex:none}}dt::after{{content:":"}}
dd{{margin:0;color:var(--ink);overflow-wrap:anywhere}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:14px;
margin-bottom:16px}}
.tile,.card{{background:var(--card);border:1px solid var(--edge);border-radius:10px}}
.tile{{padding:12px 16px 13px;display:flex;flex-direction:column;min-width:0}}
.tile .what{{color:var(--soft);font-size:13px}}
.tile strong{{font-size:25px;line-height:1.25;font-weight:640;font-variant-numeric:tabular-nums}}
.tile .note,.note{{color:var(--soft);font-size:13px;margin:0}}
.figures{{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px;align-items:start}}
.card{{margin:0;padding:16px 18px;min-width:0}}
main>.card{{margin-top:16px}}
.figures>.card{{height:100%}}
.figures>.missing{{grid-column:1/-1;height:auto}}
figcaption,.card>p{{color:var(--soft);font-size:14px;margin-bottom:10px}}
.missing{{border-style:dashed;background:none}}
.legend{{list-style:none;display:flex;flex-wrap:wrap;gap:3px 18px;margin:0 0 8px;padding:0;
font-size:13px;color:var(--soft)}}
.legend li{{display:flex;align-items:center;gap:7px}}
.swatch{{width:11px;height:11px;border-radius:3px;background:currentColor;flex:none}}
.swatch.full{{color:var(--full)}}.swatch.piecewise{{color:var(--piecewise)}}
.swatch.eager{{color:var(--eager)}}.swatch.padding{{color:var(--padding)}}
.swatch.other{{color:var(--other)}}
.plot svg{{display:block;width:100%;height:auto;overflow:visible}}
.plot.narrow{{display:none}}
svg text{{font-family:inherit;font-size:12px;fill:var(--soft)}}
svg .name{{fill:var(--ink)}}
.mark{{shape-rendering:auto}}rect.mark{{shape-rendering:crispEdges}}
.grid{{stroke:var(--line)}}.base{{stroke:var(--soft)}}.stroke{{stroke:var(--edge);stroke-width:2}}
.leader{{stroke:var(--soft);stroke-width:.8}}
.track{{fill:var(--track)}}
.mark.full{{fill:var(--full)}}.mark.piecewise{{fill:var(--piecewise)}}
.mark.eager{{fill:var(--eager)}}.mark.padding{{fill:var(--padding)}}.mark.other{{fill:var(--other)}}
.mark.line{{fill:none;stroke-width:2.5;stroke-linejoin:round}}
.mark.line.full{{stroke:var(--full)}}.mark.line.other{{stroke:var(--other)}}
.mark.dot{{stroke:var(--card);stroke-width:2}}
details{{margin-top:10px;font-size:13px}}
summary{{cursor:pointer;color:var(--soft);width:max-content}}
code{{font:.92em ui-monospace,Menlo,Consolas,monospace;color:var(--ink)}}
.scroll{{overflow-x:auto;max-height:420px;overflow-y:auto;margin-top:8px;
background:linear-gradient(to right,var(--card) 40%,transparent) left/36px 100% no-repeat local,
linear-gradient(to left,var(--card) 40%,transparent) right/36px 100% no-repeat local,
linear-gradient(to top,var(--card) 40%,transparent) bottom/100% 36px no-repeat local,
linear-gradient(to right,var(--shade),transparent) left/14px 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) right/14px 100% no-repeat scroll,
linear-gradient(to top,var(--shade),transparent) bottom/100% 14px no-repeat scroll}}
table{{border-collapse:collapse;font-size:13px;width:100%;font-variant-numeric:tabular-nums}}
th{{text-align:left;font-weight:600;color:var(--soft);position:sticky;top:0;
background:var(--card);white-space:nowrap}}
th,td{{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}}
td{{white-space:nowrap}}td.long{{white-space:normal;min-width:17em;overflow-wrap:anywhere}}
.right{{text-align:right;white-space:nowrap}}
main ul{{margin:0}}
main .card>ul:not(.legend){{padding-left:20px;color:var(--soft);font-size:14px}}
footer{{color:var(--soft);font-size:13px;padding:20px}}
@media (max-width:1000px){{.figures{{grid-template-columns:minmax(0,1fr)}}
.plot svg{{max-width:680px}}}}
@media (max-width:560px){{header,main,footer{{padding-left:12px;padding-right:12px}}
header{{padding-top:18px}}h1{{font-size:21px}}.summary{{font-size:16px}}
.card{{padding:14px 12px}}.tiles{{grid-template-columns:repeat(2,minmax(0,1fr));gap:10px}}
.figures{{gap:12px}}.tile{{padding:10px 12px}}.tile strong{{font-size:21px}}
.plot.wide{{display:none}}.plot.narrow{{display:block}}}}
@media print{{body{{background:#fff}}.card,.tile{{break-inside:avoid}}}}
""".replace("\n", "")
