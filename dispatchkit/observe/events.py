"""Events, and the observers that receive them.

An observer is any object with callbacks. A callback is a method named after an event:
``on_capture(event)`` is called for each ``CaptureEvent``, and so on. The event is a frozen record;
later versions may add fields.

Events such as captures, evictions and policy swaps are rare: a warm step sends none. A callback
runs on the thread where the event occurs, possibly during a step or a capture. Until the callback
returns, other threads cannot enter the runner. A callback may query the runner, but it must not
wait for a thread that calls the runner, and must neither queue work on the device nor capture. Its
return value is ignored. Exceptions are logged with the name of the observer; after three
consecutive exceptions, the callback is disabled.

``Notifier`` has a tuple of subscriptions for each event class. Without subscribers, an event costs
one dictionary look-up. ``has_subscribers`` lets the caller skip creating the event.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import attrs

_log = logging.getLogger("dispatchkit.observers")

#: Default number of consecutive exceptions after which an observer's callback is disabled.
MAX_FAULTS = 3


@attrs.frozen(kw_only=True)
class CaptureEvent:
    """A graph was captured and can be replayed.

    Sent after the capture and before the first step that replays the graph.

    Attributes:
        key: The graph key, as text.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        num_tokens: Capture size in tokens.
        lane: Number of the lane that captured the graph.
        elapsed_us: Host time in microseconds, including the warmup; None if not measured.
        num_bytes: Growth of the lane's pool and shared outputs in bytes; None if not measured.
            Graphs of one pool share memory, so this is not the size of the graph.
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
    """A capture failed; the key is marked as failed.

    Steps do not use the key until a later capture succeeds. Sent after the capture has ended and
    its changes to state and random generators have been undone.

    Attributes:
        key: The graph key, as text.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        num_tokens: Capture size in tokens.
        lane: Number of the lane that attempted the capture.
        reason: Short reason for counters, such as ``host_sync``, ``out_of_memory`` or ``error``.
        message: The complete error message.
        elapsed_us: Host time in microseconds until the failure; None if not measured.
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
    """A graph was evicted; later steps do not use it.

    Attributes:
        key: The graph key, as text.
        runtime_mode: ``FULL`` or ``PIECEWISE``.
        num_tokens: Capture size in tokens.
        lane: Number of the lane that had the graph.
        reason: Short reason: ``budget``, ``requested``, ``invalidated``, or ``replaced`` (a graph
            captured outside the runner took its place).
        num_bytes: Decrease of the lane's pool and shared outputs in bytes; None if not measured, as
            for ``invalidated``. Often 0, because graphs of one pool share memory.
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
    """A policy or configuration took effect, with an empty decision table.

    Also sent for the initial policy (epoch 0).

    Attributes:
        policy: Name of the new policy.
        epoch: Number of the new epoch, starting at 0.
        previous: Name of the previous policy; None for the initial policy.
    """

    callback: ClassVar[str] = "on_policy_swapped"

    policy: str
    epoch: int
    previous: str | None = None


@attrs.frozen(kw_only=True)
class PolicyErrorEvent:
    """A policy raised, returned an invalid value or violated a hard constraint while serving.

    If ``decide`` is at fault, the step runs eager, or raises in strict mode. The event is sent
    before this step, once for each affected table cell. The step waits for the callbacks, so they
    should be fast.

    Attributes:
        policy: Name of the policy at fault.
        method: The method or attribute at fault: ``decide``, ``observe`` or ``pace``, or ``choose``
            of a lane policy.
        reason: The error, as text.
        origin: The distribution that provides the policy, or the name under which it was passed in;
            may be empty.
        num_tokens: Tokens of the batch before padding; None if there was no batch.
        epoch: Epoch in which the error occurred.
    """

    callback: ClassVar[str] = "on_policy_error"

    policy: str
    method: str
    reason: str
    origin: str = ""
    num_tokens: int | None = None
    epoch: int = 0


#: All event classes.
EVENTS: tuple[type[Any], ...] = (
    PolicySwappedEvent,
    PolicyErrorEvent,
    CaptureEvent,
    CaptureFailedEvent,
    EvictEvent,
)


