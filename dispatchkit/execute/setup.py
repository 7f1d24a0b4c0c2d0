"""RunnerSpec: the arguments of a runner, and the objects made from them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from dispatchkit import plugins as plugin_sets
from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.resolve import AUTO, BUILT_IN_BACKENDS, resolve_backend
from dispatchkit.dispatch import Lanes, Policy
from dispatchkit.distributions import DEFAULT_POLICY
from dispatchkit.errors import ConfigError, UnknownNameError
from dispatchkit.execute.io.static_input import StaticInput, inputs_from_example
from dispatchkit.execute.memory import MemoryGroup
from dispatchkit.execute.slots import SlotState
from dispatchkit.execute.step.pieces import Step
from dispatchkit.execute.step.state import StepState
from dispatchkit.execute.step.support import mode_for_pieces, warn_of_downgrade
from dispatchkit.keys.axes import Axis
from dispatchkit.keys.checks import check_flag, check_instance
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import AttentionSupport, CUDAGraphMode
from dispatchkit.keys.records import changed_settings
from dispatchkit.options import RunnerOptions
from dispatchkit.plugins import PluginSet, PolicyWithPlugins

_OWN_DISTRIBUTION = "dispatchkit"


@attrs.frozen(kw_only=True, eq=False)
class RunnerSpec:
    """The arguments of a runner, sufficient to create an equivalent runner.

    Attributes:
        step: The step: a function, a module, or a list of pieces.
        inputs: Static inputs by name, at most one of them a ``SlotState``; None if ``example`` is
            given.
        example: One tensor for each input; None if ``inputs`` are given.
        policy: A policy or its name, or a ``PolicyWithPlugins``; None for the policy that a plugin
            selects for the configuration, or else the default policy.
        backend: A backend or its name.
        outputs: ``owned`` or ``view``.
        state: The state that the step changes.
        lazy: Whether keys are captured on demand.
        lanes: The number of lanes, or ``Lanes``.
        options: All other settings. ``options.config`` has the requested sizes, limits, modes and
            axes.
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

    @classmethod
    def of(
        cls,
        *,
        step: Any,
        inputs: Mapping[str, StaticInput | SlotState] | None,
        example: Mapping[str, torch.Tensor] | None,
        outputs: str,
        state: StepState | Iterable[torch.Tensor],
        lazy: bool,
        options: RunnerOptions | None,
        sizes: Sequence[int] | None,
        max_num_tokens: int | None,
        mode: CUDAGraphMode | str | None,
        axes: Sequence[Axis] | None,
        **others: Any,
    ) -> RunnerSpec:
        """Create a specification from the arguments of a runner.

        Raises:
            ConfigError: An argument is invalid, or two arguments contradict each other.
        """
        options = RunnerOptions() if options is None else options
        check_instance(options, RunnerOptions, "options")
        if inputs is None and example is None:
            hint = "Write inputs={'x': StaticInput((None, 16), 'float32')}, for example."
            raise ConfigError("inputs", None, "given unless example is given", hint)
        if inputs is not None and example is not None:
            raise ConfigError(
                "example", example, "omitted if inputs are given", "Pass only one of them."
            )
        for name, by_name in (("inputs", inputs), ("example", example)):
            if by_name is not None and not isinstance(by_name, Mapping):
                allowed = "a dictionary keyed by the names of the step's parameters"
                raise ConfigError(name, by_name, allowed)
        if outputs not in ("owned", "view"):
            raise ConfigError("outputs", outputs, "'owned' or 'view'")
        config = merge_config(
            options.config,
            sizes=sizes,
            max_num_tokens=max_num_tokens,
            mode=mode,
            axes=axes,
        )
        return cls(
            step=step,
            inputs=inputs,
            example=example,
            outputs=outputs,
            state=StepState.of(state),
            lazy=check_flag(lazy, "lazy"),
            options=attrs.evolve(options, config=config),
            **others,
        )

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that create the runner."""
        return attrs.asdict(self, recurse=False)

    @property
    def static_inputs(self) -> dict[str, StaticInput]:
        """The declarations of all inputs, including the input with slots."""
        if self.inputs is None:
            return inputs_from_example(self.example or {})
        return {
            name: spec.static_input if isinstance(spec, SlotState) else spec
            for name, spec in self.inputs.items()
        }

    @property
    def slots(self) -> tuple[str, SlotState] | None:
        """The name and state of the input with slots, or None if no input has slots.

        Raises:
            ConfigError: Several inputs are declared with a ``SlotState``.
        """
        inputs = (self.inputs or {}).items()
        found = [(name, spec) for name, spec in inputs if isinstance(spec, SlotState)]
        if len(found) > 1:
            names = [name for name, _ in found]
            hint = "Put all banks into one SlotState, because a session has a single slot."
            raise ConfigError("inputs", names, "declared with at most one SlotState", hint)
        return found[0] if found else None

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return self.lanes.count if isinstance(self.lanes, Lanes) else self.lanes

    @property
    def memory_group(self) -> MemoryGroup | None:
        """The group of runners whose memory this runner shares, or None."""
        return MemoryGroup.of(self.lanes.memory) if isinstance(self.lanes, Lanes) else None

    def without_memory(self) -> RunnerSpec:
        """Return the specification without shared memory."""
        if not isinstance(self.lanes, Lanes):
            return self
        return attrs.evolve(self, lanes=attrs.evolve(self.lanes, memory=None))

    @property
    def named_policy(self) -> str | Policy | None:
        """The requested policy, without its plugins."""
        found = self.policy
        return found.policy if isinstance(found, PolicyWithPlugins) else found

    @property
    def plugins(self) -> PluginSet | None:
        """The plugins given together with the policy, or None."""
        return self.policy.plugins if isinstance(self.policy, PolicyWithPlugins) else None

    def with_policy(self, policy: str | Policy, options: Mapping[str, Any] | None) -> RunnerSpec:
        """Return the specification with another policy from the same plugins."""
        return attrs.evolve(
            self,
            policy=policy if self.plugins is None else self.plugins.with_policy(policy),
            options=attrs.evolve(self.options, policy_options=options or {}),
        )


def check_names(spec: RunnerSpec) -> None:
    """Check that the policy and the backend are known, without creating either.

    Raises:
        UnknownNameError: No plugin provides the policy or backend.
        ConfigError: The given object is not a backend.
    """
    policy, backend, plugins = spec.named_policy, spec.backend, spec.plugins
    is_of_plugin = isinstance(backend, str) and not _is_built_in(backend)
    if plugins is None and (isinstance(policy, str) or is_of_plugin):
        plugins = plugin_sets.load_plugins()
    if plugins is not None and isinstance(policy, str):
        plugins.get_policy(policy)
    if not isinstance(backend, str):
        resolve_backend(backend)
    elif plugins is not None and is_of_plugin and backend not in plugins.backends:
        known = {AUTO, "cpu", *BUILT_IN_BACKENDS, *plugins.backends}
        raise UnknownNameError("backend", backend, known)


def _is_built_in(backend: str) -> bool:
    return backend.partition(":")[0] in (AUTO, "cpu", *BUILT_IN_BACKENDS)


def merge_config(config: DispatchConfig, **arguments: Any) -> DispatchConfig:
    """Return a configuration with the settings given as runner arguments.

    Raises:
        ConfigError: A setting is invalid, or given both in the configuration and as an argument.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    there = changed_settings(config)
    for name, value in given.items():
        if name in there:
            hint = f"options.config also has {name}={there[name]!r}; remove one of the two."
            raise ConfigError(name, value, "given in only one place", hint)
    return attrs.evolve(config, **given) if given else config


