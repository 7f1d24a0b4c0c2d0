"""The plugin interface: six hooks, and the records that ``register`` hooks return.

A plugin is a module, or an instance of a class, with functions marked ``@hookimpl``. An entry point
in the group ``dispatchkit`` names the plugin. A plugin imports only public names of dispatchkit.
For example::

    # pyproject.toml
    [project.entry-points.dispatchkit]
    smallest = "dispatchkit_smallest.plugin"

    # dispatchkit_smallest/plugin.py
    from dispatchkit.hookspecs import PolicySpec, hookimpl
    from dispatchkit_smallest.policy import SmallestPolicy

    @hookimpl
    def dispatchkit_register_policies():
        return [PolicySpec("smallest", SmallestPolicy, summary="Smallest captured bucket")]

No hook runs in a step. Events such as a capture, a swap or a policy error are sent to observers,
which are registered with ``dispatchkit_register_observers``.

A ``register`` hook is called once, when its plugin is loaded, on the loading thread. It returns a
list or tuple of records, which may be empty. To look up a name, a runner loads all installed
plugins by default, and the process may be forked later. The hook must therefore not use a device,
open files or ports, print, or import modules that only a factory needs. If the hook raises, or
returns anything but a list or tuple of records, the whole plugin is skipped.

If two plugins claim the same name, a warning names both. Precedence does not depend on the order of
``sys.path``. Built-in names come first, unless ``load_plugins`` lists them in ``replace``. Plugins
passed to ``load_plugins`` as objects follow, then the distribution named ``dispatchkit-<name>``,
then all other distributions in alphabetical order.

A hook function accepts the documented arguments or a subset, by name and without defaults. Hook
wrappers are refused. Later versions may add arguments to hooks and fields to records; only major
versions rename or remove them.
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
            "made of letters, digits, '.', '_', '@' and '-', and start with a letter or digit",
        )


def _check_callable(record: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not callable(value):
        raise ConfigError(f"{type(record).__name__}.{attribute.name}", value, "callable")


def _check_text(record: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{type(record).__name__}.{attribute.name}", value, "a string")


@attrs.frozen
class Spec:
    """A name and the factory that creates the named object.

    Attributes:
        name: The name by which users select the object.
        factory: Function that returns a new object. It is called with the user's options as keyword
            arguments, and imports other modules only when called.
        summary: One-line description for listings.
    """

    kind: ClassVar[str]
    hook: ClassVar[str]

    name: str = attrs.field(validator=_check_name)
    factory: Callable[..., Any] = attrs.field(validator=_check_callable)
    summary: str = attrs.field(default="", validator=_check_text)


@attrs.frozen
class PolicySpec(Spec):
    """A policy; see ``dispatchkit.dispatch.policy`` for its required and optional methods."""

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

    A runner calls the factory with the argument ``device``: a ``torch.device``, or a name such as
    ``cuda:1``. For the current device, the runner passes no argument. If the factory raises an
    ImportError, the message should say what to install.
    """

    kind: ClassVar[str] = "backend"
    hook: ClassVar[str] = "dispatchkit_register_backends"


@attrs.frozen
class ObserverSpec(Spec):
    """An observer, which receives events through methods such as ``on_capture``.

    See ``dispatchkit.observe.events`` for the events and the rules for callbacks.
    """

    kind: ClassVar[str] = "observer"
    hook: ClassVar[str] = "dispatchkit_register_observers"


@attrs.frozen
class CommandSpec(Spec):
    """A subcommand of the ``dispatchkit`` command line.

    The factory has no options and returns the command's function, whose parameters have typer's
    annotations and whose docstring is the help text. The factory imports the function only when
    called, because typer and rich may be missing when plugins are loaded. See ``dispatchkit.cli``.
    """

    kind: ClassVar[str] = "command"
    hook: ClassVar[str] = "dispatchkit_register_commands"


#: The record type of each ``register`` hook.
RECORDS: tuple[type[Spec], ...] = (
    PolicySpec,
    LanePolicySpec,
    BackendSpec,
    ObserverSpec,
    CommandSpec,
)


@hookspec
def dispatchkit_register_policies() -> Sequence[PolicySpec]:  # type: ignore[empty-body]
    """Return the policies that this plugin provides.

    Example:
        return [PolicySpec("smallest", SmallestPolicy)]
    """


@hookspec
def dispatchkit_register_lane_policies() -> Sequence[LanePolicySpec]:  # type: ignore[empty-body]
    """Return the lane policies that this plugin provides.

    A lane policy chooses the lane (a stream with its own buffers and graphs) for each step. It can
    be combined with any policy.

    Example:
        return [LanePolicySpec("round-robin", RoundRobin)]
    """


@hookspec
def dispatchkit_register_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Return the backends that this plugin provides.

    Example:
        return [BackendSpec("hip", make_hip_backend, summary="HIP graphs")]
    """


@hookspec
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:  # type: ignore[empty-body]
    """Return the observers that this plugin provides.

    An observer is created when the user requests it by name. Events call its methods directly, not
    through hooks.

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
    """Choose the policy for a configuration if the user does not choose one.

    Called on the thread that creates a dispatcher, while no capture is in progress. The hook must
    not use a device. The first result other than None is used; the order of plugins is unspecified.

    Args:
        config: The dispatcher's sizes (in tokens), limits and modes; read-only.

    Returns:
        The name of a registered policy, or None to leave the choice to other plugins. If all return
        None, the default policy is used.

    Raises:
        Exception: Any exception becomes a PluginError that names the plugin, and the dispatcher
            is not created. An unknown name is refused as if the user had given it.

    Example:
        return "multi" if config.max_loras > 8 else None
    """
