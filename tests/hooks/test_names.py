"""Owners of names: missing names, conflicts, built-in names, allow and block lists."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dispatchkit.errors import (
    BackendUnavailableError,
    ConfigError,
    DescriptorError,
    PolicyError,
    UnknownNameError,
)
from dispatchkit.hookspecs import BackendSpec, PolicySpec, hookimpl
from dispatchkit.plugins import PluginError, PluginSet, load_plugins

MARK = "from dispatchkit.hookspecs import *\n"


# --- missing names


def test_missing_policy_is_an_error_with_the_nearest_names(site: Any, policy_source: Any) -> None:
    """A policy requested by name is never replaced silently."""
    site.install("acme-greedy", greedy=policy_source("greedy"))
    loaded = site.load()
    with pytest.raises(UnknownNameError) as unknown:
        loaded.create_policy("greddy")
    assert unknown.value.nearest == ("greedy",)
    assert unknown.value.kind == "policy"
    with pytest.raises(LookupError):
        loaded.get_policy("nothing-like-it")
    for wrong in (3, ["greedy"], None):
        with pytest.raises(UnknownNameError, match="policy must be one of: greedy, got"):
            loaded.create_policy(wrong)


def test_missing_policy_names_the_plugin_that_failed_to_load(site: Any) -> None:
    """A load failure is not only a debug message."""
    site.install("acme-a", a="import no_such_module_a")
    site.install("dispatchkit-greedy", greedy="import no_such_module_g")
    with pytest.raises(UnknownNameError, match="no_such_module_g") as unknown:
        site.load().create_policy("greedy")
    assert "dispatchkit-greedy 1.0" in str(unknown.value)
    # The most similar name comes first.
    assert str(unknown.value).index("module_g") < str(unknown.value).index("module_a")


def test_missing_policy_names_the_plugin_that_is_blocked(site: Any, policy_source: Any) -> None:
    site.install("acme-greedy", greedy=policy_source("greedy"))
    with pytest.raises(UnknownNameError, match=r"acme-greedy.*blocked.*DISPATCHKIT_DISABLE"):
        site.load(block=["greedy"]).create_policy("greedy")
    with pytest.raises(UnknownNameError, match=r"acme-greedy.*not among.*DISPATCHKIT_PLUGINS"):
        site.load(environ={"DISPATCHKIT_PLUGINS": ""}).create_policy("greedy")


def test_missing_policy_of_an_own_distribution_says_what_to_install() -> None:
    with pytest.raises(UnknownNameError, match="Run: pip install dispatchkit-adaptive"):
        PluginSet().create_policy("adaptive")
    with pytest.raises(UnknownNameError, match="Run: pip install dispatchkit-vllm"):
        PluginSet().get_policy("vllm@0.13")
    with pytest.raises(UnknownNameError, match="Run: pip install dispatchkit-multistream"):
        PluginSet().create_lane_policy("by-key")
    with pytest.raises(UnknownNameError, match="Run: pip install dispatchkit-prometheus"):
        PluginSet().create_observer("prometheus")


@pytest.mark.parametrize("group", ["dispatch_kit", "dispatchkit.plugins", "dispatchkits"])
def test_misspelt_group_is_reported(group: str, site: Any, policy_source: Any, row: Any) -> None:
    site.install("acme-greedy", group=group, greedy=policy_source("greedy"))
    loaded = site.load()
    assert "greedy" not in sys.modules
    assert row(loaded, "greedy").state == "failed"
    assert f"group {group!r}; declare it in the group 'dispatchkit'" in str(loaded.problems[0])
    with pytest.raises(UnknownNameError, match="in the group 'dispatchkit'"):
        loaded.create_policy("greedy")


def test_other_groups_are_nobodys_business_here(site: Any) -> None:
    site.install("acme-x", group="pytest11", x="raise SystemExit")
    assert [one.name for one in site.load(strict=True).describe()] == ["dispatchkit"]


def test_broken_metadata_of_another_distribution_hides_nothing(
    site: Any, policy_source: Any
) -> None:
    site.install("acme-a", "[dispatchkit]\nthis line has no equals sign\n")
    site.install("acme-b", b=policy_source("b"))
    loaded = site.load()
    assert list(loaded.policies) == ["b"]
    (problem,) = loaded.problems
    assert "unreadable metadata" in problem.reason
    assert "acme_a-1.0.dist-info" in str(problem)


# --- conflicting names


@pytest.mark.parametrize("reverse", [False, True])
def test_one_entry_point_name_of_two_distributions(
    reverse: bool, site: Any, policy_source: Any
) -> None:
    """Both are named, in any order of the path."""
    other = site.folder("other", first=reverse)
    site.install("beta", {"rule": "rule_b"}, rule_b=policy_source("from-b"))
    site.install("alpha", {"rule": "rule_a"}, folder=other, rule_a=policy_source("from-a"))
    loaded = site.load()
    assert list(loaded.policies) == ["from-a"]
    assert "rule_b" not in sys.modules
    (problem,) = loaded.problems
    assert "beta 1.0" in str(problem)
    assert "alpha 1.0" in str(problem)
    assert [(one.distribution, one.state) for one in loaded.describe() if one.name == "rule"] == [
        ("alpha", "loaded"),
        ("beta", "duplicate"),
    ]
    # The next step in the message works.
    assert list(site.load(block=["alpha"], strict=True).policies) == ["from-b"]


@pytest.mark.parametrize("reverse", [False, True])
def test_one_policy_name_of_two_plugins(reverse: bool, site: Any, policy_source: Any) -> None:
    """Both origins are named, and the winner does not depend on the path."""
    other = site.folder("other", first=reverse)
    site.install("beta", bb=policy_source("rule"))
    site.install("alpha", folder=other, aa=policy_source("rule"))
    loaded = site.load()
    assert loaded.policies["rule"].origin.distribution == "alpha"
    (problem,) = loaded.problems
    assert problem.origin.distribution == "beta"
    assert "policy 'rule' is also registered by another plugin (alpha 1.0" in str(problem)
    assert [(one.name, one.registers) for one in loaded.describe()][1:] == [
        ("aa", ("policy rule",)),
        ("bb", ()),
    ]


@pytest.mark.parametrize("name", ["vllm", "vllm@0.13", "vllm-drafter"])
def test_the_distribution_named_after_a_policy_keeps_it(
    name: str, site: Any, policy_source: Any
) -> None:
    """No distribution with an earlier name replaces it."""
    site.install("acme", a_vllm=policy_source(name))
    site.install("dispatchkit-adaptive", b_vllm=policy_source(name))
    site.install("dispatchkit-vllm", z_vllm=policy_source(name))
    loaded = site.load()
    assert loaded.policies[name].origin.distribution == "dispatchkit-vllm"
    assert {one.origin.distribution for one in loaded.problems} == {"acme", "dispatchkit-adaptive"}


def test_one_object_under_two_names(site: Any, policy_source: Any) -> None:
    """The object is reported with both names and loaded once."""
    site.install(
        "acme", {"one": "shared_rule", "two": "shared_rule"}, shared_rule=policy_source("r")
    )
    loaded = site.load()
    assert list(loaded.policies) == ["r"]
    (problem,) = loaded.problems
    assert problem.origin.plugin == "two"
    text = str(problem)
    assert "same object as another plugin (acme 1.0, entry point 'one = shared_rule'" in text


def test_one_entry_written_twice_is_one_plugin(site: Any, policy_source: Any) -> None:
    site.install("acme", "[dispatchkit]\na = rule_x\na = rule_x\n", rule_x=policy_source("r"))
    assert list(site.load(strict=True).policies) == ["r"]


def test_one_distribution_installed_twice_is_the_one_that_python_imports(
    site: Any, policy_source: Any
) -> None:
    site.install("acme", version="1.0", rule_y=policy_source("old"))
    site.install("acme", version="2.0", folder=site.folder("b", first=True),
                 rule_y=policy_source("new"))  # fmt: skip
    loaded = site.load(strict=True)
    assert loaded.policies["new"].origin.version == "2.0"


BACKEND = """
from dispatchkit.hookspecs import *
class Own:
    def warmup(self): ...
    def capture(self): ...