def requested_mode(config: DispatchConfig, step: Step) -> CUDAGraphMode:
    """Return the requested mode, or a default if none is requested.

    The default is FULL if every piece can be captured for any batch, otherwise ``config.mode``.
    """
    if config.is_mode_given:
        return config.mode
    is_whole = all(
        piece.is_graph and piece.support is AttentionSupport.ALWAYS for piece in step.pieces
    )
    return CUDAGraphMode.FULL if is_whole else config.mode


def resolve_supported_mode(
    config: DispatchConfig, step: Step, backend: GraphBackend
) -> tuple[DispatchConfig, tuple[str, ...]]:
    """Return the configuration with the closest supported mode, and the reasons for a downgrade.

    Raises:
        ConfigError: FULL is requested for mixed batches, but a piece of the step is never captured.
    """
    supported = mode_for_pieces(
        step.pieces,
        requested_mode(config, step),
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
    """Reject slot state that a runner's steps cannot use.

    Args:
        name: Name of the input with slots.
        state: The state to check.
        device: Device on which steps run.
        options: Options of the runner; only ``rows_independent`` is used.

    Raises:
        ConfigError: The state has ``RawBank`` banks, is not on ``device``, or is compact although
            batches may be split.
    """
    setting = f"inputs[{name!r}]"
    if state.is_raw:
        hint = "Pass GraphRunner(..., state=slots.step_state), and address the banks in the step."
        raise ConfigError(setting, state, "a SlotState without RawBanks", hint)
    if state.device != device:
        hint = f"Create it with SlotState(..., device={str(device)!r})."
        raise ConfigError(
            setting, str(state.device), f"a SlotState on {device} (the device of the steps)", hint
        )
    if state.compact and options.rows_independent:
        raise ConfigError(
            "rows_independent",
            True,
            "False with a compact SlotState",
            "A step of compact sessions must start at slot 0, but only the first part of a split "
            "batch does. Omit rows_independent, or create the SlotState without compact.",
        )


def make_backend(
    backend: str | GraphBackend, device: str | torch.device | None, plugins: PluginSet | None
) -> GraphBackend:
    """Return the backend for a name or a device, or validate a backend object.

    Raises:
        ConfigError: The device is invalid or contradicts ``backend``, or the object is not a
            backend.
        UnknownNameError: No backend has the given name.
        BackendUnavailableError: The backend cannot run here.
    """
    if device is not None:
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ConfigError("device", device, "a torch device, such as 'cuda:0'") from error
    if not isinstance(backend, str):
        made = resolve_backend(backend)
        _check_device(made, device)
        return made
    if plugins is None and not _is_built_in(backend):
        plugins = plugin_sets.load_plugins()
    factories = {}
    if plugins is not None:
        for name, one in plugins.backends.items():
            # A plugin provides a built-in name only if ``load_plugins(replace=...)`` allowed it.
            if one.origin.distribution != _OWN_DISTRIBUTION:
                factories[name] = functools.partial(_create, plugins, name)
    return resolve_backend(backend, device=device, registered=factories)


def _create(plugins: PluginSet, name: str, *, device: Any) -> GraphBackend:
    """Create a plugin's backend; pass the device only if one is given."""
    return plugins.create_backend(name, **({} if device is None else {"device": device}))


def _check_device(backend: GraphBackend, device: str | torch.device | None) -> None:
    if device is not None and torch.device(device).type != torch.device(backend.torch_device).type:
        raise ConfigError(
            "device",
            str(device),
            f"a {torch.device(backend.torch_device).type} device for the backend {backend.name!r}",
        )


def make_policy(
    policy: str | Policy | None,
    options: Mapping[str, Any] | None,
    config: DispatchConfig,
    plugins: PluginSet | None,
) -> tuple[Policy, str, PluginSet | None]:
    """Return a policy, its origin and the plugins.

    The origin of a policy object is empty. The plugins are those given, or else those loaded to
    create the policy; None if neither.

    Args:
        policy: A policy or its name. None selects the policy that a plugin chooses for the
            configuration, or else the default policy.
        options: Keyword arguments for the factory that creates the named policy.
        config: The configuration of the runner.
        plugins: Plugins that provide policies. If None, installed plugins are loaded when needed.

    Raises:
        ConfigError: Options were given without a policy name, or the factory does not accept them.
        UnknownNameError: No policy has the given name; the message lists similar names.
        PluginError: The hook that selects the policy raised or did not return a name.
        PolicyError: The policy's factory raised or did not return a policy.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError("policy_options", options, "a dictionary of options by name")
    if options and not isinstance(policy, str):
        hint = "Pass policy='NAME', or set the options of a policy object when you create it."
        raise ConfigError("policy_options", options, "given only with a policy name", hint)
    if policy is not None and not isinstance(policy, str):
        return policy, "", plugins
    if plugins is None:
        plugins = plugin_sets.load_plugins()
    if policy is None:
        policy = plugins.select_policy(config) or DEFAULT_POLICY
    made = plugins.create_policy(policy, **(options or {}))
    return made, str(plugins.get_policy(policy).origin), plugins
