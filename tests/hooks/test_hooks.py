"""Each hook does what its spec says: called when, with what, and what its answer is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dispatchkit.errors import UnknownNameError
from dispatchkit.hookspecs import (
    BackendSpec,
    CaptureEvent,
    CaptureFailedEvent,
    CommandSpec,
    EvictEvent,
    LanePolicySpec,
    ObserverSpec,
    PlannerSpec,
    PluginRegisteredEvent,
    PolicyErrorEvent,
    PolicySpec,
    PolicySwappedEvent,
    hookimpl,
)
from dispatchkit.plugins import PluginError, PluginSet


class Thing:
    """Stands for whatever a factory makes."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def declare(self, config: Any) -> list[Any]:
        return []

    def choose(self, step: Any, lanes: Any) -> int:
        return 0

    def decide(self, batch: Any, graphs: Any) -> None:
        return None

    def warmup(self) -> None: ...

    def capture(self) -> None: ...


def registering(hook: str, *records: Any) -> SimpleNamespace:
    """A plugin with one register hook."""

    @hookimpl(specname=hook)
    def register() -> list[Any]:
        return list(records)

    return SimpleNamespace(register=register)


def with_plugin(plugin: object, name: str = "mine") -> PluginSet:
    plugins = PluginSet()
    plugins.register(name, plugin)
    return plugins


def test_hook_register_policies() -> None:
    plugins = with_plugin(
        registering("dispatchkit_register_policies", PolicySpec("rule", Thing, summary="a rule"))
    )
    assert plugins.policies["rule"].summary == "a rule"
    assert plugins.policies["rule"].origin.plugin == "mine"
    made = plugins.create_policy("rule", step=4)
    assert isinstance(made, Thing)
    assert made.options == {"step": 4}
    assert plugins.create_policy("rule") is not plugins.create_policy("rule")


def test_hook_register_lane_policies() -> None:
    plugins = with_plugin(
        registering("dispatchkit_register_lane_policies", LanePolicySpec("round", Thing))
    )
    assert list(plugins.lane_policies) == ["round"]
    made: Any = plugins.create_lane_policy("round", lanes=2)
    assert made.options == {"lanes": 2}


def test_hook_register_backends() -> None:
    plugins = with_plugin(registering("dispatchkit_register_backends", BackendSpec("hip", Thing)))
    assert list(plugins.backends) == ["hip"]
    assert isinstance(plugins.create_backend("hip"), Thing)


def test_hook_register_planners() -> None:
    plugins = with_plugin(registering("dispatchkit_register_planners", PlannerSpec("few", Thing)))
    assert list(plugins.planners) == ["few"]
    assert plugins.create_planner("few", sizes=3).options == {"sizes": 3}


def test_hook_register_observers() -> None:
    heard = []

    class Listener:
        def on_capture(self, event: CaptureEvent) -> None:
            heard.append(event.num_tokens)

    plugins = with_plugin(
        registering("dispatchkit_register_observers", ObserverSpec("ear", Listener))
    )
    plugins.notify(CaptureEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8))
    assert heard == []  # an observer hears once it is asked for, not because it is installed
    assert isinstance(plugins.create_observer("ear"), Listener)
    plugins.notify(CaptureEvent(key="FULL/16", runtime_mode="FULL", num_tokens=16))
    assert heard == [16]


def test_hook_register_commands() -> None:
    def compare() -> None:
        """Compare two traces."""

    plugins = with_plugin(
        registering(
            "dispatchkit_register_commands", CommandSpec("compare", compare, help="Compare")
        )
    )
    assert plugins.commands["compare"].spec.callback is compare
    assert plugins.commands["compare"].summary == "Compare"


