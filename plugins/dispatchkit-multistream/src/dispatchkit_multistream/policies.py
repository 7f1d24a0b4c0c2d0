"""The four lane policies. None of them touches a device."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

from dispatchkit import GraphKey
from dispatchkit.dispatch import LaneStep, LaneView
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count


class RoundRobin:
    """One lane after the other, whatever they have to do."""

    name = "round-robin"
    traits: ClassVar[frozenset[str]] = frozenset({"spreads"})

    def __init__(self) -> None:
        self._next = 0

    def choose(self, step: LaneStep, lanes: Sequence[LaneView]) -> int:
        """Return the lane after the last one."""
        lane = self._next % len(lanes)
        self._next = lane + 1
        return lane


class LeastLoaded:
    """The lane with the least unfinished work; of equals, the next in turn.

    Args:
        by: What work is counted in: ``tokens`` or ``steps``.

    Raises:
        ConfigError: It is neither.
    """

    name = "least-loaded"
    traits: ClassVar[frozenset[str]] = frozenset({"balances", "spreads"})

    def __init__(self, by: str = "tokens") -> None:
        if by not in ("tokens", "steps"):
            raise ConfigError("by", by, "'tokens' or 'steps'")
        self._by_tokens = by == "tokens"
        self._last = -1

    def choose(self, step: LaneStep, lanes: Sequence[LaneView]) -> int:
        """Return the lane that has least to do."""
        self._last = self.least(lanes)
        return self._last

    def least(self, lanes: Sequence[LaneView]) -> int:
        """Return which of some lanes has least to do."""
        last = self._last
        # Lanes behind the last one go before those up to it.
        order = sorted(lanes, key=lambda lane: (lane.index <= last, lane.index))
        return min(order, key=self._load).index

    def _load(self, lane: LaneView) -> int:
        return lane.unfinished_tokens if self._by_tokens else lane.num_unfinished


class ByKey:
    """Each graph on lanes of its own, and its steps where it is: stream-local graph caching.

    A key's home follows from its name alone, so that it is the same in every process. Steps
    that run eager take the least busy lane.

    Args:
        copies: On how many lanes each graph is captured: more balance better and take more
            memory.

    Raises:
        ConfigError: ``copies`` is not a whole number of at least 1.
    """

    name = "by-key"
    traits: ClassVar[frozenset[str]] = frozenset({"sticky"})
    needs_key = True

    def __init__(self, copies: int = 1) -> None:
        self._copies = check_count(copies, "copies")
        self._least = LeastLoaded()

    def homes(self, key: GraphKey, num_lanes: int) -> Sequence[int]:
        """Return the lanes a key is captured on."""
        first = zlib.crc32(str(key).encode()) % num_lanes
        return [(first + more) % num_lanes for more in range(min(self._copies, num_lanes))]

    def choose(self, step: LaneStep, lanes: Sequence[LaneView]) -> int:
        """Return the least busy lane that has the graph, or is a home of it."""
        if step.key is None:
            return self._least.choose(step, lanes)
        homes = [lanes[index] for index in self.homes(step.key, len(lanes))]
        holders = [lane for lane in lanes if lane.holds(step.key)]
        return self._least.choose(step, holders or homes)


class Priority:
    """Keeps the last lanes, on streams that go before others, for urgent steps.

    Urgent steps take whichever lane is least busy, of those kept free first; usual ones share
    the others. With one lane all share it.

    Args:
        reserved: How many lanes are kept; at least one is left for usual steps.
        threshold: From which priority on a step is urgent.

    Raises:
        ConfigError: ``reserved`` is not a whole number of at least 1.
    """

    name = "priority"
    traits: ClassVar[frozenset[str]] = frozenset({"spreads"})

    def __init__(self, reserved: int = 1, threshold: int = 1) -> None:
        self._reserved = check_count(reserved, "reserved")
        self._threshold = check_count(threshold, "threshold")
        self._urgent, self._usual = LeastLoaded(), LeastLoaded()

    def stream_priorities(self, num_lanes: int) -> Sequence[int]:
        """Return 1 for the lanes kept free, 0 for the others."""
        kept = min(self._reserved, num_lanes - 1)
        return [0] * (num_lanes - kept) + [1] * kept

    def choose(self, step: LaneStep, lanes: Sequence[LaneView]) -> int:
        """Return a lane of those that the step may use."""
        kept = min(self._reserved, len(lanes) - 1)
        usual, free = lanes[: len(lanes) - kept], lanes[len(lanes) - kept :]
        if step.priority < self._threshold or not free:
            return self._usual.choose(step, usual)
        fewest = min(lane.num_unfinished for lane in lanes)
        idlest = [lane for lane in free if lane.num_unfinished == fewest]
        return self._urgent.choose(step, idlest or lanes)
