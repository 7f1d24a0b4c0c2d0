"""GraphWrapper: plain calls, capture, replay; alone, nested, copied; on the tape."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import CaptureError, ConfigError  # noqa: E402
from dispatchkit.execute import ChurnWarning  # noqa: E402

from dispatchkit_vllm.wrapper import (  # noqa: E402
    BackendDevice,
    GraphWrapper,
    WrapperError,
    WrapperOptions,
    WrapperRules,
    capture_counter,
    capturing_is_enabled,
    set_capturing_enabled,
    set_forward_context,
)


class Doubler(torch.nn.Module):
    """Counts its Python calls; picklable, with accessible attributes."""

    limit = 7

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.num_runs = 0

    def forward(self, x, shift=None):
        self.num_runs += 1
        y = x * self.weight
        return y if shift is None else y + shift


class Switching(Doubler):
    """Computes something else in training."""

    def forward(self, x):
        return super().forward(x) + int(self.training)


class Broken:
    """A callable with an attribute that raises."""

    def __call__(self, x):
        return x

    @property
    def broken(self):
        return self.not_there_inside


class Pair(torch.nn.Module):
    """Two pieces with an eager call between them."""

    def __init__(self, device):
        super().__init__()
        self.first = GraphWrapper(Doubler(), "PIECEWISE", device)
        self.second = GraphWrapper(Doubler(), "PIECEWISE", device)
        self.between = torch.empty(4)  # wrappers copy nothing, so inputs must keep their addresses
        self.num_runs = 0

    def forward(self, x):
        self.num_runs += 1
        return self.second(torch.add(self.first(x), 1, out=self.between))


@pytest.fixture
def device():
    return BackendDevice(TapeBackend())


def run(wrapper, mode, key, *args, **kwargs):
    with torch.no_grad(), set_forward_context(mode, key):
        return wrapper(*args, **kwargs)


def test_captures_once_for_each_key_and_replays_after(device):
    inner = Doubler()
    wrapper = GraphWrapper(inner, "FULL", device)
    before = capture_counter.num_captured
    x = torch.ones(4)
    for step in range(3):
        x.fill_(step)
        assert torch.equal(run(wrapper, "FULL", "four", x), torch.full((4,), 2.0 * step))
    y = torch.ones(8)
    assert torch.equal(run(wrapper, "FULL", "eight", y), torch.full((8,), 2.0))
    assert inner.num_runs == 2
    assert capture_counter.num_captured == before + 2
    assert list(wrapper.entries) == ["four", "eight"]


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_passes_through_in_another_mode(device, mode):
    wrapper = GraphWrapper(Doubler(), "FULL", device)
    x = torch.ones(4)
    for _ in range(2):
        run(wrapper, mode, "key", x)
    assert wrapper.num_runs == 2
    assert wrapper.entries == {}


def test_passes_through_without_a_context(device):
    wrapper = GraphWrapper(Doubler(), "FULL", device)
    wrapper(torch.ones(2))
    assert wrapper.num_runs == 1
    assert wrapper.entries == {}


def test_full_around_piecewise_exactly_one_layer_acts(device):
    pair = Pair(device)
    whole = GraphWrapper(pair, "FULL", device)
    x = torch.ones(4)
    runs = []
    for mode in ("NONE", "PIECEWISE", "PIECEWISE", "FULL", "FULL"):
        x.add_(1)
        assert torch.equal(run(whole, mode, "key", x), (x * 2 + 1) * 2)
        runs.append((pair.num_runs, pair.first.unwrap().num_runs))
    # The model's Python ran in all but the last step; the pieces' did not in the second piecewise
    # step.
    assert runs == [(1, 1), (2, 2), (3, 2), (4, 3), (4, 3)]
    assert [len(each.entries) for each in (whole, pair.first, pair.second)] == [1, 1, 1]


def test_a_key_that_failed_is_captured_at_the_next_call(device):
    inner = Doubler()
    wrapper = GraphWrapper(inner, "FULL", device)
    x = torch.ones(2)
    with pytest.raises(CaptureError):
        run(wrapper, "FULL", "key", x, shift="text")
    assert wrapper.entries["key"].cudagraph is None
    assert torch.equal(run(wrapper, "FULL", "key", x), torch.full((2,), 2.0))


def test_capturing_can_be_switched_off_and_replays_go_on(device):
    wrapper = GraphWrapper(Doubler(), "FULL", device)
    x = torch.ones(2)
    run(wrapper, "FULL", "known", x)
    set_capturing_enabled(False)
    try:
        assert not capturing_is_enabled()
        with pytest.raises(CaptureError, match="captures are disabled") as caught:
            run(wrapper, "FULL", "new", x)
        assert caught.value.reason == "not_permitted"
        assert torch.equal(run(wrapper, "FULL", "known", x), torch.full((2,), 2.0))
    finally:
        set_capturing_enabled(True)
    assert torch.equal(run(wrapper, "FULL", "new", x), torch.full((2,), 2.0))


def test_a_step_in_its_mode_needs_a_descriptor(device):
    wrapper = GraphWrapper(Doubler(), "FULL", device)
    with pytest.raises(WrapperError, match="needs a descriptor"):
        run(wrapper, "FULL", None, torch.ones(2))
    assert wrapper.entries == {}


def test_moved_inputs_are_found_in_debug_mode(device, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    wrapper = GraphWrapper(Doubler(), "FULL", device)
    x, moved = torch.ones(2), torch.ones(2)
    run(wrapper, "FULL", "key", x)
    with pytest.raises(AssertionError, match="Copy the values into the captured"):
        run(wrapper, "FULL", "key", moved)
    run(wrapper, "FULL", "key", x)
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    quiet = GraphWrapper(Doubler(), "FULL", device)
    run(quiet, "FULL", "key", x)
    run(quiet, "FULL", "key", moved)  # not checked outside debug mode


def test_the_collector_rests_where_asked(device):
    states = []

    def note(x):
        states.append(gc.isenabled())
        return x + 1

    for disabled in (True, False):
        options = WrapperOptions(gc_disable=disabled)
        run(GraphWrapper(note, "FULL", device, options=options), "FULL", "key", torch.ones(2))
    assert states[0] is False
    assert gc.isenabled()


@pytest.mark.parametrize("weak", [True, False])
def test_nested_outputs_come_back_in_their_form(device, weak):
    def step(x):
        return {"sum": x.sum(), "parts": [x + 1, (x * 2, "text", 3)]}

    wrapper = GraphWrapper(step, "FULL", device, options=WrapperOptions(weak_ref_output=weak))
    x = torch.ones(2)
    run(wrapper, "FULL", "key", x)
    x.fill_(3)
    got = run(wrapper, "FULL", "key", x)
    assert got["sum"].item() == 6
    assert torch.equal(got["parts"][0], torch.full((2,), 4.0))
    assert torch.equal(got["parts"][1][0], torch.full((2,), 6.0))
    assert got["parts"][1][1:] == ("text", 3)


def test_cleared_graphs_are_captured_anew(device):
    first, second = (GraphWrapper(Doubler(), "FULL", device) for _ in range(2))
    x = torch.ones(2)
    for wrapper in (first, second):
        run(wrapper, "FULL", "key", x)
    first.clear_graphs()
    assert first.entries == {}
    assert len(second.entries) == 1
    run(first, "FULL", "key", x)
    assert first.num_runs == 2
    GraphWrapper.clear_all_graphs()
    assert first.entries == second.entries == {}


def test_mode_none_and_a_wrong_device_are_refused():
    with pytest.raises(AssertionError, match="PIECEWISE or FULL"):
        GraphWrapper(Doubler(), "NONE", "tape")
    with pytest.raises(ConfigError, match=r"device must be a backend, .* or a WrapperDevice, got"):
        GraphWrapper(Doubler(), "FULL", object())
    pairs = GraphWrapper(Doubler(), "FULL_AND_PIECEWISE", "tape")  # accepted, but matches no step
    run(pairs, "FULL", "key", torch.ones(2))
    assert pairs.entries == {}


# -- behaviour as the module ----------------------------------------------------------------


def test_attributes_reach_through_both_ways(device):
    """Setting and reading use the module; saved state has the plain module's names."""
    inner = Doubler()
    wrapper = GraphWrapper(inner, "FULL", device)
    assert wrapper.limit == 7
    assert list(wrapper.state_dict()) == ["weight"]
    wrapper.extra = 5
    assert inner.extra == wrapper.extra == 5
    wrapper.eval()
    assert not inner.training
    assert wrapper.unwrap() is inner
    assert GraphWrapper(wrapper, "PIECEWISE", device).unwrap() is inner


