"""Run a step trace through the decoder, eager and dispatched, and compare each step."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache
from dispatchkit.demo.report import Batch1, Comparison, DemoReport, Difference, KindTimes
from dispatchkit.demo.traffic import DEFAULT_STEPS, PlannedStep, Traffic, plan_traffic
from dispatchkit.distributions import load_attribute
from dispatchkit.errors import (
    BackendUnavailableError,
    ConfigError,
    MissingDistributionError,
    TraceError,
    UnknownNameError,
)
from dispatchkit.execute import EagerStepWarning, GraphRunner, RunnerStats, StaticInput
from dispatchkit.keys import DispatchConfig
from dispatchkit.keys.checks import check_count
from dispatchkit.observe import StepTrace, read_trace
from dispatchkit.registry import KeyState
from dispatchkit.settings import Settings

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet

#: Results differ slightly, because the order of summation depends on the batch size. float32 has
#: about seven digits, and a result is the sum of a few hundred terms. Measured differences are less
#: than a tenth of these tolerances.
ATOL, RTOL = 1e-3, 1e-3
MIN_SLOTS, MAX_SLOTS = 8, 512
DEVICES = ("auto", "tape", "cpu", "cuda")

#: The tape's model is small, so that the demo takes less than a minute on two cores. The GPU's
#: model has more layers, so that launch overhead matters.
TAPE_SHAPE = DecoderShape()
CUDA_SHAPE = DecoderShape(num_layers=8, num_heads=8, head_dim=32)

Progress = Callable[[str, int, int], None]


@attrs.frozen(kw_only=True)
class DemoOptions:
    """Options of the demo.

    Attributes:
        settings: Settings of the runner, such as policy, sizes and budgets; see ``load_settings``.
            Limits that are not given are derived from the trace. ``backend`` is ``tape`` or ``cpu``
            for the tape, and ``cuda`` or ``cuda:N`` for a GPU. ``auto`` uses a GPU if torch detects
            one, otherwise the tape.
        trace: Path of a step trace; None for the trace in ``dispatchkit/demo/data``.
        steps: Maximum number of steps to run, from the start of the trace.
        shape: Sizes of the decoder; None for the default of the device. The number of slots is
            derived from the trace.
    """

    settings: Settings = attrs.field(factory=Settings)
    trace: Path | None = None
    steps: int = DEFAULT_STEPS
    shape: DecoderShape | None = None

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "steps", check_count(self.steps, "steps"))


def resolve_device(name: str) -> torch.device:
    """Return the torch device for a name.

    Raises:
        UnknownNameError: The name is unknown.
        BackendUnavailableError: The device is not available.
    """
    kind, _, index = name.partition(":")
    if kind not in DEVICES or (index and not (kind == "cuda" and index.isdecimal())):
        raise UnknownNameError(
            "device", name, DEVICES, "For a specific GPU, append its number, as in cuda:1."
        )
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind in ("tape", "cpu"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            f"(built for CUDA {built}) detects no driver or GPU"
            if built
            else "was built without CUDA"
        )
        raise BackendUnavailableError(
            f"Device {name!r} is not available: torch {torch.__version__} {why}. "
            "Use the device 'tape', or run `dispatchkit doctor` to find the cause."
        )
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        allowed = ", ".join(f"cuda:{number}" for number in range(count))
        raise BackendUnavailableError(
            f"Device {name!r} does not exist. Use one that torch detects: {allowed}."
        )
    return torch.device("cuda", int(index or 0))


def run_demo(
    options: DemoOptions,
    *,
    plugins: PluginSet | None = None,
    progress: Progress | None = None,
) -> DemoReport:
    """Run each step of a trace twice, eager and dispatched, with separate caches.

    Args:
        options: Trace, number of steps, settings, and sizes of the decoder.
        plugins: The plugins that provide the policy; loaded by default.
        progress: Function that is called with the current activity, the completed amount and the
            total.

    Returns:
        The times of both runs, and the comparison of their results. Incorrect results do not
        raise; see ``DemoReport.comparison``.

    Raises:
        TraceError: The trace cannot be read, lacks a column, or has no step with tokens and
            requests.
        ConfigError: A setting is invalid, or a limit is too small for the steps.
        UnknownNameError: The policy or the device is unknown.
        BackendUnavailableError: The device is not available.
    """
    start = time.perf_counter()
    device = resolve_device(options.settings["backend"])
    trace_name, rows = _read(options.trace, options.steps)
    shape = options.shape or (CUDA_SHAPE if device.type == "cuda" else TAPE_SHAPE)
    most = min(MAX_SLOTS, max(rows.column("num_reqs")))
    # A power of two, so that the default capture sizes provide a FULL graph for every decode step.
    num_slots = max(MIN_SLOTS, 1 << (most - 1).bit_length())
    shape = attrs.evolve(shape, num_slots=num_slots)
    traffic = plan_traffic(rows, num_slots=num_slots, cache_len=shape.cache_len, vocab=shape.vocab)
    tell = progress or (lambda doing, done, total: None)
    with _one_thread(device), torch.no_grad(), warnings.catch_warnings():
        # The report counts eager steps by reason, which is more useful than a warning.
        warnings.simplefilter("ignore", EagerStepWarning)
        return _run(options, device, trace_name, shape, traffic, plugins, tell, start)


def _run(
    options: DemoOptions,
    device: torch.device,
    trace_name: str,
    shape: DecoderShape,
    traffic: Traffic,
    plugins: PluginSet | None,
    tell: Progress,
    start: float,
) -> DemoReport:
    decoder = Decoder(shape, device=device)
    eager_cache, cache = KVCache(shape, device), KVCache(shape, device)
    runner = make_runner(decoder, cache, traffic, options, device, plugins)
    tell("capturing", 0, 1)
    is_lazy = options.settings["lazy"]
    captured = runner.capture(() if is_lazy else None)
    tell("capturing", 1, 1)
    pair = _Pair(decoder, eager_cache, runner, device)
    pair.warm_up(max(step.num_tokens for step in traffic.steps))
    before = runner.stats()
    for index, step in enumerate(traffic.steps):
        tell("replaying", index, len(traffic.steps))
        pair.run_both(index, step)
    tell("replaying", len(traffic.steps), len(traffic.steps))
    after = runner.stats()
    comparison = pair.compare_caches(cache)
    return DemoReport(
        policy=runner.dispatcher.policy_name,
        policy_origin=runner.dispatcher.policy_origin,
        backend=runner.backend.name,
        device=runner.backend.device_info(),
        trace=trace_name,
        model={
            **attrs.asdict(shape),
            "num_bytes_weights": sum(weight.nbytes for weight in decoder.parameters()),
            "num_bytes_cache": cache.num_bytes,
        },
        traffic=traffic,
        times=pair.times(),
        eager_reasons=_eager_reasons(before, after),
        num_tokens=traffic.num_tokens,
        padding=sum(row.padding for row in pair.times()),
        capture={
            "num_graphs": runner.lanes[0].lifecycle.num_graphs(),
            "seconds": captured.seconds,
            "num_bytes": runner.num_bytes,
            "failed": {
                str(key): entry.reason
                for key, entry in runner.registry.entries.items()
                if entry.state is KeyState.FAILED
            },
            "lazy": is_lazy,
        },
        comparison=comparison,
        batch1=pair.batch1(),
        seconds=time.perf_counter() - start,
    )


def make_runner(
    decoder: Decoder,
    cache: KVCache,
    traffic: Traffic,
    options: DemoOptions,
    device: torch.device,
    plugins: PluginSet | None = None,
) -> GraphRunner:
    """Return a runner for the decoder, with limits derived from the traffic unless given.

    Padding rows are dummy tokens that write to the padding slot.
    """
    settings = options.settings
    largest = max(step.num_tokens for step in traffic.steps)
    most = max(step.num_reqs for step in traffic.steps)
    config = settings.dispatch_config(
        max_num_tokens=largest,
        max_num_seqs=max(most, decoder.shape.num_slots),
        query_lens=traffic.query_len,
        mode="FULL_AND_PIECEWISE",
    )
    for name, needed, noun in (
        ("max_num_tokens", largest, "tokens"),
        ("max_num_seqs", most, "requests"),
    ):
        limit = getattr(config, name)
        if limit < needed:
            raise ConfigError(
                name,
                limit,
                f"at least {needed} (the maximum number of {noun} in a step of the demo)",
                "Increase the limit, or omit it to derive it from the trace.",
            )
    policy = settings["policy"]
    return GraphRunner(
        decoder.step(cache),
        inputs={
            "tokens": StaticInput((None,), "int64", fill=0),
            "positions": StaticInput((None,), "int64", fill=0),
            "slots": StaticInput((None,), "int64", fill=decoder.shape.sink_slot),
        },
        policy=policy if plugins is None else plugins.with_policy(policy),
        backend="cuda" if device.type == "cuda" else "tape",
        # Views suffice, because each result is read before the next step.
        outputs=settings["outputs"] if settings.is_given("outputs") else "view",
        state=cache.tensors,
        lazy=settings["lazy"],
        options=attrs.evolve(settings.options(config), device=device),
    )


class _Pair:
    """The eager and the dispatched run, with the same weights and separate caches."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, runner: GraphRunner, device: torch.device
    ) -> None:
        self.decoder, self.cache, self.runner, self.device = decoder, cache, runner, device
        self._synchronize = runner.backend.synchronize
        self._different: list[Difference] = []
        self._worst = 0.0
        self._num_compared = 0
        self._samples: dict[tuple[str, str], list[tuple[PlannedStep, int, float, float]]] = (
            defaultdict(list)
        )

    def warm_up(self, num_tokens: int) -> None:
        """Run eager and dispatched steps of padding rows: of 1 row and of ``num_tokens`` rows."""
        shape = self.decoder.shape
        for size in {1, num_tokens}:
            zeros = torch.zeros(size, dtype=torch.int64, device=self.device)
            sink = torch.full_like(zeros, shape.sink_slot)
            self.decoder(zeros, zeros, sink, self.cache)
            self.runner(tokens=zeros, positions=zeros, slots=sink)
        self._synchronize()

    def run_both(self, index: int, step: PlannedStep) -> None:
        """Run a step eager and dispatched, time both, and compare all rows."""
        tokens, positions, slots = (
            torch.tensor(values, dtype=torch.int64, device=self.device)
            for values in (step.tokens, step.positions, step.slots)
        )
        before = self.runner.stats()
        self._synchronize()
        start = time.perf_counter()
        expected = self.decoder(tokens, positions, slots, self.cache)
        self._synchronize()
        middle = time.perf_counter()
        actual = self.runner(
            tokens=tokens,
            positions=positions,
            slots=slots,
            num_reqs=step.num_reqs,
            uniform=_uniform(self.runner.config, step.query_len if step.uniform else 0),
        )
        self._synchronize()
        end = time.perf_counter()
        mode, padded = _last_step(before, self.runner.stats())
        kind = "decode" if step.uniform else "mixed"
        sample = (step, padded - step.num_tokens, (middle - start) * 1e3, (end - middle) * 1e3)
        self._samples[kind, mode].append(sample)
        equal, worst = _compare(actual, expected)
        self._num_compared += 1
        self._worst = _larger(self._worst, worst)
        if not equal:
            self._different.append(
                Difference(step=index, mode=mode, num_tokens=step.num_tokens, worst=worst)
            )

    def compare_caches(self, cache: KVCache) -> Comparison:
        """Compare the final caches of the two runs, without padding rows."""
        equal, worst = True, 0.0
        for mine, theirs in zip(self.cache.real_rows(), cache.real_rows(), strict=True):
            same, difference = _compare(theirs, mine)
            equal, worst = equal and same, _larger(worst, difference)
        return Comparison(
            atol=ATOL,
            rtol=RTOL,
            steps=self._num_compared,
            different=tuple(self._different),
            worst=self._worst,
            caches_differ=not equal,
            worst_cache=worst,
        )

    def times(self) -> tuple[KindTimes, ...]:
        """Return median times by kind and runtime mode, most frequent first."""
        rows = [
            KindTimes(
                kind=kind,
                mode=mode,
                steps=len(samples),
                num_tokens=sum(step.num_tokens for step, *_ in samples),
                padding=sum(padding for _, padding, *_ in samples),
                eager_ms=statistics.median(sample[2] for sample in samples),
                dispatched_ms=statistics.median(sample[3] for sample in samples),
            )
            for (kind, mode), samples in self._samples.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.steps))

    def batch1(self, *, rounds: int = 5) -> Batch1:
        """Return the times of decoding a single request; this overwrites slot 0 of both caches."""
        calls = min(self.decoder.shape.cache_len, 100 if self.device.type == "cuda" else 20)
        one = torch.tensor([1], dtype=torch.int64, device=self.device)
        slot = torch.zeros_like(one)
        places = [torch.full_like(one, position) for position in range(calls)]

        def eager(position: torch.Tensor) -> Any:
            return self.decoder(one, position, slot, self.cache)

        uniform = _uniform(self.runner.config, 1)

        def dispatched(position: torch.Tensor) -> Any:
            return self.runner(
                tokens=one, positions=position, slots=slot, num_reqs=1, uniform=uniform
            )

        before = self.runner.stats()
        dispatched(places[0])
        mode, _ = _last_step(before, self.runner.stats())
        eager_us, dispatched_us = (
            statistics.median(self._mean_us(run, places) for _ in range(rounds))
            for run in (eager, dispatched)
        )
        return Batch1(
            eager_us=eager_us,
            dispatched_us=dispatched_us,
            mode=mode,
            ratio=eager_us / dispatched_us,
        )

    def _mean_us(self, run: Callable[[torch.Tensor], Any], places: Sequence[torch.Tensor]) -> float:
        self._synchronize()
        start = time.perf_counter()
        for position in places:
            run(position)
        self._synchronize()
        return (time.perf_counter() - start) / len(places) * 1e6


