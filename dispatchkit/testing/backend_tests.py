"""What every GraphBackend must do, as tests to subclass.

    class TestMyBackend(BackendTests):
        def make_backend(self):
            return MyBackend()

No backend is believed because of its documentation: the tape and cuda pass the same class.
torch is imported by the tests that run, not by this module.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest

from dispatchkit.backends.base import (
    BackendCapabilities,
    CapturedGraph,
    Event,
    GraphBackend,
    Stream,
)
from dispatchkit.errors import CaptureError, ConfigError, ReplayError


@attrs.define
class Rig:
    """A backend with one stream and one pool, and short ways to use them.

    Attributes:
        torch: The torch module.
        backend: The backend under test.
        stream: The stream captures run on.
        pool: The pool they share.
    """

    torch: Any
    backend: GraphBackend
    stream: Stream
    pool: Any

    def zeros(self, *shape: int, **options: Any) -> Any:
        """Return zeros on the backend's device."""
        return self.torch.zeros(*shape, device=self.backend.torch_device, **options)

    def randn(self, *shape: int) -> Any:
        """Return normal numbers on the backend's device."""
        return self.torch.randn(*shape, device=self.backend.torch_device)

    def generator(self, seed: int = 7) -> Any:
        """Return a generator of one's own on the backend's device."""
        return self.torch.Generator(device=self.backend.torch_device).manual_seed(seed)

    def default_generator(self) -> Any:
        """Return the generator that draws without ``generator=`` use."""
        if self.backend.torch_device == "cpu":
            return self.torch.default_generator
        return self.torch.cuda.default_generators[
            self.torch.device(self.backend.torch_device).index
        ]

    def capture(self, run: Callable[[], Any], **options: Any) -> CapturedGraph:
        """Capture on the rig's stream, into its pool."""
        return self.backend.capture(run, stream=self.stream, pool=self.pool, **options)

    def warm_capture(self, run: Callable[[], Any], **options: Any) -> CapturedGraph:
        """Warm up, then capture: for callables whose first run sets up a library."""
        self.backend.warmup(run, stream=self.stream)
        return self.capture(run, **options)

    def read(self, tensor: Any) -> Any:
        """Return a tensor's values once all work is done."""
        self.backend.synchronize()
        return tensor.tolist()

    def replayed(self, graph: CapturedGraph) -> Any:
        """Replay and return a copy of a tensor output."""
        graph.replay()
        self.backend.synchronize()
        return graph.outputs.clone()

    def equal(self, left: Any, right: Any) -> bool:
        """Return whether two tensors are the same, bit for bit."""
        self.backend.synchronize()
        return bool(self.torch.equal(left, right))


class Pair(NamedTuple):
    """A nested output."""

    first: Any
    second: Any


class PlannedError(Exception):
    """Raised by callables that are meant to fail."""


# -- pure functions of one float tensor (4, 8) --------------------------------------------------


def _chain(torch: Any, x: Any) -> Any:
    return ((x * 2 + 1).relu() - 0.5).tanh() / 3


def _matmul(torch: Any, x: Any) -> Any:
    return (x @ x.t()).softmax(-1) @ x


def _views(torch: Any, x: Any) -> Any:
    return x.view(2, 16).t()[3:9].reshape(-1).unflatten(0, (3, 4)).contiguous() + x[0, 0]


def _reductions(torch: Any, x: Any) -> Any:
    return torch.cat([x.sum(0), x.mean(1), x.max(1).values, x.amin(0), x.cumsum(0).flatten()])


def _sorting(torch: Any, x: Any) -> Any:
    values, indices = x.topk(3, dim=1)
    return values + x.gather(1, indices) + x.sort(dim=1).values[:, :3] + indices


def _indexing(torch: Any, x: Any) -> Any:
    rows = torch.argsort(x[:, 0])
    return x[rows][:, rows] + x.index_select(0, rows)[:, :4]


def _casts(torch: Any, x: Any) -> Any:
    return (
        (x.to(torch.bfloat16) * 3).float()
        + x.to(torch.int64).to(torch.float32)
        + x.double().float()
    )


def _attention(torch: Any, x: Any) -> Any:
    heads = x.view(1, 4, 2, 4).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def _norms(torch: Any, x: Any) -> Any:
    functional = torch.nn.functional
    return functional.gelu(functional.layer_norm(x, (8,))) + functional.rms_norm(x, (8,))


def _in_place_on_own(torch: Any, x: Any) -> Any:
    y = x.clone()
    y.add_(1).mul_(2)
    y[1:3].zero_()
    y[:, 2] = x[:, 3]
    return y