@pytest.mark.parametrize("through", ["wrapper", "module"])
def test_a_switched_or_moved_module_is_not_replayed(device, through):
    """Earlier graphs are released, and the next call captures again."""
    inner = Switching()
    wrapper = GraphWrapper(inner, "FULL", device)
    asked = wrapper if through == "wrapper" else inner
    x = torch.ones(2)
    assert run(wrapper, "FULL", "key", x).tolist() == [3.0, 3.0]
    asked.eval()
    with pytest.warns(ChurnWarning, match=r"capture of key.* captured again"):
        assert run(wrapper, "FULL", "key", x).tolist() == [2.0, 2.0]
    assert run(wrapper, "FULL", "key", x).tolist() == [2.0, 2.0]
    asked.double()
    assert run(wrapper, "FULL", "key", x).dtype is torch.float64
    assert len(wrapper.entries) == 1
    before = inner.num_runs
    run(wrapper, "FULL", "key", x)
    assert inner.num_runs == before
    twin = copy.deepcopy(wrapper)
    run(twin, "FULL", "key", x)
    twin.train()
    with pytest.warns(ChurnWarning):
        assert run(twin, "FULL", "key", x).tolist() == [3.0, 3.0]
    assert run(wrapper, "FULL", "key", x).tolist() == [2.0, 2.0]


