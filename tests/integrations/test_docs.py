"""The examples of the pages on one-line use run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"


def run_page(name):
    """Run a page's examples one after the other and return what they leave behind."""
    page = PAGES / name
    names = {"__name__": "example"}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)  # noqa: S102 - the page's own code
    return names


def test_the_page_on_graphed(capsys):
    names = run_page("graphed.md")
    assert "GraphedStats(calls=3, plain={}" in capsys.readouterr().out
    assert names["scores"].shape == (3, 2)


@pytest.mark.slow
def test_the_page_on_transformers():
    pytest.importorskip("transformers")
    names = run_page("transformers.md")
    model, inputs = names["model"], names["inputs"]
    asked = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **asked)
    assert torch.equal(
        want, names["decoder"].reset() or names["decoder"].generate(**inputs, **asked)
    )
