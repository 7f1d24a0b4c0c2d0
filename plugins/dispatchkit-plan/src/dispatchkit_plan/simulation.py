"""Simulate a trace under a policy, without a device.

The real dispatcher decides; only the device is simulated. Times come from a cost model. A learning
policy receives times with noise, as if they were measured; results contain the exact times.

The decisions of a policy that does not learn depend only on the batch, so each distinct batch is
decided only once. If graphs are captured when steps need them, the order of steps matters, so live
graphs are tracked step by step. With a learning policy, every step is decided separately.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dispatchkit.dispatch import Dispatcher, Policy
from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.keys import DispatchConfig, RuntimeMode, check_instance
from dispatchkit.observe import StepTrace, trace_config
from dispatchkit.plugins import PluginSet, load_plugins

from dispatchkit_plan.costs import CostModel
from dispatchkit_plan.lane_run import PENDING, LaneRun, Steps
from dispatchkit_plan.scenario import Scenario
from dispatchkit_plan.workload import check_trace

__all__ = ["Simulation", "simulate", "simulate_all"]


@attrs.frozen(kw_only=True)
class Simulation:
    """Result of simulating a trace under a scenario.

    Attributes:
        label: Name of the scenario.
        policy: Name of the policy.
        num_steps: Number of steps with tokens.
        modes: Number of steps in each runtime mode.
        misses: Number of eager steps for each reason.
        real_tokens: Number of real tokens of the steps that replayed a graph.
        padding_tokens: Number of padding tokens of the steps that replayed a graph.
        num_graphs: Number of keys that the policy declared, summed over lanes.
        captures: Number of captures, including repeated captures after an eviction.
        evictions: Number of graphs evicted to make room.
        probes: Number of steps with a one-shot decision of a learning policy.
        measured: Number of steps whose time a learning policy received.
        policy_errors: Number of faults of the policy; the affected steps ran eager.
        time_s: Device time of all steps according to the cost model.
        eager_time_s: Device time if every step ran eager.
        busiest_lane_s: Largest device time of a lane. This is the total time if lanes do not slow
            each other down.
        capture_time_s: Time of all captures; None if the cost model has no ``capture_us``.
        memory_bytes: Peak memory of live graphs, summed over lanes; None if the cost model has no
            ``graph_bytes``.
        cost_model: Name of the cost model.
        notes: Caveats about the numbers.
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
        """Padding as a percentage of the real tokens of replayed steps."""
        return 100.0 * self.padding_tokens / self.real_tokens if self.real_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
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
    """Simulate a trace under several scenarios."""
    plugins = plugins or load_plugins()
    return [simulate(trace, scenario, plugins=plugins) for scenario in scenarios]


def simulate(
    trace: StepTrace, scenario: Scenario | None = None, *, plugins: PluginSet | None = None
) -> Simulation:
    """Simulate a trace under a scenario.

    Args:
        trace: Steps to simulate; steps without tokens are skipped.
        scenario: Policy, sizes, limits and costs; by default, ``Scenario()``.
        plugins: Plugins that provide policies by name; loaded by default.

    Raises:
        TraceError: No step has tokens, or an axis of the configuration has no column in the trace.
        UnknownNameError: The policy is not installed, or the cost model is unknown.
        ConfigError: A setting is invalid.
        PolicyError: The policy rejects the configuration.
    """
    check_trace(trace)
    scenario = scenario or Scenario()
    if plugins is not None:
        check_instance(plugins, PluginSet, "plugins", "Pass the result of load_plugins().")
    check_instance(scenario, Scenario, "scenario", "Write Scenario(policy='vllm'), for example.")
    model = scenario.model
    config = scenario.config or trace_config(trace, sizes=scenario.sizes, mode=scenario.mode)
    axis = model.axis if model.axis in [axis.name for axis in config.axes] else ""
    steps = Steps.of(trace, config, axis)
    if not len(steps):
        raise TraceError(
            trace.source, None, "the trace has no step with tokens. Use another trace."
        )
    if scenario.max_bytes is not None and model.graph_bytes is None:
        raise ConfigError(
            "max_bytes",
            scenario.max_bytes,
            f"omitted with cost model {model.name!r}, which has no graph_bytes",
            "Use a cost model with graph_bytes, or set max_graphs instead.",
        )
    lanes = min(scenario.lanes, len(steps))
    runs = []
    for lane, policy in enumerate(_policies(scenario, lanes, plugins)):
        dispatcher = Dispatcher(
            policy, config, lazy=scenario.is_lazy, may_split=scenario.rows_independent
        )
        run = LaneRun(dispatcher, model, scenario, random.Random(scenario.seed + lane))
        run.serve(steps.every(lane, lanes))
        dispatcher.close()
        runs.append(run)
    return _merged(runs, steps, model, scenario, config)


