"""Events, and the observers that are called with them.

An observer is any object with methods named after events: ``on_capture(event)`` is called with
each ``CaptureEvent``, and so on. It takes that one frozen record, whose fields may grow.

Events are rare (a capture, an eviction, another policy); nothing here runs on the path of a step. A
callback runs on the thread on which the event happens, possibly in the middle of a step or a
capture, while no other thread can enter that runner. It may query the runner, but must not wait for
another thread that calls the runner, queue work on the device, or capture. Its return value is
ignored. An exception it raises is logged with its name, and after three faults in a row it is
switched off.

``Notifier`` keeps one tuple of callables per kind of event. Without listeners, an event costs one
dictionary look-up, and ``listens`` lets the caller skip building it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import attrs

_log = logging.getLogger("dispatchkit.observers")

#: Faults in a row after which an observer's callback is no longer called.
MAX_FAULTS = 3


@attrs.frozen(kw_only=True)
class CaptureEvent:
    """A graph was captured and may now be replayed.

    Sent after the capture has ended, before the first replay.

    Attributes:
        key: The graph key, as text.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        num_tokens: Size of the bucket in tokens.
        lane: Number of the lane it was captured on.
        elapsed_us: Microseconds on the host, warm-up included.
        num_bytes: Bytes by which the lane's pool grew. Graphs of one pool share memory, so this is
            not the size of the graph. None if the backend cannot tell.
    """

    callback: ClassVar[str] = "on_capture"

    key: str
    runtime_mode: str
    num_tokens: int
    lane: int = 0
    elapsed_us: float | None = None
    num_bytes: int | None = None


@attrs.frozen(kw_only=True)
class CaptureFailedEvent:
    """A capture failed; the key is marked, and its steps run eager with that reason.

    Sent after stream, generators and memory were restored.

    Attributes:
        key: The graph key, as text.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        num_tokens: Size of the bucket in tokens.
        lane: Number of the lane of the attempt.
        reason: A short word for counters (``host_sync``, ``out_of_memory``, ``error``).
        message: The whole error message.
        elapsed_us: Microseconds on the host until it failed.
    """

    callback: ClassVar[str] = "on_capture_failed"

    key: str
    runtime_mode: str
    num_tokens: int
    lane: int = 0
    reason: str = "error"
    message: str = ""
    elapsed_us: float | None = None


@attrs.frozen(kw_only=True)
class EvictEvent:
    """A captured graph was evicted; steps no longer choose it.

    A replay of it may still be running.

    Attributes:
        key: The graph key, as text.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        num_tokens: Size of the bucket in tokens.
        lane: Number of the lane it was on.
        reason: A short word (``budget``, ``requested``, ``invalidated``).
        num_bytes: Bytes by which the lane's pool shrank; often 0, since graphs of one pool share
            memory. None if the backend cannot tell.
    """

    callback: ClassVar[str] = "on_evict"

    key: str
    runtime_mode: str
    num_tokens: int
    lane: int = 0
    reason: str = ""
    num_bytes: int | None = None


@attrs.frozen(kw_only=True)
class PolicySwappedEvent:
    """Another policy or configuration took effect, with an empty table.

    Also sent for the first policy (epoch 0).

    Attributes:
        policy: Name of the policy that decides now.
        epoch: Number of the installed table, starting at 0.
        previous: Name of the policy that decided before; None for the first.
        reason: Why, in words; may be empty.
    """

    callback: ClassVar[str] = "on_policy_swapped"

    policy: str
    epoch: int
    previous: str | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class PolicyErrorEvent:
    """A policy raised or broke a hard constraint; the step runs eager, or another policy decides.

    Sent once per table cell in which it happens, before the step runs. The step waits, so callbacks
    should be quick.

    Attributes:
        policy: Name of the policy.
        method: The method (``declare``, ``decide``, ``observe``).
        reason: What the policy did, in words.
        origin: Distribution and version that provides the policy.
        num_tokens: Unpadded tokens of the batch; None if no batch was involved.
        epoch: Epoch of the table that was being filled.
    """

    callback: ClassVar[str] = "on_policy_error"

    policy: str
    method: str
    reason: str
    origin: str = ""
    num_tokens: int | None = None
    epoch: int = 0


#: All event classes, in the order of a graph's life cycle.
EVENTS: tuple[type[Any], ...] = (
    PolicySwappedEvent,
    PolicyErrorEvent,
    CaptureEvent,
    CaptureFailedEvent,
    EvictEvent,
)


class Subscription:
    """One callback; exceptions it raises never reach the caller.

    Attributes:
        event_type: The class of event it is called with.
        source: The owner of the callback, for the log.
        last_fault: The last exception, as text; empty if it never raised.
        is_active: False after it was switched off.
    """

    def __init__(
        self,
        event_type: type[Any],
        callback: Callable[[Any], object],
        source: str,
        *,
        max_faults: int = MAX_FAULTS,
        on_switched_off: Callable[[Subscription], None] | None = None,
    ) -> None:
        self.event_type = event_type
        self.source = source
        self.last_fault: str = ""
        self.is_active: bool = True
        self._callback = callback
        self._max_faults = max_faults
        self._faults_in_a_row = 0
        self._on_switched_off = on_switched_off

    def __repr__(self) -> str:
        state = "active" if self.is_active else "switched off"
        return f"<Subscription of {self.source} to {self.event_type.__name__}, {state}>"

    def __call__(self, event: Any) -> None:
        """Call back with an event; log and count exceptions."""
        if not self.is_active:
            return
        try:
            self._callback(event)
        # An observer must not stop a step, not even by SystemExit; Ctrl-C still does.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._fault(error)
        else:
            self._faults_in_a_row = 0

    def _fault(self, error: BaseException) -> None:
        self._faults_in_a_row += 1
        self.last_fault = f"{type(error).__name__}: {error}"
        _log.error(
            "Observer %s raised on %s; the step and the other observers continue.",
            self.source,
            self.event_type.__name__,
            exc_info=error,
        )
        if self._faults_in_a_row >= self._max_faults:
            self.is_active = False
            _log.error(
                "Observer %s is switched off for %s after %d faults in a row; the last was %s.",
                self.source,
                self.event_type.__name__,
                self._faults_in_a_row,
                self.last_fault,
            )
            if self._on_switched_off is not None:
                self._on_switched_off(self)


class Notifier:
    """Notifies subscribers of events, in the order of their subscriptions.

    Thread safety: every method may be called from any thread. Tuples are replaced, never changed,
    so that a subscription does not affect an event in progress.
    """

    def __init__(self, *, max_faults: int = MAX_FAULTS) -> None:
        self._max_faults = max_faults
        self._by_type: dict[type[Any], tuple[Subscription, ...]] = {}
        self._lock = threading.Lock()

    def subscribe(
        self, event_type: type[Any], callback: Callable[[Any], object], source: str
    ) -> Subscription:
        """Subscribe a callback to events of exactly this class, until it is switched off.

        Args:
            event_type: Class of the events; subclasses are not delivered.
            callback: Called with the event, on the thread on which it happens.
            source: The owner of the callback, named in the log if it raises.

        Returns:
            The subscription, for ``unsubscribe``.
        """
        subscription = Subscription(
            event_type,
            callback,
            source,
            max_faults=self._max_faults,
            on_switched_off=self.unsubscribe,
        )
        with self._lock:
            self._by_type[event_type] = (*self._by_type.get(event_type, ()), subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop calling back; does nothing if already unsubscribed."""
        with self._lock:
            now = self._by_type.get(subscription.event_type, ())
            rest = tuple(one for one in now if one is not subscription)
            if rest:
                self._by_type[subscription.event_type] = rest
            else:
                self._by_type.pop(subscription.event_type, None)

    def attach(self, observer: object, source: str) -> tuple[Subscription, ...]:
        """Subscribe the methods of an observer that are named after an event.

        ``on_capture(event)`` is called with each ``CaptureEvent``, and so on: each kind of event
        names its ``callback``.

        Returns:
            The subscriptions; empty if it has no such method.
        """
        pairs = []
        for event_type in EVENTS:
            method = getattr(observer, event_type.callback, None)
            if callable(method):
                pairs.append((event_type, method))
        return tuple(self.subscribe(kind, method, source) for kind, method in pairs)

    def listens(self, event_type: type[Any]) -> bool:
        """Return whether anyone is subscribed; check before building a costly event."""
        return event_type in self._by_type

    def notify(self, event: object) -> None:
        """Notify every subscriber of the event's class; exceptions are logged, not raised."""
        for subscription in self._by_type.get(type(event), ()):
            subscription(event)
