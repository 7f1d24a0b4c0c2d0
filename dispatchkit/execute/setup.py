"""Choosing what a runner is made of: configuration, backend, policy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.resolve import AUTO, BUILT_IN_BACKENDS, resolve_backend
from dispatchkit.dispatch import Lanes, Policy
from dispatchkit.distributions import DEFAULT_POLICY
from dispatchkit.errors import ConfigError
from dispatchkit.execute.io.static_input import StaticInput, inputs_from_example
from dispatchkit.execute.memory import MemoryGroup
from dispatchkit.execute.slots import SlotState
from dispatchkit.execute.step.pieces import Step
from dispatchkit.execute.step.state import StepState
from dispatchkit.execute.step.support import mode_for_pieces, warn_of_downgrade
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import AttentionSupport, CUDAGraphMode
from dispatchkit.keys.records import given_in
from dispatchkit.options import RunnerOptions
from dispatchkit.plugins import PluginSet, PolicyWithPlugins

_OWN_DISTRIBUTION = "dispatchkit"


@attrs.frozen(kw_only=True, eq=False)
class RunnerSpec:
    """What a runner was asked to be: the arguments that make another one like it.

    Attributes:
        step: What it runs.
        inputs: Static inputs by name, one of them perhaps a ``SlotState``; or
        example: one tensor for each input.
        policy: A name or an object, with or without plugins; None where plugins select it.
        backend: A name or an object.
        outputs: ``owned`` or ``view``.
        state: What the step changes.
        lazy: Whether keys are captured when they are asked for.
        lanes: How many, with or without objects that choose among them and hold their memory.
        options: All other settings; ``options.config`` holds sizes, limits, modes and axes as
            they were asked for.
    """

    step: Any
    inputs: Mapping[str, StaticInput | SlotState] | None
    example: Mapping[str, torch.Tensor] | None
    policy: str | Policy | PolicyWithPlugins | None
    backend: str | GraphBackend
    outputs: str
    state: StepState
    lazy: bool
    lanes: int | Lanes
    options: RunnerOptions

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the runner."""
        return attrs.asdict(self, recurse=False)

    @property
    def static_inputs(self) -> dict[str, StaticInput]:
        """What is declared of each input, with that of slots."""
        if self.inputs is None:
            return inputs_from_example(self.example or {})
        return {
            name: spec.static_input if isinstance(spec, SlotState) else spec
            for name, spec in self.inputs.items()
        }

    @property
    def slots(self) -> tuple[str, SlotState] | None:
        """The input that names slots, and their state.

        Raises:
            ConfigError: There are several.
        """
        inputs = (self.inputs or {}).items()
        found = [(name, spec) for name, spec in inputs if isinstance(spec, SlotState)]
        if len(found) > 1:
            names = [name for name, _ in found]
            hint = "Sessions have one slot: put all banks into one SlotState."
            raise ConfigError("inputs", names, "declared with one SlotState at most", hint)
        return found[0] if found else None

    @property
    def num_lanes(self) -> int:
        """How many lanes the runner has."""
        return self.lanes.count if isinstance(self.lanes, Lanes) else self.lanes

    @property
    def memory_group(self) -> MemoryGroup | None:
        """The group of runners that it shares a pool with; None: it shares nothing."""
        return MemoryGroup.of(self.lanes.memory) if isinstance(self.lanes, Lanes) else None

    def without_memory(self) -> RunnerSpec:
        """Return the same with pools of its own."""
        if not isinstance(self.lanes, Lanes):
            return self
        return attrs.evolve(self, lanes=attrs.evolve(self.lanes, memory=None))

    @property
    def named_policy(self) -> str | Policy | None:
        """The policy that was asked for, without its plugins."""
        found = self.policy
        return found.policy if isinstance(found, PolicyWithPlugins) else found

    @property
    def plugins(self) -> PluginSet | None:
        """The plugins that came with the policy."""
        return self.policy.plugins if isinstance(self.policy, PolicyWithPlugins) else None

    def having_policy(self, policy: str | Policy, options: Mapping[str, Any] | None) -> RunnerSpec:
        """Return the same with another policy and its options, from the same plugins."""
        return attrs.evolve(
            self,
            policy=policy if self.plugins is None else self.plugins.with_policy(policy),
            options=attrs.evolve(self.options, policy_options=options or {}),
        )


