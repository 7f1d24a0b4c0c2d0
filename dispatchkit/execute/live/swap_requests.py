"""SwapRequests: validate the settings of a swap, and try the new policy."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final

import attrs

from dispatchkit.dispatch import Policy, policy_name
from dispatchkit.dispatch.acceptance import Proposal
from dispatchkit.errors import ConfigError, counted, format_value
from dispatchkit.execute.executor import Executor
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.execute.setup import RunnerSpec, make_policy, resolve_supported_mode
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.checks import check_instance
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.options import MemoryOptions, settings_of

#: Default of the arguments for limits: keep the current limit. None removes the limit.
UNCHANGED: Final[Any] = object()


@attrs.frozen(kw_only=True)
class Change:
    """A validated swap request.

    Attributes:
        mode_reasons: Reasons for a downgrade of the mode; empty without a downgrade.
        proposal: The policy and configuration to install; None if only limits change.
        budget: The limits after the swap.
        spec: The specification of the runner after the swap.
    """

    mode_reasons: tuple[str, ...]
    proposal: Proposal | None
    budget: MemoryOptions
    spec: RunnerSpec


class SwapRequests:
    """The validator of a runner's swap requests.

    Args:
        executor: The executor whose policy and limits will be swapped.
        taps: Recorder, listener and watcher of steps.
        num_lanes: Number of lanes of the runner; a swap requires a single lane.
    """

    def __init__(self, executor: Executor, taps: StepTaps, num_lanes: int) -> None:
        self._executor, self._taps, self._num_lanes = executor, taps, num_lanes

    @property
    def requested_config(self) -> DispatchConfig:
        """The requested configuration; the mode in effect may be a downgrade."""
        return self._executor.spec.options.config

    def settings_in_force(self) -> dict[str, Any]:
        """Return the runner's settings, keyed as in a settings file.

        Plugin settings and costs are not included. Objects are represented by their names.
        """
        executor, spec = self._executor, self._executor.spec
        options = attrs.evolve(
            spec.options,
            memory=executor.lifecycle.budget,
            strict=executor.eager.strict,
            check=spec.options.check or 0,
        )
        name = spec.backend if isinstance(spec.backend, str) else executor.work.backend.name
        return {
            **settings_of(options),
            "policy": self._policy_name(),
            "backend": name,
            "outputs": spec.outputs,
            "lazy": executor.lifecycle.lazy,
        }

    def budget(self, max_graphs: Any, max_bytes: Any, eviction: str | None) -> MemoryOptions:
        """Return the current limits with the requested changes (see ``UNCHANGED``).

        Raises:
            ConfigError: A limit is invalid, or ``max_bytes`` is set although other runners may
                share the pool.
        """
        changes: dict[str, Any] = {"max_graphs": max_graphs, "max_bytes": max_bytes}
        changes = {name: value for name, value in changes.items() if value is not UNCHANGED}
        if eviction is not None:
            changes["eviction"] = eviction
        budget = attrs.evolve(self._executor.lifecycle.budget, **changes)
        if budget.max_bytes is not None and self._executor.lane.group.is_open:
            raise ConfigError(
                "max_bytes",
                budget.max_bytes,
                "None, because other runners may share the pool of this runner",
                "Set max_bytes of the GraphMemory instead.",
            )
        return budget

    def change(
        self,
        policy: str | Policy | None,
        options: dict[str, Any] | None,
        asked: DispatchConfig,
        budget: MemoryOptions,
    ) -> Change:
        """Validate a change and try its policy; return the change without applying it.

        Raises:
            ConfigError, UnknownNameError, PolicyError: As in ``Swapper.swap``.
        """
        executor = self._executor
        if self._num_lanes > 1:
            hint = "Create a new runner with the changed settings."
            problem = f"A swap requires a single lane, but this runner has {self._num_lanes} lanes."
            raise ConfigError("lanes", self._num_lanes, "1 for a swap", hint, message=problem)
        options_now = attrs.evolve(executor.spec.options, config=asked, memory=budget)
        spec = attrs.evolve(executor.spec, options=options_now)
        if asked == self.requested_config and policy is None and options is None:
            return Change(
                mode_reasons=executor.mode_reasons, proposal=None, budget=budget, spec=spec
            )
        in_force, reasons = executor.dispatcher.config, executor.mode_reasons
        if asked != self.requested_config:
            in_force, reasons = resolve_supported_mode(
                asked, executor.work.step, executor.work.backend
            )
        if policy is None and options is not None:
            named = executor.spec.named_policy
            policy = self._policy_name() if named is None else named
        if policy is None:
            chosen, origin = self._copied_policy(), executor.dispatcher.policy_origin
        else:
            chosen, origin, executor.plugins = make_policy(
                policy, options, in_force, executor.plugins
            )
            if chosen is executor.dispatcher.policy:
                hint = "Pass a new object, or omit policy to use a copy."
                raise ConfigError(
                    "policy",
                    policy_name(chosen),
                    "a different object than the one in force",
                    hint,
                    message=f"This object is already the policy in force: {policy_name(chosen)!r}.",
                )
            spec = spec.with_policy(policy, options)
        proposal = executor.dispatcher.propose(chosen, in_force, origin)
        self._check_buffer_rows(proposal.keys)
        return Change(mode_reasons=reasons, proposal=proposal, budget=budget, spec=spec)

    def config(self, config: DispatchConfig | None, **settings: Any) -> DispatchConfig:
        """Return the configuration requested as a whole or by single settings.

        Raises:
            ConfigError: The configuration is invalid, or the runner cannot swap to it.
        """
        changes = {name: value for name, value in settings.items() if value is not None}
        if config is None:
            config = (
                attrs.evolve(self.requested_config, **changes) if changes else self.requested_config
            )
        elif changes:
            hint = "Set them in config, or pass them without config."
            problem = (
                f"config cannot be combined with separate settings: {', '.join(sorted(changes))}."
            )
            allowed = "given without separate settings"
            raise ConfigError("config", sorted(changes), allowed, hint, message=problem)
        else:
            hint = "To change individual settings, pass them separately, for example sizes=[8, 16]."
            check_instance(config, DispatchConfig, "config", hint)
        has_others = config.axes and config.max_loras != self.requested_config.max_loras
        if config.axes != self.requested_config.axes or has_others:
            name = "max_loras" if config.axes == self.requested_config.axes else "axes"
            hint = (
                "The runner's inputs and variants depend on this setting, so create a new runner."
            )
            now, value = getattr(self.requested_config, name), getattr(config, name)
            problem = (
                f"A swap cannot change {name} from {format_value(now)} to {format_value(value)}."
            )
            raise ConfigError(name, value, "unchanged by a swap", hint, message=problem)
        classes = [(one.query_lens, one.varlen_decode) for one in (config, self.requested_config)]
        if classes[0] != classes[1] and self._taps.is_recording:
            now, then = (f"query_lens={one[0]}, varlen_decode={one[1]}" for one in classes[::-1])
            hint = (
                "Call runner.stop_recording() first, because the recorded query classes would "
                "become invalid."
            )
            raise ConfigError(
                "query_lens",
                config.query_lens,
                "unchanged while recording",
                hint,
                message=f"A swap cannot change {now} to {then} while steps are recorded.",
            )
        return config

    def _policy_name(self) -> str:
        """Return the name under which the policy was requested, or else the policy's own name."""
        named = self._executor.spec.named_policy
        return named if isinstance(named, str) else self._executor.dispatcher.policy_name

    def _copied_policy(self) -> Policy:
        """Return a copy of the policy, because a failed swap must not change the original."""
        current = self._executor.dispatcher.policy
        try:
            with self._executor.registry.lock:  # prevents updates of the policy
                return copy.deepcopy(current)
        except Exception as error:
            hint = f"Pass a new policy. Cause: {type(error).__name__}: {error}"
            raise ConfigError(
                "policy",
                policy_name(current),
                "a new object, because the policy in force cannot be copied",
                hint,
                message=f"The policy in force, {policy_name(current)!r}, cannot be copied.",
            ) from error

    def _check_buffer_rows(self, keys: Iterable[GraphKey]) -> None:
        room = self._executor.lane.buffers.num_rows
        largest = max((key.num_tokens for key in keys), default=0)
        if largest > room:
            raise ConfigError(
                "sizes",
                largest,
                f"at most {room}, the number of rows in the static inputs",
                f"Use sizes up to {room}, or create the runner with "
                f"options=RunnerOptions(buffers=BufferOptions(buffer_rows={largest})).",
                message=f"The swap needs a graph of {counted(largest, 'token')}, but the static "
                f"inputs have only {counted(room, 'row')}.",
            )


def no_change_error() -> ConfigError:
    """Return the error for a swap that changes nothing."""
    return ConfigError(
        "swap",
        "no change",
        "a change of at least one setting",
        "Pass a setting whose value differs from the current one.",
        message="The swap changes nothing.",
    )
