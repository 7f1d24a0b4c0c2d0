"""Registrations of plugins, and the state of each plugin."""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

import attrs

from dispatchkit.errors import Origin
from dispatchkit.hookspecs import Spec

SpecT = TypeVar("SpecT", bound=Spec)


@attrs.frozen
class Registration(Generic[SpecT]):
    """A record that a plugin registered, and the origin of the plugin.

    Attributes:
        spec: The record returned by the plugin.
        origin: The plugin and its distribution.
    """

    spec: SpecT
    origin: Origin

    @property
    def name(self) -> str:
        """The registered name."""
        return self.spec.name

    @property
    def summary(self) -> str:
        """One-line description for listings; may be empty."""
        return self.spec.summary


class PluginState(enum.StrEnum):
    """The state of a plugin that was found, passed in or requested."""

    LOADED = "loaded"
    FAILED = "failed"
    DUPLICATE = "duplicate"
    BLOCKED = "blocked"
    MISSING = "missing"


@attrs.frozen
class PluginInfo:
    """One row of the list of plugins.

    Attributes:
        name: Name of the entry point, the name given with the object, or the requested name of a
            missing plugin.
        distribution: Distribution of the plugin; None for an object passed in or a missing plugin.
        version: Version of the distribution; None for an object passed in or a missing plugin.
        origin: The plugin's origin, as text.
        state: State of the plugin.
        reason: Why the plugin is not loaded, or the problems of a loaded plugin, as text; may be
            empty.
        registers: The registrations as ``kind name``, such as ``policy vllm``.
    """

    name: str
    distribution: str | None
    version: str | None
    origin: str
    state: PluginState
    reason: str = ""
    registers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, origin: Origin, state: PluginState, reason: str = "", registers: tuple[str, ...] = ()
    ) -> PluginInfo:
        """Return the row for an origin."""
        facts = (origin.plugin, origin.distribution, origin.version, str(origin))
        return cls(*facts, state, reason, registers)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON-compatible values."""
        return {**attrs.asdict(self), "state": str(self.state), "registers": list(self.registers)}
