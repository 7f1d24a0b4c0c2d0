"""Lane policies, which choose the lane of each submitted step.

A lane is a stream with its own static inputs and graphs. A lane policy chooses the lane that runs a
step; the runner's policy chooses the graph to replay. Any lane policy works with any policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import attrs

from dispatchkit.dispatch.policy import policy_name
from dispatchkit.errors import ConfigError, PolicyError, counted, describe_exception, format_value
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.checks import (
    check_count,
    has_members,
    refuses_unknown_names,
    whole_number,
)

#: Traits that a lane policy may claim, and that the test kit then checks. ``sticky``: steps of a
#: key run on a lane that has its graph. ``spreads``: all lanes are used. ``balances``: no lane is
#: chosen while another has less unfinished work.
LANE_TRAITS = frozenset({"sticky", "spreads", "balances"})


@attrs.frozen
class PendingStep:
    """A submitted step that is not assigned to a lane yet.

    Attributes:
        num_tokens: Number of tokens, before padding.
        key: Key of the graph that would serve the step if all declared graphs were captured. None
            if the step would run eager even then, or if the lane policy does not set ``needs_key``.
        priority: Priority given by the caller: 0 is normal, larger is more urgent.
    """

    num_tokens: int
    key: GraphKey | None = None
    priority: int = 0


class LaneState(Protocol):
    """The state of a lane, as lane policies see it."""

    @property
    def index(self) -> int:
        """Number of the lane, from 0."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of submitted steps that have not finished on the device."""
        ...

    @property
    def unfinished_tokens(self) -> int:
        """Number of tokens of unfinished steps, before padding."""
        ...

    def holds(self, key: GraphKey) -> bool:
        """Return whether the lane has a captured graph for a key."""
        ...


class LanePolicy(Protocol):
    """An object that chooses a lane for each submitted step, without using the device.

    ``choose`` is called once for each submitted step, under the runner's lock. All other parts are
    optional: the protocols ``KeyedLanePolicy``, ``KeyPlacementPolicy`` and
    ``PrioritizedLanePolicy``, and the attributes ``name`` and ``traits`` (from ``LANE_TRAITS``).
    """

    def choose(self, step: PendingStep, lanes: Sequence[LaneState]) -> int:
        """Return the index of the lane for a step."""
        ...


class KeyedLanePolicy(Protocol):
    """A lane policy that requires the key of each step."""

    @property
    def needs_key(self) -> bool:
        """Whether ``choose`` receives steps with keys; each key costs a table lookup."""
        ...


class KeyPlacementPolicy(Protocol):
    """A lane policy that chooses the lanes on which a key is captured (default: all)."""

    def lanes_for_key(self, key: GraphKey, num_lanes: int) -> Iterable[int]:
        """Return the indices of the lanes for a key: at least one, and the same in each call."""
        ...


class PrioritizedLanePolicy(Protocol):
    """A lane policy that sets the stream priority of each lane (default: 0)."""

    def stream_priorities(self, num_lanes: int) -> Iterable[int]:
        """Return the priority of each lane's stream, at least 0; larger is more urgent."""
        ...


def _check_lanes(count: Any) -> int:
    return check_count(count, "lanes")


@refuses_unknown_names
@attrs.frozen
class Lanes:
    """The lanes of a runner: their number, policy and memory.

    Attributes:
        count: Number of lanes.
        policy: The lane policy; None for the policy named in ``LaneOptions``.
        memory: A ``GraphMemory`` or one of its groups, through which several runners share pools, a
            budget and memory accounts. By default each lane has its own pool.

    Raises:
        ConfigError: The number or the policy is invalid.
    """

    count: int = attrs.field(default=1, converter=_check_lanes)
    policy: LanePolicy | None = attrs.field(default=None)
    memory: Any = None

    @policy.validator
    def _check_policy(self, attribute: object, value: object) -> None:
        if value is not None and not callable(getattr(value, "choose", None)):
            hint = "To select a lane policy by name, set LaneOptions(lane_policy=...)."
            raise ConfigError("lane policy", value, "an object with a method choose()", hint)


def needs_key(policy: object) -> bool:
    """Return whether a lane policy requires the key of each step."""
    return has_members(policy, KeyedLanePolicy) and policy.needs_key


