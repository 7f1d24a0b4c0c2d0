"""Try a policy on batches around its declared sizes before the policy is installed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import attrs

from dispatchkit.dispatch.axes import declares_axes, without_axes
from dispatchkit.dispatch.cells import batch_of_cell
from dispatchkit.dispatch.constraints import broken_constraint
from dispatchkit.dispatch.policy import GraphView, Policy, PolicyParts, policy_name
from dispatchkit.errors import (
    ConfigError,
    DescriptorError,
    PolicyError,
    describe_exception,
    format_value,
)
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.checks import check_instance
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import RuntimeMode
from dispatchkit.registry import GraphRegistry

_MAX_SIZES_TRIED = 16


@attrs.frozen(eq=False)
class Proposal:
    """A policy and configuration that passed the trial and can be installed.

    Attributes:
        parts: The policy and its optional parts.
        config: The configuration under which the policy decides.
        origin: Source of the policy, for error messages.
        keys: The keys that the policy declares, in order. If the policy declares keys without axes,
            each key is repeated for every combination of axis buckets.
        adds_axes: Whether axes are added to the policy's keys: True if the configuration has axes,
            but the policy's keys do not.
    """

    parts: PolicyParts
    config: DispatchConfig
    origin: str
    keys: tuple[GraphKey, ...]
    adds_axes: bool = False

    @property
    def policy(self) -> Policy:
        """The policy itself."""
        return self.parts.policy


def trial_keys(
    policy: Policy,
    config: DispatchConfig,
    origin: str,
    modes: Collection[RuntimeMode],
    *,
    may_split: bool = False,
) -> list[GraphKey]:
    """Try a policy on batches around its declared sizes; return its keys.

    The trial treats all declared graphs as captured.

    Args:
        policy: Policy to try; no reference to it is kept.
        config: The configuration under which the policy decides.
        origin: Source of the policy, for error messages.
        modes: Runtime modes that the executor supports.
        may_split: Whether mixed batches may be split over several graphs.

    Raises:
        ConfigError: ``policy`` has neither ``declare`` nor ``decide``, or ``config`` is not a
            ``DispatchConfig``.
        PolicyError: ``policy`` is a class, a method is missing or raises, a declared key is
            invalid, or a decision violates a hard constraint.
    """
    hint = "Write DispatchConfig(sizes=[8, 16]), for example."
    check_instance(config, DispatchConfig, "config", hint)
    if not any(hasattr(policy, method) for method in ("declare", "decide")):
        hint = ""
        if isinstance(policy, str):
            hint = f"For a policy by name, pass load_plugins().create_policy({policy!r})."
        allowed = "an object with the methods declare(config) and decide(batch, graphs)"
        raise ConfigError("policy", policy, allowed, hint)
    if isinstance(policy, type):
        problem = f"cannot be called on a class; pass an instance, {policy.__name__}(...)."
        raise PolicyError(policy.__name__, "declare", problem, origin=origin)
    name = policy_name(policy)
    for method in ("declare", "decide"):
        found = getattr(policy, method, None)
        if not callable(found):
            wrong = "is missing" if found is None else f"is {format_value(found)}, not a method"
            problem = f"{wrong}; a policy needs declare(config) and decide(batch, graphs)."
            raise PolicyError(name, method, problem, origin=origin, value=found)
    try:
        answer: Any = policy.declare(config)
        keys = list(answer) if isinstance(answer, Iterable) else [answer]
    except PolicyError:
        raise
    except Exception as error:
        problem = describe_exception(error)
        raise PolicyError(name, "declare", problem, origin=origin) from error
    for key in keys:
        if not isinstance(key, GraphKey):
            given = format_value(answer)
            if isinstance(answer, Iterable):
                given = f"a collection that contains {format_value(key)}, which is not a GraphKey"
            problem = f"returned {given}; return a list of GraphKeys, which may be empty."
            raise PolicyError(name, "declare", problem, origin=origin, value=key)
        if key.num_tokens > config.max_num_tokens:
            problem = (
                f"returned {key}, but max_num_tokens is {config.max_num_tokens}; omit larger keys."
            )
            raise PolicyError(name, "declare", problem, origin=origin, value=key)
    is_plain = not declares_axes(keys)
    if config.axes and not is_plain:
        _check_axes(keys, config, name, origin)
    trial = GraphRegistry()
    trial.declare(keys)
    view = GraphView(
        trial,
        config,
        modes=frozenset(modes),
        dispatchable=lambda entry: True,
        may_split=may_split,
    )
    for batch in _probes(keys, config):
        if is_plain:
            batch = without_axes(batch)
        try:
            decision = policy.decide(batch, view)
        except Exception as error:
            problem = describe_exception(error, f" on a batch ({batch})")
            raise PolicyError(name, "decide", problem, origin=origin) from error
        fault = None if decision is None else broken_constraint(decision, batch, view)
        if fault is not None:
            raise PolicyError(name, "decide", fault, origin=origin, value=decision)
    return keys


def _check_axes(keys: list[GraphKey], config: DispatchConfig, name: str, origin: str) -> None:
    for key in keys:
        try:
            config.variants.of_buckets(0, key.descriptor.axes)
        except DescriptorError as error:
            problem = f"returned {key}: {error}"
            raise PolicyError(name, "declare", problem, origin=origin, value=key) from error


def _probes(keys: list[GraphKey], config: DispatchConfig) -> Iterator[Batch]:
    """Yield batches at and next to some declared sizes, where rules often fail."""
    sizes = sorted({key.num_tokens for key in keys})
    smallest = tuple(axis.buckets[0] for axis in config.axes)
    step = max(1, len(sizes) // _MAX_SIZES_TRIED)
    picked = {*sizes[::step], *sizes[-1:], 1, config.max_num_tokens}
    around = sorted({size + off for size in picked for off in (-1, 0, 1)})
    for num_tokens in around:
        if not 1 <= num_tokens <= config.max_num_tokens:
            continue
        for uniform in range(config.num_query_classes):
            for loras in sorted({0, min(1, config.max_loras), config.max_loras}):
                variant = config.variants.of_buckets(loras, smallest)
                for ceiling in (1, 2):
                    yield batch_of_cell(config, (ceiling, uniform, variant, num_tokens), 0)