@hookimpl
def dispatchkit_register_backends(): return [BackendSpec("tape", Own)]
"""


def test_built_in_names_are_kept_unless_replacement_is_asked_for(site: Any) -> None:
    """A plugin does not replace a built-in policy by its name alone."""
    site.install("acme", own_tape=BACKEND)
    loaded = site.load()
    assert loaded.backends["tape"].origin.distribution == "dispatchkit"
    (problem,) = loaded.problems
    assert "acme" in str(problem)
    assert (
        "'tape' is built in, and the built-in backend is used; to replace it, pass "
        "replace=['tape'] to load_plugins()" in str(problem)
    )

    replaced = site.load(replace=["tape"], strict=True)
    assert replaced.backends["tape"].origin.distribution == "acme"
    assert type(replaced.create_backend("tape")).__name__ == "Own"
    with pytest.raises(UnknownNameError, match="Did you mean 'tape'"):
        site.load(replace=["tapes"])


def test_what_is_passed_in_goes_before_what_is_found(site: Any, policy_source: Any) -> None:
    @hookimpl
    def dispatchkit_register_policies() -> Any:
        return [PolicySpec("rule", list)]

    site.install("acme", rule=policy_source("rule"))
    hooks = SimpleNamespace(dispatchkit_register_policies=dispatchkit_register_policies)
    loaded = site.load(extra=[("mine", hooks)])
    assert str(loaded.policies["rule"].origin) == "passed in as 'mine'"


def test_a_second_object_under_one_name_is_reported(site: Any) -> None:
    def plugin(name: str) -> Any:
        @hookimpl
        def dispatchkit_register_policies() -> Any:
            return [PolicySpec(name, list)]

        return SimpleNamespace(dispatchkit_register_policies=dispatchkit_register_policies)

    loaded = site.load(extra=[("mine", plugin("a")), ("mine", plugin("b"))])
    assert list(loaded.policies) == ["a"]
    (problem,) = loaded.problems
    assert "Pass the object under a different name." in problem.reason
    states = {(info.state, info.reason == "") for info in loaded.describe() if info.name == "mine"}
    assert states == {("loaded", True), ("duplicate", False)}


def test_register_policy_refuses_a_taken_name() -> None:
    plugins = PluginSet()
    registered = plugins.register_policy("rule", dict, summary="first")
    assert (registered.name, registered.summary) == ("rule", "first")
    with pytest.raises(PluginError, match="'rule'"):
        plugins.register_policy("rule", list)
    assert plugins.policies["rule"].spec.factory is dict
    with pytest.raises(ConfigError, match="callable"):
        plugins.register_policy("other", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"PolicySpec\.name"):
        plugins.register_policy("", dict)


# --- allow and block lists -----------------------------------------------------------------------

LISTS = [
    ({}, {}, {"a", "b"}),
    ({"allow": ["a"]}, {}, {"a"}),
    ({"allow": []}, {}, set()),
    ({"allow": ["acme-b"]}, {}, {"b"}),
    ({"allow": ["ACME_B"]}, {}, {"b"}),
    ({"block": ["a"]}, {}, {"b"}),
    ({"block": ["acme-b"]}, {}, {"a"}),
    ({"block": ["not-installed-anywhere"]}, {}, {"a", "b"}),
    ({}, {"DISPATCHKIT_PLUGINS": "a"}, {"a"}),
    ({}, {"DISPATCHKIT_PLUGINS": " a , b ,"}, {"a", "b"}),
    ({}, {"DISPATCHKIT_PLUGINS": ""}, set()),
    ({}, {"DISPATCHKIT_DISABLE": "a"}, {"b"}),
    ({}, {"DISPATCHKIT_DISABLE": "a,b"}, set()),
    ({}, {"DISPATCHKIT_DISABLE": ""}, {"a", "b"}),
    ({"allow": ["a"]}, {"DISPATCHKIT_PLUGINS": "b"}, set()),
    ({"allow": ["a", "b"]}, {"DISPATCHKIT_DISABLE": "b"}, {"a"}),
    ({"block": ["a"]}, {"DISPATCHKIT_DISABLE": "b"}, set()),
]


@pytest.mark.parametrize(("arguments", "environ", "expected"), LISTS)
def test_lists_of_allowed_and_blocked_names(
    arguments: Any, environ: Any, expected: set[str], site: Any, policy_source: Any
) -> None:
    """Excluded plugins are not imported, and are marked in the list."""
    site.install("acme-a", {"a": "plugin_a"}, plugin_a=policy_source("a"))
    site.install("acme-b", {"b": "plugin_b"}, plugin_b=policy_source("b"))
    loaded = site.load(environ=environ, strict=True, **arguments)
    assert set(loaded.policies) == expected
    assert {name for name in "ab" if f"plugin_{name}" in sys.modules} == expected
    states = {one.name: one.state for one in loaded.describe()}
    assert states == {"dispatchkit": "loaded"} | {
        name: "loaded" if name in expected else "blocked" for name in "ab"
    }


def test_the_environment_of_the_process_is_the_default(site: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("DISPATCHKIT_PLUGINS", "")
    assert set(load_plugins().policies) == set()
    monkeypatch.setenv("DISPATCHKIT_DISABLE", "dispatchkit")
    assert load_plugins().backends == {}


def test_lists_that_fit_nothing_are_reported(site: Any, policy_source: Any, row: Any) -> None:
    site.install("acme-greedy", greedy=policy_source("greedy"))
    loaded = site.load(allow=["greedi"])
    assert not loaded.policies
    assert row(loaded, "greedi").state == "missing"
    assert "Did you mean 'greedy'" in str(loaded.problems[0])
    loaded = site.load(environ={"DISPATCHKIT_DISABLE": "greedi"})
    assert list(loaded.policies) == ["greedy"]
    assert "Did you mean 'greedy'" in str(loaded.problems[0])


@pytest.mark.parametrize("setting", ["allow", "block", "replace"])
def test_a_string_is_no_list_of_names(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be a list of names, got 'vllm'"):
        load_plugins(**{setting: "vllm"})  # type: ignore[arg-type]


def test_loading_twice_gives_equal_sets_that_share_nothing(site: Any, policy_source: Any) -> None:
    site.install("acme-a", a=policy_source("a"))
    one, two = site.load(strict=True), site.load(strict=True)
    assert one.describe() == two.describe()
    one.register_policy("mine", list)
    assert "mine" not in two.policies
    assert "mine" in one.policies


# --- creating objects


def test_options_that_a_policy_does_not_take(site: Any, policy_source: Any) -> None:
    site.install("acme-greedy", version="0.3", greedy=policy_source("greedy"))
    loaded = site.load()
    assert loaded.create_policy("greedy", step=4).step == 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as wrong:
        loaded.create_policy("greedy", stepp=4)
    assert "policy 'greedy' (acme-greedy 0.3" in str(wrong.value)
    assert "step=8" in str(wrong.value)
    assert "stepp" in str(wrong.value)


def test_the_accepted_options_are_shown_without_quoted_annotations() -> None:
    def stepped(step: int = 8, *, order: str = "up") -> Any:
        return step, order

    plugins = PluginSet()
    plugins.register_policy("stepped", stepped)
    with pytest.raises(ConfigError, match=r"signature \(step=8, \*, order='up'\), got"):
        plugins.create_policy("stepped", stepp=4)


def test_a_factory_that_fails_is_named_with_its_origin() -> None:
    def wrong_value(step: int = 0) -> Any:
        raise DescriptorError("step", step, "1 or more")

    def crash() -> Any:
        raise ZeroDivisionError("1/0")

    plugins = PluginSet()
    for name, factory in {
        "typed": wrong_value,
        "crash": crash,
        "nothing": lambda: None,
        "class": lambda: PluginSet,
        "other": object,
    }.items():
        plugins.register_policy(name, factory)
    with pytest.raises(DescriptorError, match="step must be 1 or more") as typed:
        plugins.create_policy("typed")
    assert "passed in as 'typed'" in typed.value.__notes__[0]
    with pytest.raises(PolicyError, match=r"'crash' .*ZeroDivisionError: 1/0") as crashed:
        plugins.create_policy("crash")
    assert isinstance(crashed.value.__cause__, ZeroDivisionError)
    for name in ("nothing", "class", "other"):
        with pytest.raises(
            PolicyError, match=rf"'{name}' .*instance with the methods declare, dec"
        ):
            plugins.create_policy(name)
    plugins.register_policy("half", type("Half", (), {"declare": list}))
    with pytest.raises(PolicyError, match=r"\(Half\), which lacks decide; it must return"):
        plugins.create_policy("half")


def test_an_option_may_be_called_name() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        declare = decide = lambda self: None

    plugins = PluginSet()
    plugins.register_policy("named", Named)
    assert plugins.create_policy("named", name="x").name == "x"  # type: ignore[attr-defined]


def test_a_backend_whose_needs_are_missing_says_so() -> None:
    def needs_more() -> Any:
        import no_such_module_b  # noqa: F401

    @hookimpl
    def dispatchkit_register_backends() -> Any:
        return [BackendSpec("odd", needs_more), BackendSpec("crash", lambda: 1 / 0)]

    plugins = PluginSet()
    hooks = SimpleNamespace(dispatchkit_register_backends=dispatchkit_register_backends)
    plugins.register("mine", hooks)
    with pytest.raises(BackendUnavailableError, match=r"'odd' .*no_such_module_b"):
        plugins.create_backend("odd")
    with pytest.raises(PluginError, match=r"'crash'.*ZeroDivisionError"):
        plugins.create_backend("crash")


@pytest.mark.parametrize("setting", ["allow", "block", "replace"])
@pytest.mark.parametrize("value", [3, [3], [None]])
def test_list_of_something_else_than_names_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting}( must be a list of names| must be text)"):
        load_plugins(**{setting: value}, environ={})


@pytest.mark.parametrize("value", ["vllm", ("a",), (3, object()), None])
def test_extra_that_is_no_pair_is_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"extra(\[0\] must be a tuple| must be a list of tuples) \(name, module"
    ):
        load_plugins(extra=[value], environ={})


@pytest.mark.parametrize("wrong", [{"extra": 3}, {"strict": "yes"}, {"environ": 3}])
def test_arguments_of_the_wrong_type_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be"):
        load_plugins(**wrong)


def test_name_that_fits_no_plugin_is_told_from_one_passed_in() -> None:
    (problem,) = load_plugins(allow=["no-such-plugin"], environ={}).problems
    assert "'no-such-plugin' (not found): allowed by name" in str(problem)
    assert "passed in" not in str(problem)
