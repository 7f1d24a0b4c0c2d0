"""Exceptions of observers affect neither other observers nor the step."""

from __future__ import annotations

import logging
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dispatchkit.hookspecs import ObserverSpec, hookimpl
from dispatchkit.observe.events import EVENTS, MAX_FAULTS, CaptureEvent, EvictEvent, Notifier
from dispatchkit.plugins import PluginError, PluginSet

CAPTURE = CaptureEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8)
EVICT = EvictEvent(key="FULL/8", runtime_mode="FULL", num_tokens=8)


def listening(plugins: PluginSet, name: str, fault: BaseException | None = None) -> list[Any]:
    """Attach a plugin's observer of captures; return the list of its events."""
    heard: list[Any] = []

    class Listener:
        def on_capture(self, event: CaptureEvent) -> None:
            heard.append(event)
            if fault is not None:
                raise fault

    @hookimpl
    def dispatchkit_register_observers() -> list[ObserverSpec]:
        return [ObserverSpec(name, Listener)]

    hooks = SimpleNamespace(dispatchkit_register_observers=dispatchkit_register_observers)
    plugins.register(f"plugin-{name}", hooks)
    plugins.create_observer(name)
    return heard


@pytest.mark.parametrize("fault", [ValueError("broken"), SystemExit(1)])
def test_a_raising_observer_is_named_and_the_others_are_told(
    fault: BaseException, caplog: Any
) -> None:
    """Case 46, at any position of the broken one."""
    plugins = PluginSet()
    first = listening(plugins, "first")
    listening(plugins, "bad", fault)
    last = listening(plugins, "last")
    plugins.notifier.notify(CAPTURE)
    assert first == last == [CAPTURE]
    assert "'bad' (passed in as 'plugin-bad')" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


def test_repeated_faults_switch_an_observer_off_and_the_list_says_so(caplog: Any, row: Any) -> None:
    """After three faults in a row it is not called again."""
    plugins = PluginSet()
    heard = listening(plugins, "bad", ValueError("broken"))
    for _ in range(MAX_FAULTS + 2):
        plugins.notifier.notify(CAPTURE)
    assert len(heard) == MAX_FAULTS
    assert "is disabled" in caplog.text
    assert not plugins.notifier.has_subscribers(CaptureEvent)
    bad = row(plugins, "plugin-bad")
    assert bad.state == "loaded"
    assert "on_capture is disabled" in bad.reason
    assert "ValueError: broken" in bad.reason


def test_only_faults_in_a_row_count() -> None:
    notifier = Notifier(max_faults=2)
    heard = []

    def every_second_time(event: Any) -> None:
        heard.append(event)
        if len(heard) % 2:
            raise ValueError

    notifier.subscribe(CaptureEvent, every_second_time, "odd")
    for _ in range(10):
        notifier.notify(CAPTURE)
    assert len(heard) == 10


def test_faults_with_one_event_leave_the_other_events_of_an_observer_alone() -> None:
    notifier = Notifier(max_faults=1)
    evicted = []

    class Half:
        def on_capture(self, event: Any) -> None:
            raise ValueError

        def on_evict(self, event: Any) -> None:
            evicted.append(event)

    assert len(notifier.attach(Half(), "half")) == 2
    notifier.notify(CAPTURE)
    notifier.notify(EVICT)
    assert evicted == [EVICT]
    assert not notifier.has_subscribers(CaptureEvent)


def test_an_interrupt_goes_through() -> None:
    notifier = Notifier()

    def interrupted(event: Any) -> None:
        raise KeyboardInterrupt

    notifier.subscribe(CaptureEvent, interrupted, "ctrl-c")
    with pytest.raises(KeyboardInterrupt):
        notifier.notify(CAPTURE)


def test_unsubscribing_during_an_event_and_twice() -> None:
    notifier = Notifier()
    heard = []
    later = notifier.subscribe(CaptureEvent, lambda event: heard.append("later"), "later")

    def first(event: Any) -> None:
        heard.append("first")
        notifier.unsubscribe(later)
        notifier.unsubscribe(later)

    notifier.subscribe(CaptureEvent, first, "first")
    notifier.notify(CAPTURE)
    notifier.notify(CAPTURE)
    assert heard == ["later", "first", "first"]


def test_many_threads_tell_and_subscribe_without_losing_any() -> None:
    """Each event reaches the first subscriber exactly once."""
    notifier = Notifier()
    heard: list[Any] = []
    notifier.subscribe(CaptureEvent, heard.append, "all")
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for _ in range(50):
            notifier.notify(CAPTURE)
            notifier.unsubscribe(notifier.subscribe(CaptureEvent, lambda event: None, "short"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 8 * 50


def test_a_deciding_hook_that_raises_is_named_among_several() -> None:
    """The error names the plugin that raised, not the first or last one."""

    def chooser(fault: BaseException | None) -> SimpleNamespace:
        @hookimpl
        def dispatchkit_select_policy(config: Any) -> None:
            if fault is not None:
                raise fault

        return SimpleNamespace(dispatchkit_select_policy=dispatchkit_select_policy)

    for fault in (ValueError("broken"), SystemExit(2)):
        plugins = PluginSet()
        plugins.register("first", chooser(None))
        plugins.register("bad", chooser(fault))
        plugins.register("last", chooser(None))
        # All three share one code object, so tracebacks cannot distinguish them.
        with pytest.raises(PluginError) as raised:
            plugins.select_policy(SimpleNamespace())
        assert raised.value.origin.plugin == "bad"
        assert raised.value.__cause__ is fault
        assert re.search(r"\(test_observers\.py:\d+\)\.", str(raised.value))


def test_every_event_has_a_callback_and_a_frozen_class_of_its_own() -> None:
    assert len({one.callback for one in EVENTS}) == len(EVENTS)
    assert all(one.__setattr__ is not object.__setattr__ for one in EVENTS)
