"""On the page on writing a policy, the class passes the kit and the plugin registers."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import pytest

from dispatchkit.plugins import load_plugins
from dispatchkit.testing import run_policy_conformance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "policy.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_kits_of_the_page_on_tests_are_kits_and_its_property_holds() -> None:
    """Each block runs as printed."""
    pytest.importorskip("torch")
    from dispatchkit import testing

    names: dict[str, Any] = {}
    page = PAGE.with_name("test-plugins.md").read_text(encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(compile(block, "test-plugins.md", "exec"), names)  # noqa: S102 - its own code
    printed = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    assert out.getvalue() == "".join(printed)
    assert issubclass(names["TestHalfFullRuns"], testing.RunnerTests)
    assert issubclass(names["TestMyBackend"], testing.BackendTests)
    names["test_a_replay_covers_its_batch"]()
    assert issubclass(names["TestMyMachine"], unittest.TestCase)
    table = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert set(table) == {name for name in testing.__all__ if name.endswith("Tests")}


@pytest.fixture
def made() -> dict[str, Any]:
    """Return the names that the first block defines."""
    names: dict[str, Any] = {}
    exec(compile(blocks()[0], str(PAGE), "exec"), names)  # noqa: S102 - the page's own code
    return names


def test_the_class_keeps_the_contract_in_under_fifty_lines(made: dict[str, Any]) -> None:
    assert len(blocks()[0].splitlines()) < 50
    run_policy_conformance(made["HalfFull"]).raise_if_failed()


def test_what_is_tried_prints_the_reason_and_the_verdict(made: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(blocks()[1], made)  # noqa: S102
    assert "-> eager (padding_limit)" in out.getvalue()
    assert "satisfies the contract" in out.getvalue()


def test_the_plugin_registers_it_by_name(
    made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dispatchkit_half_full", "dispatchkit_half_full.policy"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["dispatchkit_half_full.policy"].HalfFull = made["HalfFull"]  # type: ignore[attr-defined]
    plugin = types.ModuleType("plugin")
    exec(blocks()[2], plugin.__dict__)  # noqa: S102
    found = load_plugins(extra=[("half-full", plugin)])
    assert isinstance(found.create_policy("half-full", max_share=0.25), made["HalfFull"])
