"""The examples of the page on graphed() run in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "graphed.md"


def test_the_page_on_graphed(capsys):
    names = {"__name__": "example"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the page's own code
    assert "Graphs of Sequential\n3 calls, 3 replayed\n" in capsys.readouterr().out
    assert names["scores"].shape == (3, 2)