def _policies(scenario: Scenario, lanes: int, plugins: PluginSet | None) -> list[Policy]:
    """Return a policy for each lane, because each lane learns separately."""
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
            "Pass the policy by name: each lane needs its own instance.",
        )
    return [scenario.policy]


def _merged(
    runs: Sequence[LaneRun],
    steps: Steps,
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
        for (num_tokens, value), count in run.pending.items():
            modes[RuntimeMode.NONE.name] += count
            misses[PENDING] += count
            total_us += run.eager_us(num_tokens, value) * count
        lane_us.append(total_us)
    first = runs[0].dispatcher
    learns = callable(getattr(first.policy, "observe", None))
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
        eager_time_s=_eager_us(steps, runs[0].eager_us) / 1e6,
        busiest_lane_s=max(lane_us) / 1e6,
        capture_time_s=None
        if model.capture_us is None
        else sum(run.capture_us for run in runs) / 1e6,
        memory_bytes=None
        if model.graph_bytes is None
        else round(sum(run.peak_bytes for run in runs)),
        cost_model=model.name,
        notes=tuple(_notes(steps, model, scenario, config, learns=learns)),
    )


def _eager_us(steps: Steps, eager: Callable[[int, int], float]) -> float:
    batches = np.stack([steps.num_tokens, steps.values])
    different, counts = np.unique(batches, axis=1, return_counts=True)
    return float(
        sum(
            eager(tokens, value) * count
            for tokens, value, count in zip(*different.tolist(), counts.tolist(), strict=True)
        )
    )


def _notes(
    steps: Steps, model: CostModel, scenario: Scenario, config: DispatchConfig, *, learns: bool
) -> Iterable[str]:
    if not steps.has_order and (learns or scenario.is_lazy or scenario.lanes > 1):
        yield (
            "The trace does not record the order of its steps, so each kind of step is spread "
            "evenly over the trace. Captures, evictions, learning and the steps of each lane "
            "depend on the order."
        )
    last = min(model.eager_us.last, model.graph_us.last)
    over = int((steps.num_tokens > last).sum())
    if over:
        yield (
            f"Times of {counted(over, 'step')} above {counted(last, 'token')}, the largest size "
            f"measured for {model.name}, are extrapolated linearly."
        )
    if model.clock != "device":
        yield f"Cost model {model.name} has host times, which do not predict device times."
    if model.graph_bytes is None:
        yield f"Cost model {model.name} has no graph_bytes, so memory is not predicted."
    if scenario.lanes > 1:
        yield (
            "Steps are assigned to lanes in turn. The simulation does not model how lanes slow "
            "each other down: the actual time is between busiest_lane_s and time_s."
        )
    free = [axis.name for axis in config.axes if axis.name != model.axis]
    if free:
        these = "this axis" if len(free) == 1 else "these axes"
        yield (
            f"Cost model {model.name} was not measured along {', '.join(free)}, so the "
            f"times do not include padding along {these}."
        )
    if not config.sizes:
        yield "There are no capture sizes, so every step runs eager."
