"""The lane policies, which need no device."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

from dispatchkit import GraphKey
from dispatchkit.dispatch import LaneState, PendingStep
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count


class RoundRobin:
    """A lane policy that uses all lanes in turn, regardless of their load."""

    name = "round-robin"
    traits: ClassVar[frozenset[str]] = frozenset({"spreads"})

    def __init__(self) -> None:
        self._next = 0

    def choose(self, step: PendingStep, lanes: Sequence[LaneState]) -> int:
        """Return the lane after the previous choice."""
        lane = self._next % len(lanes)
        self._next = lane + 1
        return lane


class LeastLoaded:
    """A lane policy that uses the lane with the least unfinished work.

    Equally loaded lanes are used in turn.

    Args:
        by: Unit of work, ``tokens`` or ``steps``.

    Raises:
        ConfigError: ``by`` is neither ``tokens`` nor ``steps``.
    """

    name = "least-loaded"
    traits: ClassVar[frozenset[str]] = frozenset({"balances", "spreads"})

    def __init__(self, by: str = "tokens") -> None:
        if by not in ("tokens", "steps"):
            raise ConfigError("by", by, "'tokens' or 'steps'")
        self._by_tokens = by == "tokens"
        self._last = -1

    def choose(self, step: PendingStep, lanes: Sequence[LaneState]) -> int:
        """Return the lane with the least unfinished work."""
        self._last = self.least(lanes)
        return self._last

    def least(self, lanes: Sequence[LaneState]) -> int:
        """Return the index of the least loaded of the given lanes."""
        last = self._last
        # Lanes after the previous choice come first.
        order = sorted(lanes, key=lambda lane: (lane.index <= last, lane.index))
        return min(order, key=self._load).index

    def _load(self, lane: LaneState) -> int:
        return lane.unfinished_tokens if self._by_tokens else lane.num_unfinished


class ByKey:
    """A lane policy that replays each graph on fixed lanes, so that few lanes capture it.

    The lanes of a key are computed from its name, so every process uses the same lanes. Eager steps
    use the least loaded lane.

    Args:
        copies: Number of lanes on which each graph is captured. More copies balance the load
            better, but need more memory.

    Raises:
        ConfigError: ``copies`` is not an integer of at least 1.
    """

    name = "by-key"
    traits: ClassVar[frozenset[str]] = frozenset({"sticky"})
    needs_key = True

    def __init__(self, copies: int = 1) -> None:
        self._copies = check_count(copies, "copies")
        self._least = LeastLoaded()

    def lanes_for_key(self, key: GraphKey, num_lanes: int) -> Sequence[int]:
        """Return the lanes on which a key is captured."""
        first = zlib.crc32(str(key).encode()) % num_lanes
        return [(first + more) % num_lanes for more in range(min(self._copies, num_lanes))]

    def choose(self, step: PendingStep, lanes: Sequence[LaneState]) -> int:
        """Return the least loaded lane that holds the graph.

        If no lane holds it, return the least loaded lane that is assigned to it.
        """
        if step.key is None:
            return self._least.choose(step, lanes)
        assigned = [lanes[index] for index in self.lanes_for_key(step.key, len(lanes))]
        holders = [lane for lane in lanes if lane.holds(step.key)]
        return self._least.choose(step, holders or assigned)


class Priority:
    """A lane policy that reserves the last lanes, on high-priority streams, for urgent steps.

    Urgent steps use a reserved lane, or the least loaded of all lanes if an unreserved lane has
    fewer unfinished steps than every reserved lane. Other steps share the unreserved lanes. If
    there is only one lane, all steps share it.

    Args:
        reserved: Number of reserved lanes; at least one lane is left for other steps.
        threshold: Minimum priority of urgent steps.

    Raises:
        ConfigError: ``reserved`` or ``threshold`` is not an integer of at least 1.
    """

    name = "priority"
    traits: ClassVar[frozenset[str]] = frozenset({"spreads"})

    def __init__(self, reserved: int = 1, threshold: int = 1) -> None:
        self._reserved = check_count(reserved, "reserved")
        self._threshold = check_count(threshold, "threshold")
        self._urgent, self._usual = LeastLoaded(), LeastLoaded()

    def stream_priorities(self, num_lanes: int) -> Sequence[int]:
        """Return priority 1 for reserved lanes and 0 for other lanes."""
        kept = min(self._reserved, num_lanes - 1)
        return [0] * (num_lanes - kept) + [1] * kept

    def choose(self, step: PendingStep, lanes: Sequence[LaneState]) -> int:
        """Return the lane for a step, depending on the step's priority."""
        kept = min(self._reserved, len(lanes) - 1)
        usual, free = lanes[: len(lanes) - kept], lanes[len(lanes) - kept :]
        if step.priority < self._threshold or not free:
            return self._usual.choose(step, usual)
        fewest = min(lane.num_unfinished for lane in lanes)
        idlest = [lane for lane in free if lane.num_unfinished == fewest]
        return self._urgent.choose(step, idlest or lanes)
