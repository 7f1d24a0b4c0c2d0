"""The whole contract with plugins: six hooks, and the records that they return.

A plugin is a module or an instance with functions marked ``@hookimpl``, named by an entry
point of the group ``dispatchkit``. It imports public names only::

    # pyproject.toml
    [project.entry-points.dispatchkit]
    smallest = "dispatchkit_smallest.plugin"

    # dispatchkit_smallest/plugin.py
    from dispatchkit.hookspecs import PolicySpec, hookimpl
    from dispatchkit_smallest.policy import SmallestPolicy

    @hookimpl
    def dispatchkit_register_policies():
        return [PolicySpec("smallest", SmallestPolicy, summary="Smallest captured bucket")]

No hook runs per step: a step reads a table. What happens later (a capture, a swap, a fault of
a policy) reaches observers, which ``dispatchkit_register_observers`` brings.

A ``register`` hook is called once, when its plugin is loaded, on the thread that loads. It
returns a list or tuple of records, ``[]`` for none. It must not touch a device, open files or
ports, print, or import what only a factory needs: a process may be forked afterwards, and
dispatchers load every plugin. Whatever it raises, or returns instead, undoes the whole plugin.

Where two plugins claim one name, both are named in a warning. One rule decides, whatever the
order of ``sys.path``: built-in names stay unless ``replace`` says otherwise; then what was
passed in; then the distribution called ``dispatchkit-<name>``; then the first in the alphabet.

A hook takes the arguments listed or fewer, by name, without defaults. Wrappers are refused.
Hooks gain arguments and records gain fields; neither is renamed or removed but in a major
version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from pluggy import HookimplMarker, HookspecMarker

from dispatchkit.errors import ConfigError

if TYPE_CHECKING:
    from dispatchkit.keys.config import DispatchConfig

__all__ = [
    "BackendSpec",
    "CommandSpec",
    "LanePolicySpec",
    "ObserverSpec",
    "PolicySpec",
    "Spec",
    "hookimpl",
]

hookspec: HookspecMarker = HookspecMarker("dispatchkit")
hookimpl: HookimplMarker = HookimplMarker("dispatchkit")

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
class Spec:
    """Something that can be chosen by name, and what makes it.

    Attributes:
        name: The name it is chosen by.
        factory: Called with the user's options as keywords; returns a new object. It imports
            what it needs when it is called, not before.
        summary: One line for listings.
    """

    kind: ClassVar[str]
    hook: ClassVar[str]

    name: str = attrs.field(validator=_check_name)
    factory: Callable[..., Any] = attrs.field(validator=_check_callable)
    summary: str = attrs.field(default="", validator=_check_text)


@attrs.frozen
class PolicySpec(Spec):
    """A policy; see ``dispatchkit.dispatch.policy`` for what it must have and may have."""

    kind: ClassVar[str] = "policy"
    hook: ClassVar[str] = "dispatchkit_register_policies"


@attrs.frozen
class LanePolicySpec(Spec):
    """A lane policy; see ``dispatchkit.dispatch.lanes``."""

    kind: ClassVar[str] = "lane policy"
    hook: ClassVar[str] = "dispatchkit_register_lane_policies"


@attrs.frozen
class BackendSpec(Spec):
    """A backend; see ``dispatchkit.backends.base``.

    A runner calls the factory with ``device`` alone: an index, a name such as ``cuda:1``, or
    None for the current device. An ImportError of the factory says what to install.
    """

    kind: ClassVar[str] = "backend"
    hook: ClassVar[str] = "dispatchkit_register_backends"


@attrs.frozen
class ObserverSpec(Spec):
    """An observer; its methods named after events (``on_capture``) are called with them.

    See ``dispatchkit.observe.events`` for the events and what a callback may do.
    """

    kind: ClassVar[str] = "observer"
    hook: ClassVar[str] = "dispatchkit_register_observers"


@attrs.frozen
class CommandSpec(Spec):
    """A command of the ``dispatchkit`` command line; its name is the word typed.

    The factory takes no options and returns the function that is the command, with typer's
    annotations; its docstring is the command's help. It imports that function when it is
    called: typer and rich may be missing where plugins are loaded. See ``dispatchkit.cli``.
    """

    kind: ClassVar[str] = "command"
    hook: ClassVar[str] = "dispatchkit_register_commands"


#: The record of each ``register`` hook.
RECORDS: tuple[type[Spec], ...] = (
    PolicySpec,
    LanePolicySpec,
    BackendSpec,
    ObserverSpec,
    CommandSpec,
)


@hookspec
def dispatchkit_register_policies() -> Sequence[PolicySpec]:  # type: ignore[empty-body]
    """Return the policies that this plugin brings.

    Example:
        return [PolicySpec("smallest", SmallestPolicy)]
    """


@hookspec
def dispatchkit_register_lane_policies() -> Sequence[LanePolicySpec]:  # type: ignore[empty-body]
    """Return the lane policies that this plugin brings.

    A lane policy chooses the lane (one stream with its own pool and buffers) of each step;
    it combines with any policy.

    Example:
        return [LanePolicySpec("round-robin", RoundRobin)]
    """


@hookspec
def dispatchkit_register_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Return the backends that this plugin brings.

    Example:
        return [BackendSpec("hip", make_hip_backend, summary="HIP graphs")]
    """


@hookspec
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:  # type: ignore[empty-body]
    """Return the observers that this plugin brings.

    An observer is made when the user asks for it by name; from then on it is called directly,
    not through hooks.

    Example:
        return [ObserverSpec("prometheus", PrometheusObserver)]
    """


@hookspec
def dispatchkit_register_commands() -> Sequence[CommandSpec]:  # type: ignore[empty-body]
    """Return the commands that this plugin adds to the command line.

    Example:
        return [CommandSpec("compare", load_compare, summary="Compare two traces")]
    """


@hookspec(firstresult=True)
def dispatchkit_select_policy(config: DispatchConfig) -> str | None:
    """Choose the policy for a configuration, where the user named none.

    It is called when a dispatcher is built, on the thread that builds it, while nothing is
    captured; it must not touch a device. The first answer that is not None counts, and
    plugins are asked in no promised order.

    Args:
        config: Sizes (tokens), limits and modes of the dispatcher; read only.

    Returns:
        The name of a registered policy, or None: not mine. When all answer None the default
        policy is taken.

    Raises:
        Anything: a PluginError that names the plugin; no dispatcher is built. An unknown
        name is refused as if the user had given it.

    Example:
        return "multi" if config.max_loras > 8 else None
    """
