"""Every hook is specified, tested and documented exactly."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from dispatchkit import hookspecs
from dispatchkit.observe.events import EVENTS

SPECS = {
    name: function
    for name, function in vars(hookspecs).items()
    if inspect.isfunction(function) and hasattr(function, "dispatchkit_spec")
}
RECORDS = hookspecs.RECORDS
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "hooks.md"
pages = pytest.mark.skipif(not DOCUMENT.exists(), reason="the page is not beside the tests")


def section(title: str) -> str:
    """Return the text under a heading of the page, up to the next one."""
    text = DOCUMENT.read_text()
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"hooks.md has no heading {title!r}"
    return found[1]


def test_each_record_has_a_hook_and_one_hook_selects() -> None:
    registering = {record.hook for record in RECORDS}
    assert set(SPECS) == {*registering, "dispatchkit_select_policy"}
    assert len({record.kind for record in RECORDS}) == len(registering) == 5
    options: dict[str, dict[str, Any]] = {
        name: function.dispatchkit_spec  # type: ignore[attr-defined]
        for name, function in SPECS.items()
    }
    assert [name for name, one in options.items() if one["firstresult"]] == [
        "dispatchkit_select_policy"
    ]


@pages
@pytest.mark.parametrize("name", SPECS)
def test_every_hook_is_documented_with_its_exact_arguments(name: str) -> None:
    arguments = ", ".join(inspect.signature(SPECS[name]).parameters)
    assert section(f"`{name}({arguments})`").strip()


@pages
@pytest.mark.parametrize("record", [*RECORDS, *EVENTS], ids=lambda one: one.__name__)
def test_every_record_and_event_is_documented_with_all_its_fields(record: type[Any]) -> None:
    text = section(f"`{record.__name__}`")
    documented = re.findall(r"^- `(\w+)`", text, re.MULTILINE)
    assert documented == [field.name for field in attrs.fields(record)]


@pages
def test_no_hook_is_documented_that_does_not_exist() -> None:
    named = set(re.findall(r"dispatchkit_(?:register|select)_\w+", DOCUMENT.read_text()))
    assert named == set(SPECS)


def test_everything_that_an_author_needs_comes_from_hookspecs() -> None:
    exported = set(hookspecs.__all__)
    assert {record.__name__ for record in RECORDS} | {"Spec", "hookimpl"} == exported