def _factories(torch: Any, x: Any) -> Any:
    steps = torch.arange(8, device=x.device, dtype=x.dtype)
    return torch.where(x > 0, steps, torch.full_like(x, 3.0)) + torch.zeros_like(x) + x.new_ones(8)


def _masked(torch: Any, x: Any) -> Any:
    return x.masked_fill(x > 0, -1.0) + torch.tril(x) + x.clamp(-0.5, 0.5)


def _split(torch: Any, x: Any) -> Any:
    left, right = x.chunk(2, dim=1)
    first, second = x.split([3, 1])
    return left * right + torch.stack([first.sum(), second.sum()]).sum()


def _einsum(torch: Any, x: Any) -> Any:
    return torch.einsum("ij,kj->ik", x, x) + torch.outer(x[0, :4], x[1, :4])


def _complex(torch: Any, x: Any) -> Any:
    pairs = torch.view_as_complex(x.view(4, 4, 2))
    return torch.view_as_real(pairs.conj() * pairs * 2).flatten()


FUNCTIONS: tuple[Callable[[Any, Any], Any], ...] = (
    _chain,
    _matmul,
    _views,
    _reductions,
    _sorting,
    _indexing,
    _casts,
    _attention,
    _norms,
    _in_place_on_own,
    _factories,
    _masked,
    _split,
    _einsum,
    _complex,
)


# -- calls that wait for the device ------------------------------------------------------------

HOST_SYNCS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda torch, x: x.sum().item(),
    "cpu": lambda torch, x: x.cpu(),
    "numpy": lambda torch, x: x.numpy(),
    "tolist": lambda torch, x: x.tolist(),
    "bool": lambda torch, x: bool(x.any()),
    "int": lambda torch, x: int(x[0, 0]),
    "float": lambda torch, x: float(x[0, 0]),
    "repr": lambda torch, x: repr(x),
    "nonzero": lambda torch, x: x.nonzero(),
    "mask": lambda torch, x: x[x > 0],
    "masked_select": lambda torch, x: torch.masked_select(x, x > 0),
    "unique": lambda torch, x: torch.unique(x),
    "equal": lambda torch, x: torch.equal(x, x),
    "tensor_split_index": lambda torch, x: x[: x.sum().int()],
    "repeat_interleave": lambda torch, x: torch.repeat_interleave(
        x, torch.ones(4, dtype=torch.int64, device=x.device), dim=0
    ),
}

# -- draws -------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any, str, Any], Any]] = {
    "rand": lambda torch, device, g: torch.rand(16, device=device, generator=g),
    "randn": lambda torch, device, g: torch.randn(16, device=device, generator=g),
    "randint": lambda torch, device, g: torch.randint(99, (16,), device=device, generator=g),
    "uniform_": lambda torch, device, g: torch.empty(16, device=device).uniform_(generator=g),
    "normal_": lambda torch, device, g: torch.empty(16, device=device).normal_(generator=g),
    "exponential_": lambda torch, device, g: torch.empty(16, device=device).exponential_(
        generator=g
    ),
    "bernoulli": lambda torch, device, g: torch.bernoulli(
        torch.full((16,), 0.5, device=device), generator=g
    ),
    "two draws": lambda torch, device, g: (
        torch.rand(16, device=device, generator=g) + torch.randn(16, device=device, generator=g)
    ),
}


