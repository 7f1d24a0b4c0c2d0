"""Policy, backend and observers of a runner, given by name, plugin or object."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    Decision,
    DispatchConfig,
    GraphRunner,
    Reason,
    RunnerOptions,
    StaticInput,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError, PolicyError, UnknownNameError  # noqa: E402
from dispatchkit.hookspecs import BackendSpec, PolicySpec, hookimpl  # noqa: E402
from dispatchkit.observe.events import EVENTS, PolicyErrorEvent, PolicySwappedEvent  # noqa: E402
from dispatchkit.observe.timeline import Timeline  # noqa: E402
from dispatchkit.plugins import PluginError, load_plugins  # noqa: E402

INPUTS = {"tokens": StaticInput((None,), "int64")}


class OwnTape(TapeBackend):
    """A plugin's tape, which accepts no device."""


class DeviceTape(TapeBackend):
    """A plugin's tape, which receives its device."""

    def __init__(self, device=None):
        super().__init__()
        self.given = device


def with_backend(name, factory, **options):
    @hookimpl
    def dispatchkit_register_backends():
        return [BackendSpec(name, factory)]

    hooks = SimpleNamespace(dispatchkit_register_backends=dispatchkit_register_backends)
    return load_plugins(allow=["dispatchkit"], extra=[("mine", hooks)], strict=True, **options)


def runner_with(plugins, policy, **settings):
    return GraphRunner(
        lambda tokens: tokens * 2,
        INPUTS,
        sizes=(4, 8),
        policy=policy if plugins is None else plugins.with_policy(policy),
        **settings,
    )


@pytest.mark.parametrize("spec", ["tape", "cpu"])
def test_replacement_of_a_built_in_backend_is_used(policy, spec):
    plugins = with_backend("tape", OwnTape, replace=["tape"])
    runner = runner_with(plugins, policy, backend=spec)
    assert type(runner.backend) is OwnTape
    assert runner.capture().failed == {}
    assert runner(torch.arange(3)).tolist() == [0, 2, 4]


def test_auto_finds_the_replacement_too(policy):
    plugins = with_backend("tape", DeviceTape, replace=["tape"])
    backend = runner_with(plugins, policy, options=RunnerOptions(device="cpu")).backend
    assert type(backend) is DeviceTape
    assert backend.given == torch.device("cpu")


def test_built_in_backends_stay_where_no_replacement_was_asked_for(policy):
    plugins = with_backend("other", OwnTape)
    assert type(runner_with(plugins, policy, backend="tape").backend) is TapeBackend
    assert type(runner_with(plugins, policy, backend="other").backend) is OwnTape


def test_unknown_backend_names_those_of_plugins_too(policy):
    with pytest.raises(UnknownNameError, match="Did you mean 'other'"):
        runner_with(with_backend("other", OwnTape), policy, backend="othr")


# -- the policy -------------------------------------------------------------------------------


def choosing(answer, policy_class):
    class Chooser:
        @hookimpl
        def dispatchkit_register_policies(self):
            return [PolicySpec("vllm", policy_class), PolicySpec("mine", policy_class)]

        @hookimpl
        def dispatchkit_select_policy(self, config):
            return answer(config)

    return load_plugins(allow=["dispatchkit"], extra=[("chooser", Chooser())], strict=True)


def policy_of(runner):
    return runner.dispatcher.policy_origin, type(runner.dispatcher.policy)


def test_plugin_selects_the_policy_where_the_user_names_none(policy):
    """The plugin gets the resolved configuration; it is not asked if the user names one."""
    seen = []

    class Mine(type(policy)):
        pass

    def answer(config):
        seen.append(config)
        return "mine" if config.max_num_tokens > 8 else None

    plugins = choosing(answer, Mine)
    runner = runner_with(plugins, None, backend="tape")
    assert runner.dispatcher.policy_name == "smallest"
    assert isinstance(seen[0], DispatchConfig)
    assert seen[0].sizes == (4, 8)
    runner_with(plugins, "mine", backend="tape")
    runner_with(plugins, Mine(), backend="tape")
    assert len(seen) == 1


