"""Load plugins, and choose by name among what they bring.

Loading is explicit: each dispatcher has its own ``PluginSet``, and there is no global one::

    plugins = load_plugins()
    policy = plugins.create_policy("vllm")

A broken plugin is left out whole and reported with its distribution, entry point and reason;
with ``strict=True`` that is an error. Importing this package loads neither pluggy nor any
plugin; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from dispatchkit.plugins.records import PluginInfo, PluginState, Registered

_HOME = {
    "BackendSpec": "hookspecs",
    "CommandSpec": "hookspecs",
    "LanePolicySpec": "hookspecs",
    "ObserverSpec": "hookspecs",
    "Origin": "errors",
    "PluginError": "errors",
    "PluginInfo": "plugins.records",
    "PluginLoadError": "errors",
    "PluginSet": "plugins.plugin_set",
    "PluginState": "plugins.records",
    "PolicySpec": "hookspecs",
    "PolicyWithPlugins": "plugins.plugin_set",
    "Registered": "plugins.records",
    "load_plugins": "plugins.plugin_set",
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
    "Registered",
    "load_plugins",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dispatchkit.{home}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
