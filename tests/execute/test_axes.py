"""User-defined axes: sequence lengths, image sizes, host values that control a step."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    Axis,
    DispatchConfig,
    RunnerOptions,
    StaticInput,
    eager_piece,
    graph_piece,
)
from dispatchkit.errors import (  # noqa: E402
    ConfigError,
    DescriptorError,
    InputError,
    NoGraphError,
)
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.registry import KeyState  # noqa: E402

LENGTHS = Axis("length", (4, 16))
INPUTS = {
    "x": StaticInput((None, "length", 3), "float32"),
    "bias": StaticInput((None,), "float32"),
}
WEIGHT = torch.arange(6.0).view(3, 2)


def same(actual, expected):
    torch.testing.assert_close(actual, expected)


def encode(x, bias):
    """Return results of several kinds: per position, pooled, and transposed."""
    hidden = torch.tanh(x @ WEIGHT + bias[:, None, None])
    return {"hidden": hidden, "last": x.sum((1, 2)), "turned": hidden.transpose(0, 1)}


def call_of(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, 3, generator=generator)
    return {"x": x, "bias": torch.randn(rows, generator=generator)}


@pytest.mark.slow_except("1-view")
@pytest.mark.parametrize("outputs", ["owned", "view"])
@pytest.mark.parametrize("check", [0, 1])
def test_any_value_gives_what_eager_gives(make_runner, outputs, check):
    """Inputs are padded to the bucket and results cut, for any order of rows and values."""
    runner = make_runner(
        encode, INPUTS, axes=[LENGTHS], outputs=outputs, options=RunnerOptions(check=check)
    )
    assert runner.capture().num_graphs == 8
    for seed, (rows, length) in enumerate(
        [(8, 16), (3, 2), (3, 4), (5, 9), (1, 1), (8, 3), (2, 16), (7, 5), (8, 16), (4, 0)]
    ):
        call = call_of(rows, length, seed)
        got = runner(**call, length=length)
        same(got, encode(**call))
        assert got["hidden"].shape == (rows, length, 2)
        assert got["turned"].shape == (length, rows, 2)
    assert runner.stats().eager_by_reason == {}
    assert runner.stats().steps == 10


def test_axis_is_part_of_key_reason_and_report(make_runner):
    runner = make_runner(encode, INPUTS, axes=[LENGTHS])
    runner.capture()
    assert sorted({key.descriptor.axes for key in runner.registry}) == [(4,), (16,)]
    runner(**call_of(3, 5), length=5)
    assert {str(key): hits for key, hits in runner.stats().hits.items() if hits} == {
        "FULL tokens=4 axes=16": 1
    }
    assert "axes=16" in str(runner)
    found = runner.explain(3, length=5)
    assert found.decision.key.descriptor.axes == (16,)
    assert "length in bucket 16" in str(found)


def test_value_outside_all_buckets_runs_eager_with_a_reason(make_runner):
    """Outside the declared range the step runs eager and is counted."""
    runner = make_runner(encode, INPUTS, axes=[LENGTHS])
    runner.capture()
    call = call_of(2, 17)
    problem = r"outside_axis.*Axis 'length' is 17, .* buckets are [\d, ]*16\. Add .* at least 17\."
    with pytest.warns(EagerStepWarning, match=problem):
        got = runner(**call, length=17)
    same(got, encode(**call))
    assert runner.stats().eager_by_reason == {"outside_axis": 1}
    found = runner.explain(2, length=17)
    assert found.decision.reason == "outside_axis"
    assert "outside all buckets" in found.because
    strict = make_runner(encode, INPUTS, axes=[LENGTHS], options=RunnerOptions(strict=True))
    strict.capture()
    with pytest.raises(NoGraphError, match=problem):
        strict(**call, length=17)


def test_an_exact_axis_asks_for_the_bucket_of_the_value(make_runner):
    runner = make_runner(
        lambda x, kind, width: x * kind,
        {"x": StaticInput((None,), "float32")},
        axes=[Axis("kind", (2, 5), exact=True), Axis("width", (8,))],
    )
    runner.capture()
    with pytest.warns(EagerStepWarning) as found:
        runner(torch.ones(2), kind=3, width=4)
    (one,) = found
    assert (
        "Axis 'kind' is 3, but its buckets are 2, 5. The axis is exact, so add the bucket 3."
        in (str(one.message))
    )
    assert "width" not in str(one.message)


def test_host_value_that_steers_the_step_is_a_bound_or_a_value(make_runner, quiet):
    """A host value that selects the algorithm is declared; for other values no graph is used.

    The step receives the bucket in a graph, and the value itself when it runs eager.
    """
    seen = Mock()

    def step(x, longest, kind):
        seen(longest, kind)
        return x * kind if longest < 100 else x * kind + 0.0

    axes = [Axis("longest", (64, 256)), Axis("kind", (2, 5), exact=True)]
    runner = make_runner(step, {"x": StaticInput((None,), "float32")}, axes=axes)
    runner.capture()
    given = {call.args for call in seen.call_args_list}
    assert {pair for pair in given if pair[0] in (64, 256)} == {
        (64, 2),
        (64, 5),
        (256, 2),
        (256, 5),
    }
    seen.reset_mock()
    x = torch.arange(3.0)
    for longest, kind in ((1, 2), (64, 5), (65, 2), (256, 5)):
        same(runner(x, longest=longest, kind=kind), x * kind)
    seen.assert_not_called()
    same(runner(x, longest=300, kind=2), x * 2)
    same(runner(x, longest=10, kind=3), x * 3)
    assert [call.args for call in seen.call_args_list] == [(300, 2), (10, 3)]
    assert runner.stats().eager_by_reason == {"outside_axis": 2}


def test_axis_of_pieces_and_of_state(make_runner):
    """Eager pieces use padded tensors; one call changes visible state once."""
    total = torch.zeros(())

    def count(hidden):
        total.add_(1)
        return hidden.cumsum(0)

    pieces = [graph_piece(lambda x, bias: torch.tanh(x) + bias[:, None, None])]
    pieces += [eager_piece(count), graph_piece(lambda hidden: hidden * 2)]
    runner = make_runner(pieces, INPUTS, axes=[LENGTHS], lazy=True, state=[total])
    for number, (rows, length, ceiling) in enumerate([(3, 7, 1), (8, 16, 2), (2, 2, 1), (2, 3, 2)]):
        call = call_of(rows, length, number)
        want = (torch.tanh(call["x"]) + call["bias"][:, None, None]).cumsum(0) * 2
        same(runner(**call, length=length, ceiling=ceiling), want)
        assert total.item() == number + 1
    assert runner.stats().captures == 4


def test_host_inputs_are_padded_too(make_runner):
    inputs = {
        "x": StaticInput((None, "length"), "float32", fill=-1.0, host=True),
        "y": StaticInput((None, "length"), "bfloat16", fill=2.0, host=True),
    }
    runner = make_runner(
        lambda x, y: (x * 2, y + 1), inputs, axes=[LENGTHS], options=RunnerOptions(check=1)
    )
    runner.capture()
    for rows, length in ((3, 5), (8, 16), (2, 1)):
        x = torch.randn(rows, length)
        got = runner(x.numpy(), x.bfloat16(), length=length)
        same(got, (x * 2, x.bfloat16() + 1))
    assert runner.stats().eager_by_reason == {}


def test_fill_of_padded_places_is_the_inputs_own(make_runner):
    inputs = {"x": StaticInput((None, "length"), "float32", fill=float("-inf"))}
    runner = make_runner(lambda x: x.softmax(1), inputs, axes=[LENGTHS])
    runner.capture()
    x = torch.randn(3, 6)
    same(runner(x, length=6), x.softmax(1))
    same(runner(x[:, :3], length=3), x[:, :3].softmax(1))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, InputError, "no value for axis 'length'"),
        ({"length": 5, "depth": 1}, InputError, "depth"),
        ({"length": 6}, InputError, "'x'"),
        ({"length": True}, DescriptorError, "length must be"),
        ({"length": -1}, DescriptorError, "length must be"),
        ({"length": "5"}, DescriptorError, "length must be"),
    ],
)
def test_values_that_do_not_fit_are_refused_before_anything_runs(
    make_runner, given, error, message
):
    runner = make_runner(encode, INPUTS, axes=[LENGTHS])
    runner.capture()
    with pytest.raises(error, match=message):
        runner(**call_of(3, 5), **given)
    assert runner.stats().steps == 0


def test_declarations_that_mean_two_things_or_nothing_are_refused(make_runner):
    for axes, inputs in (
        ([Axis("x", (4,))], INPUTS),
        ([Axis("loras", (4,))], INPUTS),
        ([Axis("depth", (4,))], INPUTS),
        ([], INPUTS),
        ([LENGTHS, LENGTHS], INPUTS),
        (["length"], INPUTS),
    ):
        with pytest.raises(ConfigError):
            make_runner(encode, inputs, axes=axes)
    for buckets in ((), (1.5,), (True,), (-1,), "x"):
        with pytest.raises(ConfigError, match="bucket"):
            Axis("length", buckets)
    with pytest.raises(ConfigError, match="axis"):
        Axis("two words", (4,))


def test_outputs_that_follow_an_axis_in_another_way_are_not_guessed(make_runner, quiet):
    runner = make_runner(
        lambda x: x[:, ::2], {"x": StaticInput((None, "length"), "float32")}, axes=[LENGTHS]
    )
    report = runner.capture()
    assert report.num_graphs == 0
    assert all("dimension 1 of output 0" in reason for reason in report.failed.values())
    x = torch.randn(3, 5)
    same(runner(x, length=5), x[:, ::2])
    exact = make_runner(
        lambda x: x[:, ::2],
        {"x": StaticInput((None, "length"), "float32")},
        axes=[Axis("length", (4, 16), exact=True)],
    )
    exact.capture()
    same(exact(x[:, :4], length=4), x[:, :4:2])
    assert exact.stats().steps_by_mode["FULL"] == 1


def test_steps_in_place_are_refused_where_there_are_axes(make_runner, quiet):
    runner = make_runner(encode, INPUTS, axes=[LENGTHS])
    runner.capture()
    for variant in (0, runner.config.variant(length=4)):
        with pytest.raises(InputError, match="In-place steps"):
            runner.run_in_place(3, loras=variant)


def test_keys_of_one_bucket_come_and_go_alone(make_runner, quiet):
    runner = make_runner(encode, INPUTS, axes=[LENGTHS])
    runner.capture()
    key = next(k for k in runner.registry if k.num_tokens == 4 and k.descriptor.axes == (16,))
    runner.evict(key)
    assert runner.registry.get(key).state is KeyState.EVICTED
    for length in (3, 9):
        call = call_of(3, length)
        same(runner(**call, length=length), encode(**call))
    assert runner.stats().eager_by_reason == {"evicted": 1}


def test_copies_know_their_axes(make_runner, quiet):
    runner = make_runner(encode, INPUTS, axes=[LENGTHS], backend="tape")
    twin = copy.deepcopy(runner)
    call = call_of(3, 9)
    same(twin(**call, length=9), encode(**call))
    assert twin.config == runner.config


def test_axes_and_adapters_share_one_number():
    axes = [LENGTHS, Axis("kind", (0, 7), exact=True)]
    config = DispatchConfig(sizes=(1, 2), axes=axes, max_loras=2)
    seen = {
        config.variant(loras, length=length, kind=kind): (loras, (bucket, kind))
        for loras in range(3)
        for length, bucket in ((1, 4), (4, 4), (5, 16), (17, None))
        for kind in (0, 7)
    }
    for number, facts in seen.items():
        assert config.variants.facts(number) == facts
        assert config.variants.of_buckets(*facts) == number
    assert config.variants.count == 3 * 3 * 3
    for wrong in ({"length": 1}, {"length": 1, "kind": 0, "more": 1}):
        with pytest.raises(DescriptorError, match="one value for each axis"):
            config.variant(**wrong)
    with pytest.raises(DescriptorError, match="loras"):
        config.variant(3, length=1, kind=0)


def test_recording_knows_the_buckets_of_its_steps(make_runner, quiet):
    runner = make_runner(encode, INPUTS, axes=[LENGTHS])
    recorder = runner.start_recording()
    for length in (3, 16, 17):
        runner(**call_of(2, length), length=length)
    runner.stop_recording()
    assert [step.num_active_loras for step in recorder.trace()] == [0, 0, 0]
    assert recorder.axes() == [{"length": 4}, {"length": 16}, {"length": None}]


def test_axes_that_are_no_dimension_take_no_memory_of_their_own(make_runner):
    axes = [Axis("length", (4, 16)), Axis("kind", (0, 1, 2), exact=True)]
    inputs = {"x": StaticInput((None, "length"), "float32")}
    runner = make_runner(lambda x, kind: x * (kind + 1), inputs, axes=axes)
    assert not runner.capture().failed
    x = torch.randn(3, 4)
    for kind in (2, 0, 1):
        for length in (3, 4, 9):
            x = torch.randn(3, length)
            assert torch.equal(runner(x, length=length, kind=kind), x * (kind + 1))
    assert runner.stats().steps_by_mode["NONE"] == 0
    (lane,) = runner.lanes.stats()
    assert lane.num_bytes - runner.num_bytes == 8 * (4 + 16) * 4


def test_costs_of_lanes_count_static_inputs_at_every_bucket(make_runner):
    """Costs equal those after the capture, when each bucket has its own buffers."""
    runner = make_runner(encode, INPUTS, axes=[LENGTHS], lanes=2)
    (every,) = runner.lanes.costs()
    runner.capture()
    assert every.static_bytes == sum(lane.lane.static_bytes for lane in runner.lanes)
    assert every.static_bytes > 2 * runner.lanes[0].lane.buffers.num_bytes


def test_lanes_serve_axes(make_runner):
    runner = make_runner(encode, INPUTS, axes=[LENGTHS], lanes=2)
    runner.capture()
    calls = [(call_of(1 + n % 8, 1 + n, n), 1 + n) for n in range(8)]
    handles = [runner.submit(**call, length=length) for call, length in calls]
    for (call, _), handle in zip(calls, handles, strict=True):
        same(handle.result(), encode(**call))
    assert runner.stats().eager_by_reason == {}
