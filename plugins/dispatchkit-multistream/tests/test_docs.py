"""The documented examples run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dispatchkit import load_plugins

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "lanes.md"


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_examples_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    example = examples(PAGE)[number]
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, str(PAGE), "exec"), namespace)  # noqa: S102 - the page's own code
    if number == 0:
        assert capsys.readouterr().out.startswith("every lane 16 graphs")
        for x, result in zip(namespace["batches"], namespace["results"], strict=True):
            torch.testing.assert_close(result, torch.relu(x @ namespace["weight"]))
    else:
        tests = namespace["TestSmallAndLarge"]()
        for name in (name for name in dir(tests) if name[:5] == "test_" and "trait_" not in name):
            getattr(tests, name)()


def test_pages_name_every_lane_policy() -> None:
    for page in (PAGE, PAGE.with_name("multistream.md")):
        rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
        named = {row.split("`")[1] for row in rows}
        assert named == set(load_plugins().lane_policies)