def test_hook_select_policy() -> None:
    class Chooser:
        @hookimpl
        def dispatchkit_register_policies(self) -> list[PolicySpec]:
            return [PolicySpec("small", Thing)]

        @hookimpl
        def dispatchkit_select_policy(self, config: Any) -> str | None:
            return config.choice

    plugins = with_plugin(Chooser())
    assert plugins.select_policy(SimpleNamespace(choice="small")) == "small"
    assert plugins.select_policy(SimpleNamespace(choice=None)) is None
    with pytest.raises(UnknownNameError, match=r"smal.*Did you mean 'small'") as unknown:
        plugins.select_policy(SimpleNamespace(choice="smal"))
    assert "passed in as 'mine'" in unknown.value.__notes__[0]
    with pytest.raises(PluginError, match="answered 7"):
        plugins.select_policy(SimpleNamespace(choice=7))
    with pytest.raises(PluginError, match="raised AttributeError"):
        plugins.select_policy(SimpleNamespace())


def test_select_policy_without_any_hook_chooses_nothing() -> None:
    assert PluginSet().select_policy(SimpleNamespace()) is None


def test_select_policy_asks_on_after_none_and_may_be_wrapped() -> None:
    class Silent:
        @hookimpl
        def dispatchkit_select_policy(self) -> None:
            return None

    class Loud:
        @hookimpl
        def dispatchkit_select_policy(self) -> str:
            return "rule"

    class Around:
        @hookimpl(wrapper=True)
        def dispatchkit_select_policy(self) -> Any:
            result = yield
            seen.append(result)
            return result

    seen: list[Any] = []
    plugins = PluginSet()
    plugins.register_policy("rule", Thing)
    for name, plugin in (("s1", Silent()), ("loud", Loud()), ("s2", Silent()), ("w", Around())):
        plugins.register(name, plugin)
    assert plugins.select_policy(SimpleNamespace()) == "rule"
    assert seen == ["rule"]


EXAMPLES = [
    PolicySwappedEvent(policy="b", epoch=1, previous="a"),
    PolicyErrorEvent(policy="b", method="decide", reason="raised KeyError"),
    CaptureEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8, num_bytes=4096),
    CaptureFailedEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8, reason="host_sync"),
    EvictEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8, reason="budget"),
]


def check_told_of(event: Any) -> None:
    """Two plugins hear exactly this event, whatever they return; others do not disturb."""
    heard = []

    @hookimpl(specname=event.hook)
    def tell(event: Any) -> str:
        heard.append(event)
        return "ignored"

    @hookimpl(specname=event.hook)
    def count() -> None:
        heard.append("told, without taking the event")

    plugins = PluginSet()
    assert not plugins.listens(type(event))
    plugins.notify(event)
    plugins.register("first", SimpleNamespace(tell=tell))
    plugins.register("second", SimpleNamespace(count=count))
    assert plugins.listens(type(event))
    for one in EXAMPLES:
        plugins.notify(one)
    assert heard == [event, "told, without taking the event"]


def test_hook_on_policy_swapped() -> None:
    check_told_of(EXAMPLES[0])


def test_hook_on_policy_error() -> None:
    check_told_of(EXAMPLES[1])


def test_hook_on_capture() -> None:
    check_told_of(EXAMPLES[2])


def test_hook_on_capture_failed() -> None:
    check_told_of(EXAMPLES[3])


def test_hook_on_evict() -> None:
    check_told_of(EXAMPLES[4])


def test_hook_on_plugin_registered() -> None:
    """Every plugin hears of every plugin once, itself and earlier ones included."""
    heard: dict[str, list[str]] = {"early": [], "late": []}

    def listener(me: str) -> SimpleNamespace:
        @hookimpl
        def dispatchkit_on_plugin_registered(event: PluginRegisteredEvent) -> None:
            heard[me].append(event.name)

        return SimpleNamespace(dispatchkit_on_plugin_registered=dispatchkit_on_plugin_registered)

    plugins = PluginSet()
    plugins.register("early", listener("early"))
    plugins.register_policy("rule", Thing)
    plugins.register("late", listener("late"))
    assert sorted(heard["early"]) == ["early", "late", "rule"]
    assert sorted(heard["late"]) == ["early", "late", "rule"]


def test_events_are_frozen_and_take_only_keywords() -> None:
    event = EXAMPLES[2]
    with pytest.raises(AttributeError):
        event.num_tokens = 9
    with pytest.raises(TypeError):
        CaptureEvent("FULL/8", "FULL", 8)  # type: ignore[misc]
