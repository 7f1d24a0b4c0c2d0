"""What stands between pluggy and the functions of plugins.

pluggy calls hooks; it neither contains what an observer raises nor tells whose hook answered.
The functions made here do, and are what it gets to see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from dispatchkit._plugin_check import PROJECT, Implementation
from dispatchkit._plugin_records import Origin
from dispatchkit.observe.events import Subscription

if TYPE_CHECKING:
    import pluggy


def new_manager() -> pluggy.PluginManager:
    """Return a relay that knows the contract and nobody else."""
    import pluggy

    from dispatchkit import hookspecs

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def without_event(function: Callable[[], object]) -> Callable[[Any], object]:
    """Return an observing hook that takes no event as one that may be given it."""
    return lambda _event: function()


def relayed(subscription: Subscription) -> Callable[..., Any]:
    """Return a hook implementation that tells a subscription, with its containment."""
    from dispatchkit.hookspecs import hookimpl

    @hookimpl
    def tell(event: Any) -> None:
        subscription(event)

    return tell


def traced(
    implementation: Implementation, origin: Origin, outcomes: list[tuple[object, Origin]]
) -> Callable[..., Any]:
    """Return a select_policy hook that notes what it came out with, as pluggy does not tell whose.

    Exceptions pass as they are, so that a wrapper can still catch them by their class.
    """
    function, takes = implementation.function, bool(implementation.takes)

    def answer(config: Any) -> Any:
        try:
            result = function(config) if takes else function()
        except (Exception, SystemExit) as error:
            outcomes.append((error, origin))
            raise
        outcomes.append((result, origin))
        return result

    def wrap(config: Any) -> Any:
        try:
            result = yield from function(config) if takes else function()
        except (Exception, SystemExit) as error:
            outcomes.append((error, origin))
            raise
        outcomes.append((result, origin))
        return result

    function_seen: Any = wrap if implementation.options.get("wrapper") else answer
    function_seen.dispatchkit_impl = implementation.options
    return cast("Callable[..., Any]", function_seen)
