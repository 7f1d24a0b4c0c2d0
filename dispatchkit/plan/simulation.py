"""A trace under a policy, without a device: what would run, what would it take?

The real dispatcher decides; only the device is missing. Times come from a cost model, and a
learning policy sees them with noise, as it would see measured ones. What is reported is counted
in true times.

A policy that does not learn is a function of the batch. So each different batch is decided
once and counted, and a million steps take no longer than their table. With a budget of graphs
the order matters: who is live is followed step by step. With a learning policy the decision
itself is taken at every step.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from dispatchkit.dispatch import Decision, Dispatcher, Outcome, Policy
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.keys import CaptureSizeWarning, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.keys.capture_sizes import check_count
from dispatchkit.observe.trace import StepTrace
from dispatchkit.plan.costs import CostModel, load_cost_model
from dispatchkit.plan.optimal import IntArray
from dispatchkit.plugins import PluginSet, load_plugins

__all__ = ["Noise", "Scenario", "Simulation", "simulate", "simulate_all", "trace_config"]

Eviction = Literal["lru", "benefit"]
_MAX_DENSE_CELLS = 1 << 24


@attrs.frozen
class Noise:
    """How measured times differ from true ones.

    Attributes:
        relative: Standard deviation, as a share of the time.
        outliers: Share of measurements that are outliers.
        factor: How many times as long those take.
    """

    relative: float = 0.10
    outliers: float = 0.01
    factor: float = 10.0

    def measured(self, time_us: float, chance: random.Random) -> float:
        """Return what would be measured of a step that takes so long."""
        seen = time_us * max(0.2, chance.gauss(1.0, self.relative))
        return seen * self.factor if chance.random() < self.outliers else seen


@attrs.frozen(kw_only=True)
class Scenario:
    """What a trace is run under.

    Attributes:
        policy: Name of an installed policy, or a policy.
        policy_options: Its options, where it is given by name.
        sizes: Capture sizes; the policy's default list when not given.
        mode: Which runtime modes decode and mixed batches use.
        max_graphs: Most live graphs on a lane. With it or ``max_bytes``, graphs are captured
            when they are first asked for and evicted to make room; without, all are captured
            before the first step.
        max_bytes: Most memory of live graphs on a lane, by the cost model's ``graph_bytes``.
        eviction: Who goes first: ``lru``, the one not used for longest, or ``benefit``, the
            one with the fewest replays for its size.
        capture_after: How often a graph must be asked for before it is captured; until then
            its steps run eager. Above 1, nothing is captured before the first step.
        lanes: Steps are dealt to so many lanes in turn, each with graphs of its own.
        cost_model: A cost model, or the name of a built-in one or a file.
        sample_every: Of the steps that a learning policy wants timed, one in so many is;
            those that it asks for one by one always are.
        noise: How measured times differ from true ones.
        seed: Of the noise.
        config: A whole configuration, in place of ``sizes`` and ``mode``.
        label: Name in comparisons; the policy's when empty.
    """

    policy: str | Policy = "vllm"
    policy_options: Mapping[str, Any] = attrs.field(factory=dict)
    sizes: tuple[int, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )
    mode: str = "FULL_AND_PIECEWISE"
    max_graphs: int | None = None
    max_bytes: int | None = None
    eviction: Eviction = "lru"
    capture_after: int = 1
    lanes: int = 1
    cost_model: CostModel | str = "lm-decode-h100"
    sample_every: int = 64
    noise: Noise = Noise()
    seed: int = 0
    config: DispatchConfig | None = None
    label: str = ""

    def __attrs_post_init__(self) -> None:
        check_count(self.lanes, "lanes")
        check_count(self.capture_after, "capture_after")
        check_count(self.sample_every, "sample_every")
        for setting in ("max_graphs", "max_bytes"):
            if getattr(self, setting) is not None:
                check_count(getattr(self, setting), setting)
        if self.eviction not in ("lru", "benefit"):
            raise ConfigError("eviction", self.eviction, "'lru' or 'benefit'")
        if self.config is not None and self.sizes is not None:
            raise ConfigError(
                "sizes", self.sizes, "left out beside config", "The config has sizes of its own."
            )

    @property
    def is_lazy(self) -> bool:
        """Whether graphs are captured when they are asked for, not before the first step."""
        bounded = self.max_graphs is not None or self.max_bytes is not None
        return bounded or self.capture_after > 1


@attrs.frozen(kw_only=True)
class Simulation:
    """What came of a trace under a scenario.

    Attributes:
        label: The scenario's name.
        policy: Name of the policy.
        num_steps: Steps of the trace.
        modes: Steps by the runtime mode they ran in.
        misses: Eager steps by reason.
        real_tokens: Tokens of the steps that replayed a graph, before padding.
        padding_tokens: What was added to them.
        num_graphs: Keys that the policy declared, on all lanes.
        captures: Graphs captured, again after an eviction too.
        evictions: Graphs given up for room.
        probes: Steps that ran under a one-shot decision of a learning policy.
        measured: Steps whose time a learning policy was told.
        policy_errors: Faults of the policy; the steps concerned ran eager.
        time_s: Device time of all steps, by the cost model.
        eager_time_s: The same if every step ran eager.
        busiest_lane_s: Device time of the lane with most: the least that all take together
            if lanes do not slow each other down.
        capture_time_s: Time of all captures; None where the cost model has no ``capture_us``.
        memory_bytes: Most memory that live graphs took, all lanes together; None where the
            cost model has no ``graph_bytes``.
        cost_model: Name of the cost model.
        notes: What to know about the numbers.
    """

    label: str
    policy: str
    num_steps: int
    modes: Mapping[str, int]
    misses: Mapping[str, int]
    real_tokens: int
    padding_tokens: int
    num_graphs: int
    captures: int
    evictions: int
    probes: int
    measured: int
    policy_errors: int
    time_s: float
    eager_time_s: float
    busiest_lane_s: float
    capture_time_s: float | None
    memory_bytes: int | None
    cost_model: str
    notes: tuple[str, ...]

    @property
    def hit_rate(self) -> float:
        """Share of the steps that replayed a graph."""
        return 1.0 - self.modes["NONE"] / self.num_steps

    @property
    def waste_pct(self) -> float:
        """Padded tokens per cent of the real ones, over the steps that replayed a graph."""
        return 100.0 * self.padding_tokens / self.real_tokens if self.real_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON holds it."""
        data = attrs.asdict(self)
        return {
            **data,
            "modes": dict(self.modes),
            "misses": dict(self.misses),
            "notes": list(self.notes),
            "hit_rate": round(self.hit_rate, 6),
            "waste_pct": round(self.waste_pct, 4),
        }


