"""Arguments of a runner that moved to its options, and settings kept by copies, lanes and swaps."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import attrs
import pytest

torch = pytest.importorskip("torch")

import dispatchkit  # noqa: E402
from dispatchkit import (  # noqa: E402
    Axis,
    BufferOptions,
    CaptureOptions,
    DispatchConfig,
    GraphMemory,
    GraphRunner,
    LaneOptions,
    Lanes,
    MemoryOptions,
    RunnerOptions,
    SlotState,
    StaticInput,
    StepState,
    graphed,
    load_plugins,
)
from dispatchkit.errors import ConfigError, UnknownNameError  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402

INPUTS = {"x": StaticInput((None, 2), "float32")}
NAMES = {name: getattr(dispatchkit, name) for name in dispatchkit.__all__}


class Last:
    """Always chooses the last lane."""

    name = "last"

    def choose(self, step, lanes):
        return len(lanes) - 1


def double(x):
    return x * 2


def make(**arguments):
    arguments = {"sizes": (2, 4), "mode": "FULL", "backend": "tape", **arguments}
    return GraphRunner(double, INPUTS, **arguments)


def written_for(arguments):
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    lines = str(caught.value).splitlines()
    return [
        next((line.partition(before)[2] for line in lines if before in line), "")
        for before in ("Write: ", "Call: ")
    ]


def made_from(arguments):
    """Insert the error's suggestion into the call, next to unmoved arguments, and run it."""
    text, after = written_for(arguments)
    stays = inspect.signature(GraphRunner).parameters
    kept = {name: value for name, value in arguments.items() if name in stays}
    new = eval(f"dict({text})", {**NAMES, **arguments})  # noqa: S307 - the text is our own
    runner = make(**kept | new)
    if after:
        eval(after, {"runner": runner, **arguments})  # noqa: S307
    assert runner.capture().failed == {}
    assert runner(torch.ones(3, 2)).tolist() == [[2.0, 2.0]] * 3
    return runner


def test_a_runner_has_fourteen_arguments():
    assert (
        list(inspect.signature(GraphRunner).parameters)
        == (
            "step inputs example sizes max_num_tokens mode axes policy backend outputs state lazy "
            "lanes options"
        ).split()
    )


def test_a_setting_that_moved_is_written_with_the_options_that_were_given():
    given = RunnerOptions(memory=MemoryOptions(max_graphs=7))
    runner = made_from({"max_bytes": 2**30, "strict": True, "query_len": 2, "options": given})
    assert runner.spec.options.memory == MemoryOptions(max_graphs=7, max_bytes=2**30)
    assert runner.lanes[0].eager.strict
    assert runner.config.query_lens == (2,)


def test_tensors_and_generators_that_moved_keep_their_names():
    """Values are not printed, because that would wait for the device."""
    cache, other = torch.zeros(3), torch.full((2,), 123.0)
    generator = torch.Generator()
    arguments = {"state": [cache], "scratch": [other], "generators": [generator]}
    assert "123" not in "".join(written_for(arguments))
    state = made_from(arguments).spec.state
    assert state.tensors[0] is cache
    assert state.scratch[0] is other
    assert state.generators == (generator,)


def test_plugins_come_with_the_policy():
    plugins = load_plugins(allow=["vllm"], environ={})
    for policy in ("vllm", None):
        arguments = {"plugins": plugins} | ({} if policy is None else {"policy": policy})
        runner = made_from(arguments)
        assert runner.spec.plugins is plugins
        assert runner.dispatcher.policy_name == "vllm"


def test_objects_that_choose_have_places_of_their_own():
    policy = Last()
    assert made_from({"lanes": 2, "lane_policy": policy}).spec.lanes == Lanes(2, policy)
    made_from({"eviction": lambda step: step.hits})
    options = made_from({"lanes": 2, "lane_policy": "least-loaded"}).spec.options
    assert options.lanes == LaneOptions(lane_policy="least-loaded")


def test_graphed_refuses_them_before_the_first_call():
    with pytest.raises(ConfigError, match=r"options=RunnerOptions\(strict=True\)"):
        graphed(double, strict=True)
    with pytest.raises(ConfigError, match="options must be a RunnerOptions"):
        graphed(double, options={"strict": True})


