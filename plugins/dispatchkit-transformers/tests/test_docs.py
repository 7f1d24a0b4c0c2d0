"""The examples of the how-to run in order."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))
from decoder_classes import ENCODER_DECODER, FULL, RECURRENT, WINDOWS  # noqa: E402

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "transformers.md"


def test_the_page_lists_the_classes_that_are_tested():
    text = PAGE.read_text(encoding="utf-8")
    listed = text.partition("<!-- classes -->")[2].partition("<!-- end of classes -->")[0]
    kinds = (FULL, WINDOWS, RECURRENT, ENCODER_DECODER)
    parts = re.split(r"^- ", listed, flags=re.MULTILINE)[1:]
    for part, kind in zip(parts, kinds, strict=True):
        assert f", {len(kind)} classes:" in part
        assert re.findall(r"`(\w+)`", part) == sorted(kind)


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
