"""Tests of capture, replay and state, for BackendTests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from dispatchkit.backends.base import (
    BackendCapabilities,
    CapturedGraph,
    Event,
    Stream,
)
from dispatchkit.keys import has_members
from dispatchkit.testing.backend_rig import FUNCTIONS, Pair, Rig

NOT_POISONED = (
    "The backend declares poisons_outputs, so before the first replay, outputs must contain only "
    "NaN (floating point), True (bool), or the nonzero minimum or maximum of their integer dtype."
)


class CaptureTests:
    """Tests that replays run no Python code and compute the same results as eager runs."""

    # -- attributes ---------------------------------------------------------------------

    def test_it_names_itself_and_its_device(self, rig: Rig) -> None:
        """A backend must provide its name and its device, because reports show both."""
        assert rig.backend.name
        assert rig.zeros(1).device == rig.torch.device(rig.backend.torch_device)
        assert isinstance(rig.backend.capabilities, BackendCapabilities)
        info = rig.backend.device_info()
        assert info["device"]
        assert info["torch"] == rig.torch.__version__

    def test_its_objects_fit_the_protocols(self, rig: Rig) -> None:
        """The runner uses only the members that the protocols define."""
        graph = rig.capture(lambda: rig.zeros(1) + 1)
        assert has_members(rig.stream, Stream)
        assert has_members(rig.backend.current_stream(), Stream)
        assert has_members(rig.backend.new_event(), Event)
        graph.replay()
        assert has_members(graph, CapturedGraph)

    # -- capture and replay -------------------------------------------------------------

    @pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__.strip("_"))
    @pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
    def test_replay_equals_eager_on_changed_inputs(
        self, rig: Rig, function: Callable[[Any, Any], Any], mode: str
    ) -> None:
        """Inputs change before each replay; with unchanged inputs, stale results would pass."""
        x = rig.randn(4, 8)
        with getattr(rig.torch, mode)():
            graph = rig.warm_capture(lambda: function(rig.torch, x))
            for _ in range(3):
                x.copy_(rig.randn(4, 8))
                expected = function(rig.torch, x).clone()
                rig.torch.testing.assert_close(rig.replayed(graph), expected, rtol=1e-5, atol=1e-5)

    def test_outputs_keep_their_addresses(self, rig: Rig) -> None:
        """Precomputed views of the outputs must stay valid."""
        x = rig.randn(4, 8)
        graph = rig.capture(lambda: (x * 2, [x + 1]))
        outputs = graph.outputs
        addresses = [outputs[0].data_ptr(), outputs[1][0].data_ptr()]
        for _ in range(3):
            graph.replay()
            assert graph.outputs is outputs, "A replay replaced the object in ``outputs``."
            assert [outputs[0].data_ptr(), outputs[1][0].data_ptr()] == addresses

    def test_replay_overwrites_the_outputs(self, rig: Rig) -> None:
        """An output that the caller keeps contains the result of the latest replay."""
        x = rig.zeros(3)
        graph = rig.capture(lambda: x + 1)
        graph.replay()
        kept = graph.outputs
        x.fill_(5)
        graph.replay()
        assert rig.read(kept) == [6.0] * 3

    def test_python_runs_once(self, rig: Rig) -> None:
        """Prints and attribute writes happen during the capture, never during a replay."""
        runs: list[int] = []
        x = rig.zeros(2)

        def run() -> Any:
            runs.append(1)
            return x + len(runs)

        graph = rig.capture(run)
        for _ in range(3):
            graph.replay()
        assert runs == [1], "The callable's Python code ran again during a replay."
        assert rig.read(graph.outputs) == [1.0, 1.0]

    def test_python_of_a_custom_operator_runs_once(self, rig: Rig) -> None:
        """The operator's kernels are captured, not its Python code."""
        torch = rig.torch
        runs: list[int] = []
        name = f"dispatchkit_backend_tests::scale_{id(runs)}"

        @torch.library.custom_op(name, mutates_args=(), schema="(Tensor x) -> Tensor")  # type: ignore[untyped-decorator]
        def scale(x: Any) -> Any:
            runs.append(1)
            return x * 3 + 1

        x = rig.zeros(4)
        graph = rig.capture(lambda: scale(x) * 2)
        x.fill_(2)
        graph.replay()
        graph.replay()
        assert rig.read(graph.outputs) == [14.0] * 4
        assert runs == [1]

    def test_a_custom_operator_that_writes_its_argument_is_captured(self, rig: Rig) -> None:
        """An attention operator, for example, writes to an output argument."""
        torch = rig.torch
        name = f"dispatchkit_backend_tests::fill_{id(rig)}"

        schema = "(Tensor x, Tensor(a!) out) -> ()"

        @torch.library.custom_op(name, mutates_args=("out",), schema=schema)  # type: ignore[untyped-decorator]
        def fill(x: Any, out: Any) -> None:
            out.copy_(x * 2)

        x, out = rig.zeros(4), rig.zeros(4)
        graph = rig.capture(lambda: fill(x, out))
        x.fill_(3)
        assert rig.read(out) == [0.0] * 4
        graph.replay()
        assert rig.read(out) == [6.0] * 4

    def test_nested_outputs_keep_their_structure(self, rig: Rig) -> None:
        """Outputs may contain dicts, lists, named tuples, None and plain values."""
        x = rig.zeros(2)
        graph = rig.capture(lambda: {"a": [x + 1, None], "b": Pair(x + 2, 7), "c": (x,)})
        graph.replay()
        outputs = graph.outputs
        assert rig.read(outputs["a"][0]) == [1.0, 1.0]
        assert outputs["a"][1] is None
        assert isinstance(outputs["b"], Pair)
        assert rig.read(outputs["b"].first) == [2.0, 2.0]
        assert outputs["b"].second == 7
        assert outputs["c"][0] is x

    def test_an_output_may_be_a_view_of_another(self, rig: Rig) -> None:
        """After a replay, views contain the new data without additional work."""
        x = rig.zeros(4)

        def run() -> Any:
            y = x * 2
            return y, y[1:3], x[:2]

        graph = rig.capture(run)
        x.fill_(3)
        graph.replay()
        assert [rig.read(part) for part in graph.outputs] == [[6.0] * 4, [6.0] * 2, [3.0] * 2]

    def test_a_callable_that_does_nothing_can_be_captured(self, rig: Rig) -> None:
        """A piece may return an input unchanged; torch may warn about an empty graph."""
        x = rig.zeros(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = rig.capture(lambda: x)
        graph.replay()
        assert graph.outputs is x

    @pytest.mark.parametrize(
        "dtype", ["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"]
    )
    def test_outputs_are_not_computed_at_capture(self, rig: Rig, dtype: str) -> None:
        """If a backend poisons outputs, a read before the first replay can be detected."""
        kind = getattr(rig.torch, dtype)
        x = rig.zeros(8, dtype=kind)
        graph = rig.capture(x.clone)
        before = graph.outputs.clone()
        if rig.backend.capabilities.poisons_outputs:
            self._assert_poisoned(rig, before)
        graph.replay()
        assert rig.equal(graph.outputs, x)

    @staticmethod
    def _assert_poisoned(rig: Rig, tensor: Any) -> None:
        if tensor.is_floating_point():
            assert bool(tensor.isnan().all()), NOT_POISONED
        elif tensor.dtype is rig.torch.bool:
            assert bool(tensor.all()), NOT_POISONED
        else:
            limits = rig.torch.iinfo(tensor.dtype)
            assert set(tensor.tolist()) <= {limits.min, limits.max} - {0}, NOT_POISONED

    def test_new_values_of_weights_are_seen_by_the_next_replay(self, rig: Rig) -> None:
        """A replay reads the current values of weights, not copies stored in the graph."""
        x, weight = rig.randn(4, 8), rig.randn(8, 8)
        graph = rig.warm_capture(lambda: x @ weight)
        weight.copy_(rig.randn(8, 8))
        rig.torch.testing.assert_close(
            rig.replayed(graph),
            x @ weight,
            msg=lambda text: (
                f"The replay used the values that the weights had during the capture. {text}"
            ),
        )

    def test_intermediates_that_the_callable_stashed_stay(self, rig: Rig) -> None:
        """Memory that user code still references is not reused for later intermediates."""
        x = rig.zeros(64)
        stash: dict[str, Any] = {}

        def run() -> Any:
            stash["hidden"] = x * 3
            y = stash["hidden"] + 1
            for _ in range(5):
                y = y * 1.5 - 0.5
            return y

        graph = rig.capture(run)
        other = rig.capture(lambda: ((x - 7) * 11 + 3) * 2)
        x.fill_(1)
        graph.replay()
        other.replay()
        assert rig.read(stash["hidden"]) == [3.0] * 64

    def test_outputs_of_a_graph_survive_the_replays_of_another(self, rig: Rig) -> None:
        """Graphs in a pool share the memory of intermediates, but not of live outputs."""
        x = rig.zeros(256)
        first = rig.capture(lambda: ((x + 1) * 2 + 1) * 2)
        second = rig.capture(lambda: ((x - 5) * 3 - 5) * 3)
        first.replay()
        second.replay()
        assert rig.read(first.outputs) == [6.0] * 256
        assert rig.read(second.outputs) == [-60.0] * 256

    def test_grad_mode_is_the_callers(self, rig: Rig) -> None:
        """During a capture, the callable runs in the caller's autograd mode."""
        torch = rig.torch
        seen: list[tuple[bool, bool]] = []

        def run() -> Any:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return rig.zeros(1) + 1

        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                rig.capture(run)
        assert seen == [(False, False), (False, True), (True, False)], (
            "The autograd modes (grad, inference) inside captures differ from the caller's modes."
        )

    def test_a_graph_captured_in_inference_mode_replays_outside(self, rig: Rig) -> None:
        """The autograd mode has no effect on replays."""
        torch = rig.torch
        with torch.inference_mode():
            state = rig.zeros(3)
            graph = rig.capture(lambda: state.add_(1) * 2)
        graph.replay()
        with torch.no_grad():
            graph.replay()
        assert rig.read(graph.outputs) == [4.0] * 3

    def test_replay_ignores_the_callers_autocast(self, rig: Rig) -> None:
        """Operations captured in full precision are replayed in full precision."""
        x = rig.randn(4, 8)
        graph = rig.warm_capture(lambda: x @ x.t())
        expected = x @ x.t()
        with rig.torch.autocast(rig.torch.device(rig.backend.torch_device).type):
            graph.replay()
        rig.torch.testing.assert_close(graph.outputs, expected)

    def test_a_training_step_gives_eager_gradients_and_weights(self, rig: Rig) -> None:
        """A backward pass inside the callable is captured like other operations."""
        torch = rig.torch
        x = rig.randn(8, 4)
        start = rig.randn(4, 4)
        weight = start.clone().requires_grad_()

        def step() -> Any:
            loss = (x @ weight).tanh().pow(2).mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight.sub_(gradient, alpha=0.1)
            return loss.detach(), gradient

        rig.backend.warmup(step, stream=rig.stream, iterations=2)
        with torch.no_grad():
            weight.copy_(start)
        graph = rig.capture(step)
        assert rig.equal(weight.detach(), start)
        expected = start.clone().requires_grad_()
        for _ in range(3):
            loss = (x @ expected).tanh().pow(2).mean()
            (gradient,) = torch.autograd.grad(loss, expected)
            with torch.no_grad():
                expected.sub_(gradient, alpha=0.1)
            graph.replay()
            rig.backend.synchronize()
            torch.testing.assert_close(graph.outputs[0], loss.detach())
            torch.testing.assert_close(graph.outputs[1], gradient)
            torch.testing.assert_close(weight.detach(), expected.detach())

    # -- state outside the graph ----------------------------------------------------------

    def test_a_capture_changes_no_state_and_each_replay_does_once(self, rig: Rig) -> None:
        """A capture leaves counters and caches unchanged, and each replay updates them once."""
        counter, cache = rig.zeros(1), rig.zeros(8, 2)
        position = rig.zeros(1, dtype=rig.torch.int64)

        def run() -> Any:
            counter.add_(1)
            cache.index_copy_(0, position, counter.expand(1, 2))
            cache[7].fill_(9)
            position.add_(1)
            return cache * 1

        graph = rig.capture(run)
        assert rig.read(counter) == [0.0], "The capture changed state outside the graph."
        assert rig.read(cache) == [[0.0, 0.0]] * 8
        assert rig.read(position) == [0]
        for _ in range(3):
            graph.replay()
        assert rig.read(counter) == [3.0]
        expected = [[1.0] * 2, [2.0] * 2, [3.0] * 2] + [[0.0] * 2] * 4 + [[9.0] * 2]
        assert rig.read(cache) == expected
        assert rig.read(graph.outputs) == expected

    def test_running_statistics_are_left_alone_by_a_capture(self, rig: Rig) -> None:
        """Batch norm writes running statistics, although its schema does not declare this."""
        torch = rig.torch
        norm = torch.nn.BatchNorm1d(8).to(rig.backend.torch_device)
        twin = torch.nn.BatchNorm1d(8).to(rig.backend.torch_device)
        x = rig.randn(4, 8)
        with torch.no_grad():
            rig.backend.warmup(lambda: twin(x), stream=rig.stream)
            twin.reset_running_stats()
            graph = rig.capture(lambda: norm(x))
            assert rig.equal(norm.running_mean, twin.running_mean)
            assert rig.read(norm.num_batches_tracked) == 0
            for _ in range(2):
                graph.replay()
                twin(x)
        torch.testing.assert_close(norm.running_mean, twin.running_mean)
        torch.testing.assert_close(norm.running_var, twin.running_var)
