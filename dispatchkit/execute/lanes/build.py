"""Making a runner's further lanes: runners like the first, under one lock."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import attrs

from dispatchkit.dispatch import (
    Dispatcher,
    LanePolicy,
    Lanes,
    LearningPolicy,
    lane_homes,
    lane_priorities,
    policy_name,
)
from dispatchkit.errors import ConfigError
from dispatchkit.execute.lane import Chain
from dispatchkit.execute.setup import RunnerSpec, make_policy
from dispatchkit.options import LaneOptions

if TYPE_CHECKING:
    from dispatchkit.execute.runner import GraphRunner
    from dispatchkit.plugins import PluginSet

DEFAULT_LANE_POLICY = "round-robin"


def check_lanes(spec: RunnerSpec) -> None:
    """Validate the number of lanes; refuse options that need a single lane.

    Raises:
        ConfigError: What is wrong.
    """
    count = spec.num_lanes
    if type(count) is not int or count < 1:
        raise ConfigError("lanes", count, "a whole number of at least 1, or Lanes")
    if count == 1:
        return
    if spec.outputs != "owned":
        raise ConfigError(
            "outputs",
            spec.outputs,
            "'owned' with several lanes",
            "A lane's next step is not in sight.",
        )
    if spec.options.check:
        raise ConfigError(
            "check",
            spec.options.check,
            "0 with several lanes",
            "Steps are compared on one: leave lanes out.",
        )
    if isinstance(spec.named_policy, LearningPolicy):
        raise ConfigError(
            "policy",
            policy_name(spec.named_policy),
            "given by name with several lanes",
            "It learns, and each lane learns for itself.",
        )


def add_lanes(first: GraphRunner, plugins: PluginSet | None) -> None:
    """Give a runner its further lanes, and what chooses among them.

    Args:
        first: The runner, lane 0.
        plugins: Where lane policies are found by name.

    Raises:
        ConfigError: The device has fewer streams.
        UnknownNameError: No lane policy goes by the name.
        PolicyError: The lane policy answers with something that cannot be.
    """
    spec, number = first.spec, first.spec.num_lanes
    limit = first.backend.capabilities.max_streams
    if limit is not None and number > limit:
        raise ConfigError(
            "lanes",
            number,
            f"at most {limit}: so many streams of their own does {first.backend.torch_device} give",
        )
    policy, first._lane_origin, plugins = _lane_policy(spec, plugins)
    first._lane_policy = policy
    facts = {"name": policy_name(policy), "origin": first._lane_origin}
    lane_homes(policy, first.registry, number, **facts)  # at once, not at the first capture
    priorities = lane_priorities(policy, number, **facts)
    sibling = attrs.evolve(
        spec,
        policy=plugins.with_policy(spec.named_policy) if plugins else spec.policy,
        backend=first.backend,
        lanes=1,
        options=attrs.evolve(spec.options, device=None, lanes=LaneOptions()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first has said it all
        first._siblings = tuple(type(first)(**sibling.arguments()) for _ in range(1, number))
    members = first.lanes
    chain = Chain(first.backend, disjoint_state=spec.options.lanes.disjoint_state)
    for index, (member, priority) in enumerate(zip(members, priorities, strict=True)):
        member._share(first._lock)
        peers = tuple(other._lane for other in members if other is not member)
        member._lane.join(index, priority, peers, chain)
    handles = {member._lane.stream.handle for member in members}
    if len(handles) < number:
        raise ConfigError(
            "lanes",
            number,
            f"at most {len(handles)}: so many streams of {first.backend.torch_device} are distinct",
        )
    if getattr(policy, "needs_key", False):
        # Decides as if every declared graph were there: where a key belongs, not what runs.
        own, origin, _ = make_policy(
            spec.named_policy, spec.options.policy_options, first.config, plugins
        )
        modes = frozenset(key.mode for key in first.registry)
        first._router = Dispatcher(own, first.config, modes=modes, lazy=True, origin=origin)


def _lane_policy(
    spec: RunnerSpec, plugins: PluginSet | None
) -> tuple[LanePolicy, str, PluginSet | None]:
    options = spec.options.lanes
    if isinstance(spec.lanes, Lanes):
        policy = spec.lanes.policy
        if options.lane_policy is not None or options.lane_policy_options:
            hint = "Lanes has a policy already."
            raise ConfigError("lane_policy", options.lane_policy, "given in one place alone", hint)
        if isinstance(policy, type) or not callable(getattr(policy, "choose", None)):
            raise ConfigError("lane policy", policy, "an object with choose()")
        return policy, "", plugins
    if plugins is None:
        from dispatchkit.plugins import load_plugins

        plugins = load_plugins()
    name = options.lane_policy or DEFAULT_LANE_POLICY
    made = plugins.create_lane_policy(name, **options.lane_policy_options)
    return made, str(plugins.lane_policies[name].origin), plugins
