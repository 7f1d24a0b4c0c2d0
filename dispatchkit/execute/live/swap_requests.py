"""What a swap is asked for: settings put together, checked and tried; nothing changes here."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final

import attrs

from dispatchkit.dispatch import Policy, policy_name
from dispatchkit.dispatch.acceptance import Proposal
from dispatchkit.errors import ConfigError
from dispatchkit.execute.executor import Executor
from dispatchkit.execute.live.taps import StepTaps
from dispatchkit.execute.setup import RunnerSpec, make_policy, resolve_supported_mode
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.options import MemoryOptions, settings_of

#: Stands for a limit that stays as it is, since None means that there is none.
UNCHANGED: Final[Any] = object()


@attrs.frozen(kw_only=True)
class Change:
    """What is asked for, checked.

    Attributes:
        mode_reasons: Why the mode in force will be less.
        proposal: What is to be installed; None where only limits change.
        budget: The limits.
        spec: What would make such a runner.
    """

    mode_reasons: tuple[str, ...]
    proposal: Proposal | None
    budget: MemoryOptions
    spec: RunnerSpec


class SwapRequests:
    """Check what a runner is asked to change to.

    Args:
        executor: What is in force there.
        taps: What follows the steps.
        num_lanes: How many lanes the runner has.
    """

    def __init__(self, executor: Executor, taps: StepTaps, num_lanes: int) -> None:
        self._executor, self._taps, self._num_lanes = executor, taps, num_lanes

    @property
    def asked_config(self) -> DispatchConfig:
        """The configuration that was asked for; its mode may be more than ``config`` has."""
        return self._executor.spec.options.config

    def settings_in_force(self) -> dict[str, Any]:
        """Return the settings the runner goes by, by their names in a settings file.

        Those of plugins and costs are not its own. An object goes by its own name.
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
        """Return the limits in force with those that are asked for; see ``UNCHANGED``.

        Raises:
            ConfigError: A limit cannot be used, or bytes are limited where others share them.
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
                "None where other runners share the pool",
                "The budget is that of their GraphMemory.",
            )
        return budget

    def change(
        self,
        policy: str | Policy | None,
        options: dict[str, Any] | None,
        asked: DispatchConfig,
        budget: MemoryOptions,
    ) -> Change:
        """Return a change, checked and tried; nothing is in force yet.

        Raises:
            ConfigError, UnknownNameError, PolicyError: As in ``Swapper.swap``.
        """
        executor = self._executor
        if self._num_lanes > 1:
            hint = "Each lane decides by itself; make the runner anew to change all of them."
            raise ConfigError("lanes", self._num_lanes, "1 for a swap", hint)
        options_now = attrs.evolve(executor.spec.options, config=asked, memory=budget)
        spec = attrs.evolve(executor.spec, options=options_now)
        if asked == self.asked_config and policy is None and options is None:
            return Change(
                mode_reasons=executor.mode_reasons, proposal=None, budget=budget, spec=spec
            )
        in_force, reasons = executor.dispatcher.config, executor.mode_reasons
        if asked != self.asked_config:
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
                hint = "Give a new one, or leave it out: then it is copied."
                raise ConfigError("policy", policy_name(chosen), "not the object in force", hint)
            spec = spec.having_policy(policy, options)
        proposal = executor.dispatcher.propose(chosen, in_force, origin)
        self._check_room(proposal.keys)
        return Change(mode_reasons=reasons, proposal=proposal, budget=budget, spec=spec)

    def config(self, config: DispatchConfig | None, **settings: Any) -> DispatchConfig:
        """Return the configuration that is asked for, whole or by single settings.

        Raises:
            ConfigError: It cannot be used, or is for other inputs than the runner has.
        """
        changes = {name: value for name, value in settings.items() if value is not None}
        if config is None:
            config = attrs.evolve(self.asked_config, **changes) if changes else self.asked_config
        elif changes:
            hint = "These settings are part of the config."
            raise ConfigError("config", sorted(changes), "given alone", hint)
        elif not isinstance(config, DispatchConfig):
            raise ConfigError("config", config, "a DispatchConfig")
        has_others = config.axes and config.max_loras != self.asked_config.max_loras
        if config.axes != self.asked_config.axes or has_others:
            hint = "The inputs are made for them; make a new runner."
            raise ConfigError("axes", config.axes, "as they are, and max_loras with them", hint)
        classes = [(one.query_lens, one.varlen_decode) for one in (config, self.asked_config)]
        if classes[0] != classes[1] and self._taps.is_recording:
            hint = "Stop recording first: recorded query classes would mean others."
            raise ConfigError("query_lens", config.query_lens, "as before while recording", hint)
        return config

    def _policy_name(self) -> str:
        """Return the name that the policy was asked for by, or else the one that it has."""
        named = self._executor.spec.named_policy
        return named if isinstance(named, str) else self._executor.dispatcher.policy_name

    def _copied_policy(self) -> Policy:
        """Return a copy of the policy in force, which a swap that fails must not have changed."""
        current = self._executor.dispatcher.policy
        try:
            with self._executor.registry.lock:  # nothing is learnt meanwhile
                return copy.deepcopy(current)
        except Exception as error:
            hint = f"It cannot be copied: {type(error).__name__}: {error}"
            raise ConfigError(
                "policy", policy_name(current), "given too, as a new object", hint
            ) from error

    def _check_room(self, keys: Iterable[GraphKey]) -> None:
        room = self._executor.lane.buffers.num_rows
        largest = max((key.num_tokens for key in keys), default=0)
        if largest > room:
            raise ConfigError(
                "sizes",
                largest,
                f"at most {room}, the rows of the static inputs",
                "Make the runner with options=RunnerOptions(buffers=BufferOptions(buffer_rows="
                f"{largest})) to have room for it later.",
            )


def no_change() -> ConfigError:
    """Return the error of a swap to what is in force already."""
    return ConfigError("swap", "no change", "asked for something that is not so already")
