"""Making a runner's further lanes: runners like the first, under one lock."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from dispatchkit.dispatch import (
    Dispatcher,
    LanePolicy,
    LearningPolicy,
    lane_homes,
    lane_priorities,
    policy_name,
)
from dispatchkit.errors import ConfigError
from dispatchkit.execute.lane import Chain
from dispatchkit.execute.setup import OF_CONFIG, make_policy
from dispatchkit.keys.config import DispatchConfig

if TYPE_CHECKING:
    from dispatchkit.execute.runner import GraphRunner
    from dispatchkit.plugins import PluginSet

DEFAULT_LANE_POLICY = "round-robin"


def check_lanes(lanes: Any, *, policy: Any, outputs: str, check: Any) -> None:
    """Refuse a number of lanes that is none, and what does not go with several.

    Raises:
        ConfigError: What it is.
    """
    if type(lanes) is not int or lanes < 1:
        raise ConfigError("lanes", lanes, "a whole number of at least 1")
    if lanes == 1:
        return
    if outputs != "owned":
        raise ConfigError(
            "outputs", outputs, "'owned' with several lanes", "A lane's next step is not in sight."
        )
    if check:
        raise ConfigError(
            "check", check, "0 with several lanes", "Steps are compared on one: leave lanes out."
        )
    if isinstance(policy, LearningPolicy):
        raise ConfigError(
            "policy",
            policy_name(policy),
            "given by name with several lanes",
            "It learns, and each lane learns for itself.",
        )


def add_lanes(
    first: GraphRunner, given: dict[str, Any], config: DispatchConfig, plugins: PluginSet | None
) -> None:
    """Give a runner its further lanes, and what chooses among them.

    Args:
        first: The runner, lane 0.
        given: The settings it was made from.
        config: The configuration asked for.
        plugins: Where lane policies are found by name.

    Raises:
        ConfigError: The device has fewer streams.
        UnknownNameError: No lane policy goes by the name.
        PolicyError: The lane policy answers with something that cannot be.
    """
    number = given["lanes"]
    limit = first.backend.capabilities.max_streams
    if limit is not None and number > limit:
        raise ConfigError(
            "lanes",
            number,
            f"at most {limit}: so many streams of their own does {first.backend.torch_device} give",
        )
    policy, first._lane_origin, plugins = _lane_policy(given, plugins)
    first._lane_policy = policy
    facts = {"name": policy_name(policy), "origin": first._lane_origin}
    lane_homes(policy, first.registry, number, **facts)  # at once, not at the first capture
    priorities = lane_priorities(policy, number, **facts)
    settings = {
        **given,
        **dict.fromkeys(OF_CONFIG),
        "config": config,
        "backend": first.backend,
        "device": None,
        "plugins": plugins,
        "lanes": 1,
        "lane_policy": None,
        "lane_policy_options": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first has said it all
        first._siblings = tuple(type(first)(**settings) for _ in range(1, number))
    members = first.lanes
    chain = Chain(first.backend, disjoint_state=given["disjoint_state"])
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
            given["policy"], given["policy_options"], first.config, plugins
        )
        modes = frozenset(key.mode for key in first.registry)
        first._router = Dispatcher(own, first.config, modes=modes, lazy=True, origin=origin)


def _lane_policy(
    given: dict[str, Any], plugins: PluginSet | None
) -> tuple[LanePolicy, str, PluginSet | None]:
    policy, options = given["lane_policy"], given["lane_policy_options"]
    if policy is not None and not isinstance(policy, str):
        if options:
            raise ConfigError(
                "lane_policy_options", options, "given with a lane policy's name alone"
            )
        if isinstance(policy, type) or not callable(getattr(policy, "choose", None)):
            raise ConfigError("lane_policy", policy, "a name, or an object with choose()")
        return policy, "", plugins
    if plugins is None:
        from dispatchkit.plugins import load_plugins

        plugins = load_plugins()
    name = policy or DEFAULT_LANE_POLICY
    made = plugins.create_lane_policy(name, **(options or {}))
    return made, str(plugins.lane_policies[name].origin), plugins
