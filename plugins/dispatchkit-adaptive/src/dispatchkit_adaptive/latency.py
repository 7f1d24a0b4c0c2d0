"""A policy that compares measured latencies, for third-party dispatchers with their own graphs."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable
from typing import Any, TypeVar

from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count

from dispatchkit_adaptive.estimates import Estimate

__all__ = ["LatencyPolicy"]

ModeT = TypeVar("ModeT")
MAX_KEYS = 4096


class LatencyPolicy:
    """A policy that prefers the fastest known mode for a key.

    Keys and modes may be any hashable values. A mode is eager if its name is ``EAGER`` or ``NONE``,
    in upper or lower case. Estimates are kept for the 4,096 keys that were recorded most recently.

    Args:
        history_size: Approximate number of recent latencies that determine an estimate, at least 8.
        min_samples: Minimum number of latencies before a mode is compared with others, at least 1.
        retry_every: For each key, one in this many calls of ``should_use_graph`` returns the slower
            choice, so that its latency is measured again; at least 2.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self, history_size: int = 100, *, min_samples: int = 3, retry_every: int = 64
    ) -> None:
        self.history_size = check_count(history_size, "history_size", minimum=8)
        self.min_samples = check_count(min_samples, "min_samples")
        self.retry_every = check_count(retry_every, "retry_every", minimum=2)
        self._arms: OrderedDict[Hashable, dict[Any, Estimate]] = OrderedDict()
        self._asked: Counter[Hashable] = Counter()

    def record(self, key: Hashable, mode: Hashable, latency: float) -> None:
        """Record a latency of a key in a mode; use the same unit in all calls.

        Raises:
            ConfigError: The latency is not a finite number above 0.
        """
        if isinstance(latency, bool) or not math.isfinite(latency) or latency <= 0.0:
            raise ConfigError("latency", latency, "a finite number above 0")
        if key not in self._arms and len(self._arms) >= MAX_KEYS:
            oldest, _ = self._arms.popitem(last=False)
            del self._asked[oldest]
        arms = self._arms.setdefault(key, {})
        self._arms.move_to_end(key)
        arms.setdefault(mode, Estimate(1, self.history_size, over_tokens=False)).add(1, latency)

    def latency(self, key: Hashable, mode: Hashable) -> float | None:
        """Return the expected latency; None if fewer than ``min_samples`` were recorded."""
        arm = self._arms.get(key, {}).get(mode)
        if arm is None or arm.samples < self.min_samples:
            return None
        return arm.expect(1)

    def should_use_graph(self, key: Hashable, graph_available: bool) -> bool:
        """Return whether a graph is available and eager is not known to be faster.

        Once the latencies of both are known, one in ``retry_every`` calls for a key returns the
        slower choice.
        """
        if not graph_available:
            return False
        eager, graph = math.inf, math.inf
        for mode in self._arms.get(key, {}):
            us = self.latency(key, mode)
            if us is not None and _is_eager(mode):
                eager = min(eager, us)
            elif us is not None:
                graph = min(graph, us)
        if not math.isfinite(graph) or not math.isfinite(eager):
            return True
        self._asked[key] += 1
        is_retry = self._asked[key] % self.retry_every == 0
        return (graph <= eager) is not is_retry

    def select_mode(self, key: Hashable, available_modes: Collection[ModeT]) -> ModeT:
        """Return a mode with too few latencies (below ``min_samples``), or else the fastest mode.

        Raises:
            ConfigError: No modes are given.
        """
        if not available_modes:
            raise ConfigError("available_modes", available_modes, "a list of at least one mode")
        return min(available_modes, key=lambda mode: self.latency(key, mode) or 0.0)


def _is_eager(mode: object) -> bool:
    return str(getattr(mode, "name", mode)).upper() in ("EAGER", "NONE")