def simulate_all(
    trace: StepTrace, scenarios: Iterable[Scenario], *, plugins: PluginSet | None = None
) -> list[Simulation]:
    """Return a trace under several scenarios, to be looked at side by side."""
    plugins = plugins or load_plugins()
    return [simulate(trace, scenario, plugins=plugins) for scenario in scenarios]


def simulate(
    trace: StepTrace, scenario: Scenario | None = None, *, plugins: PluginSet | None = None
) -> Simulation:
    """Return what would come of a trace under a scenario.

    Args:
        trace: Steps; those without tokens are left out.
        scenario: Policy, sizes, budget, costs; the default policy's defaults when not given.
        plugins: Where policies are found by name; loaded when needed.

    Raises:
        TraceError: No step has tokens.
        UnknownNameError: The policy is not installed, or there is no such cost model.
        ConfigError: A setting cannot be used.
        PolicyError: The policy refuses the configuration.
    """
    scenario = scenario or Scenario()
    model = (
        scenario.cost_model
        if isinstance(scenario.cost_model, CostModel)
        else load_cost_model(scenario.cost_model)
    )
    config = scenario.config or trace_config(trace, sizes=scenario.sizes, mode=scenario.mode)
    steps = _Steps.of(trace, config)
    if not len(steps):
        raise TraceError(trace.source, None, "has no step with tokens in it.")
    if scenario.max_bytes is not None and model.graph_bytes is None:
        raise ConfigError(
            "max_bytes",
            scenario.max_bytes,
            f"left out with cost model {model.name!r}, which has no graph_bytes",
            "Calibrate one, or limit max_graphs.",
        )
    lanes = min(scenario.lanes, len(steps))
    runs = []
    for lane, policy in enumerate(_policies(scenario, lanes, plugins)):
        dispatcher = Dispatcher(policy, config, lazy=scenario.is_lazy)
        run = _LaneRun(dispatcher, model, scenario, random.Random(scenario.seed + lane))
        run.serve(steps.every(lane, lanes))
        dispatcher.close()
        runs.append(run)
    return _merged(runs, steps, model, scenario, config)