def lane_fault(answer: Any, num_lanes: int) -> str:
    """Return why a chosen lane is invalid; empty if it is valid."""
    if whole_number(answer) is None:
        return f"returned {format_value(answer)}, not the index of a lane ({_indices(num_lanes)})."
    if not 0 <= answer < num_lanes:
        only = "the only index is" if num_lanes == 1 else "the indices are"
        return f"returned lane {answer}, but {only} {_indices(num_lanes)}."
    return ""


def _indices(num_lanes: int) -> str:
    return "0" if num_lanes == 1 else f"0 to {num_lanes - 1}"


def lanes_by_key(
    policy: object, keys: Iterable[GraphKey], num_lanes: int, *, name: str, origin: str = ""
) -> dict[GraphKey, tuple[int, ...]]:
    """Return the lanes on which each key is captured.

    Raises:
        PolicyError: The policy raised, or returned an invalid lane or no lane for a key.
    """
    if not has_members(policy, KeyPlacementPolicy):
        return dict.fromkeys(keys, tuple(range(num_lanes)))
    found: dict[GraphKey, tuple[int, ...]] = {}
    for key in keys:
        try:
            lanes: Collection[int] = tuple(policy.lanes_for_key(key, num_lanes))
        except Exception as error:
            problem = describe_exception(error)
            raise PolicyError(name, "lanes_for_key", problem, origin=origin) from error
        faults = [fault for one in lanes if (fault := lane_fault(one, num_lanes))]
        if faults or not lanes:
            problem = (
                f"returned no lane for {key}; return at least one index ({_indices(num_lanes)})."
            )
            if faults:
                problem = f"{faults[0]} The key is {key}."
            raise PolicyError(name, "lanes_for_key", problem, origin=origin, value=lanes)
        found[key] = tuple(sorted(set(lanes)))
    return found


class KeyPlacement:
    """The assignment of keys to the lanes on which they are captured.

    Args:
        policy: The lane policy. If it has no ``lanes_for_key``, every lane has all keys.
        keys: The declared keys. The methods read them on each call, because they may change.
        num_lanes: Number of lanes of the runner.
        origin: Source of the lane policy, for error messages.

    Attributes:
        are_chosen: Whether the lane policy assigns keys to lanes; otherwise every lane has all
            keys.
    """

    def __init__(
        self, policy: object, keys: Iterable[GraphKey], num_lanes: int, *, origin: str = ""
    ) -> None:
        self._policy, self._keys, self._num_lanes = policy, keys, num_lanes
        self._origin = origin
        self.are_chosen: bool = has_members(policy, KeyPlacementPolicy)

    def by_key(self) -> dict[GraphKey, tuple[int, ...]]:
        """Return the lanes on which each key is captured.

        Raises:
            PolicyError: The policy raised, or returned an invalid lane or no lane for a key.
        """
        name = policy_name(self._policy)
        return lanes_by_key(
            self._policy, self._keys, self._num_lanes, name=name, origin=self._origin
        )

    def by_lane(self, keys: Sequence[GraphKey] | None = None) -> list[Sequence[GraphKey] | None]:
        """Return the keys that each lane captures; None means all keys.

        Args:
            keys: Keys to capture; None for all declared keys.

        Raises:
            PolicyError: As for ``by_key``.
        """
        if not self.are_chosen:
            return [keys] * self._num_lanes
        lanes = self.by_key()
        wanted = tuple(self._keys) if keys is None else keys
        return [
            [key for key in wanted if lane in lanes.get(key, (lane,))]
            for lane in range(self._num_lanes)
        ]


def lane_priorities(
    policy: object, num_lanes: int, *, name: str, origin: str = ""
) -> tuple[int, ...]:
    """Return the priority of each lane's stream: 0 is normal, larger is more urgent.

    Raises:
        PolicyError: The lane policy raised, or did not return one non-negative integer per lane.
    """
    if not has_members(policy, PrioritizedLanePolicy):
        return (0,) * num_lanes
    try:
        answer = tuple(policy.stream_priorities(num_lanes))
    except Exception as error:
        problem = describe_exception(error)
        raise PolicyError(name, "stream_priorities", problem, origin=origin) from error
    found = tuple(number for one in answer if (number := whole_number(one)) is not None)
    if len(answer) != num_lanes or len(found) != num_lanes or min(found, default=0) < 0:
        lanes = counted(num_lanes, "lane")
        problem = (
            f"returned {format_value(answer)}; return one non-negative integer per lane ({lanes})."
        )
        raise PolicyError(name, "stream_priorities", problem, origin=origin, value=answer)
    return found
