"""Simulate and count the steps of one lane, with one dispatcher."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict

import attrs
import numpy as np

from dispatchkit.dispatch import Decision, Dispatcher, Outcome, decision_us
from dispatchkit.errors import ConfigError
from dispatchkit.keys import DispatchConfig, GraphKey
from dispatchkit.observe import StepTrace, trace_variants

from dispatchkit_plan.costs import CostModel
from dispatchkit_plan.optimal import IntArray
from dispatchkit_plan.scenario import Scenario

__all__ = ["PENDING", "LaneRun", "Steps", "Tally"]

#: Reason under which a runner counts an eager step whose graph has not been captured yet.
PENDING = "capture_pending"
_NO_GRAPH = object()  # placeholder for a captured graph
_MAX_DENSE_CELLS = 1 << 24


@attrs.frozen(eq=False)
class Steps:
    """Arguments of ``dispatch`` for each step, as arrays of shape (steps,).

    If there are axes, ``loras`` contains variants: indices that combine the adapters and the bucket
    of each axis. ``values`` contains the values of the axis that costs depend on, or zeros if there
    is no such axis.
    """

    num_tokens: IntArray
    num_reqs: IntArray
    uniform: IntArray
    loras: IntArray
    values: IntArray
    has_order: bool = True

    def __len__(self) -> int:
        return len(self.num_tokens)

    @classmethod
    def of(cls, trace: StepTrace, config: DispatchConfig, axis: str = "") -> Steps:
        """Return the steps of a trace that have tokens.

        Args:
            trace: Trace whose steps are simulated.
            config: Configuration whose limits and axes the steps must match.
            axis: Name of the axis that costs depend on; empty if there is no such axis.

        Raises:
            ConfigError: A step is larger than the configuration allows.
            TraceError: An axis of the configuration has no column in the trace.
        """
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
                f"at least {int(tokens.max())}, the number of tokens of the largest step of "
                f"{trace.source}",
            )
        lengths = column("max_query_len") if "max_query_len" in names else uniform
        query = np.zeros(len(trace), dtype=np.int64)
        for number, length in enumerate(config.query_lens, start=1):
            query[(uniform == 1) & (lengths == length)] = number
        if config.varlen_decode and "max_query_len" in names:
            short = (query == 0) & (lengths > 0) & (lengths <= config.query_len)
            query[short] = config.num_query_classes - 1
        some = tokens > 0
        return cls(
            tokens[some],
            np.minimum(column("num_reqs"), config.max_num_seqs)[some],
            query[some],
            np.array(trace_variants(trace, config), dtype=np.int64)[some],
            column(f"axis.{axis}")[some],
            trace.has_order,
        )

    def every(self, first: int, stride: int) -> Steps:
        """Return every ``stride``-th step, from the step with index ``first``."""
        part = slice(first, None, stride)
        return Steps(
            self.num_tokens[part],
            self.num_reqs[part],
            self.uniform[part],
            self.loras[part],
            self.values[part],
        )


@attrs.define(eq=False)
class Tally:
    """A decision, the time of one step with this decision, and the number of these steps."""

    decision: Decision
    time_us: float
    count: int = 0


class LaneRun:
    """The simulation of one lane."""

    dispatcher: Dispatcher
    model: CostModel
    scenario: Scenario
    measured: int
    evictions: int
    captures: int
    live_bytes: float
    peak_bytes: float
    capture_us: float

    def __init__(
        self, dispatcher: Dispatcher, model: CostModel, scenario: Scenario, chance: random.Random
    ) -> None:
        self.dispatcher, self.model, self.scenario = dispatcher, model, scenario
        self._chance = chance
        self.tallies: dict[tuple[int, int], Tally] = {}
        self._models: dict[int, CostModel] = {}  # by value of the axis
        axes = dispatcher.config.axes
        self._axis = next((i for i, axis in enumerate(axes) if axis.name == model.axis), None)
        self.measured = self.captures = self.evictions = 0
        self.capture_us = self.live_bytes = self.peak_bytes = 0.0
        # Number of steps that ran eager because a graph was missing, by tokens and axis value.
        self.pending: Counter[tuple[int, int]] = Counter()
        self._asked: Counter[GraphKey] = Counter()
        self._live: OrderedDict[GraphKey, int] = OrderedDict()  # number of replays of each key
        if not scenario.is_lazy:
            largest_first = sorted(dispatcher.registry, key=lambda key: -key.num_tokens)
            for key in largest_first:
                self._capture(key)
                dispatcher.registry.captured(key, _NO_GRAPH)

    def serve(self, steps: Steps) -> None:
        """Simulate the steps of the lane."""
        if self.dispatcher.policy_parts.learns:
            self._serve_learning(steps)
        elif self.scenario.is_lazy:
            self._serve_lazy(steps)
        else:
            tallies, number = self.decide_all(steps)
            counts = np.bincount(number, minlength=len(tallies)).tolist()
            for tally, count in zip(tallies, counts, strict=True):
                tally.count += count

    # -- policies that do not learn: each distinct batch is decided once ------------------

    def decide_all(self, steps: Steps) -> tuple[list[Tally], IntArray]:
        """Decide each distinct batch once.

        Returns:
            The tallies, and the index of the tally of each step.
        """
        num_uniform, num_loras = int(steps.uniform.max()) + 1, int(steps.loras.max()) + 1
        num_values = int(steps.values.max()) + 1
        cell = (steps.num_tokens * num_uniform + steps.uniform) * num_loras + steps.loras
        number, cells = _numbered(cell * num_values + steps.values)

        def batch_of(packed: int) -> tuple[int, int, int, int]:
            rest, value = divmod(packed, num_values)
            rest, loras = divmod(rest, num_loras)
            tokens, uniform = divmod(rest, num_uniform)
            return tokens, uniform, loras, value

        dispatch = self.dispatcher.dispatch
        tallies = []
        for packed in cells.tolist():
            tokens, uniform, loras, value = batch_of(packed)
            tallies.append(self._tally(dispatch(tokens, 0, uniform, loras), tokens, value))
        # A decision is valid for up to `max_num_reqs` requests. Batches with more requests are
        # dispatched separately.
        bounds = np.array([tally.decision.max_num_reqs for tally in tallies], dtype=np.int64)
        beyond = np.flatnonzero(steps.num_reqs > bounds[number])
        if len(beyond):
            most = int(steps.num_reqs.max()) + 1
            odd, packs = _numbered(number[beyond] * most + steps.num_reqs[beyond])
            number[beyond] = odd + len(tallies)
            for packed in packs.tolist():
                which, reqs = divmod(packed, most)
                tokens, uniform, loras, value = batch_of(int(cells[which]))
                tallies.append(self._tally(dispatch(tokens, reqs, uniform, loras), tokens, value))
        return tallies, number

    def _serve_lazy(self, steps: Steps) -> None:
        tallies, number = self.decide_all(steps)
        keys = [tally.decision.keys for tally in tallies]
        for which, value in zip(number.tolist(), steps.values.tolist(), strict=True):
            tally = tallies[which]
            if self._has_all(keys[which]):
                tally.count += 1
            else:
                self.pending[tally.decision.num_tokens, value] += 1

    # -- policies that learn: every step is decided, in order -----------------------------

    def _serve_learning(self, steps: Steps) -> None:
        dispatch, tallies = self.dispatcher.dispatch, self.tallies
        sample_every = self.scenario.sample_every
        last_sample = -sample_every
        rows = zip(
            steps.num_tokens.tolist(),
            steps.num_reqs.tolist(),
            steps.uniform.tolist(),
            steps.loras.tolist(),
            steps.values.tolist(),
            strict=True,
        )
        is_lazy = self.scenario.is_lazy
        for step, (tokens, reqs, uniform, loras, value) in enumerate(rows):
            decision = dispatch(tokens, reqs, uniform, loras)
            tally = tallies.get((id(decision), value)) or self._tally(decision, tokens, value)
            if is_lazy and not self._has_all(decision.keys):
                self.pending[tokens, value] += 1
                continue  # the step ran eager, so nothing is learned about its graph
            tally.count += 1
            if decision.timed and (decision.one_shot or step - last_sample >= sample_every):
                last_sample = step
                self.measured += 1
                time_us = self.scenario.noise.measured(tally.time_us, self._chance)
                batch = self.dispatcher.batch(tokens, reqs, uniform, loras)
                self.dispatcher.observe(Outcome(batch, decision, time_us, step=step + 1))

    # -- all policies ---------------------------------------------------------------------

    def _tally(self, decision: Decision, num_tokens: int, value: int) -> Tally:
        # Tallies are keyed by the id of the decision. A decision belongs to one cell of the table,
        # so all its steps with one value of the axis take the same time. The tally keeps the
        # decision alive, so the id is not reused.
        tally = self.tallies.get((id(decision), value))
        if tally is None:
            key = decision.key  # the keys of all parts have the same bucket of the axis
            model = self._model_at(value) if key is None else self._model_of(key)
            tally = Tally(decision, decision_us(model, decision, num_tokens))
            self.tallies[id(decision), value] = tally
        return tally

    def eager_us(self, num_tokens: int, value: int) -> float:
        """Return the time of an eager step, in microseconds."""
        return self._model_at(value).eager_us(num_tokens)

    def _model_at(self, value: int) -> CostModel:
        if self._axis is None:
            return self.model
        model = self._models.get(value)
        if model is None:
            model = self._models[value] = self.model.at(value)
        return model

    def _model_of(self, key: GraphKey) -> CostModel:
        return self._model_at(0 if self._axis is None else key.descriptor.axes[self._axis])

    def _has_all(self, keys: tuple[GraphKey, ...]) -> bool:
        """Count a replay of each graph; return False if a graph is missing.

        A missing graph is captured first if its capture is due.
        """
        live, most = self._live, self.scenario.max_graphs
        if most is not None and most < len(set(keys)):
            return False  # the parts of the step need more graphs than the limit allows
        for key in keys:
            if key in live:
                live[key] += 1
                live.move_to_end(key)
            elif not self._use(key):
                return False
        # Capturing the graph of one part may evict the graph of another part.
        return all(key in live for key in keys)

    def _use(self, key: GraphKey) -> bool:
        """Make room for a graph and capture it; return False if the capture is not due yet."""
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
                f"at least {math.ceil(need)}, the bytes that {key} needs according to cost model "
                f"{self.model.name!r}",
                "Raise max_bytes.",
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
        capture_us = self._model_of(key).capture_us
        if capture_us is not None:
            self.capture_us += capture_us(key.num_tokens)

    def _bytes_of(self, key: GraphKey) -> float:
        graph_bytes = self._model_of(key).graph_bytes
        return 0.0 if graph_bytes is None else graph_bytes(key.num_tokens)


def _numbered(values: IntArray) -> tuple[IntArray, IntArray]:
    """Return the index of each value among the distinct values, and the distinct values."""
    top = int(values.max()) + 1
    if top <= _MAX_DENSE_CELLS:  # counting is faster than the sort in np.unique
        different = np.flatnonzero(np.bincount(values, minlength=top))
        table = np.zeros(top, dtype=np.int64)
        table[different] = np.arange(len(different))
        return table[values], different
    different, number = np.unique(values, return_inverse=True)
    return number.astype(np.int64), different