def _policies(scenario: Scenario, lanes: int, plugins: PluginSet | None) -> list[Policy]:
    """Return one policy for each lane: what one has learnt is its lane's own."""
    if isinstance(scenario.policy, str):
        found = plugins or load_plugins()
        return [
            found.create_policy(scenario.policy, **scenario.policy_options) for _ in range(lanes)
        ]
    if lanes > 1:
        raise ConfigError(
            "lanes",
            lanes,
            "1 with a policy object",
            "Give the policy by name: each lane needs one of its own.",
        )
    return [scenario.policy]


def trace_config(
    trace: StepTrace, *, sizes: Sequence[int] | None = None, mode: str = "FULL_AND_PIECEWISE"
) -> DispatchConfig:
    """Return the configuration that a trace fits into.

    Limits are the trace's own; at least 256 requests, and tokens for the largest size. The
    query length is the most frequent one of uniform decode steps.
    """
    names = trace.columns
    tokens = max(trace.column("num_tokens"), default=1)
    limit = max(tokens, max(sizes, default=1) if sizes else 512, 1)
    query_lens: Counter[int] = Counter()
    if "uniform_decode" in names and "max_query_len" in names:
        pairs = zip(trace.column("uniform_decode"), trace.column("max_query_len"), strict=True)
        query_lens = Counter(length for uniform, length in pairs if uniform and length)
    most = max(trace.column("num_reqs"), default=1) if "num_reqs" in names else 1
    given: dict[str, Any] = {"capture_sizes": tuple(sizes)} if sizes else {}
    loras = max(trace.column("num_active_loras"), default=0) if "num_active_loras" in names else 0
    with warnings.catch_warnings():
        # That large steps run eager is a result here, counted among the misses.
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return DispatchConfig(
            mode=mode,
            max_num_tokens=limit,
            max_num_seqs=min(max(most, 256), limit),
            query_lens=query_lens.most_common(1)[0][0] if query_lens else 1,
            max_loras=loras,
            **given,
        )


@attrs.frozen(eq=False)
class _Steps:
    """The arguments of each step's ``dispatch``, as arrays (steps,)."""

    num_tokens: IntArray
    num_reqs: IntArray
    uniform: IntArray
    loras: IntArray

    def __len__(self) -> int:
        return len(self.num_tokens)

    @classmethod
    def of(cls, trace: StepTrace, config: DispatchConfig) -> _Steps:
        names = trace.columns

        def column(name: str) -> IntArray:
            if name not in names:
                return np.zeros(len(trace), dtype=np.int64)
            return np.array(trace.column(name), dtype=np.int64)

        tokens, uniform = column("num_tokens"), column("uniform_decode")
        if tokens.size and tokens.max() > config.max_num_tokens:
            raise ConfigError(
                "max_num_tokens",
                config.max_num_tokens,
                f"at least {int(tokens.max())}, the largest step of {trace.source}",
            )
        lengths = column("max_query_len") if "max_query_len" in names else uniform
        query = np.zeros(len(trace), dtype=np.int64)
        for number, length in enumerate(config.query_lens, start=1):
            query[(uniform == 1) & (lengths == length)] = number
        some = tokens > 0
        return cls(
            tokens[some],
            np.minimum(column("num_reqs"), config.max_num_seqs)[some],
            query[some],
            np.minimum(column("num_active_loras"), config.max_loras)[some],
        )

    def every(self, first: int, stride: int) -> _Steps:
        """Return the steps that one lane gets."""
        part = slice(first, None, stride)
        return _Steps(
            self.num_tokens[part], self.num_reqs[part], self.uniform[part], self.loras[part]
        )


