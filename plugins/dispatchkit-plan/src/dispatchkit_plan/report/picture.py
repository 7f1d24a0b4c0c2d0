"""Render a figure of a report as an SVG file."""

from __future__ import annotations

from collections.abc import Iterable

from dispatchkit.errors import UnknownNameError

from dispatchkit_plan.report.charts import Chart, text
from dispatchkit_plan.report.page import Figure, Report
from dispatchkit_plan.report.style import DARK, FONT, LIGHT, PLOT

__all__ = ["figure_of", "render_figure"]

_PLOT = (700.0, 340.0)
_MARGIN, _TITLE, _LEGEND = 18.0, 44.0, 24.0
_CHAR = 6.8  # mean width of a character in the legend


def figure_of(report: Report, name: str) -> Figure:
    """Return the named figure of a report.

    Raises:
        UnknownNameError: The report does not have the figure, or lacks the data for it.
    """
    drawn = [one for one in report.figures if isinstance(one, Figure)]
    for figure in drawn:
        if figure.name == name:
            return figure
    why = [one.why for one in report.figures if not isinstance(one, Figure) and one.name == name]
    raise UnknownNameError("figure", name, [one.name for one in drawn], " ".join(why))


def render_figure(figure: Figure) -> str:
    """Return a figure as an SVG document with its title and legend.

    The document has its own background and follows the viewer's light or dark color scheme. It
    loads no other resources.
    """
    legend = list(_legend(figure.chart))
    width, height = _PLOT
    top = _TITLE + (_LEGEND if legend else 0.0)
    plot = figure.chart.draw(width, height).replace(
        "<svg ", f'<svg x="{_MARGIN:g}" y="{top:g}" width="{width:g}" height="{height:g}" ', 1
    )
    whole_width, whole_height = width + 2 * _MARGIN, top + height + _MARGIN / 2
    style = (
        f":root{{{LIGHT}font-family:{FONT}}}@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
        f"{PLOT}.back{{fill:var(--card);stroke:var(--edge)}}"
        "svg .title{font-size:16px;font-weight:600;fill:var(--ink)}"
    )
    size = f'width="{whole_width:g}" height="{whole_height:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole_width:g} {whole_height:g}" ',
        f'{size} role="img" aria-label="{text(figure.title)}">\n',
        f"<style>{text(style.replace(chr(10), ''))}</style>\n",
        f'<rect x=".5" y=".5" width="{whole_width - 1:g}" height="{whole_height - 1:g}" ',
        'rx="10" class="back"/>\n',
        f'<text x="{_MARGIN:g}" y="30" class="title">{text(figure.title)}</text>\n',
        *legend,
        plot,
        "\n</svg>\n",
    ]
    return "".join(parts)


def _legend(chart: Chart) -> Iterable[str]:
    x = _MARGIN
    box = f'y="{_TITLE:g}" width="11" height="11" rx="3"'
    for css, name in chart.legend():
        yield f'<rect x="{x:g}" {box} class="mark {text(css)}"/>\n'
        yield f'<text x="{x + 18:g}" y="{_TITLE + 10:g}">{text(name)}</text>\n'
        x += 18 + len(name) * _CHAR + 20
