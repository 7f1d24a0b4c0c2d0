"""Each hook is called at the specified time with the specified arguments and result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dispatchkit.errors import UnknownNameError
from dispatchkit.hookspecs import (
    BackendSpec,
    CommandSpec,
    LanePolicySpec,
    ObserverSpec,
    PolicySpec,
    hookimpl,
)
from dispatchkit.observe.events import (
    EVENTS,
    CaptureEvent,
    CaptureFailedEvent,
    EvictEvent,
    PolicyErrorEvent,
    PolicySwappedEvent,
)
from dispatchkit.plugins import PluginError, PluginSet


class Thing:
    """Stands for the object that a factory returns."""

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
    """Return a plugin with one register hook."""

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


def test_hook_register_observers() -> None:
    heard = []

    class Listener:
        def on_capture(self, event: CaptureEvent) -> None:
            heard.append(event.num_tokens)

    plugins = with_plugin(
        registering("dispatchkit_register_observers", ObserverSpec("ear", Listener))
    )
    plugins.notifier.notify(CaptureEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8))
    assert heard == []  # an observer receives events when it is selected, not when it is installed
    assert isinstance(plugins.create_observer("ear"), Listener)
    plugins.notifier.notify(CaptureEvent(key="FULL/16", runtime_mode="FULL", num_tokens=16))
    assert heard == [16]


def test_hook_register_commands() -> None:
    def compare() -> None:
        """Compare two traces."""

    plugins = with_plugin(
        registering(
            "dispatchkit_register_commands",
            CommandSpec("compare", lambda: compare, summary="Compare"),
        )
    )
    assert plugins.create_command("compare") is compare
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
    with pytest.raises(PluginError, match="returned 7"):
        plugins.select_policy(SimpleNamespace(choice=7))
    with pytest.raises(PluginError, match="raised AttributeError"):
        plugins.select_policy(SimpleNamespace())


def test_select_policy_without_any_hook_chooses_nothing() -> None:
    assert PluginSet().select_policy(SimpleNamespace()) is None


def test_select_policy_asks_on_after_none() -> None:
    class Silent:
        @hookimpl
        def dispatchkit_select_policy(self) -> None:
            return None

    class Loud:
        @hookimpl
        def dispatchkit_select_policy(self) -> str:
            return "rule"

    plugins = PluginSet()
    plugins.register_policy("rule", Thing)
    for name, plugin in (("s1", Silent()), ("loud", Loud()), ("s2", Silent())):
        plugins.register(name, plugin)
    assert plugins.select_policy(SimpleNamespace()) == "rule"


def test_select_policy_asks_in_the_order_that_the_marks_ask_for() -> None:
    def chooser(name: str, **options: bool) -> SimpleNamespace:
        @hookimpl(specname="dispatchkit_select_policy", **options)
        def choose() -> str:
            return name

        return SimpleNamespace(choose=choose)

    plugins = PluginSet()
    for name in ("first", "middle", "last"):
        plugins.register_policy(name, Thing)
    plugins.register("a", chooser("first", tryfirst=True))
    plugins.register("b", chooser("middle"))
    plugins.register("c", chooser("last", trylast=True))
    assert plugins.select_policy(SimpleNamespace()) == "first"


EXAMPLES = [
    PolicySwappedEvent(policy="b", epoch=1, previous="a"),
    PolicyErrorEvent(policy="b", method="decide", reason="raised KeyError"),
    CaptureEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8, num_bytes=4096),
    CaptureFailedEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8, reason="host_sync"),
    EvictEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8, reason="budget"),
]


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.callback)
def test_each_event_reaches_the_observers_with_its_callback(event: Any) -> None:
    """Two observers receive exactly this event, for any return values."""
    heard: list[Any] = []

    class Listener:
        def __init__(self) -> None:
            setattr(self, event.callback, self.hear)

        def hear(self, event: Any) -> str:
            heard.append(event)
            return "ignored"

    plugins = with_plugin(
        registering("dispatchkit_register_observers", ObserverSpec("ear", Listener))
    )
    assert not plugins.notifier.has_subscribers(type(event))
    plugins.notifier.notify(event)
    for _ in range(2):
        plugins.create_observer("ear")
    assert plugins.notifier.has_subscribers(type(event))
    for one in EXAMPLES:
        plugins.notifier.notify(one)
    assert heard == [event, event]
    assert {type(one) for one in EXAMPLES} == set(EVENTS)


def test_events_are_frozen_and_take_only_keywords() -> None:
    event = EXAMPLES[2]
    with pytest.raises(AttributeError):
        event.num_tokens = 9
    with pytest.raises(TypeError):
        CaptureEvent("FULL/8", "FULL", 8)  # type: ignore[misc]
