"""``policies`` and ``plugins``."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

from dispatchkit.hookspecs import PolicySpec, hookimpl
from dispatchkit.settings import load_settings


def policy_plugin(*names: str) -> object:
    """Return a plugin with policies that are never created."""

    @hookimpl
    def dispatchkit_register_policies() -> list[PolicySpec]:
        return [PolicySpec(name, lambda: None, summary=f"About {name} [x]") for name in names]

    return types.SimpleNamespace(dispatchkit_register_policies=dispatchkit_register_policies)


def broken_plugin() -> object:
    @hookimpl
    def dispatchkit_register_policies() -> list[PolicySpec]:
        raise ValueError("out of order")

    return types.SimpleNamespace(dispatchkit_register_policies=dispatchkit_register_policies)


def test_policies_name_distribution_version_and_origin(run: Any) -> None:
    """The output shows where a policy comes from."""
    rows = {row["name"]: row for row in json.loads(run("policies", "--json").out)}
    assert rows["vllm"]["distribution"] == "dispatchkit-vllm"
    assert rows["vllm"]["version"]
    assert "entry point" in rows["vllm"]["origin"]


def test_policies_as_text_fit_80_columns_and_brackets_are_text(run: Any, plugins_with: Any) -> None:
    """Markup in a summary is printed literally."""
    plugins_with(mine=policy_plugin("shortest"))
    done = run("policies")
    assert done.code == 0
    assert "About shortest [x]" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_no_policy_at_all_is_found_wanting(
    run: Any, plugins_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON mode prints an empty list; the next step goes to standard error.

    Nothing needs to be installed, because a list excludes all policies.
    """
    monkeypatch.setenv("DISPATCHKIT_PLUGINS", "")
    plugins_with()
    done = run("policies", "--json")
    assert done.code == 1
    assert json.loads(done.out) == []
    assert "run `dispatchkit plugins` to list the skipped plugins" in done.err


def test_a_broken_plugin_is_shown_with_its_reason(run: Any, plugins_with: Any) -> None:
    """Other plugins are still listed; the exit code reports the problem."""
    plugins_with(bad=broken_plugin(), good=policy_plugin("shortest"))
    done = run("plugins", "--json")
    assert done.code == 1
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert rows["bad"]["state"] == "failed"
    assert "out of order" in rows["bad"]["reason"]
    assert rows["good"]["registers"] == ["policy shortest"]
    text = run("plugins")
    assert text.code == 1
    assert "out of order" in text.out
    assert max(map(len, text.out.splitlines())) <= 80


def test_other_commands_mention_a_broken_plugin_in_one_line(run: Any, plugins_with: Any) -> None:
    """The line goes to standard error, so that output stays unchanged."""
    plugins_with(bad=broken_plugin())
    done = run("policies", "--json")
    assert done.code == 0
    assert "vllm" in {row["name"] for row in json.loads(done.out)}
    assert (
        done.err == "Skipped plugins: bad. Next: run `dispatchkit plugins` to show the reasons.\n"
    )


def test_a_blocked_plugin_is_shown_and_is_no_fault(
    run: Any, plugins_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocking is intended."""
    monkeypatch.setenv("DISPATCHKIT_DISABLE", "vllm")
    plugins_with(good=policy_plugin("shortest"))
    done = run("plugins", "--json")
    assert done.code == 0
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert rows["vllm"]["state"] == "blocked"
    assert "DISPATCHKIT_DISABLE" in rows["vllm"]["reason"]


def test_the_later_place_says_which_plugins_are_loaded(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `config show`; combining the lists of both places would leave nothing."""
    monkeypatch.setenv("DISPATCHKIT_PLUGINS", "none-of-those")
    rows = json.loads(run("--set", "plugins=vllm", "policies", "--json").out)
    assert {row["distribution"] for row in rows} == {"dispatchkit-vllm"}
    loaded = load_settings(plugins=["vllm"]).runner_arguments()["policy"].plugins
    assert "vllm" in loaded.policies
