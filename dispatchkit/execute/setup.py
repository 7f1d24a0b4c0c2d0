"""Choosing what a runner is made of: configuration, backend, policy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.resolve import AUTO, BUILT_IN_BACKENDS, resolve_backend
from dispatchkit.dispatch import Policy
from dispatchkit.distributions import DEFAULT_POLICY
from dispatchkit.errors import ConfigError
from dispatchkit.execute.step.pieces import Step
from dispatchkit.execute.step.support import mode_for_pieces, warn_of_downgrade
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.keys.modes import CUDAGraphMode

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet

_OWN_DISTRIBUTION = "dispatchkit"
# Settings of a runner that a configuration holds all together.
OF_CONFIG = ("axes", "sizes", "max_num_tokens", "max_num_seqs", "query_len", "mode")


def make_config(config: DispatchConfig | None, **settings: Any) -> DispatchConfig:
    """Return the configuration given, or one from single settings; not from both.

    Raises:
        ConfigError: Both were given, or a setting cannot be used.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if config is None:
        return DispatchConfig(**given)
    if given:
        raise ConfigError(
            "config", sorted(given), "given alone", "These settings are part of the config."
        )
    if not isinstance(config, DispatchConfig):
        raise ConfigError("config", config, "a DispatchConfig")
    return config


def with_mode(config: DispatchConfig, mode: CUDAGraphMode) -> DispatchConfig:
    """Return the configuration with another mode, all else as it is.

    A copy, not a new one: what its making warns of has been said.
    """
    changed = copy.copy(config)
    object.__setattr__(changed, "mode", mode)
    return changed


def honoured(
    config: DispatchConfig, step: Step, backend: GraphBackend
) -> tuple[DispatchConfig, tuple[str, ...]]:
    """Return the configuration with the closest mode that step and backend can do, and why.

    Raises:
        ConfigError: FULL was asked for mixed batches, and a piece can never be captured.
    """
    supported = mode_for_pieces(
        step.pieces,
        config.mode,
        query_len=max(config.query_lens),
        captures=backend.capabilities.graphs,
    )
    warn_of_downgrade(supported)
    mode = supported.mode if step.can_split else supported.mode.without_piecewise()
    return config if mode is config.mode else with_mode(config, mode), supported.reasons


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
    options: dict[str, Any] | None,
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
        ConfigError: Options are no dictionary, were given without a name, or its factory does
            not take them.
        UnknownNameError: No policy goes by that name; the nearest are named.
        PluginError: The hook that selects one raised, or answered with no name.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError("policy_options", options, "a dictionary of options by name")
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
