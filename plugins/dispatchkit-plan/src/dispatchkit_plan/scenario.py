"""Scenarios of a simulation: policy, sizes, limits and costs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dispatchkit.dispatch import Policy
from dispatchkit.errors import ConfigError
from dispatchkit.keys import (
    CUDAGraphMode,
    DispatchConfig,
    check_capture_sizes,
    check_count,
    check_flag,
    check_instance,
)

from dispatchkit_plan.costs import CostModel, load_cost_model

__all__ = ["Eviction", "Noise", "Scenario"]

Eviction = Literal["lru", "benefit"]


@attrs.frozen
class Noise:
    """Deviation of measured times from true times.

    Attributes:
        relative: Standard deviation, as a share of the time.
        outliers: Share of measurements that are outliers.
        factor: Factor by which the measured time of an outlier is multiplied.
    """

    relative: float = 0.10
    outliers: float = 0.01
    factor: float = 10.0

    def __attrs_post_init__(self) -> None:
        for setting, least, most in (
            ("relative", 0.0, math.inf),
            ("outliers", 0.0, 1.0),
            ("factor", 0.0, math.inf),
        ):
            value = getattr(self, setting)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:
                allowed = "a number from 0 to 1" if most == 1 else "a non-negative number"
                raise ConfigError(setting, value, allowed)

    def measured(self, time_us: float, chance: random.Random) -> float:
        """Return a simulated measurement of a step that takes ``time_us``."""
        seen = time_us * max(0.2, chance.gauss(1.0, self.relative))
        return seen * self.factor if chance.random() < self.outliers else seen


#: Types of the settings that are objects.
_KINDS = {"policy_options": Mapping, "noise": Noise, "config": DispatchConfig}


@attrs.frozen(kw_only=True)
class Scenario:
    """Settings of a simulation.

    Attributes:
        policy: Name of an installed policy, or a policy object.
        policy_options: Options of the policy, if it is given by name.
        sizes: Capture sizes; by default, vLLM's default list for the token and request limits that
            ``trace_config`` derives from the trace.
        mode: Name of a ``CUDAGraphMode``, which selects the runtime modes of decode and mixed
            batches.
        max_graphs: Maximum number of live graphs per lane. With this or ``max_bytes``, graphs are
            captured when steps need them and evicted to make room. Without either limit and with
            ``capture_after=1``, all graphs are captured before the first step.
        max_bytes: Maximum memory of live graphs per lane in bytes, according to ``graph_bytes`` of
            the cost model.
        eviction: Graph to evict first: ``lru`` for the least recently used graph, ``benefit`` for
            the graph with the fewest replays relative to its capture size.
        capture_after: Number of steps that must need a graph before it is captured. The last of
            these steps replays the graph; the others run eager. Above 1, nothing is captured before
            the first step.
        lanes: Number of lanes. Steps are assigned to lanes in turn, and each lane has its own
            graphs.
        cost_model: Cost model, name of a built-in model, or path of a file.
        sample_every: Minimum number of steps between two measurements for a learning policy.
            One-shot decisions are always measured.
        rows_independent: Whether the policy may split mixed batches over several graphs. The time
            of a split step is the sum of the times of its parts.
        noise: Deviation of measured times from true times.
        seed: Seed of the noise.
        config: Complete configuration, instead of ``sizes`` and ``mode``.
        label: Name in comparisons; by default, the name of the policy.
    """

    policy: str | Policy = "vllm"
    policy_options: Mapping[str, Any] = attrs.field(factory=dict)
    sizes: tuple[int, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(check_capture_sizes)
    )
    mode: str = "FULL_AND_PIECEWISE"
    max_graphs: int | None = None
    max_bytes: int | None = None
    eviction: Eviction = "lru"
    capture_after: int = 1
    lanes: int = 1
    cost_model: CostModel | str = "lm-decode-h100"
    sample_every: int = 64
    rows_independent: bool = False
    noise: Noise = Noise()
    seed: int = 0
    config: DispatchConfig | None = None
    label: str = ""

    def __attrs_post_init__(self) -> None:
        for setting in ("lanes", "capture_after", "sample_every", "max_graphs", "max_bytes"):
            if getattr(self, setting) is not None:
                # check_count may convert a string; a frozen class does not allow plain assignment
                object.__setattr__(self, setting, check_count(getattr(self, setting), setting))
        check_count(self.seed, "seed", minimum=0)
        check_flag(self.rows_independent, "rows_independent")
        CUDAGraphMode.parse(self.mode)
        for setting, kind in _KINDS.items():
            if getattr(self, setting) is not None:
                check_instance(getattr(self, setting), kind, setting)
        if self.eviction not in ("lru", "benefit"):
            raise ConfigError("eviction", self.eviction, "'lru' or 'benefit'")
        if self.config is not None and self.sizes is not None:
            raise ConfigError(
                "sizes", self.sizes, "omitted with config", "Set the sizes in config instead."
            )

    @property
    def model(self) -> CostModel:
        """The loaded cost model.

        Raises:
            UnknownNameError: The name is neither a built-in model nor a file.
            ConfigError: The file is not a cost model.
        """
        given = self.cost_model
        return given if isinstance(given, CostModel) else load_cost_model(given)

    @property
    def is_lazy(self) -> bool:
        """Whether graphs are captured when steps need them, instead of before the first step."""
        bounded = self.max_graphs is not None or self.max_bytes is not None
        return bounded or self.capture_after > 1
