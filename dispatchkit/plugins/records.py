"""Records of plugins, their state and what they register."""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

import attrs

from dispatchkit.errors import Origin
from dispatchkit.hookspecs import Spec

SpecT = TypeVar("SpecT", bound=Spec)


@attrs.frozen
class Registration(Generic[SpecT]):
    """A named registration, with its origin.

    Attributes:
        spec: The record that the plugin returned.
        origin: The plugin and its distribution.
    """

    spec: SpecT
    origin: Origin

    @property
    def name(self) -> str:
        """The name users choose it by."""
        return self.spec.name

    @property
    def summary(self) -> str:
        """One line for listings; may be empty."""
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
        name: The plugin's name (its entry point's name).
        distribution: Distribution it comes from; None for an object passed in.
        version: Version of that distribution; None for an object passed in.
        origin: Where it comes from, in words.
        state: Its state.
        reason: The reason for the state, in words; may be empty.
        registers: What it registered, as ``kind name`` (``policy vllm``).
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
        """Create a row for an origin."""
        facts = (origin.plugin, origin.distribution, origin.version, str(origin))
        return cls(*facts, state, reason, registers)

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values for JSON."""
        return {**attrs.asdict(self), "state": str(self.state), "registers": list(self.registers)}
