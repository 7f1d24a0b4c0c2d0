"""Notices: send rare events to the observers of a runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatchkit.errors import PolicyError
from dispatchkit.observe.events import PolicyErrorEvent, PolicySwappedEvent

if TYPE_CHECKING:
    from dispatchkit.plugins import PluginSet


class Notices:
    """Sends the events of a runner to observers.

    Args:
        plugins: The plugins whose observers receive events, or None.
    """

    def __init__(self, plugins: PluginSet | None) -> None:
        self._plugins = plugins

    def send(self, event: object) -> None:
        """Send an event to all observers; log their exceptions."""
        if self._plugins is not None:
            self._plugins.notifier.notify(event)

    def policy_swapped(self, policy: str, previous: str | None, epoch: int) -> None:
        """Notify the observers of a policy swap."""
        self.send(PolicySwappedEvent(policy=policy, epoch=epoch, previous=previous))

    def policy_at_fault(self, error: PolicyError, num_tokens: int | None, epoch: int) -> None:
        """Notify the observers of a policy error."""
        self.send(
            PolicyErrorEvent(
                policy=error.policy,
                method=error.hook,
                reason=str(error),
                origin=error.origin,
                num_tokens=num_tokens,
                epoch=epoch,
            )
        )