def test_selected_policy_takes_the_place_of_the_default(policy):
    made = []

    def factory():
        made.append("mine")
        return policy

    class Chooser:
        @hookimpl
        def dispatchkit_register_policies(self):
            return [PolicySpec("mine", factory)]

        @hookimpl
        def dispatchkit_select_policy(self, config):
            return "mine"

    plugins = load_plugins(allow=["dispatchkit"], extra=[("chooser", Chooser())], strict=True)
    runner = runner_with(plugins, None, backend="tape")
    assert made == ["mine"]
    assert runner.dispatcher.policy is policy
    assert runner.dispatcher.policy_origin == "passed in as 'chooser'"


@pytest.mark.parametrize(("answer", "error"), [("mien", UnknownNameError), (7, PluginError)])
def test_selection_that_cannot_be_used_builds_no_runner(policy, answer, error):
    with pytest.raises(error):
        runner_with(choosing(lambda config: answer, type(policy)), None, backend="tape")


def test_options_need_a_name(policy):
    for given in (policy, None):
        with pytest.raises(ConfigError, match="policy_options"):
            runner_with(None, given, backend="tape", options=RunnerOptions(policy_options={"x": 1}))


# -- events of the policy ---------------------------------------------------------------------


@pytest.fixture
def heard():
    """Return plugins of an observer, and the list of its events except registrations."""
    plugins = load_plugins(allow=())
    events = []
    for kind in EVENTS:
        plugins.notifier.subscribe(kind, events.append, "test")
    return plugins, events


def test_observers_hear_which_policy_decides(heard, policy):
    plugins, events = heard
    runner = runner_with(plugins, policy, backend="tape")
    assert events == [PolicySwappedEvent(policy="smallest", epoch=0)]

    class Other(type(policy)):
        name = "other"

    runner.dispatcher.swap(Other())
    assert events[1:] == [PolicySwappedEvent(policy="other", epoch=1, previous="smallest")]


def test_refused_swap_is_no_event(heard, policy):
    plugins, events = heard
    runner = runner_with(plugins, policy, backend="tape")
    with pytest.raises(PolicyError):
        runner.dispatcher.swap(SimpleNamespace(declare=lambda config: [3], decide=print))
    assert len(events) == 1


class Faulty:
    """Correct at the trial, wrong for five tokens later."""

    name = "faulty"
    armed = False

    def declare(self, config):
        return []

    def decide(self, batch, graphs):
        if self.armed and batch.num_tokens == 5:
            raise LookupError("five")
        return Decision.eager(Reason.NO_KEY)


@pytest.mark.parametrize("strict", [False, True])
def test_observers_hear_of_a_policys_fault_once_for_each_cell(heard, quiet, strict):
    plugins, events = heard
    faulty = Faulty()
    runner = runner_with(plugins, faulty, backend="tape", options=RunnerOptions(strict=strict))
    faulty.armed = True
    if strict:
        with pytest.raises(PolicyError):
            runner(torch.arange(5))
    else:
        with pytest.warns(RuntimeWarning, match="policy_error"):
            runner(torch.arange(5))
        assert runner(torch.arange(5)).tolist() == [0, 2, 4, 6, 8]
    (fault,) = [event for event in events if isinstance(event, PolicyErrorEvent)]
    assert (fault.policy, fault.method, fault.num_tokens, fault.epoch) == (
        "faulty",
        "decide",
        5,
        0,
    )
    assert "LookupError" in fault.reason


def test_observer_that_raises_disturbs_nothing(policy, caplog):
    plugins = load_plugins(allow=())

    def raising(event):
        raise ValueError("observer")

    for kind in EVENTS:
        plugins.notifier.subscribe(kind, raising, "the raising one")
    runner = runner_with(plugins, policy, backend="tape")
    assert runner.capture().failed == {}
    assert runner(torch.arange(3)).tolist() == [0, 2, 4]
    assert "the raising one" in caplog.text


