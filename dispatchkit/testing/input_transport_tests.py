"""Test kit for the transports that copy inputs into the buffers of graphs.

    class TestMyBackendsInputs(InputTransportTests):
        def make_backend(self):
            return MyBackend()

Each test runs once per entry of ``WAYS``. The step returns each input as its graph reads it: first
the rows of the call, then padding rows with the fill value.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.optional import features_of
from dispatchkit.errors import counted
from dispatchkit.execute import EagerStepWarning, GraphRunner, StaticInput
from dispatchkit.execute.step.pieces import eager_piece, graph_piece
from dispatchkit.keys import BatchDescriptor, GraphKey, RuntimeMode
from dispatchkit.options import BufferOptions, CaptureOptions, RunnerOptions
from dispatchkit.testing.smallest import OneBucketPolicy

SIZES = (1, 4, 8)
DEVICE = {
    "x": StaticInput((None, 3), "float32", fill=-1),
    "y": StaticInput((None,), "int64", fill=7),
    "flag": StaticInput((None,), "bool", fill=True),
    "half": StaticInput((None, 3), "bfloat16", fill=1),
    "complex": StaticInput((None,), "complex64", fill=2),
    "table": StaticInput((2,), "float32"),
}
#: Inputs that copy nodes do not support, because they are batched along a dimension other than 0,
#: have elements of more than 8 bytes, or are too large at 8 rows.
BESIDE = {
    "wide": StaticInput((3, None), "int32", fill=4),
    "pairs": StaticInput((None,), "complex128", fill=2),
    "large": StaticInput((None, 40_000), "uint8", fill=3),
}
HOST = {
    "tokens": StaticInput((None,), "int64", fill=9, host=True),
    "rows": StaticInput((None, 3), "bfloat16", fill=1, host=True),
    "mask": StaticInput((None,), "bool", fill=True, host=True),
    "short": StaticInput((None, 5), "int16", fill=6, host=True),
    "fixed": StaticInput((2,), "float64", host=True),
}
#: A host input that copy nodes do not support, because it is batched along dimension 1.
ACROSS = {"across": StaticInput((2, None), "float16", fill=5, host=True)}

#: Input values are slices of ``_COUNTING``, which repeats 0, 1, ..., 96 and is longer than the
#: largest input at 8 rows.
_PERIOD = 97
_COUNTING = torch.arange(320_000 + _PERIOD, dtype=torch.int16).remainder(_PERIOD)

#: Maximum bytes of host inputs in a ``short`` copy node: enough for 4 rows, but not for 8 rows.
MOST_DATA = 150


@attrs.frozen
class Way:
    """One combination of inputs, copy node and kind of graph.

    Attributes:
        inputs: The declared inputs.
        path: Expected prefix of the paths that ``runner.controls.input_path`` returns; a tuple of
            allowed prefixes if the paths differ between sizes.
        node: The copy node of the graphs: ``used``, ``none``, ``short`` (it has no room for the
            host inputs of the largest size) or ``lost`` (it is not found in the captured graph).
        kind: ``full``, ``pieces``, or ``registered`` for graphs captured outside the runner.
    """

    inputs: dict[str, StaticInput]
    path: str | tuple[str, ...]
    node: str = "none"
    kind: str = "full"

    @property
    def has_host(self) -> bool:
        """Whether there are host inputs."""
        return any(spec.host for spec in self.inputs.values())

    @property
    def key_mode(self) -> RuntimeMode:
        """Runtime mode of the graphs."""
        return RuntimeMode.PIECEWISE if self.kind == "pieces" else RuntimeMode.FULL


WAYS = {
    "copied": Way(DEVICE | BESIDE, "copy: "),
    "copied, one dtype": Way({"y": DEVICE["y"]}, "copy: "),
    "staged": Way(HOST | ACROSS, "staging: "),
    "staged, with device inputs": Way(DEVICE | HOST, "copy: "),
    "staged, into pieces": Way(DEVICE | HOST, "copy: made of pieces; host", kind="pieces"),
    "node, device inputs": Way(DEVICE, "node", "used"),
    "node, with unsupported inputs": Way(DEVICE | BESIDE, "node", "used"),
    "node, host inputs": Way(HOST, "node", "used"),
    "node, device and host inputs": Way(DEVICE | HOST, "node", "used"),
    "node, with host and unsupported inputs": Way(BESIDE | HOST | DEVICE, "node", "used"),
    "node, host inputs staged": Way(DEVICE | HOST | ACROSS, "node; host inputs: staging: ", "used"),
    "node or staged": Way(HOST, ("node", "staging: too many"), "short"),
    "node or staged, with device inputs": Way(DEVICE | HOST, "node", "short"),
    "node not found": Way(DEVICE | HOST, "copy: lost", "lost"),
    "registered graphs": Way(
        DEVICE | BESIDE, "copy: captured outside the runner", kind="registered"
    ),
    "registered graphs, with host inputs": Way(
        HOST | DEVICE, "copy: captured outside the runner", kind="registered"
    ),
}


class InputTransportTests:
    """Tests of the values that a runner's graphs read.

    Subclass it under a name that starts with ``Test``. Override ``make_backend`` and, if needed,
    ``lag``.
    """

    def make_backend(self) -> GraphBackend:
        """Return a new backend."""
        from dispatchkit.backends.tape import TapeBackend

        return TapeBackend()

    def lag(self, backend: GraphBackend) -> None:
        """Make the device lag behind the host, if possible."""
        if backend.torch_device != "cpu":
            torch.cuda._sleep(100_000)  # noqa: SLF001 - no public API delays the device

    @pytest.fixture(params=list(WAYS))
    def way(self, request: pytest.FixtureRequest) -> Way:
        """Return one entry of ``WAYS``."""
        found: Way = WAYS[request.param]
        return found

    @pytest.fixture
    def bench(self, way: Way) -> Iterator[Bench]:
        """Yield a ``Bench`` for one entry of ``WAYS``."""
        backend = self.make_backend()
        if way.node != "none" and features_of(backend).copy_nodes is None:
            pytest.skip(f"Backend {backend.name!r} offers no copy nodes.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerStepWarning)
            yield Bench(way, NodeSwitch(backend, way.node), lambda: self.lag(backend))
            backend.synchronize()

    # -- values that graphs read ----------------------------------------------------------

    def test_the_path_is_the_one_under_test(self, bench: Bench) -> None:
        """Each graph uses the transport that the other tests assume."""
        runner = bench.runner()
        for size in SIZES:
            path, expected = runner.controls.input_path(bench.key(size)), bench.way.path
            starts = (expected,) if isinstance(expected, str) else expected
            assert path.startswith(starts), (
                f"The input path of size {size} is {path!r}, but must start with "
                f"{' or '.join(map(repr, starts))}."
            )

    def test_a_graph_reads_the_rows_of_its_call_and_fill_behind(self, bench: Bench) -> None:
        """Each step (in place, eager, ...) reads its own rows, even after a larger step."""
        kinds = ["call", "strided", "negated", "in place", "eager"]
        if bench.way.node in ("used", "short"):
            kinds += ["refused", "refused in place"]
        steps = []
        for second in kinds:
            steps += [step for first in kinds for step in ((first, 7), (second, 3))]
            steps += [("in place", 8), ("call", 3), ("call", 8), ("in place", 2), ("call", 1)]
        runner = bench.runner()
        for number, (kind, rows) in enumerate(steps):
            bench.run_and_compare(runner, rows, number, kind)
        reasons = dict(runner.stats().eager_by_reason)
        reasons.pop("ceiling", None)  # the steps that must run eager
        assert not reasons, f"Steps ran eager for unexpected reasons: {reasons}."

    def test_larger_graphs_fill_further(self, bench: Bench) -> None:
        """One row is padded correctly in buckets of different sizes, in varying order."""
        runner = bench.runner()
        runner_keys = [bench.key(size) for size in SIZES]
        for number, smallest in enumerate((0, 2, 1, 2, 0)):
            for index, key in enumerate(runner_keys):
                runner.controls.set_enabled(index >= smallest, key=key)
            for kind in ("call", "in place"):
                bench.run_and_compare(runner, 1, 10 * number, kind, bucket=SIZES[smallest])

    def test_host_values_are_taken_and_tensors_are_read_in_order(self, bench: Bench) -> None:
        """Zeroing host inputs and dropping all tensors after a call do not affect its step."""
        runner, kept = bench.runner(), []
        for number in range(40):
            rows = number * 5 % 8 + 1
            values = bench.values(rows, number)
            wanted = bench.wanted(values, rows)
            bench.lag()
            kept.append((runner(**bench.given(values), ceiling=bench.ceiling), wanted))
            for name, value in values.items():
                if bench.way.inputs[name].host:
                    value.zero_()
            del values
        bench.backend.synchronize()
        for result, wanted in kept:
            bench.compare(result, wanted)

    def test_nothing_of_a_call_is_kept_alive(self, bench: Bench) -> None:
        """After a step, the runner keeps no reference to the inputs of the call."""
        runner = bench.runner()
        for rows, ceiling in ((3, 2), (3, 2), (8, 2), (8, 0), (3, 2)):
            values = bench.values(rows, rows)
            held = [weakref.ref(value) for value in values.values()]
            runner(**values, ceiling=min(ceiling, bench.ceiling))
            bench.backend.synchronize()
            del values
            alive = [ref() for ref in held if ref() is not None]
            assert not alive, (
                f"The runner still references {counted(len(alive), 'input')} of a finished call."
            )

    # -- other features of a runner -------------------------------------------------------

    def test_threads(self, bench: Bench) -> None:
        """Concurrent callers on separate streams each get the rows of their own call."""
        runner, failures = bench.runner(), []
        start = threading.Barrier(3)

        def work(first: int) -> None:
            try:
                start.wait()
                with bench.backend.use_stream(bench.backend.new_stream()):
                    for number in range(first, first + 25):
                        bench.run_and_compare(runner, number * 5 % 8 + 1, number, "call")
            except BaseException as error:  # noqa: BLE001 - the main thread reports it
                failures.append(error)

        threads = [threading.Thread(target=work, args=(100 * index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, f"A step on a separate thread failed: {failures[0]!r}"

    def test_lanes(self, bench: Bench) -> None:
        """Each lane has its own static inputs, and host values are copied during the call."""
        if bench.way.kind == "registered":
            pytest.skip("Graphs captured outside the runner run only on the first lane.")
        runner, handles = bench.runner(lanes=2), []
        for number in range(24):
            rows = number * 5 % 8 + 1
            values = bench.values(rows, number)
            wanted = bench.wanted(values, rows)
            bench.lag()
            handles.append((runner.submit(**bench.given(values), ceiling=bench.ceiling), wanted))
            for name, value in values.items():
                if bench.way.inputs[name].host:
                    value.zero_()
        for handle, wanted in handles:
            bench.compare(handle.result(), wanted)

    def test_check_mode(self, bench: Bench) -> None:
        """In strict check mode, which raises if a replay differs from eager, all steps pass."""
        runner = bench.runner(by_rows=True, options=RunnerOptions(check=1, strict=True))
        for number in range(12):
            rows = number * 5 % 8 + 1
            values = bench.values(rows, number)
            result = runner(**bench.given(values), ceiling=bench.ceiling)
            bench.compare(result, bench.wanted(values, rows, rows))
        assert runner.stats().eager_by_reason == {}

    @pytest.mark.filterwarnings("ignore:The step draws random numbers")
    def test_random_numbers(self, bench: Bench) -> None:
        """Random numbers in a step do not change its transport, and equal those of an eager run."""
        if bench.way.kind != "full":
            pytest.skip("Only full graphs are tested with random numbers.")
        runner = bench.runner(draws=True)
        assert runner.controls.input_path(bench.key(4)).startswith(bench.way.path)
        device = bench.backend.torch_device
        for number in range(6):
            rows = number * 5 % 8 + 1
            values = bench.values(rows, number)
            torch.manual_seed(number)
            result = dict(runner(**bench.given(values)))
            torch.manual_seed(number)
            assert torch.equal(result.pop("drawn"), torch.rand(4, device=device))
            bench.compare(result, bench.wanted(values, rows))

    def test_a_capture_on_the_way_loses_no_rows(self, bench: Bench) -> None:
        """In-place steps that capture a graph, or recapture a stale one, read their own rows."""
        if bench.way.kind == "registered":
            pytest.skip("The graphs were captured outside the runner.")
        runner = bench.runner(lazy=True)
        for number, (rows, kind) in enumerate(
            [(3, "in place"), (7, "call"), (2, "in place"), (3, "in place"), (5, "call")]
        ):
            if number > 2:
                runner.invalidate("a test")
            bench.run_and_compare(runner, rows, number, kind)
        assert runner.stats().eager_by_reason == {}

    def test_a_node_that_cannot_be_set_is_made_up_for(self, bench: Bench) -> None:
        """If a copy node's parameters cannot be set, torch copies, and ``input_path`` says so."""
        if bench.way.node not in ("used", "short"):
            pytest.skip("The graphs have no copy node.")
        runner = bench.runner()
        for number in range(30):
            kind = "in place" if number % 3 == 1 else "call"
            refused = "refused " if number % 4 == 2 else ""
            bench.run_and_compare(runner, number * 5 % 8 + 1, number, f"{refused}{kind}")
        path = runner.controls.input_path(bench.key(4))
        assert path.startswith("copy: the copy node failed"), path
        assert runner.stats().eager_by_reason == {}


