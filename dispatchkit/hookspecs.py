"""The whole contract with plugins: every hook, by phase of life.

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

The verb of a hook's name tells how it is called:

- ``dispatchkit_register_<things>``: collected once from each plugin when it is loaded. Returns
  a list or tuple of records. What raises, or returns something else, undoes the whole plugin.
- ``dispatchkit_select_<one>``: the first answer that is not None counts. Plugins are asked in
  no promised order. What raises is an error that names the plugin.
- ``dispatchkit_on_<event>``: every plugin is told; what is returned is ignored. One frozen
  argument, ``event``, whose fields may grow. What raises is logged with the plugin's name, the
  others are told all the same, and after three faults in a row it is not called any more. A
  runner may be in the middle of a step or a capture then, and lets no other thread in: a hook
  may ask that runner things, and must not wait for another thread that calls it.

No hook is called per step: a step reads a table. A hook takes the arguments listed or fewer,
by name, without defaults. Old-style wrappers (``hookwrapper=True``) are refused everywhere;
wrappers (``wrapper=True``) may only go around ``select`` hooks. Specs grow by arguments and
events by fields; neither is renamed or removed but in a major version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pluggy import HookimplMarker, HookspecMarker

from dispatchkit._plugin_records import (
    BackendSpec,
    CommandSpec,
    LanePolicySpec,
    ObserverSpec,
    PlannerSpec,
    PolicySpec,
)
from dispatchkit.observe.events import (
    CaptureEvent,
    CaptureFailedEvent,
    EvictEvent,
    PluginRegisteredEvent,
    PolicyErrorEvent,
    PolicySwappedEvent,
)

if TYPE_CHECKING:
    from dispatchkit.keys.config import DispatchConfig

__all__ = [
    "BackendSpec",
    "CaptureEvent",
    "CaptureFailedEvent",
    "CommandSpec",
    "EvictEvent",
    "LanePolicySpec",
    "ObserverSpec",
    "PlannerSpec",
    "PluginRegisteredEvent",
    "PolicyErrorEvent",
    "PolicySpec",
    "PolicySwappedEvent",
    "hookimpl",
]

hookspec: HookspecMarker = HookspecMarker("dispatchkit")
hookimpl: HookimplMarker = HookimplMarker("dispatchkit")


# --- loading: what a plugin brings ---------------------------------------------------------------


@hookspec
def dispatchkit_register_policies() -> Sequence[PolicySpec]:  # type: ignore[empty-body]
    """Return the policies that this plugin brings.

    Called:
        Once per loading, on the thread that loads plugins. No capture is underway. It must
        not touch the device, nor read its properties.

    Rule:
        Collected. Two plugins that claim one name are both named in a report, and one rule
        decides, whatever the order of ``sys.path``: what the user passed in, then the
        distribution called ``dispatchkit-<name>``, then the first in the alphabet.

    Returns:
        A list or tuple of ``PolicySpec``; empty for none. None is refused.

    Raises:
        Anything: the whole plugin is undone and reported.

    Example:
        return [PolicySpec("smallest", SmallestPolicy)]
    """


@hookspec
def dispatchkit_register_lane_policies() -> Sequence[LanePolicySpec]:  # type: ignore[empty-body]
    """Return the lane policies that this plugin brings.

    A lane policy chooses the lane (one stream with its own pool and buffers) of each step;
    it combines with any policy.

    Called:
        Once per loading, on the thread that loads plugins. No capture is underway. It must
        not touch the device, nor make streams.

    Rule:
        Collected; names are settled as for policies.

    Returns:
        A list or tuple of ``LanePolicySpec``; empty for none. None is refused.

    Raises:
        Anything: the whole plugin is undone and reported.

    Example:
        return [LanePolicySpec("round-robin", RoundRobin)]
    """


@hookspec
def dispatchkit_register_backends() -> Sequence[BackendSpec]:  # type: ignore[empty-body]
    """Return the backends that this plugin brings.

    Called:
        Once per loading, on the thread that loads plugins. No capture is underway. It must
        not touch the device: a process forked afterwards must still be able to use it. The
        factory may, as it is called when a user chooses the backend.

    Rule:
        Collected; names are settled as for policies. Built-in names (``tape``, ``cuda``)
        stay with dispatchkit unless the user asks for a replacement.

    Returns:
        A list or tuple of ``BackendSpec``; empty for none. None is refused.

    Raises:
        Anything: the whole plugin is undone and reported.

    Example:
        return [BackendSpec("hip", make_hip_backend, summary="HIP graphs")]
    """


@hookspec
def dispatchkit_register_planners() -> Sequence[PlannerSpec]:  # type: ignore[empty-body]
    """Return the planners of capture sizes that this plugin brings.

    Called:
        Once per loading, on the thread that loads plugins. No capture is underway. It must
        not touch the device; planning needs none.

    Rule:
        Collected; names are settled as for policies.

    Returns:
        A list or tuple of ``PlannerSpec``; empty for none. None is refused.

    Raises:
        Anything: the whole plugin is undone and reported.

    Example:
        return [PlannerSpec("powers-of-two", PowersOfTwo)]
    """


@hookspec
def dispatchkit_register_observers() -> Sequence[ObserverSpec]:  # type: ignore[empty-body]
    """Return the observers and exporters that this plugin brings.

    An observer is made by its factory when the user asks for it by name, and is then called
    directly, not through hooks; this is the way for anything that wants to hear often.

    Called:
        Once per loading, on the thread that loads plugins. No capture is underway. It must
        not touch the device, open ports or files: the factory does.

    Rule:
        Collected; names are settled as for policies.

    Returns:
        A list or tuple of ``ObserverSpec``; empty for none. None is refused.

    Raises:
        Anything: the whole plugin is undone and reported.

    Example:
        return [ObserverSpec("prometheus", PrometheusObserver)]
    """


@hookspec
def dispatchkit_register_commands() -> Sequence[CommandSpec]:  # type: ignore[empty-body]
    """Return the commands that this plugin adds to the command line.

    Called:
        Once per loading, on the thread that loads plugins; dispatchers load them too, and
        not only the command line. No capture is underway. It must not touch the device, nor
        print, nor import what only the command needs.

    Rule:
        Collected; names are settled as for policies.

    Returns:
        A list or tuple of ``CommandSpec``; empty for none. None is refused.

    Raises:
        Anything: the whole plugin is undone and reported.

    Example:
        return [CommandSpec("compare", compare, help="Compare two traces")]
    """


@hookspec(historic=True)
def dispatchkit_on_plugin_registered(event: PluginRegisteredEvent) -> None:
    """Hear that a plugin was loaded.

    Called:
        Once for each plugin, this one too, on the thread that loads plugins. A plugin that
        is loaded late hears of the earlier ones as well: this hook alone is historic. No
        capture is underway; it must not touch the device.

    Rule:
        Every plugin is told; what is returned is ignored.

    Args:
        event: The plugin's name, distribution, version and what it registered.

    Raises:
        Anything: logged with the plugin's name; switched off after three faults in a row.

    Example:
        log.info("dispatchkit has %s %s", event.name, event.version)
    """


# --- building: what is chosen --------------------------------------------------------------------


@hookspec(firstresult=True)
def dispatchkit_select_policy(config: DispatchConfig) -> str | None:
    """Choose the policy for a configuration, where the user named none.

    Called:
        When a dispatcher is built, on the thread that builds it. No capture is underway. It
        must not touch the device.

    Rule:
        The first answer that is not None counts. May be wrapped (``wrapper=True``).

    Args:
        config: Sizes (tokens), limits and modes of the dispatcher; read only.

    Returns:
        The name of a registered policy, or None: not mine. When all answer None the
        default policy is taken.

    Raises:
        Anything: a PluginError that names the plugin; no dispatcher is built. An unknown
        name is refused as if the user had given it.

    Example:
        return "multi" if config.max_loras > 8 else None
    """


@hookspec
def dispatchkit_on_policy_swapped(event: PolicySwappedEvent) -> None:
    """Hear that another policy or configuration decides from now on.

    Called:
        After the new table is in place, on the thread that swapped; also for the first
        policy (epoch 0). No capture is underway; it must not touch the device.

    Rule:
        Every plugin is told; what is returned is ignored.

    Args:
        event: The policy, the one before it and the epoch.

    Raises:
        Anything: logged with the plugin's name; switched off after three faults in a row.

    Example:
        metrics.epoch.set(event.epoch)
    """


# --- running: what happened ----------------------------------------------------------------------


@hookspec
def dispatchkit_on_policy_error(event: PolicyErrorEvent) -> None:
    """Hear that a policy raised or broke a hard constraint.

    Called:
        On the thread that dispatched the batch, once for each cell of the table that it
        happened in, before the step runs eager. No capture of dispatchkit is underway. It must
        not touch the device, and be quick: a step waits for it.

    Rule:
        Every plugin is told; what is returned is ignored.

    Args:
        event: The policy, its origin, the method and what it did.

    Raises:
        Anything: logged with the plugin's name; switched off after three faults in a row.

    Example:
        alerts.send(f"{event.policy}: {event.reason}")
    """


@hookspec
def dispatchkit_on_capture(event: CaptureEvent) -> None:
    """Hear that a graph was captured.

    Called:
        On the thread that captured, when the capture has ended, before the first replay. It
        may read device memory figures; it must not queue work on the device nor capture.

    Rule:
        Every plugin is told; what is returned is ignored.

    Args:
        event: The key, runtime mode, bucket (tokens), lane, time (µs) and pool growth
            (bytes).

    Raises:
        Anything: logged with the plugin's name; switched off after three faults in a row.

    Example:
        metrics.captures.labels(event.runtime_mode).inc()
    """


@hookspec
def dispatchkit_on_capture_failed(event: CaptureFailedEvent) -> None:
    """Hear that a capture failed.

    Called:
        On the thread that captured, when stream, generators and memory are as before and
        the key is marked. It may read device memory figures; it must not queue work on the
        device nor capture.

    Rule:
        Every plugin is told; what is returned is ignored.

    Args:
        event: The key, runtime mode, bucket (tokens), lane, reason and message.

    Raises:
        Anything: logged with the plugin's name; switched off after three faults in a row.

    Example:
        log.warning("no graph for %s: %s", event.key, event.reason)
    """


@hookspec
def dispatchkit_on_evict(event: EvictEvent) -> None:
    """Hear that a captured graph was given up.

    Called:
        On the thread that evicted, when the graph can no longer be chosen. A replay of it
        may still be running; it must not queue work on the device nor capture.

    Rule:
        Every plugin is told; what is returned is ignored.

    Args:
        event: The key, runtime mode, bucket (tokens), lane, reason and bytes given back.

    Raises:
        Anything: logged with the plugin's name; switched off after three faults in a row.

    Example:
        metrics.evictions.labels(event.reason).inc()
    """
