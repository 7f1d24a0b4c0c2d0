"""The registry: transitions, order of covering keys, and listeners."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import DescriptorError, RegistryError
from dispatchkit.keys import Batch, BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.registry import GraphEntry, GraphRegistry, KeyState, RegistryEvent
from dispatchkit.testing import apply_change, batches, changes, configs, graph_keys

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


def key(num_tokens, mode=PIECEWISE, **facts):
    return GraphKey(mode, BatchDescriptor(num_tokens, **facts))


@pytest.fixture
def registry():
    registry = GraphRegistry()
    registry.declare([key(8), key(16), key(8, FULL)])
    return registry


# -- life of a key ------------------------------------------------------------------------


def test_declared_key_has_no_graph(registry):
    entry = registry.get(key(8))
    assert entry.state is KeyState.DECLARED
    assert entry.graph is None
    assert entry.attempts == 0
    assert list(registry) == [key(8), key(16), key(8, FULL)]
    assert len(registry) == 3


@pytest.mark.parametrize("keys", [3, [3], "FULL"])
def test_only_keys_are_declared(keys):
    registry = GraphRegistry()
    with pytest.raises(
        DescriptorError, match=r"keys(\[0\] must be a GraphKey| must be a list of GraphKeys), got"
    ):
        registry.declare(keys)
    assert len(registry) == 0


def test_entry_takes_no_memory_and_is_told_without_its_graph():
    """A graph may be any object; comparisons use only keys, states and numbers."""
    entry = GraphEntry(key(8), graph="something large")
    assert entry.num_bytes == 0
    assert "something large" not in repr(entry)
    assert entry == GraphEntry(key(8), graph="another")


def test_unknown_key_is_not_in_it(registry):
    assert key(9) not in registry
    assert registry.get(key(9)) is None
    assert "something" not in registry


def test_captured_key_holds_its_graph_and_bytes(registry):
    graph = object()
    entry = registry.captured(key(8), graph, num_bytes=4096)
    assert registry.get(key(8)) is entry
    assert (entry.state, entry.graph, entry.num_bytes) == (KeyState.CAPTURED, graph, 4096)
    assert registry.captured(key(16), graph).num_bytes == 0


def test_declaring_again_keeps_a_graph(registry):
    entry = registry.captured(key(8), object())
    registry.declare([key(8), key(32)])
    assert registry.get(key(8)) is entry
    assert key(32) in registry


def test_failures_are_counted_until_a_capture_succeeds(registry):
    """The capturer bounds retries by this count."""
    registry.failed(key(8), "host_sync")
    entry = registry.failed(key(8), "out_of_memory")
    assert (entry.state, entry.attempts, entry.reason) == (KeyState.FAILED, 2, "out_of_memory")
    entry = registry.captured(key(8), object())
    assert (entry.attempts, entry.reason) == (0, "")


@pytest.mark.parametrize("lose", ["failed", "evicted"])
def test_a_lost_graph_is_let_go(registry, lose):
    """Otherwise an evicted graph would keep its memory through its entry."""
    registry.captured(key(8), object(), num_bytes=10)
    entry = getattr(registry, lose)(key(8), "reason")
    assert (entry.graph, entry.num_bytes, entry.reason) == (None, 0, "reason")


def test_stale_graph_is_kept_but_marked(registry):
    """A replay in flight may still read it."""
    graph = object()
    registry.captured(key(8), graph)
    entry = registry.stale(key(8), "weights moved")
    assert (entry.state, entry.graph) == (KeyState.STALE, graph)
    assert registry.evicted(key(8)).state is KeyState.EVICTED


@pytest.mark.parametrize(
    ("before", "act"),
    [
        ("declared", "evicted"),
        ("declared", "stale"),
        ("failed", "evicted"),
        ("failed", "stale"),
        ("evicted", "evicted"),
        ("evicted", "stale"),
        ("stale", "stale"),
    ],
)
def test_impossible_transition_is_refused(registry, before, act):
    if before in ("evicted", "stale"):
        registry.captured(key(8), object())
    if before != "declared":
        getattr(registry, before)(key(8), "reason")
    entry = registry.get(key(8))
    with pytest.raises(RegistryError, match=f"is {before}; only captured"):
        getattr(registry, act)(key(8), "again")
    assert registry.get(key(8)) is entry


@pytest.mark.parametrize("act", ["captured", "failed", "evicted", "stale"])
def test_key_must_be_declared_first(registry, act):
    with pytest.raises(RegistryError, match=r"not declared\. Declare it before"):
        getattr(registry, act)(key(9), "x")


@pytest.mark.parametrize("state", ["evicted", "failed", "stale", "captured"])
def test_any_key_may_be_captured_again(registry, state):
    registry.captured(key(8), object())
    if state != "captured":
        getattr(registry, state)(key(8), "reason")
    graph = object()
    assert registry.captured(key(8), graph).graph is graph


def test_forgotten_key_is_gone_everywhere(registry):
    registry.set_enabled(False, key=key(8))
    registry.forget(key(8))
    assert key(8) not in registry
    assert list(registry.covering(Batch(8), PIECEWISE)) == [key(16)]
    registry.declare([key(8)])
    assert registry.is_enabled(key(8)), "a key declared anew starts enabled"
    with pytest.raises(RegistryError, match="not declared"):
        registry.forget(key(9))


def test_clear_forgets_all(registry):
    registry.clear()
    assert len(registry) == 0
    assert list(registry.covering(Batch(1), FULL)) == []


def test_entries_cannot_be_written(registry):
    with pytest.raises(TypeError):
        registry.entries[key(8)] = None
    with pytest.raises(AttributeError):
        registry.get(key(8)).state = KeyState.CAPTURED


# -- switches -------------------------------------------------------------------------------


def test_disabled_mode_disables_its_keys_only(registry):
    registry.set_enabled(False, mode=FULL)
    assert not registry.is_enabled(key(8, FULL))
    assert registry.is_enabled(key(8))
    assert registry.disabled_modes == {FULL}
    registry.set_enabled(True, mode=FULL)
    assert registry.is_enabled(key(8, FULL))


def test_enabling_a_mode_leaves_a_disabled_key_off(registry):
    registry.set_enabled(False, key=key(8))
    registry.set_enabled(False, mode=PIECEWISE)
    registry.set_enabled(True, mode=PIECEWISE)
    assert not registry.is_enabled(key(8))
    assert registry.is_enabled(key(16))


@pytest.mark.parametrize(
    ("given", "said"), [({}, "nothing"), ({"mode": RuntimeMode.NONE}, "mode NONE")]
)
def test_switching_nothing_is_refused(registry, given, said):
    """If it were accepted, callers would assume an effect."""
    with pytest.raises(RegistryError, match=f"needs mode PIECEWISE or FULL, or a key; got {said}"):
        registry.set_enabled(False, **given)


def test_disabling_an_unknown_key_changes_nothing(registry):
    with pytest.raises(RegistryError, match="not declared"):
        registry.set_enabled(False, key=key(9), mode=FULL)
    assert registry.disabled_modes == frozenset()


# -- listeners ------------------------------------------------------------------------------


@pytest.fixture
def told(registry):
    events = []
    registry.subscribe(events.append)
    return events


def test_every_change_is_told_with_before_and_after(registry, told):
    registry.declare([key(32), key(32)])
    registry.captured(key(32), object())
    registry.stale(key(32), "weights moved")
    registry.evicted(key(32), "budget")
    registry.failed(key(32), "error")
    registry.forget(key(32))
    assert told == [
        RegistryEvent(key(32), None, KeyState.DECLARED),
        RegistryEvent(key(32), KeyState.DECLARED, KeyState.CAPTURED),
        RegistryEvent(key(32), KeyState.CAPTURED, KeyState.STALE, "weights moved"),
        RegistryEvent(key(32), KeyState.STALE, KeyState.EVICTED, "budget"),
        RegistryEvent(key(32), KeyState.EVICTED, KeyState.FAILED, "error"),
        RegistryEvent(key(32), KeyState.FAILED, None),
    ]


def test_listener_sees_the_new_state(registry):
    """A table that queries during the event must not get the old answer."""
    seen = []
    registry.subscribe(lambda event: seen.append(registry.get(event.key).state))
    registry.captured(key(8), object())
    assert seen == [KeyState.CAPTURED]


def test_refused_change_is_not_told(registry, told):
    with pytest.raises(RegistryError):
        registry.evicted(key(8))
    assert told == []


def test_switching_a_mode_tells_of_each_key_largest_first(registry, told):
    """The event of the largest key empties most of a table, and the others empty the rest."""
    registry.set_enabled(False, mode=PIECEWISE)
    assert told == [
        RegistryEvent(key(16), KeyState.DECLARED, KeyState.DECLARED, "disabled", by_mode=True),
        RegistryEvent(key(8), KeyState.DECLARED, KeyState.DECLARED, "disabled", by_mode=True),
    ]
    registry.set_enabled(False, key=key(8))
    assert told[-1] == RegistryEvent(key(8), KeyState.DECLARED, KeyState.DECLARED, "disabled")


def test_end_of_subscription_ends_one_listener(registry, told):
    other = []
    unsubscribe = registry.subscribe(other.append)
    unsubscribe()
    registry.captured(key(8), object())
    assert (len(told), other) == (1, [])


def test_listener_is_told_under_the_lock(registry):
    """No other writer runs in between, so tables follow the order of changes."""
    seen = []

    def try_to_write(event):
        done = threading.Event()
        writer = threading.Thread(
            target=lambda: (registry.captured(key(16), object()), done.set()), daemon=True
        )
        writer.start()
        seen.append((event.key, registry.get(key(16)).state, writer))

    unsubscribe = registry.subscribe(try_to_write)
    registry.lock.acquire()
    registry.captured(key(8), object())
    unsubscribe()
    (changed, state, writer) = seen[0]
    assert (changed, state) == (key(8), KeyState.DECLARED)
    registry.lock.release()
    writer.join(timeout=30)
    assert registry.get(key(16)).state is KeyState.CAPTURED


# -- covering keys --------------------------------------------------------------------------


def order_of(each, serial):
    own = each.descriptor
    special = 0 if own.uniform else 1 if own.max_query_len is not None else 2
    return (own.num_tokens, own.num_active_loras, special, serial)


@given(st.data())
def test_covering_is_all_that_covers_in_one_total_order(data):
    """Compared with brute force: all covering keys of the mode, by size, adapters, kind, age."""
    config = data.draw(configs())
    keys = data.draw(st.lists(graph_keys(config), max_size=25, unique=True))
    registry = GraphRegistry()
    first, later = keys[::2], keys[1::2]
    registry.declare(first)
    registry.declare(later)
    forgotten = set(data.draw(st.lists(st.sampled_from(keys), max_size=3)) if keys else ())
    for each in forgotten:
        registry.forget(each)
    declared = [each for each in (*first, *later) if each not in forgotten]
    serials = {each: serial for serial, each in enumerate(declared)}
    for batch in data.draw(st.lists(batches(config), min_size=1, max_size=5)):
        for mode in (FULL, PIECEWISE):
            expected = [each for each in declared if each.mode is mode and each.covers(batch)]
            expected.sort(key=lambda each: order_of(each, serials[each]))
            assert list(registry.covering(batch, mode)) == expected


def test_covering_prefers_fewer_adapters_then_the_more_special():
    registry = GraphRegistry()
    mixed, uniform = key(8, FULL), key(8, FULL, num_reqs=8, uniform=True)
    varlen = key(8, FULL, max_query_len=1)
    loras = key(8, FULL, num_active_loras=2)
    uniform_loras = key(8, FULL, num_reqs=8, uniform=True, num_active_loras=2)
    larger = key(9, FULL)
    registry.declare([larger, loras, uniform_loras, mixed, varlen, uniform])
    batch = Batch(7, uniform=True, query_len=1, max_query_len=1)
    assert list(registry.covering(batch, FULL)) == [
        *(uniform, varlen, mixed),
        *(uniform_loras, loras),
        larger,
    ]


def test_covering_walk_survives_changes_to_the_registry(registry):
    """Readers hold no lock: an iteration continues over its initial keys."""
    walk = registry.covering(Batch(1), PIECEWISE)
    assert next(walk) == key(8)
    registry.declare([key(12)])
    registry.forget(key(16))
    assert list(walk) == [key(16)]
    assert list(registry.covering(Batch(1), PIECEWISE)) == [key(8), key(12)]


@given(st.data())
def test_events_tell_the_whole_story(data):
    """Listeners can derive every state: events are complete and in order."""
    config = data.draw(configs())
    keys = data.draw(st.lists(graph_keys(config), min_size=1, max_size=6, unique=True))
    registry = GraphRegistry()
    known = {}

    def listen(event):
        assert event.before == known.get(event.key)
        known[event.key] = event.after

    registry.subscribe(listen)
    registry.declare(keys)
    for change in data.draw(st.lists(changes(keys), max_size=15)):
        apply_change(registry, change)
        assert known == {each: entry.state for each, entry in registry.entries.items()}


def test_many_writers_lose_no_change():
    """Transitions read and write under the lock."""
    registry = GraphRegistry()
    registry.declare([key(8)])
    threads = [
        threading.Thread(target=lambda: [registry.failed(key(8), "x") for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert registry.get(key(8)).attempts == 800
