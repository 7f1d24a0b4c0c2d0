"""The code of the page on steps runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "steps.md"


@pytest.mark.filterwarnings("ignore")
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dispatchkit_adaptive")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)  # noqa: S102 - the page's own code
    assert names["out"].shape == (5, 16)
    assert {path.name for path in tmp_path.iterdir()} == {"steps.csv.gz", "steps.json"}