@attrs.define(eq=False)
class _Tally:
    """A decision with how often it was taken and what a step under it costs."""

    decision: Decision
    time_us: float
    count: int = 0


class _LaneRun:
    """One lane's steps through one dispatcher."""

    def __init__(
        self, dispatcher: Dispatcher, model: CostModel, scenario: Scenario, chance: random.Random
    ) -> None:
        self.dispatcher, self.model, self.scenario = dispatcher, model, scenario
        self._chance = chance
        self.tallies: dict[int, _Tally] = {}
        self.measured = self.captures = self.evictions = 0
        self.capture_us = self.live_bytes = self.peak_bytes = 0.0
        self.pending: Counter[int] = Counter()  # eager steps before a capture, by tokens
        self._asked: Counter[GraphKey] = Counter()
        self._live: OrderedDict[GraphKey, int] = OrderedDict()  # key to its replays
        if not scenario.is_lazy:
            largest_first = sorted(dispatcher.registry, key=lambda key: -key.num_tokens)
            for key in largest_first:
                self._capture(key)
                dispatcher.registry.captured(key, _NO_GRAPH)

    def serve(self, steps: _Steps) -> None:
        """Run the lane's steps."""
        if callable(getattr(self.dispatcher.policy, "observe", None)):
            self._serve_learning(steps)
        elif self.scenario.is_lazy:
            self._serve_lazy(steps)
        else:
            for tally, count in self._decide_all(steps)[0]:
                tally.count += count

    # -- a policy that does not learn: every different batch once -------------------------

    def _decide_all(self, steps: _Steps) -> tuple[list[tuple[_Tally, int]], list[_Tally], IntArray]:
        """Decide each different batch once.

        Returns:
            (tally, steps) pairs; the tallies by number; each step's number.
        """
        num_uniform, num_loras = int(steps.uniform.max()) + 1, int(steps.loras.max()) + 1
        cell = (steps.num_tokens * num_uniform + steps.uniform) * num_loras + steps.loras
        number, cells = _numbered(cell)
        dispatch = self.dispatcher.dispatch
        tallies = []
        for packed in cells.tolist():
            rest, loras = divmod(packed, num_loras)
            tokens, uniform = divmod(rest, num_uniform)
            tallies.append(self._tally(dispatch(tokens, 0, uniform, loras), tokens))
        # A cell's decision holds up to a number of requests; beyond it the batch is asked for.
        bounds = np.array([tally.decision.max_num_reqs for tally in tallies], dtype=np.int64)
        beyond = np.flatnonzero(steps.num_reqs > bounds[number])
        if len(beyond):
            most = int(steps.num_reqs.max()) + 1
            odd, packs = _numbered(number[beyond] * most + steps.num_reqs[beyond])
            number[beyond] = odd + len(tallies)
            for packed in packs.tolist():
                which, reqs = divmod(packed, most)
                rest, loras = divmod(int(cells[which]), num_loras)
                tokens, uniform = divmod(rest, num_uniform)
                tallies.append(self._tally(dispatch(tokens, reqs, uniform, loras), tokens))
        counts = np.bincount(number, minlength=len(tallies)).tolist()
        return list(zip(tallies, counts, strict=True)), tallies, number

    def _serve_lazy(self, steps: _Steps) -> None:
        _, tallies, number = self._decide_all(steps)
        keys = [tally.decision.key for tally in tallies]
        live, use = self._live, self._use
        for which in number.tolist():
            tally, key = tallies[which], keys[which]
            if key is None:
                tally.count += 1
            elif key in live:
                tally.count += 1
                live[key] += 1
                live.move_to_end(key)
            elif use(key):
                tally.count += 1
            else:
                self.pending[tally.decision.num_tokens] += 1

    # -- a policy that learns: every step, in order ---------------------------------------

    def _serve_learning(self, steps: _Steps) -> None:
        dispatch, tallies = self.dispatcher.dispatch, self.tallies
        sample_every = self.scenario.sample_every
        last_sample = -sample_every
        rows = zip(
            steps.num_tokens.tolist(),
            steps.num_reqs.tolist(),
            steps.uniform.tolist(),
            steps.loras.tolist(),
            strict=True,
        )
        live, is_lazy = self._live, self.scenario.is_lazy
        for step, (tokens, reqs, uniform, loras) in enumerate(rows):
            decision = dispatch(tokens, reqs, uniform, loras)
            tally = tallies.get(id(decision)) or self._tally(decision, tokens)
            key = decision.key
            if is_lazy and key is not None:
                if key in live:
                    live[key] += 1
                    live.move_to_end(key)
                elif not self._use(key):
                    self.pending[tokens] += 1
                    continue  # it ran eager and teaches nothing of its graph
            tally.count += 1
            if decision.timed and (decision.one_shot or step - last_sample >= sample_every):
                last_sample = step
                self.measured += 1
                time_us = self.scenario.noise.measured(tally.time_us, self._chance)
                batch = self.dispatcher.batch(tokens, reqs, uniform, loras)
                self.dispatcher.observe(Outcome(batch, decision, time_us, step=step + 1))

    # -- both -----------------------------------------------------------------------------

    def _tally(self, decision: Decision, num_tokens: int) -> _Tally:
        # By identity: a bound decision belongs to one cell, and so has one time. The tally
        # keeps it alive, so that its id stays its own.
        tally = self.tallies.get(id(decision))
        if tally is None:
            captured = None if decision.key is None else decision.key.num_tokens
            piecewise = decision.mode is RuntimeMode.PIECEWISE
            time_us = self.model.step_us(num_tokens, captured, piecewise=piecewise)
            tally = _Tally(decision, time_us)
            self.tallies[id(decision)] = tally
        return tally

    def _use(self, key: GraphKey) -> bool:
        """Capture a graph that is asked for, after making room for it; False: not yet."""
        scenario, live = self.scenario, self._live
        self._asked[key] += 1
        if self._asked[key] < scenario.capture_after:
            return False
        need = self._bytes_of(key)
        limit = scenario.max_bytes
        if limit is not None and need > limit:
            raise ConfigError(
                "max_bytes",
                limit,
                f"at least {need:.0f}, what the graph of {key} takes by {self.model.name}",
            )
        while live and (
            (scenario.max_graphs is not None and len(live) >= scenario.max_graphs)
            or (limit is not None and self.live_bytes + need > limit)
        ):
            victim = next(iter(live))
            if scenario.eviction == "benefit":
                victim = min(live, key=lambda one: live[one] / one.num_tokens)
            del live[victim]
            self.live_bytes -= self._bytes_of(victim)
            self.evictions += 1
        self._capture(key)
        return True

    def _capture(self, key: GraphKey) -> None:
        self._live[key] = 1
        self.captures += 1
        self.live_bytes += self._bytes_of(key)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.model.capture_us is not None:
            self.capture_us += self.model.capture_us(key.num_tokens)

    def _bytes_of(self, key: GraphKey) -> float:
        return 0.0 if self.model.graph_bytes is None else self.model.graph_bytes(key.num_tokens)