def merge_config(config: DispatchConfig, **arguments: Any) -> DispatchConfig:
    """Return a configuration with the arguments of a runner that are settings of it.

    Raises:
        ConfigError: A setting is given in both places, or cannot be used.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    there = given_in(config)
    for name, value in given.items():
        if name in there:
            hint = f"options.config has {name}={there[name]!r} too."
            raise ConfigError(name, value, "given in one place alone", hint)
    return attrs.evolve(config, **given) if given else config


def asked_mode(config: DispatchConfig, step: Step) -> CUDAGraphMode:
    """Return the mode that is asked for; without one, FULL where one graph serves any batch."""
    if config.is_mode_given:
        return config.mode
    is_whole = all(
        piece.is_graph and piece.support is AttentionSupport.ALWAYS for piece in step.pieces
    )
    return CUDAGraphMode.FULL if is_whole else config.mode


def resolve_supported_mode(
    config: DispatchConfig, step: Step, backend: GraphBackend
) -> tuple[DispatchConfig, tuple[str, ...]]:
    """Return the configuration with the closest mode that step and backend can do, and why.

    Raises:
        ConfigError: FULL was asked for mixed batches, and a piece can never be captured.
    """
    supported = mode_for_pieces(
        step.pieces,
        asked_mode(config, step),
        query_len=max(config.query_lens),
        captures=backend.capabilities.graphs,
    )
    warn_of_downgrade(supported)
    mode = supported.mode if step.can_split else supported.mode.without_piecewise()
    changed = config if mode is config.mode else attrs.evolve(config, mode=mode)
    return changed, supported.reasons


def check_slot_state(
    name: str, state: SlotState, device: torch.device, options: RunnerOptions
) -> None:
    """Refuse slot state that steps of a runner cannot use.

    Args:
        name: The input that names slots.
        state: Theirs.
        device: Where steps run.
        options: Those of the runner.

    Raises:
        ConfigError: It is on another device; steps address its banks; or batches may be split, and
            sessions are compact.
    """
    setting = f"inputs[{name!r}]"
    if state.is_raw:
        hint = "Declare GraphRunner(..., state=slots.step_state), and let the step address them."
        raise ConfigError(setting, state, "a SlotState without RawBanks", hint)
    if state.device != device:
        hint = f"SlotState(..., device={str(device)!r})."
        raise ConfigError(setting, str(state.device), f"on {device}, as the steps are", hint)
    if state.compact and options.rows_independent:
        raise ConfigError(
            "rows_independent", True, "False with compact sessions", "A part reads no first slots."
        )


def make_backend(
    backend: str | GraphBackend, device: str | torch.device | None, plugins: PluginSet | None
) -> GraphBackend:
    """Return the backend that a name, or a device, stands for; an object is one already.

    Raises:
        ConfigError: Name and device contradict each other, or the object is no backend.
        UnknownNameError: No backend goes by that name.
        BackendUnavailableError: It cannot run here.
    """
    if device is not None:
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ConfigError("device", device, "a device that torch knows") from error
    if not isinstance(backend, str):
        made = resolve_backend(backend)
        _check_device(made, device)
        return made
    built_in = backend.partition(":")[0] in (AUTO, "cpu", *BUILT_IN_BACKENDS)
    if plugins is None and not built_in:
        from dispatchkit.plugins import load_plugins

        plugins = load_plugins()
    factories = {}
    if plugins is not None:
        for name, one in plugins.backends.items():
            # A built-in name is another's only where its replacement was asked for at loading.
            if one.origin.distribution != _OWN_DISTRIBUTION:
                factories[name] = functools.partial(_create, plugins, name)
    return resolve_backend(backend, device=device, registered=factories)


def _create(plugins: PluginSet, name: str, *, device: Any) -> GraphBackend:
    """Make a plugin's backend; one that takes no device is given none."""
    return plugins.create_backend(name, **({} if device is None else {"device": device}))


def _check_device(backend: GraphBackend, device: str | torch.device | None) -> None:
    if device is not None and torch.device(device).type != torch.device(backend.torch_device).type:
        raise ConfigError(
            "device", str(device), f"on {backend.torch_device} for the {backend.name} backend"
        )


def make_policy(
    policy: str | Policy | None,
    options: Mapping[str, Any] | None,
    config: DispatchConfig,
    plugins: PluginSet | None,
) -> tuple[Policy, str, PluginSet | None]:
    """Return the policy that a name stands for, where it comes from, and the plugins.

    Args:
        policy: A name or an object; None for the one that a plugin selects for the
            configuration, else the default.
        options: For the factory of a named policy.
        config: What it is selected for.
        plugins: Loaded when a name must be found.

    Raises:
        ConfigError: Options were given without a name, or its factory does not take them.
        UnknownNameError: No policy goes by that name; the nearest are named.
        PluginError: The hook that selects one raised, or answered with no name.
    """
    if options and not isinstance(policy, str):
        raise ConfigError("policy_options", options, "given with a policy's name alone")
    if policy is not None and not isinstance(policy, str):
        return policy, "", plugins
    if plugins is None:
        from dispatchkit.plugins import load_plugins

        plugins = load_plugins()
    if policy is None:
        policy = plugins.select_policy(config) or DEFAULT_POLICY
    made = plugins.create_policy(policy, **(options or {}))
    return made, str(plugins.get_policy(policy).origin), plugins
