"""Values as written in pyproject.toml come back unchanged when read."""

from __future__ import annotations

import tomllib

import pytest

from dispatchkit.settings import shown


@pytest.mark.parametrize(
    "value", [{"a": 1}, {"a.b": 1, "c d": [1, 2]}, {'quo"ted': {"ä": "x"}}, {}, "text", [1, "a"]]
)
def test_a_value_is_shown_as_toml(value):
    assert tomllib.loads(f"it = {shown(value)}") == {"it": value}
