"""The examples of the page on axes run as printed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "axes.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["dimension", "host-value", "packed"])
def test_example_runs(example, capsys):
    # An upper bound of the axis controls the step; any eager run must warn.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names: dict = {}
        exec(compile(example, str(PAGE), "exec"), names)  # noqa: S102
    assert names["runner"].stats().eager_by_reason == {}
    assert names["runner"].stats().steps_by_mode["FULL"] == 1
