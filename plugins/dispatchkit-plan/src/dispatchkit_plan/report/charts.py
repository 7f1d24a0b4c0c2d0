"""Draw plots as SVG text, without scripts or other files.

Each plot is drawn for a given width and height in CSS pixels. A page contains every plot twice, for
wide and narrow screens, so that text is readable on both. Colors are CSS classes, which the page
defines for light and dark color schemes. All text from data is escaped here.
"""

from __future__ import annotations

import functools
import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence

import attrs

__all__ = [
    "Band",
    "Bars",
    "Chart",
    "Line",
    "Lines",
    "Pairs",
    "Series",
    "Shares",
    "StackedBars",
    "text",
]

_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 14.0, 12.0, 44.0
_CHAR = 6.6  # mean width of a character at 12 px
_LABEL_HEIGHT = 14.0
# Maximum distance of a label from its point without a leader line.
_NEAR = 12.0
# Maximum number of points whose labels are placed in every possible order: 120 orders for 5 points.
_MAX_ORDERED = 5
# Distance below which two points share one block of labels.
_ONE_PLACE = 4.0
# Characters that HTML and XML do not allow in text, including lone surrogates.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def text(value: object) -> str:
    """Return a value as text, escaped for use in HTML elements and attributes."""
    return html.escape(_UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


@attrs.frozen
class Series:
    """Values of a plot that share a color.

    Attributes:
        name: Name in the legend.
        css: CSS class of the color: ``full``, ``piecewise``, ``eager``, ``padding`` or ``other``.
        values: Value of each category.
    """

    name: str
    css: str
    values: tuple[float, ...]


@attrs.frozen
class Line:
    """A line, or labeled points.

    Attributes:
        name: Name in the legend, or label of the points.
        css: CSS class of the color.
        points: (x, y) pairs, sorted by x.
        marked: Whether to draw labeled points instead of a line.
    """

    name: str
    css: str
    points: tuple[tuple[float, float], ...]
    marked: bool = False


class Chart:
    """A plot with a legend."""

    label: str

    def draw(self, width: float, height: float) -> str:
        """Return the plot as an ``<svg>`` element of the given size in CSS pixels."""
        raise NotImplementedError

    def legend(self) -> Sequence[tuple[str, str]]:
        """Return the (CSS class, name) pairs of the legend."""
        return ()


# -- scales -------------------------------------------------------------------------------


def _ticks(top: float, count: int) -> list[float]:
    """Return round numbers from 0 to at least ``top``."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors: tuple[float, ...] = (1, 2, 5) if len(decades) < 4 else (1,)
    if high < 10 * low:
        factors = (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [10.0**decade * factor for decade in decades for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def number(value: float) -> str:
    """Format a number in a few characters, such as 1,234, 12k or 0.05."""
    if abs(value) >= 1e9:
        return f"{value / 1e9:.3g}G"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.3g}"


# -- the frame of a plot ------------------------------------------------------------------


@attrs.define
class _Frame:
    """The axes of a plot and the SVG elements drawn so far."""

    width: float
    height: float
    left: float = _LEFT
    parts: list[str] = attrs.field(factory=list)

    @property
    def inner_width(self) -> float:
        return self.width - self.left - _RIGHT

    @property
    def bottom(self) -> float:
        return self.height - _BOTTOM

    @property
    def inner_height(self) -> float:
        return self.bottom - _TOP

    def add_text(
        self, x: float, y: float, what: str, css: str = "tick", anchor: str = "middle"
    ) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}"'
        self.parts.append(f'<text {place} class="{css}" text-anchor="{anchor}">{text(what)}</text>')

    def y_axis(self, ticks: Iterable[tuple[float, str]], label: str) -> None:
        for y, what in ticks:
            self.parts.append(
                f'<line x1="{self.left:.1f}" x2="{self.width - _RIGHT:.1f}" y1="{y:.1f}" '
                f'y2="{y:.1f}" class="grid"/>'
            )
            self.add_text(self.left - 7, y + 4, what, anchor="end")
        middle = _TOP + self.inner_height / 2
        self.parts.append(
            f'<text transform="translate(10 {middle:.1f}) rotate(-90)" class="axis" '
            f'text-anchor="middle">{text(label)}</text>'
        )

    def x_axis(self, ticks: Sequence[tuple[float, str]], label: str) -> None:
        """Draw the x axis with as many ticks as fit without overlap, always including the last."""
        chosen: list[tuple[float, str]] = []
        free = math.inf
        for x, what in reversed(ticks):
            half = len(what) * _CHAR / 2 + 3
            if x + half <= free:
                chosen.append((x, what))
                free = x - half
        for x, what in chosen:
            self.parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.bottom:.1f}" '
                f'y2="{self.bottom + 4:.1f}" class="base"/>'
            )
            half = len(what) * _CHAR / 2
            self.add_text(min(x, self.width - half - 1), self.bottom + 17, what)
        self.parts.append(
            f'<line x1="{self.left:.1f}" x2="{self.width - _RIGHT:.1f}" y1="{self.bottom:.1f}" '
            f'y2="{self.bottom:.1f}" class="base"/>'
        )
        self.add_text(self.left + self.inner_width / 2, self.height - 7, label, "axis")

    def leader_line(self, x: float, y: float, end: float) -> None:
        """Draw a leader line from a point to its label."""
        self.parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{end:.1f}" class="leader"/>'
        )

    def bar(self, x: float, y: float, w: float, h: float, css: str, what: str) -> None:
        if h > 0 and w > 0:
            self.parts.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" '
                f'class="mark {css}"><title>{text(what)}</title></rect>'
            )

    def svg(self, label: str) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'aria-label="{text(label)}">{"".join(self.parts)}</svg>'
        )


# -- the plots ----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class StackedBars(Chart):
    """A vertical bar of stacked values for each category.

    Attributes:
        label: Description of the plot for screen readers.
        categories: Names below the bars.
        series: Parts of each bar, from the bottom up.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        unit: Unit of the values in tooltips.
    """

    label: str
    categories: tuple[str, ...]
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    unit: str

    def legend(self) -> Sequence[tuple[str, str]]:
        """Return the (CSS class, name) pairs of the legend."""
        return [(one.css, one.name) for one in self.series]

    def draw(self, width: float, height: float) -> str:
        """Return the plot as SVG."""
        frame = _Frame(width, height)
        sums = [sum(values) for values in zip(*(s.values for s in self.series), strict=True)]
        ticks = _ticks(max(sums, default=0), 5)
        scale = frame.inner_height / ticks[-1]
        frame.y_axis(((frame.bottom - t * scale, number(t)) for t in ticks), self.y_label)
        pitch = frame.inner_width / max(1, len(self.categories))
        bar = max(1.0, min(pitch * 0.78, 42.0))
        for index, category in enumerate(self.categories):
            x = frame.left + (index + 0.5) * pitch - bar / 2
            y = frame.bottom
            whole = ", ".join(f"{s.name} {s.values[index]:,.4g}" for s in self.series)
            for one in self.series:
                h = one.values[index] * scale
                y -= h
                frame.bar(x, y, bar, h, one.css, f"{self.x_label} {category}: {whole} {self.unit}")
        places = [
            (frame.left + (index + 0.5) * pitch, category)
            for index, category in enumerate(self.categories)
        ]
        frame.x_axis(places, self.x_label)
        return frame.svg(self.label)


@attrs.frozen(kw_only=True)
class Shares(Chart):
    """Shares of the steps over time, as adjacent bars of full height.

    Attributes:
        label: Description of the plot for screen readers.
        ends: Number of the last step of each bar.
        series: Parts of the bars, with one count per bar.
        x_label: Label of the x axis.
    """

    label: str
    ends: tuple[int, ...]
    series: tuple[Series, ...]
    x_label: str = "step"

    def legend(self) -> Sequence[tuple[str, str]]:
        """Return the (CSS class, name) pairs of the legend."""
        return [(one.css, one.name) for one in self.series]

    def draw(self, width: float, height: float) -> str:
        """Return the plot as SVG."""
        frame = _Frame(width, height)
        marks = [(frame.bottom - frame.inner_height * n / 4, f"{25 * n}%") for n in range(5)]
        frame.y_axis(marks, "share of steps")
        last = max(self.ends[-1] if self.ends else 1, 1)
        start = 0
        for index, end in enumerate(self.ends):
            x = frame.left + frame.inner_width * start / last
            w = frame.inner_width * (end - start) / last
            total = sum(one.values[index] for one in self.series)
            y = frame.bottom
            for one in self.series:
                share = one.values[index] / total if total else 0.0
                h = frame.inner_height * share
                y -= h
                what = f"steps {start + 1:,} to {end:,}: {one.name} {share:.1%}"
                # Bars overlap slightly, so that no gap is visible between them.
                frame.bar(x, y, w + (0.3 if index + 1 < len(self.ends) else 0), h, one.css, what)
            start = end
        ticks = [
            (frame.left + frame.inner_width * t / last, number(t))
            for t in _ticks(last, 6)
            if t <= last
        ]
        frame.x_axis(ticks, self.x_label)
        return frame.svg(self.label)


@attrs.frozen(kw_only=True)
class Lines(Chart):
    """Lines and labeled points, on a linear x axis and a logarithmic y axis.

    Attributes:
        label: Description of the plot for screen readers.
        lines: Lines and labeled points to draw.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        unit: Unit of the y values.
    """

    label: str
    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    unit: str

    def legend(self) -> Sequence[tuple[str, str]]:
        """Return the (CSS class, name) pairs of the legend."""
        # Marked points have labels in the plot.
        return [(line.css, line.name) for line in self.lines if not line.marked]

    def draw(self, width: float, height: float) -> str:
        """Return the plot as SVG."""
        frame = _Frame(width, height)
        points = [point for line in self.lines for point in line.points]
        ys = [y for _, y in points if y > 0] or [1.0]
        low, high = min(ys), max(ys)
        low, high = low / 1.3, max(high * 1.3, low * 4)
        right = _ticks(max((x for x, _ in points), default=1), 6)[-1]

        def at(x: float, y: float) -> tuple[float, float]:
            share = (math.log(max(y, low)) - math.log(low)) / (math.log(high) - math.log(low))
            return frame.left + frame.inner_width * x / right, frame.bottom - (
                frame.inner_height * share
            )

        ticks = [(at(0, t)[1], f"{number(t)}{self.unit}") for t in _log_ticks(low, high)]
        frame.y_axis(ticks, self.y_label)
        for line in self.lines:
            if not line.marked:
                path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line.points)
                frame.parts.append(f'<polyline points="{path}" class="mark line {line.css}"/>')
        groups: list[tuple[float, float, list[str]]] = []
        for line in self.lines:
            for x, y in line.points if line.marked else ():
                cx, cy = at(x, y)
                # If two points coincide, the larger one stays visible around the smaller one.
                value = f"{self.y_label} {y:.2f}{self.unit}"
                radius = 7.5 if line.css == "eager" else 5
                frame.parts.append(
                    f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{radius}" class="mark dot {line.css}">'
                    f"<title>{text(f'{line.name}: {value}, {self.x_label} {x:g}')}</title></circle>"
                )
                what = f"{line.name}: {y:.3g}{self.unit}"
                for gx, gy, names in groups:
                    if math.hypot(gx - cx, gy - cy) < _ONE_PLACE:
                        names.append(what)
                        break
                else:
                    groups.append((cx, cy, [what]))
        drawn: list[_Box] = []
        for line in self.lines:
            if not line.marked:
                drawn += _boxes_along([at(x, y) for x, y in line.points])
        _label_points(frame, groups, drawn)
        places = [(at(t, low)[0], number(t)) for t in _ticks(right, 6)]
        frame.x_axis(places, self.x_label)
        return frame.svg(self.label)


def _boxes_along(corners: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float, float]]:
    """Yield boxes that cover a line, so that labels can avoid the line."""
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        count = int(max(abs(x1 - x0), abs(y1 - y0)) / 6) + 1
        for step in range(count):
            x, y = x0 + (x1 - x0) * step / count, y0 + (y1 - y0) * step / count
            yield x - 4, x + 4, y + 4


_Box = tuple[float, float, float]
"""(left, right, baseline) of a label, or of an area that labels should not cover."""
_Group = tuple[float, float, list[str]]
"""(x, y, labels) of a point; its labels are stacked."""


def _label_points(frame: _Frame, groups: Sequence[_Group], drawn: Sequence[_Box]) -> None:
    """Draw labels next to points, with as few overlaps as possible."""
    dots = [(x - 7, x + 7, y + 4) for x, y, _ in groups]
    # Labels placed first get the best positions, so try all orders unless there are too many.
    orders = itertools.permutations(groups) if len(groups) <= _MAX_ORDERED else iter([groups])
    lowest, parts = math.inf, list[Callable[[], None]]()
    for order in orders:
        names = _LabelLayout(frame, list(drawn), list(dots))
        cost = 0
        for group in order:
            cost += names.place(*group)
            if cost >= lowest:
                break
        else:
            lowest, parts = cost, names.parts
    for what in parts:
        what()


class _LabelLayout:
    """A layout of labels next to points.

    Args:
        frame: Frame to draw on.
        drawn: Boxes of lines; labels cover them only if necessary.
        solid: Boxes of points; covering one costs more than covering a line.

    Attributes:
        parts: Functions that draw the labels and their leader lines.
    """

    def __init__(self, frame: _Frame, drawn: list[_Box], solid: list[_Box]) -> None:
        self._frame, self._drawn, self._solid = frame, drawn, solid
        self._names: list[_Box] = []
        self.parts: list[Callable[[], None]] = []

    def place(self, x: float, y: float, lines: Sequence[str]) -> int:
        """Place the labels of a point where their cost is lowest, and return the cost."""
        frame = self._frame
        width = max(map(len, lines)) * _CHAR
        below_first = (len(lines) - 1) * _LABEL_HEIGHT
        edge = frame.width - 2
        level = y + 4 - below_first / 2
        beside = [(x + 11, level)] if x + 11 + width < edge else []
        if x - 11 - width > frame.left:
            beside.append((x - 11 - width, level))
        middle = min(max(x - width / 2, frame.left + 4), edge - width)
        above_or_below = [
            (left, top)
            for distance in range(0, 90, 15)
            for top in (y - 13 - below_first - distance, y + 23 + distance)
            for left in (middle, max(x - width, frame.left + 4), min(x, edge - width))
        ]
        places = [*beside, *above_or_below]
        inside = [
            place
            for place in places
            if _TOP + 6 < place[1] and place[1] + below_first < frame.bottom - 3
        ]
        costs: dict[tuple[float, float], int] = {}
        for place in inside or places:
            has_stroke = place not in beside
            costs[place] = self._cost(x, y, place, width, below_first, has_stroke=has_stroke)
            if costs[place] == 0:
                break
        chosen = min(costs, key=lambda place: costs[place])  # the first place with the lowest cost
        left, top = chosen
        tops = [top + at * _LABEL_HEIGHT for at in range(len(lines))]
        self._names += [(left, left + width, line) for line in tops]
        end = _stroke_end(y, top, below_first)
        if chosen not in beside and abs(end - y) > _NEAR:
            self.parts.append(functools.partial(frame.leader_line, x, y, end))
            self._solid += _boxes_along([(x, y), (x, end)])
        self.parts += [
            functools.partial(frame.add_text, left, line, what, "name", "start")
            for what, line in zip(lines, tops, strict=True)
        ]
        return costs[chosen]

    def _cost(
        self,
        x: float,
        y: float,
        place: tuple[float, float],
        width: float,
        below_first: float,
        *,
        has_stroke: bool,
    ) -> int:
        """Return the cost of placing labels: overlaps, and the length of the leader line."""
        left, top = place
        tops = [top + at * _LABEL_HEIGHT for at in range(round(below_first / _LABEL_HEIGHT) + 1)]

        right, above, below = left + width, tops[0] - _LABEL_HEIGHT, tops[-1] + _LABEL_HEIGHT

        def covered(places: Sequence[_Box]) -> int:
            return sum(
                abs(line - other) < _LABEL_HEIGHT
                for begin, end, other in places
                if above < other < below and begin <= right and left <= end
                for line in tops
            )

        cost = 3 * covered(self._drawn) + 100 * covered([*self._solid, *self._names])
        if has_stroke:
            low, high = sorted((y, _stroke_end(y, top, below_first)))
            cost += 100 * sum(
                begin <= x <= end and low < other + 3 and other - 11 < high
                for begin, end, other in self._names
            )
            cost += round((high - low) / _LABEL_HEIGHT)
        return cost


def _stroke_end(y: float, top: float, below_first: float) -> float:
    """Return the y coordinate at which a leader line meets the labels."""
    return top + below_first + 3 if top < y else top - 11


@attrs.frozen(kw_only=True)
class Pairs(Chart):
    """Values of each category as dots on a vertical stroke, with a logarithmic y axis.

    Attributes:
        label: Description of the plot for screen readers.
        categories: Names below the x axis.
        series: Values of the dots of each color; 0 means unknown, and is not drawn.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        unit: Unit of the values.
    """

    label: str
    categories: tuple[str, ...]
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    unit: str

    def legend(self) -> Sequence[tuple[str, str]]:
        """Return the (CSS class, name) pairs of the legend."""
        return [(one.css, one.name) for one in self.series]

    def draw(self, width: float, height: float) -> str:
        """Return the plot as SVG."""
        frame = _Frame(width, height)
        known = [value for one in self.series for value in one.values if value > 0] or [1.0]
        low, high = min(known) / 1.15, max(known) * 1.15
        if high < 2 * low:
            low, high = low / 1.5, high * 1.5

        def at(value: float) -> float:
            share = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
            return frame.bottom - frame.inner_height * share

        frame.y_axis(((at(t), number(t)) for t in _log_ticks(low, high)), self.y_label)
        pitch = frame.inner_width / max(1, len(self.categories))
        radius = max(1.6, min(4.5, pitch * 0.42))
        for index, category in enumerate(self.categories):
            x = frame.left + (index + 0.5) * pitch
            here = [(one, one.values[index]) for one in self.series if one.values[index] > 0]
            if len(here) > 1:
                ends = [at(value) for _, value in here]
                frame.parts.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{min(ends):.1f}" y2="{max(ends):.1f}" '
                    'class="stroke"/>'
                )
            whole = ", ".join(f"{one.name} {value:,.4g} {self.unit}" for one, value in here)
            for one, value in here:
                frame.parts.append(
                    f'<circle cx="{x:.1f}" cy="{at(value):.1f}" r="{radius:.1f}" '
                    f'class="mark {one.css}">'
                    f"<title>{text(f'{self.x_label} {category}: {whole}')}</title></circle>"
                )
        places = [
            (frame.left + (index + 0.5) * pitch, category)
            for index, category in enumerate(self.categories)
        ]
        frame.x_axis(places, self.x_label)
        return frame.svg(self.label)


@attrs.frozen
class Band:
    """A row of ``Bars``.

    Attributes:
        name: Name above the bar.
        parts: (CSS class, value, tooltip) of each part, from left to right.
        note: Text above the right end of the bar.
    """

    name: str
    parts: tuple[tuple[str, float, str], ...]
    note: str


@attrs.frozen(kw_only=True)
class Bars(Chart):
    """Rows of horizontal bars, each with its name above it.

    Attributes:
        label: Description of the plot for screen readers.
        bands: Rows, from top to bottom.
        colors: (CSS class, name) pairs of the legend.
        whole: Value of a bar of full width. If the longest bar has a greater value, it has full
            width instead.
    """

    label: str
    bands: tuple[Band, ...]
    colors: tuple[tuple[str, str], ...] = ()
    whole: float = 0.0

    def legend(self) -> Sequence[tuple[str, str]]:
        """Return the (CSS class, name) pairs of the legend."""
        return self.colors

    def draw(self, width: float, height: float) -> str:
        """Return the plot as SVG; its height depends on the number of rows."""
        row = 42.0
        frame = _Frame(width, max(row * len(self.bands) + 8, 50.0), left=2.0)
        longest = max((sum(value for _, value, _ in band.parts) for band in self.bands), default=0)
        top = max(longest, self.whole)
        scale = (width - 4) / top if top else 0.0
        most = int((width - 8) / _CHAR)
        for index, band in enumerate(self.bands):
            y = index * row + 16
            note = band.note[: most // 2]
            room = most - len(note) - 2
            name = band.name if len(band.name) <= room else band.name[: room - 1] + "…"
            frame.add_text(2, y, name, "name", "start")
            frame.add_text(width - 2, y, note, "tick", "end")
            frame.parts.append(
                f'<rect x="2" y="{y + 6:.1f}" width="{width - 4:.1f}" height="12" rx="2" '
                'class="track"/>'
            )
            x = 2.0
            for css, value, what in band.parts:
                # Small values get a minimum width, so that they stay visible.
                w = max(value * scale, 1.5) if value > 0 else 0.0
                frame.bar(x, y + 6, min(w, width - 2 - x), 12, css, f"{band.name}: {what}")
                x += w
        return frame.svg(self.label)
