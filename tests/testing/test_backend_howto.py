"""The blocks of the page on writing a backend run, and its tables match the contract."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dispatchkit import backends
from dispatchkit.backends import BackendFeatures, GraphBackend
from dispatchkit.plugins import load_plugins
from dispatchkit.testing import BackendTests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "backend.md"


def test_the_blocks_of_the_page_run_and_its_backend_is_found_by_name():
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, "backend.md", "exec"), names)  # noqa: S102 - the page's own code
    assert issubclass(names["TestMyBackend"], BackendTests)
    plugin = types.SimpleNamespace(
        dispatchkit_register_backends=names["dispatchkit_register_backends"]
    )
    plugins = load_plugins(allow=[], extra=[("page", plugin)], strict=True)
    assert plugins.create_backend("my-device").name == "tape"


def test_the_tables_of_the_page_name_each_member_and_each_optional_part():
    first_cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named >= {name for name in vars(GraphBackend) if not name.startswith("_")}
    parts = {field.type.split(" ")[0] for field in BackendFeatures.__attrs_attrs__}
    assert named >= parts
    assert parts <= set(backends.__all__)