WRONG = {
    "outputs": ["viw", 3],
    "mode": ["FUL", 3],
    "lazy": ["yes", 1],
    "lanes": [0, "2"],
    "sizes": ["x", 1.5, [0], []],
    "max_num_tokens": [0, "x"],
    "axes": [3, ["length"]],
    "policy": ["vlm"],
    "backend": ["tpe", 3],
    "state": [3, "x"],
    "options": [3],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_refused_at_once_by_both_front_doors(name, value):
    """The error does not wait for the first call, which may come much later."""
    problems = []
    for wrong in (
        lambda: make(**{name: value}),
        lambda: graphed(double, **{name: value}),
        lambda: graphed(**{name: value}),
    ):
        with pytest.raises(ConfigError) as caught:
            wrong()
        problems.append(str(caught.value))
    assert len(set(problems)) == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: RunnerOptions(3), r"settings of RunnerOptions must be given by name .* \(3,\)"),
        (lambda: GraphMemory(4), r"settings of GraphMemory must be given by name \(max_bytes, sl"),
        (lambda: make().swap("vllm"), r"settings of swap must be given by name .* \('vllm',\)"),
        (lambda: MemoryOptions(eviction=print), "Pass a function to runner.controls.set_eviction."),
        (
            lambda: RunnerOptions(device=3),
            "device must be a torch device such as 'cuda:0', or None, got 3",
        ),
        (lambda: Lanes(0), "lanes must be a whole number of at least 1, got 0"),
        (lambda: Lanes("x"), "lanes must be a whole number of at least 1, got 'x'"),
        (
            lambda: Lanes(2, "by-key"),
            r"an object with (a method )?choose\(\), .*LaneOptions\(lane_policy=",
        ),
    ],
)
def test_a_record_refuses_what_it_cannot_hold(made, message):
    with pytest.raises(ConfigError, match=message):
        made()


@pytest.mark.parametrize("value", ["rows", 1.5, {"x": "0"}, [0]])
def test_a_wrong_batch_dim_is_refused_at_once(value):
    with pytest.raises(ConfigError, match="batch_dims must be the index of a dimension, None"):
        graphed(double, batch_dims=value)


def test_lanes_of_graphed_may_be_an_object():
    memory = GraphMemory()
    fast = graphed(double, lanes=Lanes(2, memory=memory))
    fast(torch.ones(2))
    assert fast.graphed.memory is memory
    assert len(fast.graphed.runners[0].lanes) == 2
    with pytest.raises(ConfigError, match="omitted if lanes contains a memory"):
        graphed(double, lanes=Lanes(1, memory=memory), memory=memory)


@pytest.mark.parametrize(
    ("made_with", "typo", "nearest"),
    [
        (make, "size", "sizes"),
        (make, "polcy", "policy"),
        (lambda **typo: graphed(double, **typo), "size", "sizes"),
        (RunnerOptions, "strickt", "strict"),
        (CaptureOptions, "warmup", "warmups"),
        (MemoryOptions, "max_graph", "max_graphs"),
        (BufferOptions, "rowcount", "row_count"),
        (LaneOptions, "policy", "lane_policy"),
        (DispatchConfig, "max_tokens", "max_num_tokens"),
        (StepState, "tensor", "tensors"),
        (Lanes, "counts", "count"),
        (GraphMemory, "sleep", "sleeps"),
        (lambda **typo: Axis("length", [4], **typo), "exactly", "exact"),
        (lambda **typo: StaticInput((None,), "int64", **typo), "hosts", "host"),
        (
            lambda **typo: SlotState({"h": StaticInput((None,), "int64")}, 2, **typo),
            "dev",
            "device",
        ),
        (lambda **typo: attrs.evolve(RunnerOptions(), **typo), "strickt", "strict"),
        (lambda **typo: make().swap(**typo), "polcy", "policy"),
    ],
)
def test_a_misspelt_keyword_is_refused_with_the_nearest(made_with, typo, nearest):
    with pytest.raises(UnknownNameError) as caught:
        made_with(**{typo: 1})
    assert nearest in caught.value.nearest
    assert "_" not in {name[0] for name in caught.value.known}


