"""What a swap is asked for: settings put together, checked and tried; nothing changes here."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from dispatchkit.backends.base import GraphBackend
from dispatchkit.dispatch import Decision, Dispatcher, Policy, policy_name
from dispatchkit.dispatch.acceptance import Proposal
from dispatchkit.errors import ConfigError
from dispatchkit.execute.capture.lifecycle import Lifecycle
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.live.notices import Notices
from dispatchkit.execute.replay.eager import EagerRunner
from dispatchkit.execute.setup import RunnerSpec, honoured, make_policy
from dispatchkit.execute.step.pieces import Step
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode
from dispatchkit.observe.recorder import StepRecorder
from dispatchkit.options import MemoryOptions, settings_of
from dispatchkit.registry import GraphRegistry

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet

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
    """The part of GraphRunner that checks what it is asked to change to."""

    dispatcher: Dispatcher
    registry: GraphRegistry
    eager: EagerRunner
    spec: RunnerSpec
    config: DispatchConfig
    mode_reasons: tuple[str, ...]
    backend: GraphBackend
    lifecycle: Lifecycle
    lanes: tuple[Any, ...]
    _lane: Lane
    _lock: threading.RLock
    _notices: Notices
    _plugins: PluginSet | None
    _recorder: StepRecorder | None
    _shadow_dispatch: Callable[..., Decision] | None
    _step: Step
    _swap_lock: threading.Lock

    def proposed(
        self,
        *,
        policy: str | Policy | None = None,
        policy_options: dict[str, Any] | None = None,
        config: DispatchConfig | None = None,
        sizes: Sequence[int] | None = None,
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        mode: CUDAGraphMode | str | None = None,
    ) -> Proposal:
        """Return the policy and configuration that such a ``swap`` would install; it is not made.

        Raises:
            ConfigError, UnknownNameError, PolicyError: As in ``swap``.
        """
        asked = self._asked_config(
            config,
            capture_sizes=sizes,
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            mode=mode,
        )
        with self._swap_lock:
            change = self._checked(policy, policy_options, asked, self.lifecycle.budget)
        if change.proposal is None:
            raise no_change()
        return change.proposal

    @property
    def asked_config(self) -> DispatchConfig:
        """The configuration that was asked for; its mode may be more than ``config`` has."""
        return self.spec.options.config

    @property
    def asked_mode(self) -> CUDAGraphMode:
        """The mode that was asked for."""
        return self.asked_config.mode

    def settings_in_force(self) -> dict[str, Any]:
        """Return the settings the runner goes by, by their names in a settings file.

        Those of plugins and costs are not its own. An object goes by its own name.
        """
        spec = self.spec
        options = attrs.evolve(
            spec.options,
            memory=self.lifecycle.budget,
            strict=self.eager.strict,
            check=spec.options.check or 0,
        )
        return {
            **settings_of(options),
            "policy": self._policy_name(),
            "backend": spec.backend if isinstance(spec.backend, str) else self.backend.name,
            "outputs": spec.outputs,
            "lazy": self.lifecycle.lazy,
        }

    # -- what is asked for --------------------------------------------------------------

    def _budget(self, max_graphs: Any, max_bytes: Any, eviction: str | None) -> MemoryOptions:
        changes: dict[str, Any] = {"max_graphs": max_graphs, "max_bytes": max_bytes}
        changes = {name: value for name, value in changes.items() if value is not UNCHANGED}
        if eviction is not None:
            changes["eviction"] = eviction
        return attrs.evolve(self.lifecycle.budget, **changes)

    def _checked(
        self,
        policy: str | Policy | None,
        options: dict[str, Any] | None,
        asked: DispatchConfig,
        budget: MemoryOptions,
    ) -> Change:
        if len(self.lanes) > 1:
            hint = "Each lane decides by itself; make the runner anew to change all of them."
            raise ConfigError("lanes", len(self.lanes), "1 for a swap or a shadow", hint)
        options_now = attrs.evolve(self.spec.options, config=asked, memory=budget)
        spec = attrs.evolve(self.spec, options=options_now)
        if asked == self.asked_config and policy is None and options is None:
            return Change(mode_reasons=self.mode_reasons, proposal=None, budget=budget, spec=spec)
        in_force, reasons = self.config, self.mode_reasons
        if asked != self.asked_config:
            in_force, reasons = honoured(asked, self._step, self.backend)
        if policy is None and options is not None:
            named = self.spec.named_policy
            policy = self._policy_name() if named is None else named
        if policy is None:
            chosen, origin = self._copied_policy(), self.dispatcher.policy_origin
        else:
            chosen, origin, self._plugins = make_policy(policy, options, in_force, self._plugins)
            if chosen is self.dispatcher.policy:
                hint = "Give a new one, or leave it out: then it is copied."
                raise ConfigError("policy", policy_name(chosen), "not the object in force", hint)
            spec = spec.having_policy(policy, options)
        proposal = self.dispatcher.propose(chosen, in_force, origin)
        self._check_room(proposal.keys)
        return Change(mode_reasons=reasons, proposal=proposal, budget=budget, spec=spec)

    def _asked_config(self, config: DispatchConfig | None, **settings: Any) -> DispatchConfig:
        changes = {name: value for name, value in settings.items() if value is not None}
        if config is None:
            config = serving_config(self.asked_config, changes) if changes else self.asked_config
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
        is_followed = self._recorder is not None or self._shadow_dispatch is not None
        if classes[0] != classes[1] and is_followed:
            hint = (
                "Stop recording or end the shadow first: recorded query classes would mean others."
            )
            raise ConfigError("query_lens", config.query_lens, "as before while recording", hint)
        return config

    def _policy_name(self) -> str:
        """Return the name that the policy was asked for by, or else the one that it has."""
        named = self.spec.named_policy
        return named if isinstance(named, str) else self.dispatcher.policy_name

    def _copied_policy(self) -> Policy:
        """Return a copy of the policy in force, which a swap that fails must not have changed."""
        current = self.dispatcher.policy
        try:
            with self.registry.lock:  # nothing is learnt meanwhile
                return copy.deepcopy(current)
        except Exception as error:
            hint = f"It cannot be copied: {type(error).__name__}: {error}"
            raise ConfigError(
                "policy", policy_name(current), "given too, as a new object", hint
            ) from error

    def _check_room(self, keys: Iterable[GraphKey]) -> None:
        room = self._lane.buffers.num_rows
        largest = max((key.num_tokens for key in keys), default=0)
        if largest > room:
            raise ConfigError(
                "sizes",
                largest,
                f"at most {room}, the rows of the static inputs",
                "Make the runner with options=RunnerOptions(buffers=BufferOptions(buffer_rows="
                f"{largest})) to have room for it later.",
            )


def serving_config(asked: DispatchConfig, changes: Mapping[str, Any]) -> DispatchConfig:
    """Return a configuration with other settings, for callers that send batches meanwhile.

    A limit that follows from the sizes grows with them, and never shrinks below batches that
    were allowed so far.
    """
    config = attrs.evolve(asked, **changes)
    if "max_num_tokens" not in changes and config.max_num_tokens < asked.max_num_tokens:
        config = attrs.evolve(config, max_num_tokens=asked.max_num_tokens)
    return config


def no_change() -> ConfigError:
    """Return the error of a swap to what is in force already."""
    return ConfigError("swap", "no change", "asked for something that is not so already")