class BackendTests:
    """The promises of GraphBackend; subclass and define ``make_backend``."""

    def make_backend(self) -> GraphBackend:
        """Return a new backend."""
        raise NotImplementedError("Define make_backend() in the subclass of BackendTests.")

    def settle(self, rig: Rig) -> None:
        """Give unused memory back to the device, where a backend keeps it for later."""
        gc.collect()

    @pytest.fixture
    def rig(self) -> Any:
        """Return the backend with a stream and a pool."""
        torch = pytest.importorskip("torch")
        backend = self.make_backend()
        yield Rig(torch, backend, backend.new_stream(), backend.new_pool())
        backend.synchronize()

    # -- what it is ---------------------------------------------------------------------

    def test_it_names_itself_and_its_device(self, rig: Rig) -> None:
        """Reports and the choice by name need both."""
        assert rig.backend.name
        assert rig.zeros(1).device == rig.torch.device(rig.backend.torch_device)
        assert isinstance(rig.backend.capabilities, BackendCapabilities)
        info = rig.backend.device_info()
        assert info["device"]
        assert info["torch"] == rig.torch.__version__

    def test_its_objects_fit_the_protocols(self, rig: Rig) -> None:
        """The runner uses only what the Protocols name."""
        graph = rig.capture(lambda: rig.zeros(1) + 1)
        assert isinstance(rig.stream, Stream)
        assert isinstance(rig.backend.current_stream(), Stream)
        assert isinstance(rig.backend.new_event(), Event)
        graph.replay()
        assert isinstance(graph, CapturedGraph)

    # -- capture and replay -------------------------------------------------------------

    @pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__.strip("_"))
    @pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
    def test_replay_equals_eager_on_changed_inputs(
        self, rig: Rig, function: Callable[[Any, Any], Any], mode: str
    ) -> None:
        """A replay of the captured inputs proves nothing: the inputs change each time."""
        x = rig.randn(4, 8)
        with getattr(rig.torch, mode)():
            graph = rig.warm_capture(lambda: function(rig.torch, x))
            for _ in range(3):
                x.copy_(rig.randn(4, 8))
                expected = function(rig.torch, x).clone()
                rig.torch.testing.assert_close(rig.replayed(graph), expected, rtol=1e-5, atol=1e-5)

    def test_outputs_keep_their_addresses(self, rig: Rig) -> None:
        """Ready-made views of the outputs stay right only then."""
        x = rig.randn(4, 8)
        graph = rig.capture(lambda: (x * 2, [x + 1]))
        outputs = graph.outputs
        addresses = [outputs[0].data_ptr(), outputs[1][0].data_ptr()]
        for _ in range(3):
            graph.replay()
            assert graph.outputs is outputs
            assert [outputs[0].data_ptr(), outputs[1][0].data_ptr()] == addresses

    def test_replay_overwrites_the_outputs(self, rig: Rig) -> None:
        """An output kept over the next replay shows the next result."""
        x = rig.zeros(3)
        graph = rig.capture(lambda: x + 1)
        graph.replay()
        kept = graph.outputs
        x.fill_(5)
        graph.replay()
        assert rig.read(kept) == [6.0] * 3

    def test_python_runs_once(self, rig: Rig) -> None:
        """Prints and attribute writes happen at capture, never at replay."""
        runs: list[int] = []
        x = rig.zeros(2)

        def run() -> Any:
            runs.append(1)
            return x + len(runs)

        graph = rig.capture(run)
        for _ in range(3):
            graph.replay()
        assert runs == [1]
        assert rig.read(graph.outputs) == [1.0, 1.0]

    def test_python_of_a_custom_operator_runs_once(self, rig: Rig) -> None:
        """What the operator does is captured, not the call of it."""
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
        """Attention written as an operator fills a buffer it is given."""
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
        """Dicts, lists, named tuples, None and plain values come back as returned."""
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
        """Views need no work at replay, and must show the new data."""
        x = rig.zeros(4)

        def run() -> Any:
            y = x * 2
            return y, y[1:3], x[:2]

        graph = rig.capture(run)
        x.fill_(3)
        graph.replay()
        assert [rig.read(part) for part in graph.outputs] == [[6.0] * 4, [6.0] * 2, [3.0] * 2]

    def test_a_callable_that_does_nothing_can_be_captured(self, rig: Rig) -> None:
        """A piece may return an input as it is; torch may warn of an empty graph."""
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
        """Whoever reads before the first replay must see it."""
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
            assert bool(tensor.isnan().all())
        elif tensor.dtype is rig.torch.bool:
            assert bool(tensor.all())
        else:
            limits = rig.torch.iinfo(tensor.dtype)
            assert set(tensor.tolist()) <= {limits.min, limits.max} - {0}

    def test_new_values_of_weights_are_seen_by_the_next_replay(self, rig: Rig) -> None:
        """Weights are read from their place, not copied into the graph."""
        x, weight = rig.randn(4, 8), rig.randn(8, 8)
        graph = rig.warm_capture(lambda: x @ weight)
        weight.copy_(rig.randn(8, 8))
        rig.torch.testing.assert_close(rig.replayed(graph), x @ weight)

    def test_intermediates_that_the_callable_stashed_stay(self, rig: Rig) -> None:
        """Memory that user code still refers to is not used for later intermediates."""
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
        """Graphs of a pool share intermediates, not outputs that are still held."""
        x = rig.zeros(256)
        first = rig.capture(lambda: ((x + 1) * 2 + 1) * 2)
        second = rig.capture(lambda: ((x - 5) * 3 - 5) * 3)
        first.replay()
        second.replay()
        assert rig.read(first.outputs) == [6.0] * 256
        assert rig.read(second.outputs) == [-60.0] * 256

    def test_grad_mode_is_the_callers(self, rig: Rig) -> None:
        """A capture changes no mode behind the callable's back."""
        torch = rig.torch
        seen: list[tuple[bool, bool]] = []

        def run() -> Any:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return rig.zeros(1) + 1

        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                rig.capture(run)
        assert seen == [(False, False), (False, True), (True, False)]

    def test_a_graph_captured_in_inference_mode_replays_outside(self, rig: Rig) -> None:
        """The caller's mode at replay does not matter: a replay is a launch."""
        torch = rig.torch
        with torch.inference_mode():
            state = rig.zeros(3)
            graph = rig.capture(lambda: state.add_(1) * 2)
        graph.replay()
        with torch.no_grad():
            graph.replay()
        assert rig.read(graph.outputs) == [4.0] * 3

    def test_replay_ignores_the_callers_autocast(self, rig: Rig) -> None:
        """What was captured in full precision stays so."""
        x = rig.randn(4, 8)
        graph = rig.warm_capture(lambda: x @ x.t())
        expected = x @ x.t()
        with rig.torch.autocast(rig.torch.device(rig.backend.torch_device).type):
            graph.replay()
        rig.torch.testing.assert_close(graph.outputs, expected)

    def test_a_training_step_gives_eager_gradients_and_weights(self, rig: Rig) -> None:
        """Backward inside the callable is captured like any other work."""
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
        """Counters and caches must not notice that a graph was made."""
        counter, cache = rig.zeros(1), rig.zeros(8, 2)
        position = rig.zeros(1, dtype=rig.torch.int64)

        def run() -> Any:
            counter.add_(1)
            cache.index_copy_(0, position, counter.expand(1, 2))
            cache[7].fill_(9)
            position.add_(1)
            return cache * 1

        graph = rig.capture(run)
        assert rig.read(counter) == [0.0]
        assert rig.read(cache) == [[0.0, 0.0]] * 8
        assert rig.read(position) == [0]
        for _ in range(3):
            graph.replay()
        assert rig.read(counter) == [3.0]
        expected = [[1.0] * 2, [2.0] * 2, [3.0] * 2] + [[0.0] * 2] * 4 + [[9.0] * 2]
        assert rig.read(cache) == expected
        assert rig.read(graph.outputs) == expected

    def test_running_statistics_are_left_alone_by_a_capture(self, rig: Rig) -> None:
        """Batch norm writes its statistics without saying so in its signature."""
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

    # -- random numbers -------------------------------------------------------------------

    @pytest.mark.parametrize("own_generator", [False, True], ids=["default", "own"])
    @pytest.mark.parametrize("name", DRAWS)
    def test_replays_draw_the_sequence_of_eager(
        self, rig: Rig, name: str, own_generator: bool
    ) -> None:
        """Eager and replay may be mixed without a repeated or a lost number."""
        device = rig.backend.torch_device
        generator = rig.generator() if own_generator else None
        source = generator if generator is not None else rig.default_generator()
        draw = DRAWS[name]
        source.manual_seed(11)
        expected = [draw(rig.torch, device, generator).clone() for _ in range(4)]
        source.manual_seed(11)
        before = source.get_state()
        graph = rig.capture(
            lambda: draw(rig.torch, device, generator),
            generators=[] if generator is None else [generator],
        )
        assert rig.torch.equal(source.get_state(), before)
        drawn = [rig.replayed(graph), draw(rig.torch, device, generator).clone()]
        drawn += [rig.replayed(graph), rig.replayed(graph)]
        assert [rig.equal(a, b) for a, b in zip(drawn, expected, strict=True)] == [True] * 4

    def test_dropout_draws_the_sequence_of_eager(self, rig: Rig) -> None:
        """The draw that models make in training."""
        x = rig.torch.ones(64, device=rig.backend.torch_device)

        def drop() -> Any:
            return rig.torch.nn.functional.dropout(x, 0.5)

        rig.default_generator().manual_seed(3)
        expected = [drop().clone() for _ in range(3)]
        rig.default_generator().manual_seed(3)
        graph = rig.capture(drop)
        drawn = [rig.replayed(graph) for _ in range(3)]
        assert [rig.equal(a, b) for a, b in zip(drawn, expected, strict=True)] == [True] * 3

    def test_seeding_again_repeats_the_replays(self, rig: Rig) -> None:
        """The seed is read at replay, not at capture."""
        graph = rig.capture(lambda: rig.torch.rand(8, device=rig.backend.torch_device))
        rig.default_generator().manual_seed(5)
        first = rig.replayed(graph)
        rig.default_generator().manual_seed(5)
        assert rig.equal(rig.replayed(graph), first)
        assert not rig.equal(rig.replayed(graph), first)

    def test_a_graph_says_whether_it_draws(self, rig: Rig) -> None:
        """Graphs without random state may be launched by shorter ways."""
        x = rig.zeros(4)
        quiet = rig.capture(lambda: x + 1)
        drawing = rig.capture(lambda: rig.torch.rand(4, device=rig.backend.torch_device))
        quiet.replay()
        drawing.replay()
        assert not quiet.has_random_state
        assert drawing.has_random_state

    # -- captures that fail ---------------------------------------------------------------

    def _program(self, rig: Rig, state: Any, generator: Any) -> list[Callable[[], Any]]:
        """Return steps of every kind; a callable fails after some number of them."""
        device = rig.backend.torch_device
        torch = rig.torch
        return [
            lambda: state * 2,
            lambda: state.add_(1),
            lambda: state.view(2, 4)[1].mul_(3),
            lambda: torch.rand(8, device=device),
            lambda: torch.rand(8, device=device, generator=generator),
            lambda: torch.nn.functional.dropout(state, 0.5),
            lambda: state.uniform_(generator=generator),
            lambda: state.index_copy_(0, torch.arange(2, device=device), state[:2] + 1),
            lambda: torch.add(state, 1, out=state),
            lambda: state.exp_().log_(),
        ]

    @pytest.mark.parametrize("num_steps", range(11))
    def test_a_capture_that_fails_leaves_everything_as_before(
        self, rig: Rig, num_steps: int
    ) -> None:
        """At whatever step: state, generators, stream, collector and other graphs."""
        backend, torch = rig.backend, rig.torch
        state, generator = rig.randn(8), rig.generator()
        x = rig.zeros(8)
        healthy = rig.capture(lambda: (x + 1) * 2)
        default_before = rig.default_generator().get_state()
        own_before = generator.get_state()
        state_before = state.clone()
        handle = backend.current_stream_handle()
        program = self._program(rig, state, generator)

        def run() -> None:
            for step in program[:num_steps]:
                step()
            raise PlannedError("on purpose")

        with pytest.raises(CaptureError) as caught:
            rig.capture(run, generators=[generator])
        assert isinstance(caught.value.__cause__, PlannedError)
        assert caught.value.reason == "error"
        assert backend.current_stream_handle() == handle
        assert not backend.is_capturing()
        assert gc.isenabled()
        assert torch.equal(rig.default_generator().get_state(), default_before)
        assert torch.equal(generator.get_state(), own_before)
        assert rig.equal(state, state_before)
        torch.rand(2, device=backend.torch_device)  # eager draws go on working
        x.fill_(4)
        assert rig.read(rig.replayed(healthy)) == [10.0] * 8
        again = rig.capture(lambda: x - 1)
        assert rig.read(rig.replayed(again)) == [3.0] * 8

    @pytest.mark.parametrize("name", HOST_SYNCS)
    def test_calls_that_wait_for_the_device_are_refused(self, rig: Rig, name: str) -> None:
        """With a reason to count, and without harm to what comes after."""
        x = rig.torch.ones(4, 8, device=rig.backend.torch_device)
        before = rig.default_generator().get_state()
        with pytest.raises(CaptureError) as caught:
            rig.capture(lambda: HOST_SYNCS[name](rig.torch, x + 1))
        assert caught.value.reason == "host_sync"
        assert caught.value.__cause__ is not None
        assert rig.torch.equal(rig.default_generator().get_state(), before)
        graph = rig.capture(lambda: x + 1)
        assert rig.read(rig.replayed(graph)[0]) == [2.0] * 8

    def test_a_refused_call_is_named(self, rig: Rig) -> None:
        """The user has to find it in a model of a thousand lines."""
        x = rig.zeros(3)
        with pytest.raises(CaptureError, match=r"Tensor\.item"):
            rig.capture(lambda: x.sum().item())

    def test_a_refused_call_that_the_callable_catches_still_fails(self, rig: Rig) -> None:
        """The capture is lost anyway: nothing may look as if it had worked."""
        x = rig.zeros(3)

        def run() -> Any:
            try:
                x.tolist()
            except RuntimeError:
                return x + 1
            return x

        with pytest.raises(CaptureError) as caught:
            rig.capture(run)
        assert caught.value.reason == "host_sync"

    @pytest.mark.parametrize(
        "wait",
        [
            lambda rig: rig.stream.synchronize(),
            lambda rig: rig.backend.synchronize(),
            lambda rig: rig.backend.new_event().synchronize(),
            lambda rig: rig.stream.query(),
        ],
        ids=["stream", "device", "event", "query"],
    )
    def test_waits_through_the_backend_are_refused(
        self, rig: Rig, wait: Callable[[Rig], Any]
    ) -> None:
        """A device forbids them in a capture; so does every backend."""
        with pytest.raises(CaptureError) as caught:
            rig.capture(lambda: wait(rig))
        assert caught.value.reason == "host_sync"
        assert rig.read(rig.replayed(rig.capture(lambda: rig.zeros(1) + 1))) == [1.0]

    def test_captures_do_not_nest(self, rig: Rig) -> None:
        """Exactly one layer acts; the inner function is to be called itself."""
        x = rig.zeros(2)
        with pytest.raises(CaptureError) as caught:
            rig.capture(lambda: rig.capture(lambda: x + 1))
        assert caught.value.reason == "nested"
        assert rig.read(rig.replayed(rig.capture(lambda: x + 1))) == [1.0, 1.0]

    def test_running_out_of_memory_is_reported_as_such(self, rig: Rig) -> None:
        """The key goes to eager for this reason, and other graphs live on."""
        x = rig.zeros(4)
        healthy = rig.capture(lambda: x + 1)

        def run() -> Any:
            return rig.torch.empty(2**50, dtype=rig.torch.uint8, device=rig.backend.torch_device)

        with pytest.raises(CaptureError) as caught:
            rig.capture(run)
        assert caught.value.reason == "out_of_memory"
        assert rig.read(rig.replayed(healthy)) == [1.0] * 4

    def test_an_interrupt_passes_through_and_leaves_everything_as_before(self, rig: Rig) -> None:
        """Ctrl-C is not a capture error, but must not break the device either."""
        state = rig.zeros(2)

        def run() -> None:
            state.add_(1)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            rig.capture(run)
        assert rig.read(state) == [0.0, 0.0]
        assert not rig.backend.is_capturing()
        assert rig.read(rig.replayed(rig.capture(lambda: state + 1))) == [1.0, 1.0]

    def test_failing_captures_reserve_no_memory(self, rig: Rig) -> None:
        """Twenty failures of several kinds leave the pool as it was."""
        x = rig.zeros(1024)
        rig.capture(lambda: (x + 1) * 2)
        kinds: list[Callable[[], Any]] = [
            lambda: (x + 1).sum().item(),
            lambda: (x + 1)[x > 0],
            lambda: (x + 1) / PlannedError,
            lambda: (x + 1).cpu() + 1,
            lambda: (x + 1) @ rig.zeros(7),
        ]
        sizes: list[int] = []
        for turn in range(20):
            with pytest.raises(CaptureError):
                rig.capture(kinds[turn % 5])
            if turn % 5 == 4:
                self.settle(rig)
                sizes.append(rig.backend.pool_bytes(rig.pool))
        assert len(set(sizes)) == 1

    @pytest.mark.parametrize("enabled", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_the_collector_is_held_and_put_back(self, rig: Rig, enabled: bool, fails: bool) -> None:
        """A collection in mid-capture may destroy an old graph; the setting is the user's."""
        seen: list[bool] = []

        def run() -> Any:
            seen.append(gc.isenabled())
            if fails:
                raise PlannedError("on purpose")
            return rig.zeros(1) + 1

        try:
            if not enabled:
                gc.disable()
            if fails:
                with pytest.raises(CaptureError):
                    rig.capture(run)
            else:
                rig.capture(run)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
        assert seen == [False]

    def test_is_capturing_is_true_only_inside(self, rig: Rig) -> None:
        """A call inside a capture passes straight through on this answer."""
        seen: list[bool] = []

        def run() -> Any:
            seen.append(rig.backend.is_capturing())
            return rig.zeros(1) + 1

        rig.capture(run)
        assert seen == [True]
        assert not rig.backend.is_capturing()

    # -- release --------------------------------------------------------------------------

    def test_a_released_graph_refuses_to_replay(self, rig: Rig) -> None:
        """It would run on memory that is no longer its own."""
        x = rig.zeros(2)
        graph, other = rig.capture(lambda: x + 1), rig.capture(lambda: x + 2)
        graph.replay()
        graph.release()
        graph.release()
        with pytest.raises(ReplayError):
            graph.replay()
        with pytest.raises(ReplayError):
            _ = graph.outputs
        assert rig.read(rig.replayed(other)) == [2.0, 2.0]

    def test_release_right_after_replay_is_safe(self, rig: Rig) -> None:
        """Eviction does not wait for the device."""
        counter = rig.zeros(4)
        graph = rig.capture(lambda: counter.add_(1))
        graph.replay()
        graph.replay()
        graph.release()
        assert rig.read(counter) == [2.0] * 4

    def test_many_captures_and_releases_leave_nothing(self, rig: Rig) -> None:
        """Eviction and re-capture go on for weeks."""
        x = rig.zeros(256)
        sizes: list[int] = []
        for _ in range(30):
            graph = rig.capture(lambda: (x + 1) * 2)
            graph.replay()
            sizes.append(rig.backend.pool_bytes(rig.pool))
            graph.release()
        assert max(sizes) == sizes[0]
        del graph
        self.settle(rig)
        assert rig.backend.pool_bytes(rig.pool) == 0

    # -- pools ----------------------------------------------------------------------------

    def test_a_pool_counts_what_it_reserves(self, rig: Rig) -> None:
        """Budgets are kept in these bytes."""
        assert rig.backend.pool_bytes(rig.pool) == 0
        x = rig.zeros(1 << 16)
        graph = rig.capture(lambda: (x + 1) * 2)
        assert rig.backend.pool_bytes(rig.pool) >= x.nbytes
        graph.release()
        self.settle(rig)
        assert rig.backend.pool_bytes(rig.pool) == 0

    def test_a_shared_pool_is_smaller_than_a_pool_each(self, rig: Rig) -> None:
        """Captured largest first, one pool comes near the largest graph alone."""
        base = rig.zeros(1 << 22)
        sizes = [1 << shift for shift in (22, 21, 20, 19)]

        def run(size: int) -> Callable[[], Any]:
            part = base[:size]
            return lambda: rig.torch.sum((((part + 1) * 2).relu() - 3) * part)

        pools = [rig.backend.new_pool() for _ in sizes]
        graphs = [
            rig.backend.capture(run(size), stream=rig.stream, pool=pool)
            for size, pool in zip(sizes, pools, strict=True)
        ]
        graphs += [rig.capture(run(size)) for size in sizes]
        alone = [rig.backend.pool_bytes(pool) for pool in pools]
        shared = rig.backend.pool_bytes(rig.pool)
        assert shared < sum(alone)
        assert shared <= 1.25 * alone[0]
        base.fill_(2)
        # (relu((2 + 1) * 2) - 3) * 2 is 6 for each element.
        assert [rig.read(rig.replayed(graph)) for graph in graphs[4:]] == [6.0 * n for n in sizes]

    # -- streams and events ---------------------------------------------------------------

    def test_use_stream_sets_and_restores_the_current_stream(self, rig: Rig) -> None:
        """Also when the block raises, and when blocks nest."""
        backend = rig.backend
        other = backend.new_stream()
        start = backend.current_stream_handle()
        assert len({start, rig.stream.handle, other.handle}) == 3
        with backend.use_stream(rig.stream):
            assert backend.current_stream_handle() == rig.stream.handle
            with backend.use_stream(other):
                assert backend.current_stream_handle() == other.handle
                assert backend.current_stream().handle == other.handle
            assert backend.current_stream_handle() == rig.stream.handle
        with pytest.raises(PlannedError), backend.use_stream(rig.stream):
            raise PlannedError
        assert backend.current_stream_handle() == start

    def test_the_current_stream_is_the_threads_own(self, rig: Rig) -> None:
        """One thread's choice does not move another's work."""
        seen: list[int] = []
        start = rig.backend.current_stream_handle()
        with rig.backend.use_stream(rig.stream):
            thread = threading.Thread(
                target=lambda: seen.append(rig.backend.current_stream_handle())
            )
            thread.start()
            thread.join()
        assert seen == [start]

    def test_streams_are_distinct_up_to_the_limit(self, rig: Rig) -> None:
        """Two lanes on one stream would wait for each other without anyone knowing."""
        limit = rig.backend.capabilities.max_streams
        if limit is None:
            pytest.skip("the backend states no limit of streams")
        streams = [rig.stream, *(rig.backend.new_stream() for _ in range(limit - 1))]
        assert len({stream.handle for stream in streams}) == limit
        with pytest.raises(ConfigError, match=str(limit)):
            rig.backend.new_stream()
        streams.pop()
        gc.collect()
        assert rig.backend.new_stream().handle

    def test_a_graph_replays_on_any_stream(self, rig: Rig) -> None:
        """It is launched on the caller's stream, in its order."""
        x = rig.zeros(4)
        graph = rig.capture(lambda: x * 2)
        for value in range(5):
            x.fill_(value)
            graph.replay()
            assert rig.read(graph.outputs.clone()) == [2.0 * value] * 4

    def test_work_ordered_by_waits_gives_the_right_data(self, rig: Rig) -> None:
        """The caller's stream feeds the lane's, and reads what comes back."""
        backend = rig.backend
        caller = backend.new_stream()
        x = rig.zeros(1 << 12)
        graph = rig.capture(lambda: (x * 2 + 1) * 2)
        results = []
        backend.synchronize()
        for value in range(12):
            with backend.use_stream(caller):
                # Without this wait the next input would overwrite one still being read.
                caller.wait_stream(rig.stream)
                x.fill_(value)
                rig.stream.wait_stream(caller)
                with backend.use_stream(rig.stream):
                    graph.replay()
                caller.wait_stream(rig.stream)
                results.append(graph.outputs.clone())
        backend.synchronize()
        assert [result.unique().tolist() for result in results] == [
            [4.0 * value + 2] for value in range(12)
        ]

    def test_events_order_two_streams(self, rig: Rig) -> None:
        """Record on one, wait on the other; the same event is used again."""
        backend = rig.backend
        other, event = backend.new_stream(), backend.new_event()
        x = rig.zeros(1 << 12)
        results = []
        backend.synchronize()
        for value in range(1, 8):
            with backend.use_stream(rig.stream):
                x.add_(1)
                event.record()
            with backend.use_stream(other):
                other.wait_event(event)
                results.append((value, x * 2))
            rig.stream.wait_stream(other)
        backend.synchronize()
        for value, result in results:
            assert result.unique().tolist() == [2.0 * value]

    def test_events_tell_when_work_is_done(self, rig: Rig) -> None:
        """An event never recorded has nothing to wait for."""
        event = rig.backend.new_event()
        assert event.query()
        event.record(rig.stream)
        event.synchronize()
        assert event.query()
        assert rig.stream.query()

    def test_timing_events_measure(self, rig: Rig) -> None:
        """In microseconds, from the first event to the second."""
        start, end = (rig.backend.new_event(timing=True) for _ in range(2))
        x = rig.zeros(1 << 16)
        start.record()
        for _ in range(20):
            x.add_(1)
        end.record()
        end.synchronize()
        assert start.elapsed_us(end) > 0.0

    def test_events_without_timing_refuse_to_measure(self, rig: Rig) -> None:
        """A time of zero would be taken for a fast step."""
        start, end = rig.backend.new_event(), rig.backend.new_event(timing=True)
        start.record()
        end.record()
        end.synchronize()
        with pytest.raises(ConfigError):
            start.elapsed_us(end)

    def test_a_time_that_was_never_taken_is_an_error(self, rig: Rig) -> None:
        """Both events must have been recorded."""
        start, end = (rig.backend.new_event(timing=True) for _ in range(2))
        start.record()
        with pytest.raises(ReplayError):
            start.elapsed_us(end)

    # -- warm-up --------------------------------------------------------------------------

    def test_warmup_runs_on_the_given_stream_in_the_callers_order(self, rig: Rig) -> None:
        """After what the caller queued before, and before what it queues next."""
        seen: list[int] = []
        x = rig.zeros(1 << 12)
        start = rig.backend.current_stream_handle()

        def run() -> Any:
            seen.append(rig.backend.current_stream_handle())
            return x + len(seen)

        x.fill_(5)
        result = rig.backend.warmup(run, stream=rig.stream, iterations=3)
        after = result * 2
        assert seen == [rig.stream.handle] * 3
        assert rig.read(after[:2]) == [16.0, 16.0]
        assert rig.backend.current_stream_handle() == start

    def test_a_failing_warmup_raises_what_the_callable_raised(self, rig: Rig) -> None:
        """The step itself is broken: nothing to do with capture."""
        start = rig.backend.current_stream_handle()

        def run() -> None:
            raise PlannedError("on purpose")

        with pytest.raises(PlannedError):
            rig.backend.warmup(run, stream=rig.stream)
        assert rig.backend.current_stream_handle() == start

    # -- threads --------------------------------------------------------------------------

    def test_threads_capture_and_replay_without_harm_to_each_other(self, rig: Rig) -> None:
        """One capture at a time per device, whoever asks; replays go on meanwhile."""
        backend = rig.backend
        results: dict[int, list[float]] = {}
        errors: list[BaseException] = []
        streams = [backend.new_stream() for _ in range(4)]
        inputs = [rig.zeros(64) for _ in range(4)]
        backend.synchronize()

        def work(number: int) -> None:
            try:
                x, stream, pool = inputs[number], streams[number], backend.new_pool()
                got = []
                with backend.use_stream(stream):
                    for turn in range(5):
                        graph = backend.capture(
                            lambda: rig.torch.relu((x + 1) * (number + 1)), stream=stream, pool=pool
                        )
                        x.fill_(turn)
                        graph.replay()
                        got.append(graph.outputs.clone())
                stream.synchronize()
                results[number] = [float(part[0]) for part in got]
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert results == {
            number: [(turn + 1.0) * (number + 1) for turn in range(5)] for number in range(4)
        }
        assert gc.isenabled()
