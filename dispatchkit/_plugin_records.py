"""What plugins hand over, and where it comes from: records and origins.

Public names are ``dispatchkit.hookspecs`` (for authors of plugins) and ``dispatchkit.plugins``
(for those who use them).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from dispatchkit.errors import ConfigError

if TYPE_CHECKING:
    from dispatchkit.backends.base import GraphBackend
    from dispatchkit.dispatch.policy import Policy

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*")


def _check_name(record: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{type(record).__name__}.{attribute.name}",
            value,
            "letters, digits, '.', '_', '@' and '-', starting with a letter or digit",
        )


def _check_callable(record: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not callable(value):
        raise ConfigError(f"{type(record).__name__}.{attribute.name}", value, "callable")


def _check_text(record: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{type(record).__name__}.{attribute.name}", value, "a string")


@attrs.frozen
class PolicySpec:
    """A policy that can be chosen by name.

    Attributes:
        name: The name it is chosen by.
        factory: Called with the user's options as keywords; returns a new policy.
        summary: One line for listings.
    """

    name: str = attrs.field(validator=_check_name)
    factory: Callable[..., Policy] = attrs.field(validator=_check_callable)
    summary: str = attrs.field(default="", validator=_check_text)


@attrs.frozen
class LanePolicySpec:
    """A lane policy that can be chosen by name.

    Attributes:
        name: The name it is chosen by.
        factory: Called with the user's options as keywords; returns a new lane policy.
        summary: One line for listings.
    """

    name: str = attrs.field(validator=_check_name)
    factory: Callable[..., Any] = attrs.field(validator=_check_callable)
    summary: str = attrs.field(default="", validator=_check_text)


@attrs.frozen
class BackendSpec:
    """A backend that can be chosen by name.

    Attributes:
        name: The name it is chosen by.
        factory: Called with options as keywords, by a runner with ``device`` alone (an index,
            a name such as ``cuda:1``, or None for the current one); returns a backend. It
            imports what it needs when called, not before; a failing import says what to
            install.
        summary: One line for listings.
    """

    name: str = attrs.field(validator=_check_name)
    factory: Callable[..., GraphBackend] = attrs.field(validator=_check_callable)
    summary: str = attrs.field(default="", validator=_check_text)


@attrs.frozen
class PlannerSpec:
    """A planner of capture sizes that can be chosen by name.

    Attributes:
        name: The name it is chosen by.
        factory: Called with the user's options as keywords; returns a new planner. Programs
            get one by ``plugins.create_planner(name)``; ``dispatchkit plan`` has its own.
        summary: One line for listings.
    """

    name: str = attrs.field(validator=_check_name)
    factory: Callable[..., Any] = attrs.field(validator=_check_callable)
    summary: str = attrs.field(default="", validator=_check_text)


@attrs.frozen
class ObserverSpec:
    """An observer or exporter that can be chosen by name.

    Attributes:
        name: The name it is chosen by.
        factory: Called with the user's options as keywords; returns a new observer. Its
            methods named after events (``on_capture``, ``on_evict``, ...) are called with
            them; see ``dispatchkit.observe.events.Notifier.attach``.
        summary: One line for listings.
    """

    name: str = attrs.field(validator=_check_name)
    factory: Callable[..., Any] = attrs.field(validator=_check_callable)
    summary: str = attrs.field(default="", validator=_check_text)


@attrs.frozen
class CommandSpec:
    """A command of the ``dispatchkit`` command line.

    Attributes:
        name: The word on the command line.
        callback: A function with typer's annotations; its arguments become options.
        help: One line for ``dispatchkit --help``; the callback's docstring when empty.
    """

    name: str = attrs.field(validator=_check_name)
    callback: Callable[..., Any] = attrs.field(validator=_check_callable)
    help: str = attrs.field(default="", validator=_check_text)


AnySpec = PolicySpec | LanePolicySpec | BackendSpec | PlannerSpec | ObserverSpec | CommandSpec

#: What ``dispatchkit_register_<things>`` returns: word for one of them -> (hook, class).
KINDS: dict[str, tuple[str, type[Any]]] = {
    "policy": ("dispatchkit_register_policies", PolicySpec),
    "lane policy": ("dispatchkit_register_lane_policies", LanePolicySpec),
    "backend": ("dispatchkit_register_backends", BackendSpec),
    "planner": ("dispatchkit_register_planners", PlannerSpec),
    "observer": ("dispatchkit_register_observers", ObserverSpec),
    "command": ("dispatchkit_register_commands", CommandSpec),
}


@attrs.frozen
class Origin:
    """Where something comes from.

    Attributes:
        plugin: Name of the plugin: its entry point's name, or the name it was passed in by.
        distribution: Distribution with the entry point; None for an object passed in.
        version: Version of that distribution; None for an object passed in.
        entry_point: What the entry point names (``module:object``); None likewise.
        is_there: False for a name that was asked for and fits no plugin.
    """

    plugin: str
    distribution: str | None = None
    version: str | None = None
    entry_point: str | None = None
    is_there: bool = True

    def __str__(self) -> str:
        if not self.is_there:
            return "not found"
        if self.distribution is None:
            return f"passed in as {self.plugin!r}"
        what = " ".join(filter(None, (self.distribution, self.version)))
        if self.entry_point is None:
            return what
        return f"{what}, entry point '{self.plugin} = {self.entry_point}'"


SpecT = TypeVar("SpecT", bound=AnySpec)


@attrs.frozen
class Registered(Generic[SpecT]):
    """One thing that can be chosen by name, with its origin.

    Attributes:
        spec: The record that the plugin returned.
        origin: The plugin and its distribution.
    """

    spec: SpecT
    origin: Origin

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        return self.spec.name

    @property
    def summary(self) -> str:
        """One line for listings; may be empty."""
        return self.spec.help if isinstance(self.spec, CommandSpec) else self.spec.summary
