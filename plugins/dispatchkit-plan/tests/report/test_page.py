"""A page is self-contained, escaped, and written completely or not at all."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatchkit.dispatch import Dispatcher
from dispatchkit.errors import ConfigError
from dispatchkit.observe import StepTrace, trace_config

from dispatchkit_plan import load_cost_model
from dispatchkit_plan.report import (
    account_for,
    render,
    report_of_account,
    report_of_simulations,
    report_of_statistics,
    waste_plan,
    write_report,
)
from dispatchkit_plan.report.charts import (
    Band,
    Bars,
    Line,
    Lines,
    Pairs,
    Series,
    Shares,
    StackedBars,
)
from dispatchkit_plan.report.page import Figure, Report, Table, Tile

VOID = {"meta", "br"}


class Reader(html.parser.HTMLParser):
    """Parser that checks the nesting of tags and collects tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def pages(account: Any, trace: Any, simulations: Any, statistics: Any) -> dict[str, str]:
    """Return one page of each kind."""
    rows = [one.to_json() for one in simulations]
    made = {
        "trace": report_of_account(account, plan=waste_plan(trace, 512)),
        "simulations": report_of_simulations(rows, source="s"),
        "live": report_of_statistics(statistics, source="live.json"),
    }
    return {name: render(one, version="1") for name, one in made.items()}


@pytest.mark.parametrize("name", ["trace", "simulations", "live"])
def test_a_page_is_complete_in_itself(pages: dict[str, str], name: str) -> None:
    """Well formed, without scripts, addresses, other files or invalid numbers."""
    text = pages[name]
    found = Reader(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    names = {attribute for attribute, _ in found.attributes}
    assert not {"src", "href", "srcset"} & names
    assert not [attribute for attribute in names if attribute.startswith("on")]
    assert re.search(r"https?:|url\(|@import|nan|inf(?!o)", text.lower()) is None
    assert text.count("<svg") >= 4


def test_vllm_is_a_point_beside_the_best_sizes(pages: dict[str, str]) -> None:
    """Padding against number of graphs, with the run itself."""
    figure = pages["trace"].split('id="waste"')[1].split("</figure>")[0]
    assert "best sizes for this traffic" in figure
    assert "vLLM default (51)" in figure
    assert "this run (51)" in figure
    assert "<polyline" in figure


def test_without_sizes_or_arms_it_is_said_what_is_missing(
    account: Any, statistics: dict[str, Any]
) -> None:
    """A plot without data is replaced by a sentence with the next step."""
    made = render(report_of_account(account, plan="There are no sizes."), version="1")
    assert "There are no sizes." in made
    del statistics["arms"]
    made = render(report_of_statistics(statistics, source="x"), version="1")
    assert "The policy has not measured any steps" in made


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((512,), "Graphs serve 50.0% of 2 steps. Padding is 156.00% of the real tokens of"),
        ((1024,), "Graphs serve 100.0% of 2 steps. Padding is 156.00% of the real tokens of"),
        ((1,), "Every step runs eager"),
    ],
)
def test_the_summary_mentions_eager_steps_only_if_there_are_any(
    plugins: Any, sizes: tuple[int, ...], expected: str
) -> None:
    steps = StepTrace({"num_tokens": [200, 600]})
    policy = plugins.create_policy("vllm")
    dispatcher = Dispatcher(policy, trace_config(steps, sizes=sizes), lazy=True)
    account = account_for(steps, dispatcher, load_cost_model("lm-decode-h100"))
    summary = report_of_account(account, plan="No plan.").summary
    assert expected in summary
    assert ("eager" in summary) == (sizes[0] < 600)


def test_one_simulation_is_not_compared(simulations: Any) -> None:
    rows = [one.to_json() for one in simulations]
    several = report_of_simulations(rows, source="s")
    assert several.summary.startswith(
        "default, powers of two and four graphs were simulated on the same"
    )
    assert several.tiles[1].note.endswith(", the shortest")
    single = report_of_simulations(rows[:1], source="s")
    assert "on the same" not in single.summary
    assert "shortest" not in single.summary + single.tiles[1].note


