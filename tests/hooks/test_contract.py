"""The contract is whole: every hook is specified by its rules, tested, and documented exactly."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from dispatchkit import hookspecs
from dispatchkit._plugin_records import KINDS
from dispatchkit.observe.events import EVENTS

SPECS = {
    name: function
    for name, function in vars(hookspecs).items()
    if inspect.isfunction(function) and hasattr(function, "dispatchkit_spec")
}
RECORDS = [record for _, record in KINDS.values()]
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "hooks.md"
pages = pytest.mark.skipif(not DOCUMENT.exists(), reason="the page is not beside the tests")


def section(title: str) -> str:
    """Return the text under a heading of the page, up to the next one."""
    text = DOCUMENT.read_text()
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"hooks.md has no heading {title!r}"
    return found[1]


def test_there_are_hooks_of_each_verb_and_no_others() -> None:
    verbs = {re.match(r"dispatchkit_(register|select|on)_\w+$", name)[1] for name in SPECS}  # type: ignore[index]
    assert verbs == {"register", "select", "on"}
    assert {name for name in SPECS if "_register_" in name} == {hook for hook, _ in KINDS.values()}
    assert {name for name in SPECS if "_on_" in name} == {one.hook for one in EVENTS}


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_has_a_test_of_its_own(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / "test_hooks.py").read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert f"test_hook_{name.removeprefix('dispatchkit_')}" in tests


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_says_when_by_whom_and_by_which_rule_it_is_called(name: str) -> None:
    text = inspect.getdoc(SPECS[name]) or ""
    arguments = inspect.signature(SPECS[name]).parameters
    expected = ["Called:", "Rule:", "Raises:", "Example:"]
    expected += ["Args:"] if arguments else []
    expected += [] if "_on_" in name else ["Returns:"]
    for heading in expected:
        assert f"\n{heading}\n" in text, heading
    called = text.split("Called:")[1].split("Rule:")[0]
    assert "thread" in called
    assert "device" in called
    assert "captur" in called
    if "_on_" not in name:
        assert "None" in text.split("Returns:")[1].split("Raises:")[0]
    for argument in arguments:
        assert f"{argument}: " in text


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_keeps_to_the_rule_of_its_verb(name: str) -> None:
    options: dict[str, Any] = SPECS[name].dispatchkit_spec  # type: ignore[attr-defined]
    assert options["firstresult"] == ("_select_" in name)
    assert options["historic"] == (name == "dispatchkit_on_plugin_registered")
    if "_on_" in name:
        assert list(inspect.signature(SPECS[name]).parameters) == ["event"]


@pages
@pytest.mark.parametrize("name", SPECS)
def test_every_hook_is_documented_with_its_exact_arguments(name: str) -> None:
    arguments = ", ".join(inspect.signature(SPECS[name]).parameters)
    text = section(f"`{name}({arguments})`")
    summary = (inspect.getdoc(SPECS[name]) or "").splitlines()[0]
    assert summary in text
    assert "Called:" in text


@pages
@pytest.mark.parametrize("record", [*RECORDS, *EVENTS], ids=lambda one: one.__name__)
def test_every_record_and_event_is_documented_with_all_its_fields(record: type[Any]) -> None:
    text = section(f"`{record.__name__}`")
    documented = re.findall(r"^- `(\w+)`", text, re.MULTILINE)
    assert documented == [field.name for field in attrs.fields(record)]
    assert all(f"    {field.name}: " in (record.__doc__ or "") for field in attrs.fields(record))


@pages
def test_no_hook_is_documented_that_does_not_exist() -> None:
    named = set(re.findall(r"dispatchkit_(?:register|select|on)_\w+", DOCUMENT.read_text()))
    assert named == set(SPECS)


def test_everything_that_an_author_needs_comes_from_hookspecs() -> None:
    exported = set(hookspecs.__all__)
    assert {record.__name__ for record in [*RECORDS, *EVENTS]} | {"hookimpl"} == exported
