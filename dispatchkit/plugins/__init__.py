"""Load plugins; create their policies and other objects by name.

Each call of ``load_plugins`` returns an independent ``PluginSet``; there is no global set::

    plugins = load_plugins()
    policy = plugins.create_policy("vllm")

A broken plugin is skipped as a whole and reported with its distribution, its entry point and the
reason. With ``strict=True``, loading raises instead. Importing this package imports neither pluggy
nor any plugin; each public name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.lazy import lazy_names

if TYPE_CHECKING:
    from dispatchkit.errors import Origin, PluginError, PluginLoadError
    from dispatchkit.hookspecs import (
        BackendSpec,
        CommandSpec,
        LanePolicySpec,
        ObserverSpec,
        PolicySpec,
    )
    from dispatchkit.plugins.plugin_set import PluginSet, PolicyWithPlugins, load_plugins
    from dispatchkit.plugins.records import PluginInfo, PluginState, Registration

_LAZY_NAMES = {
    "BackendSpec": ".hookspecs",
    "CommandSpec": ".hookspecs",
    "LanePolicySpec": ".hookspecs",
    "ObserverSpec": ".hookspecs",
    "Origin": ".errors",
    "PluginError": ".errors",
    "PluginInfo": "records",
    "PluginLoadError": ".errors",
    "PluginSet": "plugin_set",
    "PluginState": "records",
    "PolicySpec": ".hookspecs",
    "PolicyWithPlugins": "plugin_set",
    "Registration": "records",
    "load_plugins": "plugin_set",
}

__all__ = [
    "BackendSpec",
    "CommandSpec",
    "LanePolicySpec",
    "ObserverSpec",
    "Origin",
    "PluginError",
    "PluginInfo",
    "PluginLoadError",
    "PluginSet",
    "PluginState",
    "PolicySpec",
    "PolicyWithPlugins",
    "Registration",
    "load_plugins",
]


__getattr__, __dir__ = lazy_names(__name__, _LAZY_NAMES)
