"""What a runner tells observers of: cold events, through its plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.errors import PolicyError
from dispatchkit.observe.events import PolicyErrorEvent, PolicySwappedEvent

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet


class Notices:
    """Tells the observers of one runner.

    Args:
        plugins: Whose hooks and observers; None: nobody listens.
    """

    def __init__(self, plugins: PluginSet | None) -> None:
        self._plugins = plugins

    def tell(self, event: object) -> None:
        """Tell of an event; what observers raise is contained."""
        if self._plugins is not None:
            self._plugins.notifier.notify(event)

    def policy_swapped(self, policy: str, previous: str | None, epoch: int) -> None:
        """Tell that a policy, or a configuration, is in force."""
        self.tell(PolicySwappedEvent(policy=policy, epoch=epoch, previous=previous))

    def policy_at_fault(self, error: PolicyError, num_tokens: int | None, epoch: int) -> None:
        """Tell that a policy raised or broke a hard constraint."""
        self.tell(
            PolicyErrorEvent(
                policy=error.policy,
                method=error.hook,
                reason=str(error),
                origin=error.origin,
                num_tokens=num_tokens,
                epoch=epoch,
            )
        )
