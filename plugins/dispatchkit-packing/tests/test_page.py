"""The examples of the page on packing run as printed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "packing.md"


def test_the_examples_run_one_after_another():
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names: dict = {}
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)  # noqa: S102
    assert len(examples) == 2
    assert names["runner"].stats().eager_by_reason == {}
