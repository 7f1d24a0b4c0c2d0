"""Forecast the effect of a swap on a serving runner, from recorded steps.

The simulator decides each step twice, with the current and with the new policy and configuration. A
cost model provides the times. The runner is not changed.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from dispatchkit.dispatch import Dispatcher, Policy, Reason
from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.keys import CaptureSizeWarning, DispatchConfig
from dispatchkit.observe import StepTrace
from dispatchkit.registry import GraphRegistry, KeyState

from dispatchkit_plan.costs import CostModel
from dispatchkit_plan.lane_run import LaneRun, Steps
from dispatchkit_plan.scenario import Scenario
from dispatchkit_plan.workload import check_trace

if TYPE_CHECKING:
    from dispatchkit.execute import GraphRunner

__all__ = ["Difference", "SwapForecast", "forecast_swap"]

_SHOWN_DIFFERENCES = 10


@attrs.frozen(kw_only=True)
class Difference:
    """Steps that would run differently after the swap.

    Attributes:
        active: Current decision, as text.
        candidate: Decision after the swap, as text.
        num_steps: Number of these steps.
        min_tokens: Smallest number of tokens of these steps.
        max_tokens: Largest number of tokens of these steps.
        gain_us: Total time that the swap saves on these steps; negative if they take longer.
    """

    active: str
    candidate: str
    num_steps: int
    min_tokens: int
    max_tokens: int
    gain_us: float


@attrs.frozen(kw_only=True)
class SwapForecast:
    """Time of recorded steps without and with a swap.

    Attributes:
        active: Name of the current policy.
        candidate: Name of the policy after the swap.
        num_steps: Number of compared steps.
        same_steps: Number of steps that would replay the same graph, or still run eager.
        refused_steps: Number of steps for which the runner would raise before or after the swap,
            because they are above an explicitly set ``max_num_tokens``. They are excluded from all
            other fields.
        active_us: Time of the compared steps without the swap, according to the cost model.
        candidate_us: Time of the compared steps with the swap, according to the cost model.
        differences: Groups of steps that would run differently, largest groups first.
        cost_model: Name of the cost model.
        notes: Caveats about the numbers.
    """

    active: str
    candidate: str
    num_steps: int
    same_steps: int
    refused_steps: int
    active_us: float
    candidate_us: float
    differences: tuple[Difference, ...]
    cost_model: str
    notes: tuple[str, ...] = ()

    @property
    def gain_us(self) -> float:
        """Time that the swap saves; negative if the steps take longer."""
        return self.active_us - self.candidate_us

    @property
    def ratio(self) -> float:
        """Time with the swap divided by the time without it; below 1 if the swap saves time."""
        return self.candidate_us / self.active_us if self.active_us else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as JSON values."""
        return {**attrs.asdict(self), "gain_us": self.gain_us, "ratio": self.ratio}

    def __str__(self) -> str:
        same = f"{counted(self.num_steps, 'step')} ({self.same_steps:,} unchanged)"
        times = f"{self.candidate_us / 1e3:.2f} ms instead of {self.active_us / 1e3:.2f} ms"
        change = f"{_change(self.gain_us)} ({abs(1 - self.ratio):.1%})"
        names = f"{self.candidate} instead of {self.active}"
        if self.candidate == self.active:
            names = f"{self.candidate} with the new settings"
        lines = [
            f"{names}, over {same}",
            f"   time {times}: {change} according to {self.cost_model}",
        ]
        lines += [
            f"   {counted(one.num_steps, 'step')} of {_range(one.min_tokens, one.max_tokens)}: "
            f"{one.active} -> {one.candidate}, {_change(one.gain_us)}"
            for one in self.differences[:_SHOWN_DIFFERENCES]
        ]
        if len(self.differences) > _SHOWN_DIFFERENCES:
            more = len(self.differences) - _SHOWN_DIFFERENCES
            lines.append(f"   and {counted(more, 'more kind')} of steps")
        lines += [f"   {note}" for note in self.notes]
        return "\n".join(lines)


def forecast_swap(
    runner: GraphRunner, trace: StepTrace, *, cost_model: CostModel | str, **change: Any
) -> SwapForecast:
    """Forecast the effect of a swap on traffic like that in a recorded trace.

    Args:
        runner: Serving runner, which is not changed.
        trace: Recorded steps: the result of ``recorder.trace()`` for the recorder that
            ``runner.start_recording()`` returns.
        cost_model: Cost model measured by ``calibrate(runner)``, name of a built-in model, or path
            of a file.
        change: Arguments of the swap: ``policy``, ``policy_options``, ``sizes``, ``mode``,
            ``max_num_tokens`` and ``max_num_seqs``. ``config`` can be passed instead of the last
            four.

    Raises:
        ConfigError: The swap changes nothing, or a setting is invalid.
        UnknownNameError: The policy or cost model is unknown.
        PolicyError: The policy rejects the configuration.
        TraceError: No step has tokens, every step with tokens exceeds an explicitly set
            ``max_num_tokens`` before or after the swap, or the trace has no column for an axis.
    """
    if not hasattr(runner, "swapper"):
        raise ConfigError("runner", runner, "a GraphRunner")
    check_trace(trace)
    proposal = runner.swapper.proposed(**change)
    scenario = Scenario(cost_model=cost_model)
    limit = _token_limit(runner.config, proposal.config)
    with_tokens = [step for step in trace if step.num_tokens]
    kept = [step for step in with_tokens if limit is None or step.num_tokens <= limit]
    if not kept:
        sizes = "with tokens" if limit is None else f"of 1 to {limit} tokens"
        problem = f"the trace has no step {sizes} to compare. Use another trace."
        raise TraceError(trace.source, None, problem)
    compared = StepTrace.from_steps(kept, source=trace.source)
    with runner.registry.lock:  # keeps the policy from learning during the copy
        in_force = copy.deepcopy(runner.dispatcher.policy)
    largest = max(step.num_tokens for step in kept)
    now = _Side(in_force, _covering(runner.config, largest), runner.registry, scenario)
    then = _Side(proposal.policy, _covering(proposal.config, largest), runner.registry, scenario)
    refused = len(with_tokens) - len(kept)
    return _compared(now, then, compared, refused, limit, scenario.model)