EVIL = "<script>alert(1)</script>\"'&\x00\ud800</svg><b onclick=x>"


def test_text_of_data_is_escaped_everywhere(
    simulations: Any, statistics: dict[str, Any], tmp_path: Path
) -> None:
    """Labels, reasons, notes and file names come from outside."""
    row = {
        **simulations[0].to_json(),
        "label": EVIL,
        "notes": [EVIL],
        "misses": {EVIL: 3},
        "cost_model": EVIL,
    }
    statistics["policy"] = EVIL
    statistics["samples"][-1]["eager_by_reason"] = {EVIL: 3}
    statistics["arms"][0]["arms"][0]["arm"] = EVIL
    for made in (
        report_of_simulations([row, row], source=EVIL),
        report_of_statistics(statistics, source=EVIL),
    ):
        text = render(made, version=EVIL)
        assert "<script" not in text
        assert "<b " not in text
        assert "\x00" not in text
        text.encode("utf-8")
        found = Reader(text)
        assert "script" not in found.tags
        assert any("<script>alert(1)</script>" in word for word in found.words)
        write_report(made, tmp_path / "page.html")


texts = st.one_of(st.text(max_size=20), st.just(EVIL))
numbers = st.floats(0, 1e12).map(lambda value: 0.0 if value < 1e-9 else value)


@settings(max_examples=4)
@given(texts, st.lists(numbers, min_size=1, max_size=30), st.integers(1, 4))
def test_any_data_gives_a_plot_that_is_well_formed_and_inside_its_frame(
    name: str, values: list[float], count: int
) -> None:
    """Zeros, one value, huge ranges, odd names."""
    categories = tuple(f"{name}{index}" for index in range(len(values)))
    series = tuple(Series(name, "full", tuple(values)) for _ in range(count))
    points = tuple((float(index), value) for index, value in enumerate(values))
    parts = tuple(("eager", value, name) for value in values[:count])
    words = {"label": name, "x_label": name, "y_label": name, "unit": name}
    charts = [
        StackedBars(categories=categories, series=series, **words),
        Shares(label=name, ends=tuple(range(1, len(values) + 1)), series=series),
        Lines(
            lines=(Line(name, "full", points), Line(name, "eager", points[:5], marked=True)),
            **words,
        ),
        Pairs(categories=categories, series=series, **words),
        Bars(label=name, bands=(Band(name, parts, name),)),
    ]
    for chart in charts:
        for width, height in ((540.0, 320.0), (330.0, 290.0)):
            svg = chart.draw(width, height)
            Reader(svg)
            assert "nan" not in re.sub(
                r"<title>.*?</title>|<text.*?</text>|aria-label=\S+", "", svg
            )
            for x, w in re.findall(r'<rect x="(-?[\d.]+)" y="[-\d.]+" width="([\d.]+)"', svg):
                assert -0.5 <= float(x)
                assert float(x) + float(w) <= width + 0.5
            for x, y in re.findall(r'<circle cx="(-?[\d.]+)" cy="(-?[\d.]+)"', svg):
                assert 0 <= float(x) <= width
                assert -1 <= float(y) <= height + 1


def test_long_tables_say_what_is_left_out_and_long_cells_are_cut() -> None:
    """The page must stay readable."""
    table = Table(("a",), (("x" * 1000,),), total=40)
    chart = Bars(label="b", bands=())
    made = Report(
        title="t",
        summary="s",
        facts=(),
        tiles=(Tile("n", "1"),),
        figures=(Figure("f", "F", "c", chart, table),),
    )
    text = render(made, version="1")
    assert "39 more rows are omitted" in text
    assert "x" * 301 not in text
    one_less = attrs.evolve(made.figures[0], table=attrs.evolve(table, total=2))
    assert "1 more row is omitted" in render(attrs.evolve(made, figures=(one_less,)), version="1")


