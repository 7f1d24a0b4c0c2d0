"""A third party's names for dispatchers: graphs, a policy and statistics in one object."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dispatchkit.errors import (
    ConfigError,
    DescriptorError,
    DispatchkitError,
    RegistrationError,
)

from dispatchkit_vllm.facade import policies
from dispatchkit_vllm.facade.policies import (
    AdaptiveDispatchPolicy,
    CompositeDispatcher,
    CudagraphDispatcher,
    DefaultDispatchPolicy,
    DispatchMode,
    DispatchPolicy,
    DispatchStats,
    NotBuiltError,
    StreamDispatcher,
    create_dispatch_key,
    get_padded_key,
)

EAGER, PIECEWISE, FULL = DispatchMode.EAGER, DispatchMode.PIECEWISE, DispatchMode.FULL


def dispatcher(policy: DispatchPolicy | None = None, **options) -> CudagraphDispatcher:
    return CudagraphDispatcher(lambda key: ("eager", key.num_tokens), policy, **options)


def test_replays_the_graph_of_a_key_and_runs_others_eager():
    made = dispatcher()
    four, five = create_dispatch_key(4, 2), create_dispatch_key(5, 2)
    made.register_graph(four, lambda: "replayed", input_ptrs=[1, 2])
    assert made.dispatch(four) == "replayed"
    assert made.dispatch(five) == ("eager", 5)
    assert made.has_graph(four)
    assert not made.has_graph(five)
    assert made.get_graph(four).input_ptrs == (1, 2)
    assert made.get_graph(five) is None
    assert (made.stats.num_full, made.stats.num_eager, made.stats.graph_ratio) == (1, 1, 0.5)
    assert DispatchStats().graph_ratio == 0.0


def test_every_field_of_the_key_tells_graphs_apart():
    """Variants of one size are separate."""
    made = dispatcher()
    made.register_graph(create_dispatch_key(4, 2, 128, False), lambda: "replayed")
    for other in ((4, 1, 128, False), (4, 2, 64, False), (4, 2, 128, True)):
        assert made.dispatch(create_dispatch_key(*other)) == ("eager", 4)


def test_full_goes_before_piecewise_unless_preferred_otherwise():
    key = create_dispatch_key(4)
    for prefer, expected in ((False, "full"), (True, "piecewise")):
        made = dispatcher(DefaultDispatchPolicy(prefer_piecewise=prefer))
        made.register_graph(key, lambda: "full")
        made.register_graph(key, lambda: "piecewise", mode=PIECEWISE)
        assert made.dispatch(key) == expected


def test_a_disabled_mode_is_not_replayed():
    made, key = dispatcher(), create_dispatch_key(4)
    made.register_graph(key, lambda: "full")
    made.disable_mode(FULL)
    assert not made.has_graph(key)
    assert made.dispatch(key) == ("eager", 4)
    made.enable_mode(FULL)
    assert made.dispatch(key) == "full"


def test_the_policy_bounds_the_tokens():
    made = dispatcher(DefaultDispatchPolicy(4, 8))
    for num_tokens in (3, 4, 8, 9):
        made.register_graph(create_dispatch_key(num_tokens), lambda: "full")
    answers = [made.dispatch(create_dispatch_key(n)) for n in (3, 4, 8, 9)]
    assert answers == [("eager", 3), "full", "full", ("eager", 9)]


def test_the_graph_not_used_for_longest_makes_room():
    made = dispatcher(max_cached_graphs=2)
    keys = [create_dispatch_key(n) for n in (1, 2, 3)]
    for key in keys[:2]:
        made.register_graph(key, lambda: "full")
    made.dispatch(keys[0])
    made.register_graph(keys[2], lambda: "full")
    assert [made.has_graph(key) for key in keys] == [True, False, True]
    assert len(made.registry) == 2
    made.clear_cache()
    assert len(made.registry) == 0


def test_registering_again_replaces_the_graph():
    made, key = dispatcher(max_cached_graphs=1), create_dispatch_key(4)
    made.register_graph(key, lambda: "first")
    made.register_graph(key, lambda: "second")
    assert made.dispatch(key) == "second"


def test_a_failing_graph_is_the_callers_error_and_counted():
    made, key = dispatcher(), create_dispatch_key(4)

    def fail():
        raise RuntimeError("launch refused")

    made.register_graph(key, fail)
    with pytest.raises(RuntimeError, match="launch refused"):
        made.dispatch(key)
    assert made.stats.num_full == 1


@pytest.mark.parametrize("bad", [(0,), (-1,), (2.5,), (True,), (4, 5), (4, 0), (4, 2, -1)])
def test_impossible_keys_are_refused(bad):
    with pytest.raises(ConfigError):
        create_dispatch_key(*bad)


def test_keys_are_padded_to_a_multiple():
    key = create_dispatch_key(5, 2, 64, True)
    assert get_padded_key(key, 4) == create_dispatch_key(8, 2, 64, True)
    assert get_padded_key(key, 1) == key
    with pytest.raises(ConfigError, match="pad_to"):
        get_padded_key(key, 0)


def test_eager_has_no_graph_and_an_empty_range_is_refused():
    with pytest.raises(DescriptorError):
        dispatcher().register_graph(create_dispatch_key(4), lambda: None, mode=EAGER)
    with pytest.raises(ConfigError, match="min_tokens_for_graph"):
        DefaultDispatchPolicy(9, 8)


# -- several dispatchers ------------------------------------------------------------------


def with_graphs(name: str, *sizes: int) -> CudagraphDispatcher:
    made = CudagraphDispatcher(lambda key: f"{name} eager")
    for size in sizes:
        made.register_graph(create_dispatch_key(size), lambda: name)
    return made


def test_the_highest_priority_with_a_graph_runs_the_batch():
    both = CompositeDispatcher()
    both.add_dispatcher("low", with_graphs("low", 1, 2), priority=1)
    both.add_dispatcher("high", with_graphs("high", 2, 3), priority=5)
    both.add_dispatcher("later", with_graphs("later", 2, 3), priority=5)
    answers = [both.dispatch(create_dispatch_key(n)) for n in (1, 2, 3, 4)]
    assert answers == ["low", "high", "high", "high eager"]


def test_a_composite_of_one_is_that_one():
    one = CompositeDispatcher()
    one.add_dispatcher("only", with_graphs("only", 2))
    assert [one.dispatch(create_dispatch_key(n)) for n in (2, 3)] == ["only", "only eager"]


def test_a_dispatcher_that_raises_when_asked_is_passed_over_and_counted(caplog):
    class Broken:
        def has_graph(self, key):
            raise RuntimeError("broken")

    both = CompositeDispatcher()
    both.add_dispatcher("broken", Broken(), priority=9)
    both.add_dispatcher("sound", with_graphs("sound", 2))
    assert both.dispatch(create_dispatch_key(2)) == "sound"
    assert both.faults == {"broken": 1, "sound": 0}
    assert "broken" in caplog.text


def test_a_batch_that_fails_is_not_run_again_elsewhere():
    runs = []

    def fail():
        runs.append("first")
        raise RuntimeError("launch refused")

    first = CudagraphDispatcher(lambda key: None)
    first.register_graph(create_dispatch_key(2), fail)
    both = CompositeDispatcher()
    both.add_dispatcher("first", first, priority=1)
    both.add_dispatcher("second", with_graphs("second", 2))
    with pytest.raises(RuntimeError, match="launch refused"):
        both.dispatch(create_dispatch_key(2))
    assert runs == ["first"]


def test_an_empty_composite_and_a_name_taken_are_refused():
    both = CompositeDispatcher()
    with pytest.raises(ConfigError, match="add_dispatcher"):
        both.dispatch(create_dispatch_key(2))
    both.add_dispatcher("one", with_graphs("one"))
    with pytest.raises(RegistrationError, match="'one' is already used"):
        both.add_dispatcher("one", with_graphs("one"))


def test_latencies_choose_the_mode():
    """Graphs are used until eager is known to be faster; of two graphs, the faster is used."""
    policy = AdaptiveDispatchPolicy(history_size=16)
    key = create_dispatch_key(4)
    graphs = (DispatchMode.FULL, DispatchMode.PIECEWISE)
    assert policy.should_use_graph(key, True)
    assert not policy.should_use_graph(key, False)
    for _ in range(4):
        policy.record(key, DispatchMode.FULL, 3.0)
        policy.record(key, DispatchMode.PIECEWISE, 2.0)
    assert policy.select_mode(key, graphs) is DispatchMode.PIECEWISE
    assert policy.should_use_graph(key, True)
    for _ in range(4):
        policy.record(key, DispatchMode.EAGER, 1.0)
    assert not policy.should_use_graph(key, True)
    # Another key is not affected.
    assert policy.should_use_graph(create_dispatch_key(8), True)
    with pytest.raises(ConfigError, match="latency"):
        policy.record(key, DispatchMode.FULL, -1.0)
    with pytest.raises(ConfigError, match="history_size"):
        AdaptiveDispatchPolicy(history_size=2)


def test_a_dispatcher_runs_what_latencies_say():
    policy = AdaptiveDispatchPolicy()
    made = dispatcher(policy)
    key = create_dispatch_key(4)
    made.register_graph(key, lambda: "graph")
    assert made.dispatch(key) == "graph"
    for _ in range(4):
        policy.record(key, DispatchMode.FULL, 3.0)
        policy.record(key, DispatchMode.EAGER, 1.0)
    assert made.dispatch(key) == ("eager", 4)


def test_names_of_what_is_not_installed_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "dispatchkit_adaptive", None)
    with pytest.raises(NotBuiltError, match="pip install dispatchkit-adaptive") as caught:
        AdaptiveDispatchPolicy()
    assert isinstance(caught.value, DispatchkitError)
    assert caught.value.policy == "adaptive"


def test_streams_need_the_distribution_that_brings_lane_policies(monkeypatch):
    monkeypatch.setattr(policies, "load_plugins", lambda: SimpleNamespace(lane_policies={}))
    with pytest.raises(NotBuiltError, match="pip install dispatchkit-multistream"):
        StreamDispatcher(print, 2)


def test_a_key_stays_on_its_stream_and_waits_for_the_caller():
    """On a deferred tape, whose streams are independent, a missing wait gives old values."""
    torch = pytest.importorskip("torch")
    tape = pytest.importorskip("dispatchkit.backends.tape")
    for seed in range(8):
        backend = tape.TapeBackend(scheduler=seed)
        seen = []
        made = StreamDispatcher(seen.append, 3, backend=backend)
        static = {n: torch.zeros(4) for n in (1, 2, 4, 8)}
        for n, tensor in static.items():
            graph = backend.capture(
                lambda tensor=tensor: tensor.add_(1),
                stream=made.streams[made._select_stream(create_dispatch_key(n))],
                pool=backend.new_pool(),
            )
            made.register_graph(create_dispatch_key(n), graph)
        streams = {n: made._select_stream(create_dispatch_key(n)) for n in static}
        assert len(set(streams.values())) > 1
        with backend.use_stream(backend.new_stream()):
            for n, tensor in static.items():
                tensor.fill_(n)
                made.dispatch(create_dispatch_key(n))
                made.dispatch(create_dispatch_key(n))
                assert made._select_stream(create_dispatch_key(n)) == streams[n]
            made.wait()
            results = {n: tensor.clone() for n, tensor in static.items()}
        made.dispatch(create_dispatch_key(3))
        backend.synchronize()
        assert {n: one[0].item() for n, one in results.items()} == {n: n + 2 for n in static}
        assert (made.stats.num_full, made.stats.num_eager, seen) == (8, 1, [create_dispatch_key(3)])


def test_more_streams_than_the_device_gives_are_refused():
    pytest.importorskip("torch")
    tape = pytest.importorskip("dispatchkit.backends.tape")
    with pytest.raises(ConfigError, match=r"All streams of cpu are in use \(max_streams=2\)"):
        StreamDispatcher(print, 3, backend=tape.TapeBackend(max_streams=2))


def test_numbers_may_be_text_and_are_numbers_from_then_on():
    key = create_dispatch_key("6", "2", "0")
    assert (key.num_tokens, key.num_reqs, key.max_seq_len) == (6, 2, 0)
    assert get_padded_key(key, "4").num_tokens == 8
    policy = DefaultDispatchPolicy("2", "9")
    assert policy.should_use_graph(key, graph_available=True)