class Bench:
    """A helper that creates runners and call arguments, and checks what the graphs read."""

    def __init__(self, way: Way, backend: NodeSwitch, lag: Callable[[], None]) -> None:
        self.way, self.backend, self.lag = way, backend, lag
        self.device = torch.device(backend.torch_device)
        self.ceiling = 1 if way.kind == "pieces" else 2

    def key(self, size: int) -> GraphKey:
        """Return the key of the graph for a capture size."""
        return GraphKey(self.way.key_mode, BatchDescriptor(size))

    def runner(
        self,
        *,
        draws: bool = False,
        by_rows: bool = False,
        lazy: bool = False,
        lanes: int = 1,
        options: RunnerOptions = RunnerOptions(),  # noqa: B008 - it is frozen
    ) -> Any:
        """Return a runner, with all graphs captured unless ``lazy`` is set.

        Args:
            draws: Whether the step also returns four random numbers.
            by_rows: Whether results contain only the rows of the call, without padding.
            lazy: Whether to capture each graph on first use.
            lanes: Number of lanes of the runner.
            options: Further settings.
        """
        step = _returning(self.way.inputs, draws=draws)
        if not by_rows:
            # Results include padding, so the proof of rows would fail.
            options = attrs.evolve(
                options,
                buffers=BufferOptions(output_batch_dims=None),
                capture=CaptureOptions(prove_rows=False),
            )
        runner = GraphRunner(
            [graph_piece(step), eager_piece(dict)] if self.way.kind == "pieces" else step,
            self.way.inputs,
            sizes=SIZES,
            policy=_CoveringPolicy(),
            mode="PIECEWISE" if self.way.kind == "pieces" else "FULL",
            backend=self.backend,
            lazy=lazy,
            lanes=lanes,
            options=options,
        )
        if self.way.kind == "registered":
            self._register(runner, step, by_rows=by_rows)
        elif not lazy:
            failed = runner.capture().failed
            assert not failed, f"Captures failed: {failed}"
        return runner

    def _register(self, runner: Any, step: Callable[..., Any], *, by_rows: bool) -> None:
        backend = self.backend
        stream, pool = backend.new_stream(), backend.new_pool()
        for size in SIZES:
            static = {name: spec.full(size, self.device) for name, spec in self.way.inputs.items()}
            backend.warmup(lambda static=static: step(**static), stream=stream)
            graph = backend.capture(lambda static=static: step(**static), stream=stream, pool=pool)
            dims = {name: spec.batch_dim for name, spec in self.way.inputs.items()}
            runner.controls.register(
                self.key(size),
                graph,
                inputs=static,
                outputs=graph.outputs,
                output_batch_dims=dims if by_rows else None,
                has_effect=False,
            )

    # -- calls ----------------------------------------------------------------------------

    def values(self, rows: int, number: int) -> dict[str, torch.Tensor]:
        """Return the input values of a call; ``number`` selects different values for each call."""
        made = {}
        for index, (name, spec) in enumerate(self.way.inputs.items()):
            shape = spec.sized(rows)
            start = (10 * number + index) % _PERIOD
            value = _COUNTING[start : start + shape.numel()].view(shape)
            if spec.dtype is torch.bool:
                value = value.remainder(2)
            device = "cpu" if spec.host else self.device
            made[name] = value.to(device, spec.dtype, copy=True)
        return made

    def given(self, values: Mapping[str, torch.Tensor], kind: str = "call") -> dict[str, Any]:
        """Return the values as call arguments; ``kind`` selects, for example, strided tensors."""
        made: dict[str, Any] = {}
        for index, (name, value) in enumerate(values.items()):
            given: Any = value
            if kind == "strided":
                given = torch.stack([value, value], -1)[..., 0]
            elif kind == "negated" and value.dtype is torch.float32:
                given = torch._neg_view(-value)  # noqa: SLF001 - no public API negates lazily
            elif kind == "negated" and value.is_complex():
                given = value.conj().resolve_conj().conj()
            elif kind == "negated" and self.way.inputs[name].host and index % 2:
                given = value.tolist() if value.dtype is torch.int64 else value
            made[name] = given
        return made

    def wanted(
        self, values: Mapping[str, torch.Tensor], rows: int, bucket: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the inputs that a graph should read: the values, then the fill value."""
        if bucket is None:
            bucket = next(size for size in SIZES if size >= rows)
        made = {}
        for name, spec in self.way.inputs.items():
            full = spec.full(bucket, torch.device("cpu"))
            dim = spec.batch_dim
            (full if dim is None else full.narrow(dim, 0, rows)).copy_(values[name])
            made[name] = full
        return made

    def compare(self, result: Mapping[str, torch.Tensor], wanted: Mapping[str, Any]) -> None:
        """Check that a result equals the expected result."""
        assert list(result) == list(wanted)
        for name, value in wanted.items():
            got = result[name].cpu()
            assert torch.equal(got, value), (
                f"The graph read {got} for {name!r}, but must read {value}."
            )

    def run_and_compare(
        self, runner: Any, rows: int, number: int, kind: str, bucket: int | None = None
    ) -> None:
        """Run one step and compare its result."""
        values = self.values(rows, number)
        ceiling = 0 if kind == "eager" else self.ceiling
        self.backend.refuses = kind.startswith("refused")
        if "in place" in kind:
            self._write(runner, values, rows)
            result = runner.run_in_place(rows, ceiling=ceiling)
        else:
            result = runner(**self.given(values, kind), ceiling=ceiling)
        self.compare(result, self.wanted(values, rows, rows if kind == "eager" else bucket))
        self.backend.refuses = False

    def _write(self, runner: Any, values: Mapping[str, torch.Tensor], rows: int) -> None:
        runner.buffers.wait()
        for name, spec in self.way.inputs.items():
            place, dim = runner.buffers[name], spec.batch_dim
            (place if dim is None else place.narrow(dim, 0, rows)).copy_(values[name])


class _CoveringPolicy(OneBucketPolicy):
    """A policy with one key per mode and size; it chooses the smallest ready key that fits."""

    traits = frozenset({"smallest_bucket", "monotone", "order", "stateless"})

    def candidates(self, batch: Any, mode: RuntimeMode, graphs: Any) -> Any:
        return graphs.covering(batch, mode)


def _returning(inputs: Mapping[str, StaticInput], *, draws: bool) -> Callable[..., Any]:
    """Return a step that returns all of its inputs."""

    def step(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in given.items()}
        if draws:
            found["drawn"] = torch.rand(4, device=next(iter(given.values())).device)
        return found

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in inputs]
    step.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return step


class NodeSwitch:
    """A backend wrapper that restricts copy nodes as ``Way.node`` specifies.

    Attributes:
        refuses: Whether setting a node fails.
    """

    def __init__(self, real: GraphBackend, node: str) -> None:
        self._real, self._node = real, node
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def copy_node(self, num_regions: int, num_bytes: int, data_bytes: int = 0) -> Any:
        """Return a wrapped node of the backend, or the reason why there is none."""
        if self._node == "none":
            return "switched off for this test"
        if self._node == "short" and data_bytes > MOST_DATA:
            return "too many bytes for this test"
        real: Any = self._real
        made = real.copy_node(num_regions, num_bytes, data_bytes=data_bytes)
        return made if isinstance(made, str) else _SwitchedNode(made, self, self._node == "lost")


class _SwitchedNode:
    """A copy node that can fail to attach, or fail when it is set."""

    def __init__(self, real: Any, switch: NodeSwitch, is_lost: bool) -> None:
        self._real, self._switch, self._is_lost = real, switch, is_lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def attach(self, graph: Any) -> str:
        """Attach the node, unless the test requires a failure."""
        problem: str = "lost for this test" if self._is_lost else self._real.attach(graph)
        return problem

    def setter(self, regions: Any, offsets: Any = ()) -> Callable[[Any], int]:
        """Return a function that sets the node, but returns 1 while ``switch.refuses`` is True."""
        set_node, switch = self._real.setter(regions, offsets), self._switch

        def set_or_refuse(tensors: Any) -> int:
            return 1 if switch.refuses else set_node(tensors)

        return set_or_refuse