_PENDING = "capture_pending"  # the runner's word for it
_NO_GRAPH = object()  # stands where a captured graph would


def _numbered(values: IntArray) -> tuple[IntArray, IntArray]:
    """Return (each entry's number, the different values by number)."""
    top = int(values.max()) + 1
    if top <= _MAX_DENSE_CELLS:  # by counting, without the sort that np.unique does
        different = np.flatnonzero(np.bincount(values, minlength=top))
        table = np.zeros(top, dtype=np.int64)
        table[different] = np.arange(len(different))
        return table[values], different
    different, number = np.unique(values, return_inverse=True)
    return number.astype(np.int64), different


def _merged(
    runs: Sequence[_LaneRun],
    steps: _Steps,
    model: CostModel,
    scenario: Scenario,
    config: DispatchConfig,
) -> Simulation:
    modes: Counter[str] = Counter({mode.name: 0 for mode in RuntimeMode})
    misses: Counter[str] = Counter()
    real = padding = probes = 0
    lane_us = []
    for run in runs:
        total_us = 0.0
        for tally in run.tallies.values():
            decision, count = tally.decision, tally.count
            modes[decision.mode.name] += count
            total_us += tally.time_us * count
            probes += count * decision.one_shot
            if decision.key is None:
                misses[str(decision.reason)] += count
            else:
                real += decision.num_tokens * count
                padding += decision.padding * count
        for num_tokens, count in run.pending.items():
            modes[RuntimeMode.NONE.name] += count
            misses[_PENDING] += count
            total_us += model.eager_us(num_tokens) * count
        lane_us.append(total_us)
    first = runs[0].dispatcher
    return Simulation(
        label=scenario.label or first.policy_name,
        policy=first.policy_name,
        num_steps=len(steps),
        modes=dict(modes),
        misses={reason: count for reason, count in misses.most_common() if count},
        real_tokens=real,
        padding_tokens=padding,
        num_graphs=sum(len(run.dispatcher.registry) for run in runs),
        captures=sum(run.captures for run in runs),
        evictions=sum(run.evictions for run in runs),
        probes=probes,
        measured=sum(run.measured for run in runs),
        policy_errors=sum(run.dispatcher.num_policy_errors for run in runs),
        time_s=sum(lane_us) / 1e6,
        eager_time_s=_eager_us(steps, model.eager_us) / 1e6,
        busiest_lane_s=max(lane_us) / 1e6,
        capture_time_s=None
        if model.capture_us is None
        else sum(run.capture_us for run in runs) / 1e6,
        memory_bytes=None
        if model.graph_bytes is None
        else round(sum(run.peak_bytes for run in runs)),
        cost_model=model.name,
        notes=tuple(_notes(steps, model, scenario, config)),
    )


def _eager_us(steps: _Steps, eager: Callable[[float], float]) -> float:
    counts = np.bincount(steps.num_tokens)
    return float(sum(eager(int(n)) * int(counts[n]) for n in np.flatnonzero(counts)))


def _notes(
    steps: _Steps, model: CostModel, scenario: Scenario, config: DispatchConfig
) -> Iterable[str]:
    last = min(model.eager_us.last, model.graph_us.last)
    over = int((steps.num_tokens > last).sum())
    if over:
        yield (
            f"{over} of {len(steps)} steps are above {last} tokens, the last measured size of "
            f"{model.name}; their times go on in a straight line."
        )
    if model.clock != "device":
        yield f"{model.name} holds times of a host without a device: they say nothing of one."
    if model.graph_bytes is None:
        yield f"{model.name} has no graph_bytes: memory is not predicted."
    if scenario.lanes > 1:
        yield (
            "Lanes get the steps in turn; how far they slow each other down is not modelled: "
            "the truth lies between busiest_lane_s and time_s."
        )
    if not config.capture_sizes:
        yield "There are no capture sizes: every step runs eager."