# -- kept settings --------------------------------------------------------------------------


def asked(runner):
    """Return the derived settings of a runner's configuration."""
    return repr(runner.spec.options.config)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])  # noqa: S301
def test_copies_keep_what_was_asked_for(how):
    runner = make(sizes=None, max_num_tokens=8, options=RunnerOptions(strict=True))
    twin = how(runner)
    assert twin.spec.options == runner.spec.options
    assert asked(twin) == asked(runner) == "DispatchConfig(mode='FULL', max_num_tokens=8)"


def test_lanes_keep_what_was_asked_for_and_do_not_warn_again():
    """Each lane has the whole budget and all options."""
    options = RunnerOptions(
        config=DispatchConfig(max_num_seqs=8), memory=MemoryOptions(max_graphs=3), strict=True
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runner = make(max_num_tokens=16, lanes=3, options=options)
    assert len([one for one in told if "5 to 16" in str(one.message)]) == 1
    members = list(runner.lanes)
    assert len({asked(member) for member in members}) == 1
    for member in members[1:]:
        assert member.spec is runner.spec
        assert member.spec.options.memory == options.memory
        assert member.spec.options.strict
        assert member.lifecycle.budget.max_graphs == 3


def test_swaps_keep_what_was_asked_for():
    """Settings derived from sizes follow the new sizes; an explicit limit stays."""
    options = RunnerOptions(config=DispatchConfig(max_num_seqs=2))
    runner = make(sizes=None, max_num_tokens=8, options=options)
    runner.swap(mode="FULL_DECODE_ONLY", max_graphs=5)
    assert asked(runner) == (
        "DispatchConfig(mode='FULL_DECODE_ONLY', max_num_tokens=8, max_num_seqs=2)"
    )
    assert copy.copy(runner).lanes[0].lifecycle.budget.max_graphs == 5
    sized = make(sizes=(2, 4, 8))
    sized.swap(sizes=(4, 8))
    assert asked(sized) == "DispatchConfig(mode='FULL', sizes=(4, 8))"
    sized.swap(sizes=(4,))
    assert not sized.config.has_token_limit
    with pytest.warns(EagerStepWarning, match="above_largest_size"):
        sized(torch.ones(9, 2))
    limited = make(max_num_tokens=8, sizes=(2, 8))
    with pytest.warns(UserWarning, match="5 to 8 tokens run eager"):
        limited.swap(sizes=(4,))
    assert limited.config.max_num_tokens == 8


def test_state_is_declared_once_and_not_printed():
    state = StepState([torch.zeros(2)], scratch=[torch.ones(1)])
    assert StepState.of(state) is state
    assert repr(state) == "<StepState of 1 tensor, 1 scratch tensor, 0 generators>"
    assert make(state=state).spec.state is state
    with pytest.raises(ConfigError, match=r"scratch must be a list of tensors.*scratch=\[tensor\]"):
        StepState(scratch=torch.zeros(3))
    with pytest.raises(ConfigError, match=r"tensors\[0\] must be a tensor, got 3"):
        StepState([3])


@pytest.mark.parametrize(
    ("record", "name", "place"),
    [
        (RunnerOptions, "lazy", "lazy is an argument of GraphRunner"),
        (RunnerOptions, "max_graphs", r"RunnerOptions\(memory=MemoryOptions\(max_graphs="),
        (MemoryOptions, "warmups", r"RunnerOptions\(capture=CaptureOptions\(warmups="),
        (CaptureOptions, "strict", r"Write: RunnerOptions\(strict="),
    ],
)
def test_a_setting_in_the_wrong_record_is_reported_with_its_place(record, name, place):
    with pytest.raises(UnknownNameError, match=f"has no setting '{name}'.*{place}"):
        record(**{name: 2})


def test_the_arguments_that_a_hint_names_exist():
    assert set(inspect.signature(GraphRunner).parameters) >= dispatchkit.options._OF_RUNNER