def test_a_file_is_whole_or_not_there(account: Any, tmp_path: Path) -> None:
    """This holds for the Python function too."""
    path = tmp_path / "page.html"
    write_report(account, path)
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    with pytest.raises(ConfigError, match="an existing folder"):
        write_report(account, tmp_path / "no" / "page.html")
    with pytest.raises(ConfigError, match="source must be"):
        write_report(3, path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a non-empty list of simulations, got \[3\]"):
        write_report([3], path)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"a non-empty list of simulations, got \[\]"):
        write_report([], path)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.data())
def test_saved_files_that_were_changed_are_refused_with_a_message_or_drawn(
    make_statistics: Any, data: Any
) -> None:
    """One value of a file is replaced by an arbitrary value."""
    document = make_statistics()
    target: Any = document
    while isinstance(target, dict | list) and target:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(target[key], dict | list) or data.draw(st.booleans()):
            target[key] = data.draw(anything)
            break
        target = target[key]
    try:
        text = render(report_of_statistics(document, source="x"), version="1")
    except ConfigError as error:
        text = f"<p>{type(error)}"
    assert text


_BOX = re.compile(r'<text x="([\d.]+)" y="([\d.]+)" class="name" text-anchor="start">([^<]*)<')
_DOT = re.compile(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="[\d.]+" class="mark dot')
_STROKE = re.compile(r'<line x1="([\d.]+)" y1="([\d.]+)" x2="[\d.]+" y2="([\d.]+)" class="leader"')


@pytest.mark.parametrize("width", [330.0, 540.0])
@pytest.mark.parametrize(
    ("top", "points"),
    [
        (100.0, [("powers-of-two (10)", 10, 40.1), ("vLLM default (51)", 51, 3.95)]),
        (100.0, [("default (51)", 51, 3.95), ("i. (76)", 76, 3.95), ("this run (51)", 51, 3.95)]),
        (100.0, [("default (51)", 51, 3.95), ("i. (76)", 76, 3.95), ("this run (24)", 24, 3.0)]),
        (100.0, [("one", 50, 3.0), ("two", 52, 3.1), ("three", 54, 3.2), ("four", 56, 3.3)]),
        (100.0, [("all at", 10, 1.0), ("one", 10, 1.0), ("place", 10, 1.0), ("apart", 80, 9.0)]),
        (
            400.0,
            [
                ("vLLM default (51)", 51, 2.97),
                ("vLLM interactivity (76)", 76, 2.97),
                ("powers-of-two (10)", 10, 3.95),
                ("this run (24)", 24, 3.95),
            ],
        ),
    ],
)
def test_names_cover_no_name_and_no_point_and_no_stroke_goes_through_one(
    width: float, top: float, points: list[tuple[str, int, float]]
) -> None:
    """Pages fit phones and wide screens."""
    marks = tuple(
        Line(name, "eager" if "default" in name else "other", ((x, y),), marked=True)
        for name, x, y in points
    )
    curve = Line("curve", "full", tuple((n, top / n) for n in range(1, 65)))
    chart = Lines(label="", lines=(curve, *marks), x_label="x", y_label="y", unit="%")
    drawn = chart.draw(width, 300.0)
    boxes = [
        (float(x), float(x) + 6.0 * len(what), float(y) - 9, float(y) + 2)
        for x, y, what in _BOX.findall(drawn)
    ]
    assert len(boxes) == len(points)
    for index, (left, right, upper, bottom) in enumerate(boxes):
        assert 0 <= left <= right <= width + 1
        for begin, end, above, below in boxes[:index]:
            assert right < begin or end < left or bottom < above or below < upper
        for x, y in _DOT.findall(drawn):
            assert not (left < float(x) < right and upper < float(y) < bottom)
        for x, y0, y1 in _STROKE.findall(drawn):
            low, high = sorted((float(y0), float(y1)))
            assert not (left < float(x) < right and low < bottom and upper < high)