def _uniform(config: DispatchConfig, query_len: int) -> int:
    """Return the ``uniform`` argument for a query length; 0 if ``query_lens`` lacks it."""
    lens = config.query_lens
    return lens.index(query_len) + 1 if query_len in lens else 0


def _last_step(before: RunnerStats, after: RunnerStats) -> tuple[str, int]:
    """Return the mode and the padded size of the only step between two readings of the stats."""
    mode = next(
        mode for mode, count in after.steps_by_mode.items() if count > before.steps_by_mode[mode]
    )
    return mode, after.padded_tokens - before.padded_tokens


def _eager_reasons(before: RunnerStats, after: RunnerStats) -> dict[str, int]:
    """Return the number of eager steps by reason between two readings of the stats."""
    return {
        reason: count - before.eager_by_reason.get(reason, 0)
        for reason, count in after.eager_by_reason.items()
        if count > before.eager_by_reason.get(reason, 0)
    }


def _compare(actual: torch.Tensor, expected: torch.Tensor) -> tuple[bool, float]:
    """Return whether two results agree within the tolerance, and their largest difference."""
    if actual.shape != expected.shape:
        return False, float("nan")
    if expected.numel() == 0:
        return True, 0.0
    worst = float((actual - expected).abs().max())
    return bool(torch.allclose(actual, expected, rtol=RTOL, atol=ATOL)), worst


def _larger(one: float, other: float) -> float:
    """Return the larger value, or NaN if either is NaN."""
    return other if other != other or other > one else one


def _read(path: Path | None, steps: int) -> tuple[str, StepTrace]:
    """Return the name and first steps of a trace."""
    if path is not None:
        return str(path), _read_file(path)[:steps]
    with as_file(files("dispatchkit.demo") / "data" / "azure_conv_high.csv") as excerpt:
        return "azure_conv_high (excerpt, CC-BY-4.0)", read_trace(excerpt)[:steps]


def _read_file(path: Path) -> StepTrace:
    """Return the steps of a trace file or, with dispatchkit-plan, of a histogram or log."""
    try:
        read: Callable[[Path], StepTrace] = load_attribute("read_steps")
    except MissingDistributionError as missing:
        try:
            return read_trace(path)
        except TraceError as error:
            error.add_note(f"For histograms and server logs: {missing}")
            raise
    return read(path)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Limit torch to one CPU thread in a ``with`` block if the device is the CPU."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