# -- unusable settings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inputs": [StaticInput((None,), "int64")]}, r"inputs must be a dictionary .* got \[Sta"),
        ({"inputs": None}, r"inputs must be given unless example is given\. Write inputs="),
        ({"example": {"x": torch.zeros(2)}}, "example must be omitted .* got {'x': <Tensor of sh"),
        ({"inputs": None, "example": torch.zeros(2)}, "example must be a dictionary"),
        ({"inputs": None, "example": (torch.zeros(2),)}, "example must be a dictionary"),
        ({"sizes": 8}, r"sizes must be a list .*, such as \[8, 16\], got 8"),
        ({"options": {"strict": True}}, "options must be a RunnerOptions"),
        ({"options": RunnerOptions}, r"Pass an instance: RunnerOptions\(\.\.\.\)"),
        ({"backend": TapeBackend}, r"Pass an instance: TapeBackend\(\.\.\.\)"),
        ({"state": torch.zeros(3)}, r"state must be a list of tensors.*state=\[tensor\]"),
    ],
)
def test_setting_of_a_wrong_kind_is_told_by_name(policy, settings, said):
    with pytest.raises(ConfigError, match=said):
        GraphRunner(
            lambda tokens: tokens, **{"inputs": INPUTS, "sizes": [4], "policy": policy} | settings
        )


def test_sizes_given_once_serve_copies_too(policy):
    sizes = (size for size in (4, 8))
    runner = GraphRunner(lambda tokens: tokens, INPUTS, sizes=sizes, policy=policy)
    assert copy.copy(runner).config.sizes == (4, 8)


def test_swap_and_watchers_of_a_wrong_kind_are_told_by_name(policy):
    runner = GraphRunner(lambda tokens: tokens, INPUTS, sizes=[4], policy=policy)
    with pytest.raises(ConfigError, match="sizes must be a list"):
        runner.swap(sizes=4)

    def register(**wrong):
        key = next(iter(runner.registry))
        right = {"key": key, "graph": None, "inputs": {}, "outputs": None}
        runner.controls.register(**{**right, **wrong})

    for call, message in (
        (
            lambda: runner.swap(policy="threshold", policy_options=3),
            "policy_options must be a dict",
        ),
        (lambda: runner.swap(policy=3), "policy must be an object with the methods declare"),
        (lambda: runner.capture(progress=3), "progress must be True, False or a function of"),
        (lambda: runner.capture(again="x"), "again must be True or False"),
        (lambda: runner.freeze(strict="x"), "strict must be True or False"),
        (lambda: runner.invalidate(3), "reason must be a non-empty string"),
        (lambda: runner.controls.set_enabled("x"), "enabled must be True or False"),
        (lambda: runner.controls.set_enabled(True, key=3), r"a GraphKey, got 3\. list\("),
        (lambda: runner.controls.has([]), r"key must be a GraphKey, got \[\]"),
        (lambda: runner.controls.get([]), r"key must be a GraphKey, got \[\]"),
        (lambda: runner.evict("FULL tokens=4"), "key must be a GraphKey, got 'FULL tokens=4'"),
        (lambda: runner.controls.upload(3), "key must be a GraphKey, got 3"),
        (lambda: runner.controls.input_path(3), "key must be a GraphKey, got 3"),
        (lambda: register(key=3), "key must be a GraphKey, got 3"),
        (lambda: register(inputs=3), "inputs must be a dictionary of tensors by input name, got 3"),
        (
            lambda: register(output_batch_dims="derived"),
            "output_batch_dims must be the index of a dimension, None, or a .* got 'derived'",
        ),
        (lambda: register(has_effect="x"), "has_effect must be True or False"),
        (
            lambda: runner.controls.set_eviction("lru"),
            r"score must be a function .*swap\(eviction",
        ),
        (
            lambda: runner.taps.on_decision(3),
            "listener must be a function that takes a decision, or None",
        ),
        (
            lambda: runner.taps.watch_steps(print),
            "watcher must be an object with the methods enter",
        ),
        (lambda: runner.taps.watch_steps(Timeline), r"Pass an instance: Timeline\(\.\.\.\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(UnknownNameError, match=r"input must be one of: tokens, got \['x'\]"):
        runner.buffers[["x"]]
    with pytest.raises(ConfigError, match="decision must be a decision from this runner's"):
        runner.decisions.run(None, {})
