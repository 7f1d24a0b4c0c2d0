"""Create the lanes of a runner."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dispatchkit.dispatch import (
    Dispatcher,
    KeyPlacement,
    LanePolicy,
    Lanes,
    LearningPolicy,
    lane_priorities,
    needs_key,
    policy_name,
)
from dispatchkit.errors import ConfigError
from dispatchkit.execute.executor import Executor, Workload
from dispatchkit.execute.lane import Chain
from dispatchkit.execute.lanes.chooser import LaneChooser
from dispatchkit.execute.memory import PoolGroup, Turns
from dispatchkit.execute.setup import RunnerSpec, make_policy
from dispatchkit.keys.checks import check_instance, has_members

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet

DEFAULT_LANE_POLICY = "round-robin"


def check_lanes(spec: RunnerSpec) -> None:
    """Validate the number of lanes; reject options that need a single lane.

    Raises:
        ConfigError: The number or an option is invalid.
    """
    count = spec.num_lanes
    if type(count) is not int or count < 1:
        raise ConfigError("lanes", count, "a whole number of at least 1, or a Lanes object")
    if count == 1:
        return
    if spec.options.check:
        raise ConfigError(
            "check",
            spec.options.check,
            "0 with several lanes",
            "Check mode needs a single lane. Omit check, or omit lanes.",
        )
    if has_members(spec.named_policy, LearningPolicy):
        raise ConfigError(
            "policy",
            policy_name(spec.named_policy),
            "given by name with several lanes",
            "Register the policy in a plugin and pass its name, so that each lane creates its own "
            "instance, or use a single lane.",
            message=f"The object {policy_name(spec.named_policy)!r} is a policy that learns, so "
            f"{count} lanes cannot share it.",
        )


def make_executors(work: Workload) -> tuple[Executor, ...]:
    """Create an executor for each lane; all share one lock.

    Raises:
        ConfigError: The device has fewer independent streams than lanes.
    """
    number, backend = work.spec.num_lanes, work.backend
    limit = backend.capabilities.max_streams
    if limit is not None and number > limit:
        raise ConfigError(
            "lanes",
            number,
            f"at most {limit}, the number of independent streams on {backend.torch_device}",
            "Use fewer lanes.",
        )
    return tuple(Executor(work, group) for group in _pool_groups(work, number))


def _pool_groups(work: Workload, number: int) -> list[PoolGroup]:
    """Return the pool group of each lane, shared with other runners if possible."""
    group, backend, lock = work.spec.memory_group, work.backend, threading.RLock()
    turns = Turns(lock, backend.torch_device)
    if group is None:
        return [PoolGroup(backend, lock, turns=turns) for _ in range(number)]
    memory, why = group.memory, _why_not_shared(work, number)
    if not why:
        return [memory.open_group(backend, group.name)]
    return [
        memory.closed_group(backend, f"{group.name} (not shared: {why})", lock, turns)
        for _ in range(number)
    ]


def _why_not_shared(work: Workload, number: int) -> str:
    """Return why the lanes cannot share a pool with other runners; empty if they can.

    If such lanes shared a pool, their steps could overlap with steps of another runner, results
    could be overwritten before they are read, or this runner's ``max_bytes`` would also limit the
    graphs of other runners.
    """
    options = work.spec.options
    if number > 1:
        return "the runner has several lanes"
    if work.step.can_split:
        return "the step can run in PIECEWISE mode"  # its eager pieces may call another runner
    if work.spec.outputs == "view" and not options.buffers.share_outputs:
        return "outputs are views of the pool"
    if options.memory.max_bytes is not None:
        return "the runner has its own max_bytes"
    return ""


def join_lanes(executors: Sequence[Executor]) -> tuple[LaneChooser | None, KeyPlacement]:
    """Join executors as lanes; return the lane chooser and key placement.

    Raises:
        ConfigError: The device has fewer distinct streams than lanes, or the lane policy is given
            twice or is invalid.
        UnknownNameError: No lane policy has the given name.
        PolicyError: The lane policy returns an invalid answer.
    """
    first, number = executors[0], len(executors)
    spec, backend = first.spec, first.work.backend
    options = spec.options.lanes
    has_policy = isinstance(spec.lanes, Lanes) and spec.lanes.policy is not None
    if number == 1 and not (has_policy or options.lane_policy or options.lane_policy_options):
        return None, KeyPlacement(None, first.registry, 1)
    policy, origin, plugins = _lane_policy(spec, first.plugins)
    if number == 1:  # no choice to make, but an unknown name must raise
        return None, KeyPlacement(None, first.registry, 1)
    placement = KeyPlacement(policy, first.registry, number, origin=origin)
    placement.by_key()  # raise for an invalid answer before the first capture
    priorities = lane_priorities(policy, number, name=policy_name(policy), origin=origin)
    chain = Chain(backend, disjoint_state=spec.options.lanes.disjoint_state)
    lanes = [one.lane for one in executors]
    for index, (lane, priority) in enumerate(zip(lanes, priorities, strict=True)):
        lane.join(index, priority, tuple(one for one in lanes if one is not lane), chain)
    handles = {lane.stream.handle for lane in lanes}
    if len(handles) < number:
        raise ConfigError(
            "lanes",
            number,
            f"at most {len(handles)}, the number of distinct streams on {backend.torch_device}",
            "Use fewer lanes.",
        )
    router = None
    if needs_key(policy):
        config = first.dispatcher.config
        own, policy_origin, _ = make_policy(
            spec.named_policy, spec.options.policy_options, config, plugins
        )
        modes = frozenset(key.mode for key in first.registry)
        router = Dispatcher(
            own,
            config,
            modes=modes,
            lazy=True,
            may_split=spec.options.rows_independent,
            origin=policy_origin,
        )
    return LaneChooser(policy, origin, router), placement


def _lane_policy(
    spec: RunnerSpec, plugins: PluginSet | None
) -> tuple[LanePolicy, str, PluginSet | None]:
    options = spec.options.lanes
    if isinstance(spec.lanes, Lanes) and spec.lanes.policy is not None:
        policy = spec.lanes.policy
        for name in ("lane_policy", "lane_policy_options"):
            if given := getattr(options, name):
                raise ConfigError(
                    name,
                    given,
                    "omitted if Lanes contains a lane policy",
                    "Omit the policy of Lanes, or omit lane_policy and lane_policy_options.",
                )
        allowed = "an object with a method choose()"
        return check_instance(policy, LanePolicy, "lane policy", allowed=allowed), "", plugins
    if plugins is None:
        from dispatchkit.plugins import load_plugins

        plugins = load_plugins()
    name = options.lane_policy or DEFAULT_LANE_POLICY
    made = plugins.create_lane_policy(name, **options.lane_policy_options)
    return made, str(plugins.lane_policies[name].origin), plugins
