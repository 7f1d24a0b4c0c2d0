"""Pages in a real browser: every plot is drawn at both widths, in both themes, offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatchkit_plan.report import (
    report_of_account,
    report_of_simulations,
    report_of_statistics,
    waste_plan,
    write_report,
)

pytestmark = pytest.mark.slow

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no chromium; apt-get install chromium", allow_module_level=True)

WIDTHS = {"desk": 1280, "phone": 390}
PAGES = ["trace", "simulations", "live"]

# For each visible plot: its size, and the number of marks with a size.
MEASURE = """() => [...document.querySelectorAll('figure')].map(figure => {
  const seen = [...figure.querySelectorAll('svg')].filter(s => s.getClientRects().length);
  const svg = seen[0], box = svg ? svg.getBoundingClientRect() : null;
  const marks = svg ? [...svg.querySelectorAll('.mark')] : [];
  const boxes = marks.map(m => m.getBoundingClientRect());
  const real = boxes.filter(b => b.width > 0.2 && b.height > 0.2);
  const inside = real.filter(b => b.left >= box.left - 1 && b.right <= box.right + 1
                               && b.top >= box.top - 1 && b.bottom <= box.bottom + 1);
  const texts = svg ? [...svg.querySelectorAll('text')] : [];
  const colors = new Set(marks.map(m => {
    const style = getComputedStyle(m);
    return style.fill === 'none' ? style.stroke : style.fill; }));
  return {name: figure.id, shown: seen.length, width: box && box.width, height: box && box.height,
          marks: marks.length, real: real.length, inside: inside.length,
          colors: [...colors], size: Math.min(...texts.map(t =>
              parseFloat(getComputedStyle(t).fontSize) * box.width / svg.viewBox.baseVal.width)),
          cut: texts.filter(t => { const b = t.getBoundingClientRect();
              return b.left < -1 || b.right > innerWidth + 1; }).map(t => t.textContent)};
})"""


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    account: Any,
    trace: Any,
    simulations: Any,
    make_statistics: Any,
) -> Path:
    """Return a folder with a page of each kind."""
    made = tmp_path_factory.mktemp("pages")
    plan = waste_plan(trace, 512)
    rows = [one.to_json() for one in simulations]
    write_report(report_of_account(account, plan=plan), made / "trace.html")
    simulated = report_of_simulations(rows, source="azure_conv_high.csv")
    write_report(simulated, made / "simulations.html")
    live = report_of_statistics(make_statistics(), source="statistics.json")
    write_report(live, made / "live.html")
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("where", list(WIDTHS))
@pytest.mark.parametrize("name", PAGES)
def test_every_plot_is_drawn(browser: Any, folder: Path, name: str, where: str, theme: str) -> None:
    """Marks have a size, lie in their frame and have the theme's colors; no text is cut.

    If SCREENSHOTS names a folder, pictures are saved there for inspection.
    """
    context = browser.new_context(
        viewport={"width": WIDTHS[where], "height": 900}, color_scheme=theme, offline=True
    )
    try:
        tab = context.new_page()
        complaints: list[str] = []
        requests: list[str] = []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        address = (folder / f"{name}.html").as_uri()
        tab.goto(address)
        figures = tab.evaluate(MEASURE)
        assert len(figures) >= 4
        for figure in figures:
            assert figure["shown"] == 1, figure
            assert figure["width"] > 250, figure
            assert figure["height"] > 40, figure
            assert figure["real"] > 0, figure
            assert figure["inside"] == figure["real"] >= 0.6 * figure["marks"], figure
            assert "rgb(0, 0, 0)" not in figure["colors"], figure
            assert figure["size"] >= 10.5, figure
            assert figure["cut"] == [], figure
        wide, inner = tab.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= inner
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(244, 245, 247)") == (theme == "light")
        assert complaints == []
        assert requests == [address]
        if os.environ.get("SCREENSHOTS"):
            path = Path(os.environ["SCREENSHOTS"]) / f"{name}-{where}-{theme}.png"
            tab.screenshot(path=path, full_page=True)
    finally:
        context.close()


def test_numbers_fold_out(browser: Any, folder: Path) -> None:
    """The table behind a plot serves readers who cannot see the plot."""
    tab = browser.new_page()
    try:
        tab.goto((folder / "trace.html").as_uri())
        figure = tab.locator("figure#padding")
        assert not figure.locator("table").is_visible()
        figure.locator("summary").click()
        assert figure.locator("table").is_visible()
        assert figure.locator("tbody tr").count() > 10
    finally:
        tab.close()