def _token_limit(*configs: DispatchConfig) -> int | None:
    """Return the largest number of tokens that every configuration allows; None without a limit."""
    limits = [config.max_num_tokens for config in configs if config.has_token_limit]
    return min(limits, default=None)


def _covering(config: DispatchConfig, num_tokens: int) -> DispatchConfig:
    """Return a configuration that has the same graphs and allows batches of ``num_tokens``."""
    if num_tokens <= config.max_num_tokens:
        return config
    with warnings.catch_warnings():
        # No warning is needed: batches above the largest capture size already run eager.
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return attrs.evolve(
            config,
            sizes=config.sizes,
            max_num_tokens=num_tokens,
            max_num_seqs=config.max_num_seqs,
        )


class _Side:
    """One side of the comparison: a separate dispatcher whose graphs count as captured."""

    def __init__(
        self, policy: Policy, config: DispatchConfig, live: GraphRegistry, scenario: Scenario
    ) -> None:
        self.dispatcher = Dispatcher(policy, config)
        self.config = config
        chance = random.Random(scenario.seed)
        self.run = LaneRun(self.dispatcher, scenario.model, scenario, chance)
        registry = self.dispatcher.registry
        for mode in live.disabled_modes & set(self.dispatcher.modes):
            registry.set_enabled(False, mode=mode)
        for key in registry:
            entry = live.get(key)
            if entry is None:
                continue
            if registry.is_enabled(key) and not live.is_enabled(key):
                registry.set_enabled(False, key=key)
            if entry.state is KeyState.FAILED:
                registry.failed(key, entry.reason)  # another capture would fail again


def _compared(
    now: _Side, then: _Side, trace: StepTrace, refused: int, limit: int | None, model: CostModel
) -> SwapForecast:
    before, number_before = now.run.decide_all(Steps.of(trace, now.config))
    after, number_after = then.run.decide_all(Steps.of(trace, then.config))
    pairs, counts = np.unique(np.stack([number_before, number_after]), axis=1, return_counts=True)
    same = 0
    active_us = candidate_us = 0.0
    faults = 0
    found: dict[tuple[str, str], Difference] = {}
    for first, second, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
        one, other = before[first], after[second]
        num_tokens = one.decision.num_tokens
        active_us += one.time_us * count
        candidate_us += other.time_us * count
        if other.decision.reason == Reason.POLICY_ERROR:
            faults += count
        if one.decision.key == other.decision.key:
            same += count
            continue
        words = str(one.decision), str(other.decision)
        gain_us = (one.time_us - other.time_us) * count
        known = found.get(words)
        found[words] = Difference(
            active=words[0],
            candidate=words[1],
            num_steps=count + (known.num_steps if known else 0),
            min_tokens=min(num_tokens, known.min_tokens if known else num_tokens),
            max_tokens=max(num_tokens, known.max_tokens if known else num_tokens),
            gain_us=gain_us + (known.gain_us if known else 0.0),
        )
    forecast = SwapForecast(
        active=now.dispatcher.policy_name,
        candidate=then.dispatcher.policy_name,
        num_steps=len(number_before),
        same_steps=same,
        refused_steps=refused,
        active_us=active_us,
        candidate_us=candidate_us,
        differences=tuple(
            sorted(found.values(), key=lambda one: (-one.num_steps, one.min_tokens, one.active))
        ),
        cost_model=model.name,
        notes=tuple(_notes(then, trace, refused, limit, faults, model)),
    )
    now.dispatcher.close()
    then.dispatcher.close()
    return forecast


def _notes(
    then: _Side, trace: StepTrace, refused: int, limit: int | None, faults: int, model: CostModel
) -> Iterator[str]:
    if refused and limit is not None:
        yield (
            f"Excluded: {counted(refused, 'step')} above max_num_tokens ({limit}), which the "
            "current or the new configuration refuses with an error."
        )
    if faults:
        yield (
            f"Because the new policy raised an error or violated a hard constraint, "
            f"{counted(faults, 'step')} would run eager."
        )
    largest = max(trace.column("num_tokens"))
    if not model.covers(largest):
        yield (
            f"Cost model {model.name} was not measured up to {counted(largest, 'token')}, so "
            "times beyond its range are extrapolated."
        )
    if then.dispatcher.policy_parts.learns:
        yield "The new policy learns while it serves; the forecast does not include what it learns."


def _range(least: int, most: int) -> str:
    return counted(most, "token") if least == most else f"{least:,} to {counted(most, 'token')}"


def _change(gain_us: float) -> str:
    return f"{'saves' if gain_us >= 0 else 'costs'} {abs(gain_us) / 1e3:.2f} ms"
