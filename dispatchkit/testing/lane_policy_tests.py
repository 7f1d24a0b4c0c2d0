"""LanePolicyTests, the test kit for lane policies.

Each test checks one property on random schedules with a fixed seed. A schedule submits steps to
simulated lanes and finishes some of these steps; no device is needed. The docstring of a test
explains the harm of violating its property. The core set of tests applies to every lane policy. A
*trait* is an optional property, which is tested if the policy lists it in ``traits`` and skipped
otherwise.
"""

from __future__ import annotations

import copy
import random
import unittest
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import attrs

from dispatchkit.dispatch import (
    LANE_TRAITS,
    KeyPlacementPolicy,
    LanePolicy,
    PendingStep,
    lane_fault,
    lane_priorities,
    lanes_by_key,
    needs_key,
    policy_name,
    policy_traits,
)
from dispatchkit.errors import PolicyError, counted
from dispatchkit.keys import BatchDescriptor, GraphKey, RuntimeMode, has_members

MOST_LANES = 8
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_KEYS = tuple(
    GraphKey(mode, BatchDescriptor(size))
    for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE)
    for size in _SIZES
)


class SampleLane:
    """A simulated lane, whose steps finish on demand.

    Args:
        index: Index of the lane.
        keys: Keys whose graphs are captured on the lane.
    """

    def __init__(self, index: int, keys: Sequence[GraphKey] = ()) -> None:
        self._index, self._keys = index, frozenset(keys)
        self._tokens: deque[int] = deque()

    @property
    def index(self) -> int:
        """Index of the lane."""
        return self._index

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished steps."""
        return len(self._tokens)

    @property
    def unfinished_tokens(self) -> int:
        """Total number of tokens of the unfinished steps."""
        return sum(self._tokens)

    def holds(self, key: GraphKey) -> bool:
        """Return whether the lane has a graph for a key."""
        return key in self._keys

    def submit(self, num_tokens: int) -> None:
        """Add a step to the lane."""
        self._tokens.append(num_tokens)

    def finish(self) -> None:
        """Finish the oldest step, if any."""
        if self._tokens:
            self._tokens.popleft()

    def __repr__(self) -> str:
        tokens = counted(self.unfinished_tokens, "token")
        return f"<lane {self._index}: {counted(self.num_unfinished, 'step')}, {tokens}>"


@attrs.frozen
class Schedule:
    """A sequence of submitted and finished steps.

    Attributes:
        num_lanes: Number of lanes.
        steps: Pairs of a step and a tuple of lane indices. After the step is submitted, each index
            in the tuple finishes the oldest step of its lane.
    """

    num_lanes: int
    steps: tuple[tuple[PendingStep, tuple[int, ...]], ...]

    @classmethod
    def sample(cls, rng: random.Random, num_lanes: int | None = None, length: int = 40) -> Schedule:
        """Return a schedule with random steps (some eager) and a random rate of finished steps."""
        number = rng.randint(1, MOST_LANES) if num_lanes is None else num_lanes
        rate = rng.choice((0.0, 0.5, 1.0, 2.0))  # mean number of steps that finish per submission
        keys = rng.sample(_KEYS, rng.randint(1, len(_KEYS)))
        steps = []
        for _ in range(length):
            key = None if rng.random() < 0.15 else rng.choice(keys)
            tokens = rng.randint(1, 512) if key is None else rng.randint(1, key.num_tokens)
            priority = rng.choice((0, 0, 0, 1, 2, -1))
            count = int(rate + rng.random())
            done = tuple(rng.randrange(number) for _ in range(count))
            steps.append((PendingStep(tokens, key, priority), done))
        return cls(number, tuple(steps))


class LanePolicyTests:
    """Test kit for a lane policy.

    Subclass it under a name that starts with ``Test``, and define ``make_lane_policy``.

    Attributes:
        seed: Seed of the random schedules; the same seed gives the same schedules.
        max_examples: Number of schedules per property.
    """

    seed: int = 0
    max_examples: int = 30

    def make_lane_policy(self) -> LanePolicy:
        """Return a fresh lane policy."""
        raise NotImplementedError(f"{type(self).__name__} must define make_lane_policy().")

    # -- choices ------------------------------------------------------------------------

    def test_every_step_gets_a_lane(self) -> None:
        """``choose`` always returns the index of an existing lane.

        It must also do so for eager steps (which have no key), if all lanes are busy, and if there
        is only one lane. If ``choose`` raises or returns anything but the index of a lane, the step
        runs on the least busy lane. In strict mode, the step raises instead.
        """
        for schedule in self._schedules():
            for _ in self._play(self.make_lane_policy(), schedule):
                pass

    def test_same_history_gives_the_same_lanes(self) -> None:
        """Two fresh policies choose the same lanes for the same history.

        A failure that depends on chance, the clock or the address of an object cannot be
        reproduced. A policy must compare keys by value, not by identity.
        """
        for schedule in self._schedules():
            first = [lane for _, lane, _ in self._play(self.make_lane_policy(), schedule)]
            again = copy.deepcopy(schedule)  # keys that are equal but not identical
            second = [lane for _, lane, _ in self._play(self.make_lane_policy(), again)]
            if first != second:
                pairs = enumerate(zip(first, second, strict=True))
                at = next(index for index, pair in pairs if len({*pair}) > 1)
                step = schedule.steps[at][0]
                self._fail(
                    f"chose lane {first[at]}, but a fresh policy chose lane {second[at]} for the "
                    "same history",
                    step,
                )

    def test_policies_share_nothing(self) -> None:
        """Two policies used together choose the same lanes as each policy alone.

        Each runner in a process has its own policy. If a counter is stored in the class, the
        choices for one runner depend on the traffic of the others.
        """
        for schedule in self._schedules():
            alone = [lane for _, lane, _ in self._play(self.make_lane_policy(), schedule)]
            mine = self._play(self.make_lane_policy(), schedule)
            other = self._play(self.make_lane_policy(), schedule)
            for want, (step, lane, _), _ in zip(alone, mine, other, strict=True):
                if lane != want:
                    self._fail(
                        f"chose lane {lane}, but lane {want} when it was the only policy", step
                    )

    def test_keys_are_asked_for_where_they_matter(self) -> None:
        """If the choices of a policy depend on the key, it must set ``needs_key = True``.

        Otherwise, the policy receives steps without keys.
        """
        for schedule in self._schedules():
            if needs_key(self.make_lane_policy()):
                return
            bare = attrs.evolve(
                schedule,
                steps=tuple((attrs.evolve(step, key=None), done) for step, done in schedule.steps),
            )
            with_keys = self._play(self.make_lane_policy(), schedule)
            without = self._play(self.make_lane_policy(), bare)
            for (step, lane, _), (_, other, _) in zip(with_keys, without, strict=True):
                if lane != other:
                    self._fail(
                        f"chose lane {lane}, but lane {other} if steps have no keys; set "
                        "needs_key = True to receive keys",
                        step,
                    )

    # -- placement of keys ----------------------------------------------------------------

    def test_lanes_for_key_are_valid_and_stable(self) -> None:
        """``lanes_for_key`` always returns the same lanes for a key, and at least one.

        A key without a lane is never captured, and its steps run eager. If the lane of a key
        changes, the graph is captured on one lane and looked up on another.
        """
        for number in range(1, MOST_LANES + 1):
            answers = [
                self._lanes_by_key(self.make_lane_policy(), keys, number)
                for keys in (_KEYS, tuple(reversed(copy.deepcopy(_KEYS))))
            ]
            for key in _KEYS:
                if answers[0][key] != answers[1][key]:
                    self._fail(
                        f"lanes_for_key returned {answers[0][key]} for {key} with "
                        f"{counted(number, 'lane')}, but a fresh policy returned "
                        f"{answers[1][key]} when the keys were passed in reverse order"
                    )

    def test_steps_go_where_their_graph_is(self) -> None:
        """A step runs on a lane that has the graph of its key.

        On any other lane, the step runs eager.
        """
        for schedule in self._schedules():
            policy = self.make_lane_policy()
            if not has_members(policy, KeyPlacementPolicy):
                return  # every lane has all keys
            assigned = self._lanes_by_key(policy, _KEYS, schedule.num_lanes)
            for step, lane, _ in self._play(policy, schedule):
                if step.key is not None and lane not in assigned[step.key]:
                    self._fail(
                        f"chose lane {lane}, but lanes_for_key returns {assigned[step.key]} for "
                        "the key",
                        step,
                    )

    def test_stream_priorities_fit_the_lanes(self) -> None:
        """``stream_priorities`` always returns one non-negative integer per lane.

        A runner creates its streams with these priorities. With an invalid value, the runner cannot
        be created.
        """
        for number in range(1, MOST_LANES + 1):
            policy = self.make_lane_policy()
            try:
                first = lane_priorities(policy, number, name=policy_name(policy))
                second = lane_priorities(self.make_lane_policy(), number, name=policy_name(policy))
            except PolicyError as error:
                self._fail(f"with {counted(number, 'lane')}, {_without_name(error)}")
            if first != second:
                self._fail(
                    f"stream_priorities returned {first} for {counted(number, 'lane')}, but a "
                    f"fresh policy returned {second}"
                )

    # -- traits ---------------------------------------------------------------------------

    def test_traits_are_known(self) -> None:
        """All claimed traits exist; a misspelled trait would never be tested."""
        unknown = policy_traits(self.make_lane_policy()) - LANE_TRAITS
        if unknown:
            known = ", ".join(sorted(LANE_TRAITS))
            self._fail(
                f"claims unknown traits: {', '.join(sorted(unknown))}; known traits: {known}"
            )

    def test_trait_spreads_uses_every_lane(self) -> None:
        """If steps have many different keys, every lane gets some of the steps.

        Each lane has its own buffers and graphs, which waste memory if the lane is not used.
        """
        self._skip_unless("spreads")
        for number in range(1, MOST_LANES + 1):
            schedule = Schedule.sample(random.Random(self.seed + number), number, 32 * number)
            used = {lane for _, lane, _ in self._play(self.make_lane_policy(), schedule)}
            if len(used) < number:
                idle = sorted({*range(number)} - used)
                self._fail(
                    f"used lanes {sorted(used)} in {32 * number} steps, but never lanes {idle}"
                )

    def test_trait_sticky_keeps_a_key_on_its_lanes(self) -> None:
        """Steps run on lanes that have the graph of their key, even if these lanes are busy."""
        self._skip_unless("sticky")
        for schedule in self._schedules():
            for step, lane, lanes in self._play(self.make_lane_policy(), schedule):
                key = step.key
                holders = [] if key is None else [x.index for x in lanes if x.holds(key)]
                if holders and lane not in holders:
                    self._fail(
                        f"chose lane {lane}, which does not have the graph of the key; lanes with "
                        f"the graph: {', '.join(map(str, holders))}",
                        step,
                    )

    def test_trait_balances_takes_the_least_busy(self) -> None:
        """No lane has both fewer unfinished steps and fewer unfinished tokens than the chosen one.

        Lanes finish their steps at different times, so the load of a lane is its unfinished work,
        not the number of steps submitted to it.
        """
        self._skip_unless("balances")
        for schedule in self._schedules():
            for step, lane, lanes in self._play(self.make_lane_policy(), schedule):
                own = lanes[lane]
                for other in lanes:
                    fewer = other.num_unfinished < own.num_unfinished
                    if fewer and other.unfinished_tokens < own.unfinished_tokens:
                        self._fail(f"chose {own}, but {other} has less work", step)

    # -- internals ------------------------------------------------------------------------

    def _schedules(self) -> Iterator[Schedule]:
        for number in range(self.max_examples):
            yield Schedule.sample(random.Random(1000 * self.seed + number))

    def _play(
        self, policy: Any, schedule: Schedule
    ) -> Iterator[tuple[PendingStep, int, list[SampleLane]]]:
        """Yield each step with the chosen lane and all lanes, before the step is submitted."""
        assigned = self._lanes_by_key(policy, _KEYS, schedule.num_lanes)
        lanes = [
            SampleLane(index, [key for key in _KEYS if index in assigned[key]])
            for index in range(schedule.num_lanes)
        ]
        for step, done in schedule.steps:
            try:
                answer = policy.choose(step, tuple(lanes))
            except Exception as error:  # noqa: BLE001 - any exception is a finding
                problem = f"choose raised {type(error).__name__}: {error}".rstrip(": ")
                self._fail(f"{problem} (lanes: {lanes})", step, cause=error)
            fault = lane_fault(answer, len(lanes))
            if fault:
                self._fail(f"choose {fault}", step)
            yield step, answer, lanes
            lanes[answer].submit(step.num_tokens)
            for index in done:
                lanes[index].finish()

    def _lanes_by_key(
        self, policy: Any, keys: Sequence[GraphKey], num_lanes: int
    ) -> dict[GraphKey, tuple[int, ...]]:
        try:
            return lanes_by_key(policy, keys, num_lanes, name=policy_name(policy))
        except PolicyError as error:
            self._fail(f"with {counted(num_lanes, 'lane')}, {_without_name(error)}")

    def _skip_unless(self, trait: str) -> None:
        if trait not in policy_traits(self.make_lane_policy()):
            raise unittest.SkipTest(f"trait {trait} is not claimed")

    def _fail(
        self, problem: str, step: PendingStep | None = None, *, cause: Exception | None = None
    ) -> NoReturn:
        name = policy_name(self.make_lane_policy())
        lines = [f"Lane policy {name!r}: {problem}"]
        if step is not None:
            key = "no key" if step.key is None else f"key {step.key}"
            tokens = counted(step.num_tokens, "token")
            lines.append(f"  step: {tokens}, {key}, priority {step.priority}")
        raise AssertionError("\n".join(lines)) from cause


def _without_name(error: PolicyError) -> str:
    """Return the message of an error without the name of the policy."""
    return f"{error.hook} {str(error).partition(f': {error.hook} ')[2]}"