def test_a_switched_module_keeps_its_graph_while_capturing_is_off(device):
    """The call in training is refused; after switching back, the earlier graph is used again."""
    inner = Switching().eval()
    wrapper = GraphWrapper(inner, "FULL", device)
    x = torch.ones(2)
    run(wrapper, "FULL", "key", x)
    set_capturing_enabled(False)
    try:
        inner.train()
        with pytest.raises(CaptureError, match=r"capture of key, and captures are disabled\. Undo"):
            run(wrapper, "FULL", "key", x)
        inner.eval()
        assert run(wrapper, "FULL", "key", x).tolist() == [2.0, 2.0]
    finally:
        set_capturing_enabled(True)
    assert inner.num_runs == 1


def test_autocast_does_not_make_a_wrapper_capture_anew(device):
    """Only the module matters; a caller that needs both uses a descriptor for each."""
    inner = Doubler()
    wrapper = GraphWrapper(inner, "FULL", device)
    x = torch.ones(2)
    for number in range(6):
        with torch.autocast("cpu", enabled=number % 2 == 1):
            assert run(wrapper, "FULL", "key", x).tolist() == [2.0, 2.0]
    assert inner.num_runs == 1


def test_rules_of_a_release_may_replay_whatever_was_switched(device):
    """vLLM does the same, because its modules are never switched."""
    inner = Switching()
    wrapper = GraphWrapper(inner, "FULL", device, rules=WrapperRules(guards_module=False))
    x = torch.ones(2)
    run(wrapper, "FULL", "key", x)
    inner.eval()
    assert run(wrapper, "FULL", "key", x).tolist() == [3.0, 3.0]


def test_a_missing_attribute_is_told_from_one_that_breaks_inside(device):
    """A short message for a missing one; an error inside a real attribute is unchanged."""
    wrapper = GraphWrapper(Doubler(), "FULL", device)
    with pytest.raises(AttributeError, match="neither GraphWrapper nor the wrapped Doubler"):
        _ = wrapper.nowhere
    with pytest.raises(AttributeError, match="not_there_inside"):
        _ = GraphWrapper(Broken(), "FULL", device).broken
    assert not hasattr(wrapper, "__deepcopy__")


def test_half_built_objects_do_not_recurse():
    """Copying and unpickling create them so."""
    bare = GraphWrapper.__new__(GraphWrapper)
    for name in ("runnable", "entries", "anything", "__setstate__x"):
        with pytest.raises(AttributeError):
            getattr(bare, name)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))],  # noqa: S301
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_start_without_graphs(device, duplicate):
    """Each kind of copy captures its own graphs."""
    wrapper = GraphWrapper(Doubler(), "FULL", device)
    x = torch.ones(2)
    run(wrapper, "FULL", "key", x)
    twin = duplicate(wrapper)
    assert twin.entries == {}
    assert len(wrapper.entries) == 1
    assert torch.equal(run(twin, "FULL", "key", x), torch.full((2,), 2.0))
    assert list(twin.state_dict()) == ["weight"]
