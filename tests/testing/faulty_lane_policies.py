"""Lane policies with one realistic mistake each, and the property that must find it."""

from __future__ import annotations

import random
from typing import ClassVar

#: (faulty lane policy, property that finds it, pattern of the message)
PLANTED = []


def planted(finding, message):
    def add(policy):
        PLANTED.append((policy, finding, message))
        return policy

    return add


class InTurn:
    """Correct base class of the faulty policies."""

    name = "in-turn"
    traits = frozenset({"spreads"})

    def __init__(self):
        self._next = 0

    def choose(self, step, lanes):
        self._next += 1
        return (self._next - 1) % len(lanes)


@planted("every step gets a lane", r"returned lane (\d), but (the indices are|the only index is) 0")
class CountsFromOne(InTurn):
    """Numbers lanes from 1 instead of 0."""

    def choose(self, step, lanes):
        return super().choose(step, lanes) + 1


@planted("every step gets a lane", r"returned <lane 0: .*>, not the index")
class ReturnsTheLane(InTurn):
    """Returns the lane instead of its index."""

    def choose(self, step, lanes):
        return lanes[super().choose(step, lanes)]


@planted("every step gets a lane", r"returned lane -1, but (the indices are|the only index is) 0")
class PriorityAsIndex(InTurn):
    """Uses the priority, which may be negative or large, as the index."""

    def choose(self, step, lanes):
        return min(step.priority, len(lanes) - 1)


@planted("every step gets a lane", r"choose raised StopIteration \(lanes: \[<lane 0: \d+ step")
class OnlyIdleLanes(InTurn):
    """Requires an idle lane, but there may be none."""

    def choose(self, step, lanes):
        return next(lane.index for lane in lanes if not lane.num_unfinished)


@planted("every step gets a lane", r"choose raised AttributeError: 'NoneType'.*\n  step: .*no key")
class ForgetsEagerSteps(InTurn):
    """Reads the key of eager steps, which have none."""

    needs_key = True

    def choose(self, step, lanes):
        return step.key.num_tokens % len(lanes)


@planted("every step gets a lane", r"returned None, not the index")
class ForgetsToReturn(InTurn):
    """Returns None where no case matches."""

    def choose(self, step, lanes):
        answer = None
        if step.priority == 0:
            answer = super().choose(step, lanes)
        return answer


@planted("every step gets a lane", r"ZeroDivisionError")
class KeepsAllLanesFree(InTurn):
    """Reserves one lane for urgent steps, so that a single lane leaves none."""

    def choose(self, step, lanes):
        return super().choose(step, lanes) % (len(lanes) - 1)


@planted("same history gives the same lanes", r"for the same history")
class TakesOneByChance(InTurn):
    """Chooses a random lane, which no seed reproduces."""

    def choose(self, step, lanes):
        return random.randrange(len(lanes))


@planted(
    "same history gives the same lanes",
    r"a fresh policy chose lane \d for the same history\n  step: .*key \w+ tok",
)
class KeysByAddress(InTurn):
    """Identifies keys by their address, though equal keys are one key."""

    needs_key = True

    def choose(self, step, lanes):
        return (id(step.key) >> 6) % len(lanes)


@planted("policies share nothing", r"when it was the only policy")
class CountsInTheClass(InTurn):
    """Shares its turns among all policies of the process."""

    turns: ClassVar[list[int]] = [0]

    def __init__(self):
        self.turns[0] = 0

    def choose(self, step, lanes):
        self.turns[0] += 1
        return self.turns[0] % len(lanes)


@planted(
    "keys are asked for where they matter",
    r"but lane \d if steps have no keys; set needs_key = True",
)
class ForgetsNeedsKey(InTurn):
    """Reads keys without setting ``needs_key``."""

    def choose(self, step, lanes):
        return 0 if step.key is None else step.key.num_tokens % len(lanes)


@planted("lanes for key are valid and stable", r"returned no lane for FULL tokens=128")
class NoLaneForLargeKeys(InTurn):
    """Omits large graphs by mistake."""

    def lanes_for_key(self, key, num_lanes):
        return [lane for lane in range(num_lanes) if key.num_tokens <= 64]


@planted(
    "lanes for key are valid and stable",
    r"with 1 lane, lanes_for_key returned lane 1, but the only index is 0\. The key is FULL",
)
class LanesBySize(InTurn):
    """Ignores the number of lanes."""

    def lanes_for_key(self, key, num_lanes):
        return [min(key.num_tokens, 8)]


@planted(
    "lanes for key are valid and stable",
    r"lanes_for_key returned \(\d,\) for .* policy returned \(\d,\) when",
)
class LanesInOrderOfCalls(InTurn):
    """Assigns keys to lanes in the order of calls."""

    needs_key = True

    def lanes_for_key(self, key, num_lanes):
        self._next += 1
        return [self._next % num_lanes]


@planted("steps go where their graph is", r"chose lane \d, but lanes_for_key returns")
class ChoosesUnassignedLanes(InTurn):
    """Captures by key, but chooses lanes in turn."""

    def lanes_for_key(self, key, num_lanes):
        return [key.num_tokens % num_lanes]


@planted("stream priorities fit the lanes", r"stream_priorities returned \(1,\); return one non")
class OnePriority(InTurn):
    """Returns one priority for all lanes instead of one per lane."""

    def stream_priorities(self, num_lanes):
        return [1]


@planted(
    "traits are known", r"claims unknown traits: balance; known traits: balances, spreads, sticky"
)
class MisspeltTrait(InTurn):
    """Claims a misspelt trait."""

    traits = frozenset({"balance"})


@planted("trait spreads uses every lane", r"never lanes \[")
class AlwaysTheFirstIdle(InTurn):
    """Prefers the first of equal lanes, so that the last lanes stay unused with few steps."""

    def choose(self, step, lanes):
        return min(lanes[:2], key=lambda lane: lane.num_unfinished).index


@planted("trait sticky keeps a key on its lanes", r"lanes with the graph: \d")
class LeavesWhenBusy(InTurn):
    """Claims that keys stay on their lanes, but moves steps when a lane is busy."""

    traits = frozenset({"sticky"})
    needs_key = True

    def lanes_for_key(self, key, num_lanes):
        return [key.num_tokens % num_lanes]

    def choose(self, step, lanes):
        assigned = 0 if step.key is None else step.key.num_tokens % len(lanes)
        if lanes[assigned].num_unfinished > 2:
            return min(lanes, key=lambda lane: lane.num_unfinished).index
        return assigned


@planted("trait balances takes the least busy", r"has less work")
class RemembersWhatItGave(InTurn):
    """Counts the steps assigned to each lane, but not those that finished."""

    traits = frozenset({"balances"})

    def __init__(self):
        self._given = {}

    def choose(self, step, lanes):
        lane = min(lanes, key=lambda one: self._given.get(one.index, 0)).index
        self._given[lane] = self._given.get(lane, 0) + step.num_tokens
        return lane
