"""Simulate ranks that run each step together.

The result breaks down the lost time: waiting for the slowest rank, padding, and agreement. The
simulation models dispatchkit-ranks with a policy that does not learn. Each rank decides for its own
batch, with the real dispatcher. All ranks then dispatch the maximum number of tokens, requests and
adapters. The most restrictive mode that any rank has chosen is the ceiling of this second dispatch.
The simulation assumes the following:

* Steps of one trace are assigned to the ranks in turn: consecutive steps, one per rank, form one
  common step.
* An agreement is an exchange of messages in a chain: each message takes ``hop_us`` and waits for
  the previous message. A tree has ``2 * ceil(log2(ranks))`` messages, and a ring has
  ``2 * (ranks - 1)``. Messages are so small that their size does not matter.
* Ranks wait for each other only because their own batches take different times. All of this waiting
  is attributed to the slowest rank.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any, Literal

import attrs
import numpy as np

from dispatchkit.dispatch import Dispatcher, decision_us
from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.keys import DispatchConfig, RuntimeMode, check_count, check_instance
from dispatchkit.observe import StepTrace, trace_config
from dispatchkit.plugins import PluginSet, load_plugins

from dispatchkit_plan.lane_run import LaneRun, Steps
from dispatchkit_plan.optimal import IntArray
from dispatchkit_plan.scenario import Scenario
from dispatchkit_plan.workload import check_trace

__all__ = ["Exchange", "RankSimulation", "simulate_ranks"]


@attrs.frozen(kw_only=True)
class Exchange:
    """Cost of one agreement, in which the ranks agree on the size and mode of a step.

    Attributes:
        shape: ``tree`` (NCCL between hosts) or ``ring`` (gloo).
        hop_us: Microseconds for one message to another rank, including the wake-up of the receiving
            process.
        own_us: Microseconds of work on each rank, in addition to the messages.
    """

    shape: Literal["tree", "ring"] = "tree"
    hop_us: float = 50.0
    own_us: float = 10.0

    def __attrs_post_init__(self) -> None:
        if self.shape not in ("tree", "ring"):
            raise ConfigError("shape", self.shape, "'tree' or 'ring'")
        for name in ("hop_us", "own_us"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ConfigError(name, value, "a finite, non-negative number of microseconds")

    def num_hops(self, ranks: int) -> int:
        """Return the number of messages in the chain."""
        if self.shape == "ring":
            return 2 * (ranks - 1)
        return 2 * math.ceil(math.log2(ranks))

    def time_us(self, ranks: int) -> float:
        """Return the duration of one agreement in microseconds; 0 for a single rank."""
        return 0.0 if ranks == 1 else self.own_us + self.num_hops(ranks) * self.hop_us


@attrs.frozen(kw_only=True)
class RankSimulation:
    """Result of simulating a trace on several ranks.

    Times are in seconds per rank. Multiply them by ``ranks`` for the total of all ranks.

    Attributes:
        label: Name of the scenario.
        policy: Name of the policy.
        ranks: Number of ranks that run each step together.
        num_steps: Total number of steps of all ranks.
        modes: Number of these steps in each runtime mode.
        changed_modes: Number of steps that run in a different mode than their rank would choose
            alone.
        real_tokens: Number of real tokens of all ranks.
        rank_padding: Number of tokens added to make every batch as large as the largest batch of
            its common step.
        graph_padding: Number of tokens then added to fill the graphs.
        own_s: Time of the steps if each rank decided alone, averaged over ranks.
        slowest_s: Time spent waiting for the rank with the slowest step, averaged over ranks.
        padding_s: Extra time due to the agreed size and mode, compared with the slowest rank's own
            step.
        exchange_s: Time of the agreements.
        cost_model: Name of the cost model.
        notes: Caveats about the numbers.
    """

    label: str
    policy: str
    ranks: int
    num_steps: int
    modes: dict[str, int]
    changed_modes: int
    real_tokens: int
    rank_padding: int
    graph_padding: int
    own_s: float
    slowest_s: float
    padding_s: float
    exchange_s: float
    cost_model: str
    notes: tuple[str, ...]

    @property
    def time_s(self) -> float:
        """Time of all steps in seconds, which is the same on every rank."""
        return self.own_s + self.slowest_s + self.padding_s + self.exchange_s

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {**attrs.asdict(self), "notes": list(self.notes), "time_s": self.time_s}


def simulate_ranks(
    trace: StepTrace,
    ranks: int,
    scenario: Scenario | None = None,
    *,
    exchange: Exchange | None = None,
    plugins: PluginSet | None = None,
) -> RankSimulation:
    """Simulate a trace whose steps run together on several ranks.

    Args:
        trace: Steps, which are assigned to the ranks in turn. Steps without tokens are skipped, as
            are the last steps if they do not fill a common step.
        ranks: Number of ranks that run each step together.
        scenario: Policy, sizes and costs; by default, ``Scenario()``. Limits on graphs, lazy
            captures, several lanes, axes and split batches are not supported.
        exchange: Cost of an agreement; by default, ``Exchange()``.
        plugins: Plugins that provide policies by name; loaded by default.

    Raises:
        TraceError: There are fewer steps with tokens than ranks.
        ConfigError: A setting is invalid, or is not supported with ranks.
        UnknownNameError: The policy is not installed, or the cost model is unknown.
        PolicyError: The policy rejects the configuration.
    """
    check_trace(trace)
    scenario, exchange = scenario or Scenario(), exchange or Exchange()
    check_instance(scenario, Scenario, "scenario", "Write Scenario(policy='vllm'), for example.")
    check_instance(exchange, Exchange, "exchange", "Write Exchange(), for example.")
    ranks = check_count(ranks, "ranks")
    config = scenario.config or trace_config(trace, sizes=scenario.sizes, mode=scenario.mode)
    _check(scenario, config)
    policy = scenario.policy
    if isinstance(policy, str):
        policy = (plugins or load_plugins()).create_policy(policy, **scenario.policy_options)
    model = scenario.model
    dispatcher = Dispatcher(policy, config)
    if dispatcher.policy_parts.learns:
        raise ConfigError(
            "policy",
            dispatcher.policy_name,
            "a policy that does not learn",
            "Use vllm, for example.",
            message=f"Policy {dispatcher.policy_name!r} learns, but simulating ranks requires a "
            "policy that does not learn.",
        )
    steps = Steps.of(trace, config)
    num_rounds = len(steps) // ranks
    if not num_rounds:
        fewer = f", or at most {counted(len(steps), 'rank')}" if len(steps) else ""
        raise TraceError(
            trace.source,
            None,
            f"the trace has {counted(len(steps), 'step')} with tokens, but simulating "
            f"{counted(ranks, 'rank')} requires at least {ranks:,}. Use a longer trace{fewer}.",
        )
    steps = _first(steps, num_rounds * ranks)
    run = LaneRun(dispatcher, model, scenario, random.Random(0))
    tallies, number = run.decide_all(steps)
    own_us = np.array([tally.time_us for tally in tallies])[number].reshape(num_rounds, ranks)
    own_mode = np.array([int(tally.decision.mode) for tally in tallies])[number]
    care = own_mode.reshape(num_rounds, ranks).min(axis=1)
    modes: Counter[str] = Counter({mode.name: 0 for mode in RuntimeMode})
    graph_padding = 0
    slowest = own_us.max(axis=1)
    agreed, which, counts = np.unique(
        _agreed(steps, care, ranks, config), axis=1, return_inverse=True, return_counts=True
    )
    times = np.zeros(agreed.shape[1])
    agreed_mode = np.zeros(agreed.shape[1], dtype=np.int64)
    for index, (batch, count) in enumerate(zip(agreed.T.tolist(), counts.tolist(), strict=True)):
        decision = dispatcher.dispatch(*batch)
        times[index] = decision_us(model, decision, batch[0])
        agreed_mode[index] = int(decision.mode)
        modes[decision.mode.name] += count * ranks
        graph_padding += count * ranks * decision.padding
    which = which.reshape(-1)
    changed = int((own_mode != np.repeat(agreed_mode[which], ranks)).sum())
    dispatcher.close()
    agreement = "A single rank needs no agreement."
    if ranks > 1:
        agreement = (
            f"An agreement takes {counted(exchange.num_hops(ranks), 'message')} of "
            f"{exchange.hop_us:g} µs each, and {exchange.own_us:g} µs of work on each rank."
        )
    real = int(steps.num_tokens.sum())
    return RankSimulation(
        label=scenario.label or dispatcher.policy_name,
        policy=dispatcher.policy_name,
        ranks=ranks,
        num_steps=num_rounds * ranks,
        modes=dict(modes),
        changed_modes=changed,
        real_tokens=real,
        rank_padding=int((agreed[0] * counts).sum()) * ranks - real,
        graph_padding=graph_padding,
        own_s=float(own_us.mean(axis=1).sum()) / 1e6,
        slowest_s=float((slowest - own_us.mean(axis=1)).sum()) / 1e6,
        padding_s=float((times[which] - slowest).sum()) / 1e6,
        exchange_s=num_rounds * exchange.time_us(ranks) / 1e6,
        cost_model=model.name,
        notes=(f"Steps of the trace are combined in order, {ranks} at a time.", agreement),
    )


def _check(scenario: Scenario, config: DispatchConfig) -> None:
    refused = {
        "max_graphs": scenario.max_graphs,
        "max_bytes": scenario.max_bytes,
        "capture_after": scenario.capture_after if scenario.is_lazy else None,
        "lanes": scenario.lanes if scenario.lanes > 1 else None,
        "rows_independent": scenario.rows_independent or None,
        "axes": [axis.name for axis in config.axes] or None,
    }
    for name, value in refused.items():
        if value is not None:
            raise ConfigError(
                name,
                value,
                "omitted if ranks are simulated",
                f"Remove {name}, or simulate without ranks.",
            )


def _first(steps: Steps, count: int) -> Steps:
    columns = {
        one.name: getattr(steps, one.name)[:count]
        for one in attrs.fields(Steps)
        if one.name != "has_order"
    }
    return attrs.evolve(steps, **columns)


def _agreed(steps: Steps, care: IntArray, ranks: int, config: DispatchConfig) -> IntArray:
    """Return the arguments of ``dispatch`` that ranks agree on. Shape (5, common steps)."""

    def most(values: IntArray) -> IntArray:
        found: IntArray = values.reshape(-1, ranks).max(axis=1)
        return found

    classes = steps.uniform.reshape(-1, ranks)
    common = np.where((classes == classes[:, :1]).all(axis=1), classes[:, 0], 0)
    if config.varlen_decode:
        short = [i for i, length in enumerate(config.query_lens, 1) if length <= config.query_len]
        varlen = config.num_query_classes - 1
        fits = np.isin(classes, [*short, varlen]).all(axis=1)
        common = np.where((common == 0) & fits, varlen, common)
    return np.stack([most(steps.num_tokens), most(steps.num_reqs), common, most(steps.loras), care])
