"""The examples of the how-to run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "transformers.md"


def test_the_examples_of_the_page_give_the_tokens_of_generate():
    names = {"__name__": "example"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - the page's own code
    model, inputs, decoder = names["model"], names["inputs"], names["decoder"]
    asked = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **asked)
    assert torch.equal(want, decoder.reset() or decoder.generate(**inputs, **asked))
