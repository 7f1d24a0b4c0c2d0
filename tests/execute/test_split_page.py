"""The examples of the page on split batches run as printed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dispatchkit import DispatchConfig, Dispatcher
from dispatchkit.keys import CaptureSizeWarning
from dispatchkit.testing import OneBucketPolicy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "split.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
PRINTED = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)


def test_a_batch_of_600_is_split_as_printed(capsys):
    pytest.importorskip("dispatchkit_threshold")
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        exec(EXAMPLES[0], names)  # noqa: S102
    assert capsys.readouterr().out == PRINTED[0]
    assert names["runner"].stats().eager_by_reason == {}


def test_parts_submitted_to_lanes_are_ordinary_steps():
    pytest.importorskip("dispatchkit_threshold")
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        exec(EXAMPLES[0], names)  # noqa: S102
        exec(EXAMPLES[2], names)  # noqa: S102
    lanes = names["lanes"]
    assert [one.num_tokens for one in lanes.lanes.stats()] == [512, 88]
    assert lanes.stats().steps_by_mode["FULL"] == 2


def test_a_policy_of_ones_own_splits_by_the_rule_of_the_page():
    names: dict = {}
    exec(EXAMPLES[1], names)  # noqa: S102
    policy = type("Own", (OneBucketPolicy,), {"decide": names["decide"]})()
    config = DispatchConfig(mode="FULL", sizes=(8, 32))
    table = Dispatcher(policy, config, lazy=True, may_split=True)
    assert [part.num_tokens for part in table.dispatch(31).parts] == [8, 8, 8, 7]
    assert table.dispatch(32).reason == "not_split"