class Subscription:
    """A subscribed callback; its exceptions are logged instead of propagated.

    Attributes:
        event_type: Class of the events that the callback receives.
        source: Owner of the callback, for log messages.
        last_fault: The last exception of the callback, as text; empty if it has not raised.
        is_active: False once the callback has been disabled.
    """

    def __init__(
        self,
        event_type: type[Any],
        callback: Callable[[Any], object],
        source: str,
        *,
        max_faults: int = MAX_FAULTS,
        on_disabled: Callable[[Subscription], None] | None = None,
    ) -> None:
        self.event_type = event_type
        self.source = source
        self.last_fault: str = ""
        self.is_active: bool = True
        self._callback = callback
        self._max_faults = max_faults
        self._faults_in_a_row = 0
        self._on_disabled = on_disabled

    def __repr__(self) -> str:
        state = "active" if self.is_active else "disabled"
        return f"<Subscription of {self.source} to {self.event_type.__name__}, {state}>"

    def __call__(self, event: Any) -> None:
        """Call the callback with an event; log and count exceptions."""
        if not self.is_active:
            return
        try:
            self._callback(event)
        # An observer must not stop a step, even with SystemExit. Ctrl-C still does.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self._fault(error)
        else:
            self._faults_in_a_row = 0

    def _fault(self, error: BaseException) -> None:
        self._faults_in_a_row += 1
        self.last_fault = f"{type(error).__name__}: {error}"
        _log.error(
            "Observer %s raised on %s; the runner and the other observers continue.",
            self.source,
            self.event_type.__name__,
            exc_info=error,
        )
        if self._faults_in_a_row >= self._max_faults:
            self.is_active = False
            times = self._faults_in_a_row
            _log.error(
                "Observer %s is disabled for %s after %s. Last exception: %s.",
                self.source,
                self.event_type.__name__,
                "an exception" if times == 1 else f"{times} consecutive exceptions",
                self.last_fault,
            )
            if self._on_disabled is not None:
                self._on_disabled(self)


class Notifier:
    """The subscriptions to each event class; callbacks run in the order of subscription.

    Thread safety: any thread may call any method. Tuples of subscriptions are immutable, so a new
    subscription does not affect an event that is being delivered.
    """

    def __init__(self, *, max_faults: int = MAX_FAULTS) -> None:
        self._max_faults = max_faults
        self._by_type: dict[type[Any], tuple[Subscription, ...]] = {}
        self._lock = threading.Lock()

    def subscribe(
        self, event_type: type[Any], callback: Callable[[Any], object], source: str
    ) -> Subscription:
        """Subscribe a callback to events of one class.

        Args:
            event_type: Exact class of the events; events of subclasses are not delivered.
            callback: Function that is called with each event, on the thread where the event occurs.
            source: Owner of the callback, for log messages.

        Returns:
            The subscription, to pass to ``unsubscribe``.
        """
        subscription = Subscription(
            event_type,
            callback,
            source,
            max_faults=self._max_faults,
            on_disabled=self.unsubscribe,
        )
        with self._lock:
            self._by_type[event_type] = (*self._by_type.get(event_type, ()), subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a subscription; a second call has no effect."""
        with self._lock:
            now = self._by_type.get(subscription.event_type, ())
            rest = tuple(one for one in now if one is not subscription)
            if rest:
                self._by_type[subscription.event_type] = rest
            else:
                self._by_type.pop(subscription.event_type, None)

    def attach(self, observer: object, source: str) -> tuple[Subscription, ...]:
        """Subscribe an observer's methods that are named after events.

        The ``callback`` attribute of each event class is the name of the observer's method, such as
        ``on_capture``.

        Returns:
            The subscriptions; empty if the observer has no method named after an event.
        """
        pairs = []
        for event_type in EVENTS:
            method = getattr(observer, event_type.callback, None)
            if callable(method):
                pairs.append((event_type, method))
        return tuple(self.subscribe(kind, method, source) for kind, method in pairs)

    def has_subscribers(self, event_type: type[Any]) -> bool:
        """Return whether an event class has subscribers."""
        return event_type in self._by_type

    def notify(self, event: object) -> None:
        """Call all subscribers of the event's class; exceptions are logged, not raised."""
        for subscription in self._by_type.get(type(event), ()):
            subscription(event)
