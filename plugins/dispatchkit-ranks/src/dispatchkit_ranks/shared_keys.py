"""Restrict keys to those that all ranks can run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dispatchkit.dispatch import Dispatcher, Reason
from dispatchkit.keys import GraphKey
from dispatchkit.registry import KeyState, RegistryEvent


class SharedKeys:
    """The keys of a rank, restricted to those that all ranks can run.

    Withheld keys are disabled in the registry, and enabled again when all ranks can run them.
    Every change to a key must be exchanged before the next decision.

    Args:
        dispatcher: Dispatcher whose keys are restricted.

    Attributes:
        has_changes: Whether a key changed on this rank since the last exchange.
        withheld: Keys that this rank can run but another rank cannot, with the reason by rank
            index.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._registry = dispatcher, dispatcher.registry
        self.has_changes: bool = True
        self.withheld: dict[GraphKey, dict[int, str]] = {}
        self._disabled_by_user: set[GraphKey] = set()
        self._is_merging = False
        self._unsubscribe = self._registry.subscribe(self._on_event)

    def close(self) -> None:
        """Unsubscribe from the registry; withheld keys stay withheld."""
        self._unsubscribe()

    def report(self) -> str:
        """Return the keys that this rank can and cannot run, as text."""
        self.has_changes = False
        lost = {}
        ready = []
        for key in self._registry:
            why = self._why_not(key)
            if why is None:
                ready.append(str(key))
            else:
                entry = self._registry.get(key)
                lost[str(key)] = (entry.reason if entry is not None else "") or why
        return json.dumps({"ready": sorted(ready), "lost": lost})

    def merge_reports(self, reports: Sequence[str]) -> dict[GraphKey, dict[int, str]]:
        """Withhold keys that some rank cannot run, and restore keys that all ranks can run.

        Args:
            reports: The return value of ``report`` on each rank, in rank order.

        Returns:
            The keys that some rank cannot run, with the reason by rank index.
        """
        everyone = [json.loads(text) for text in reports]
        ready = [set(each["ready"]) for each in everyone]
        lost: dict[GraphKey, dict[int, str]] = {}
        with self._merging():
            for key in tuple(self._registry):
                name = str(key)
                why = {
                    rank: each["lost"].get(name, str(Reason.NO_KEY))
                    for rank, each in enumerate(everyone)
                    if name not in ready[rank]
                }
                if why:
                    lost[key] = why
                if not why or self._why_not(key) is not None:
                    self._restore(key)
                    continue
                self.withheld[key] = why
                if self._registry.is_enabled(key):
                    self._registry.set_enabled(False, key=key)
        return lost

    def restore_all(self) -> None:
        """Restore all withheld keys."""
        with self._merging():
            for key in tuple(self.withheld):
                self._restore(key)

    # -- internals ----------------------------------------------------------------------

    @contextmanager
    def _merging(self) -> Iterator[None]:
        # Hold the lock, so that changes by other threads wait and are recorded afterwards.
        with self._registry.lock:
            self._is_merging = True
            try:
                yield
            finally:
                self._is_merging = False

    def _restore(self, key: GraphKey) -> None:
        """Restore a withheld key; a key that the user disabled stays disabled."""
        if self.withheld.pop(key, None) is not None and key not in self._disabled_by_user:
            self._registry.set_enabled(True, key=key)

    def _why_not(self, key: GraphKey) -> str | None:
        """Return why this rank cannot run a key; None if it can, even if the key is withheld."""
        why = self._dispatcher.graphs.why_not(key)
        if why != Reason.DISABLED or key not in self.withheld:
            return why
        if key.mode in self._registry.disabled_modes or key in self._disabled_by_user:
            return Reason.DISABLED
        entry = self._registry.get(key)
        if entry is None or entry.state is not KeyState.CAPTURED:
            return entry.reason or str(entry.state) if entry is not None else Reason.NO_KEY
        return None

    def _on_event(self, event: RegistryEvent) -> None:
        if self._is_merging:
            return
        self.has_changes = True
        if event.after is None:
            self.withheld.pop(event.key, None)
            self._disabled_by_user.discard(event.key)
        if event.before is event.after and not event.by_mode:
            # The user enabled or disabled the key, which may also be withheld.
            if event.reason == "disabled":
                self._disabled_by_user.add(event.key)
            elif event.reason == "enabled":
                self._disabled_by_user.discard(event.key)
