"""A broken plugin is reported by name and reason, leaves nothing behind, and the others load."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dispatchkit.errors import RegistrationError
from dispatchkit.hookspecs import BackendSpec, ObserverSpec, PolicySpec, hookimpl
from dispatchkit.plugins import PluginError, PluginLoadError, PluginSet, PluginState

MARK = "from dispatchkit.hookspecs import *\n"

# Fault -> (entry point's value after the module, source, words of the reason).
BROKEN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "import of a missing module": (
        "",
        "import no_such_module_x",
        ("importing", "no_such_module_x", "(bad_plugin.py:"),
    ),
    "import that exits": ("", "import sys; sys.exit(3)", ("SystemExit", "3", "(bad_plugin.py:")),
    "import that exits without Exception": (
        "",
        "class Odd(BaseException): ...\nraise Odd('gone')",
        ("Odd", "gone"),
    ),
    "syntax error": ("", "def :", ("SyntaxError",)),
    "missing attribute": (":plugin", "", ("AttributeError", "plugin")),
    "property that raises on the way": (
        ":holder.plugin",
        (
            "class Holder:\n"
            "    @property\n"
            "    def plugin(self): raise ValueError('no')\n"
            "holder = Holder()"
        ),
        ("ValueError: no",),
    ),
    "class instead of instance": (
        ":Plugin",
        "class Plugin:\n    @hookimpl\n    def dispatchkit_register_policies(self): return []",
        ("class Plugin", "instance"),
    ),
    "dictionary": (":plugin", "plugin = {'dispatchkit_register_policies': 1}", ("dict",)),
    "function": (":plugin", "def plugin(): return 1", ("function plugin", "module")),
    "None": (":plugin", "plugin = None", ("NoneType",)),
    "no hook at all": ("", "def helper(): return 1", ("has no hooks", "@hookimpl")),
    "unmarked hook": (
        "",
        "def dispatchkit_register_policies(): return []",
        ("dispatchkit_register_policies", "not marked", "@hookimpl"),
    ),
    "mark of another project": (
        "",
        (
            "import pluggy\n"
            "@pluggy.HookimplMarker('otherkit')\n"
            "def dispatchkit_register_policies(): return []"
        ),
        ("another project", "otherkit"),
    ),
    "misspelt hook": (
        "",
        "@hookimpl\ndef dispatchkit_register_policys(): return []",
        ("dispatchkit_register_policys", "Did you mean 'dispatchkit_register_policies'"),
    ),
    "misspelt hook beside a good one": (
        "",
        (
            "@hookimpl\ndef dispatchkit_register_policies(): return [PolicySpec('half', list)]\n"
            "@hookimpl\ndef dispatchkit_select_policies(config): return None"
        ),
        ("dispatchkit_select_policies", "Did you mean 'dispatchkit_select_policy'"),
    ),
    "wrong argument": (
        "",
        "@hookimpl\ndef dispatchkit_select_policy(confg): return None",
        ("'confg'", "dispatchkit_select_policy"),
    ),
    "too many arguments": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(config): return []",
        ("'config'", "dispatchkit_register_policies(config)"),
    ),
    "argument with a default": (
        "",
        "@hookimpl\ndef dispatchkit_select_policy(config=None): return None",
        ("'config=None'", "positional parameter"),
    ),
    "keywords": (
        "",
        "@hookimpl\ndef dispatchkit_select_policy(**config): return None",
        ("**config",),
    ),
    "keyword-only argument": (
        "",
        "@hookimpl\ndef dispatchkit_select_policy(*, config): return None",
        ("dispatchkit_select_policy", "'config'"),
    ),
    "async hook": (
        "",
        "@hookimpl\nasync def dispatchkit_select_policy(config): return None",
        ("async",),
    ),
    "generator": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): yield PolicySpec('x', list)",
        ("is a generator function",),
    ),
    "hook that left": (
        "",
        "@hookimpl\ndef dispatchkit_on_capture(event): return None",
        ("no hook dispatchkit_on_capture",),
    ),
    "wrapper around the select hook": (
        "",
        "@hookimpl(wrapper=True)\ndef dispatchkit_select_policy(): return (yield)",
        ("is a hook wrapper",),
    ),
    "old-style wrapper": (
        "",
        "@hookimpl(hookwrapper=True)\ndef dispatchkit_select_policy(config): yield",
        ("is a hook wrapper",),
    ),
    "wrapper around a register hook": (
        "",
        "@hookimpl(wrapper=True)\ndef dispatchkit_register_policies(): return (yield)",
        ("is a hook wrapper",),
    ),
    "wrapper that does not yield": (
        "",
        "@hookimpl(wrapper=True)\ndef dispatchkit_select_policy(): return 1",
        ("is a hook wrapper",),
    ),
    "hook that is a property": (
        ":plugin",
        (
            "class Plugin:\n"
            "    @property\n"
            "    def dispatchkit_register_policies(self): raise ValueError\n"
            "plugin = Plugin()"
        ),
        ("is not a function (property)",),
    ),
    "two functions for one hook": (
        "",
        (
            "@hookimpl\ndef dispatchkit_register_policies(): return []\n"
            "@hookimpl(specname='dispatchkit_register_policies')\ndef more(): return []"
        ),
        ("two of its functions",),
    ),
    "hook that raises": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): raise KeyError('k')",
        ("running dispatchkit_register_policies", "KeyError", "(bad_plugin.py:"),
    ),
    "hook that exits": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): raise SystemExit(1)",
        ("SystemExit",),
    ),
    "second hook that raises": (
        "",
        (
            "@hookimpl\ndef dispatchkit_register_policies(): return [PolicySpec('half', list)]\n"
            "@hookimpl\ndef dispatchkit_register_observers(): raise KeyError('k')"
        ),
        ("running dispatchkit_register_observers",),
    ),
    "hook that returns None": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): return None",
        ("returned None", "list of PolicySpec"),
    ),
    "hook that returns a record alone": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): return PolicySpec('x', list)",
        ("list of PolicySpec",),
    ),
    "hook that returns a coroutine": (
        "",
        "async def late(): ...\n@hookimpl\ndef dispatchkit_register_policies(): return late()",
        ("coroutine",),
    ),
    "record of another kind": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): return [LanePolicySpec('x', list)]",
        ("LanePolicySpec", "return PolicySpec records"),
    ),
    "same name twice": (
        "",
        (
            "@hookimpl\ndef dispatchkit_register_policies():\n"
            "    return [PolicySpec('x', list), PolicySpec('x', dict)]"
        ),
        ("'x' twice",),
    ),
    "factory that cannot be called": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): return [PolicySpec('x', 'list')]",
        ("PolicySpec.factory", "callable"),
    ),
    "name with a space": (
        "",
        "@hookimpl\ndef dispatchkit_register_policies(): return [PolicySpec('x y', list)]",
        ("PolicySpec.name", "'x y'"),
    ),
}


def test_a_module_that_does_not_exist_is_not_blamed_on_the_import_system(
    site: Any, row: Any
) -> None:
    site.install("acme-mid", {"bad": "no_such_plugin_module:plugin"})
    reason = row(site.load(), "bad").reason
    assert reason.endswith("No module named 'no_such_plugin_module'.")


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_plugin_is_left_out_whole_and_named(
    fault: str, site: Any, policy_source: Any, row: Any, caplog: Any
) -> None:
    """Cases 41 and 44: isolated, undone and reported at load; other plugins are loaded."""
    value, source, words = BROKEN[fault]
    site.install("acme-first", first=policy_source("first"))
    site.install("acme-mid", {"bad": f"bad_plugin{value}"}, "2.1", bad_plugin=MARK + source)
    site.install("zeta-last", last=policy_source("last"))

    with caplog.at_level(logging.WARNING):
        loaded = site.load()

    assert set(loaded.policies) == {"first", "last"}
    assert not loaded.observers
    bad = row(loaded, "bad")
    assert (bad.state, bad.distribution, bad.version) == (PluginState.FAILED, "acme-mid", "2.1")
    assert f"bad = bad_plugin{value}" in bad.origin
    assert bad.registers == ()
    for word in words:
        assert word in bad.reason
    (problem,) = loaded.problems
    assert str(problem) in caplog.text  # a load failure is not only a debug message
    assert problem.__cause__ is not None


def test_strict_mode_raises_all_problems_as_a_group(site: Any, policy_source: Any) -> None:
    """Strict loading names every broken plugin in one error."""
    site.install("acme-a", a="import no_such_module_a")
    site.install("acme-b", b="raise SystemExit")
    site.install("acme-c", c=policy_source("c"))
    with pytest.raises(PluginLoadError) as raised:
        site.load(strict=True)
    assert [one.origin.plugin for one in raised.value.exceptions] == ["a", "b"]
    assert isinstance(raised.value, RegistrationError)
    assert isinstance(raised.value, ExceptionGroup)
    assert "no_such_module_a" in str(raised.value)
    assert "acme-b" in str(raised.value)


def test_interrupt_while_a_plugin_is_imported_is_not_contained(site: Any) -> None:
    site.install("acme-a", a="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.load()


def test_a_broken_plugin_passed_in_is_reported_like_any_other(site: Any, row: Any) -> None:
    loaded = site.load(extra=[("mine", {"a": 1})])
    assert row(loaded, "mine").state == "failed"
    with pytest.raises(PluginLoadError):
        site.load(extra=[("mine", {"a": 1})], strict=True)


def test_register_raises_and_a_corrected_plugin_of_that_name_is_taken() -> None:
    """Nothing of a refused plugin remains, including its name."""

    class Plugin:
        answer: Any = None

        @hookimpl
        def dispatchkit_register_policies(self) -> Any:
            return self.answer

    plugins, plugin = PluginSet(), Plugin()
    for _ in range(2):
        with pytest.raises(PluginError, match="returned None"):
            plugins.register("mine", plugin)
    assert not plugins.policies
    assert plugins.describe() == ()
    plugin.answer = [PolicySpec("rule", list)]
    plugins.register("mine", plugin)
    assert list(plugins.policies) == ["rule"]


def test_register_is_all_or_nothing_where_one_name_is_taken() -> None:
    plugins = PluginSet()
    plugins.register_policy("taken", list)

    @hookimpl
    def dispatchkit_register_policies() -> list[PolicySpec]:
        return [PolicySpec("free", list), PolicySpec("taken", list)]

    @hookimpl
    def dispatchkit_select_policy() -> str:
        return "free"

    hooks = SimpleNamespace(
        dispatchkit_register_policies=dispatchkit_register_policies,
        dispatchkit_select_policy=dispatchkit_select_policy,
    )
    problem = r"'mine'.*'taken' is already registered by another plugin \(passed in"
    with pytest.raises(PluginError, match=problem):
        plugins.register("mine", hooks)
    assert list(plugins.policies) == ["taken"]
    assert plugins.select_policy(SimpleNamespace()) is None


def test_hooks_of_other_versions_may_be_marked_optional(site: Any) -> None:
    site.install(
        "acme-next",
        next_one=MARK
        + "@hookimpl(optionalhook=True)\ndef dispatchkit_select_teleport(event): return None\n"
        + "@hookimpl\ndef dispatchkit_register_policies(): return [PolicySpec('x', list)]",
    )
    assert list(site.load(strict=True).policies) == ["x"]


def test_marks_of_other_projects_on_other_functions_are_their_business(site: Any) -> None:
    site.install(
        "acme-both",
        both=MARK
        + "import pluggy\n@pluggy.HookimplMarker('pytest')\ndef pytest_configure(config): ...\n"
        + "@hookimpl\ndef dispatchkit_register_policies(): return [PolicySpec('x', list)]",
    )
    assert list(site.load(strict=True).policies) == ["x"]


def test_all_ways_to_write_a_hook_are_found() -> None:
    class Plugin:
        @hookimpl
        def dispatchkit_register_policies(self) -> list[PolicySpec]:
            return [PolicySpec("method", list)]

        @staticmethod
        @hookimpl
        def dispatchkit_select_policy(config: Any) -> str:
            return "method"

        @classmethod
        @hookimpl
        def dispatchkit_register_backends(cls) -> list[BackendSpec]:
            return [BackendSpec("class", list)]

    class Child(Plugin):
        @hookimpl(specname="dispatchkit_register_observers")
        def observers(self) -> list[ObserverSpec]:
            return [ObserverSpec("renamed", list)]

    plugins = PluginSet()
    plugins.register("child", Child())
    assert list(plugins.policies) == ["method"]
    assert list(plugins.backends) == ["class"]
    assert list(plugins.observers) == ["renamed"]
    assert plugins.select_policy(SimpleNamespace()) == "method"


def test_a_plugin_that_is_still_being_added_selects_nothing() -> None:
    """Another thread may select meanwhile; here the plugin's own hook does."""
    plugins = PluginSet()
    seen: list[str | None] = []

    @hookimpl
    def dispatchkit_register_policies() -> list[PolicySpec]:
        seen.append(plugins.select_policy(SimpleNamespace()))
        return [PolicySpec("mine", list)]

    @hookimpl
    def dispatchkit_select_policy() -> str:
        return "mine"

    hooks = (dispatchkit_register_policies, dispatchkit_select_policy)
    plugins.register("mine", SimpleNamespace(**{hook.__name__: hook for hook in hooks}))
    assert seen == [None]
    assert plugins.select_policy(SimpleNamespace()) == "mine"
