"""Keys that all ranks have: a key that is lost on any rank is used by none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dispatchkit.dispatch import Dispatcher, Reason
from dispatchkit.keys import GraphKey
from dispatchkit.registry import KeyState, RegistryEvent


class SharedKeys:
    """Withhold, on this rank, the keys that another rank cannot run.

    A key is withheld by disabling it in the registry, and enabled again once all ranks have it.
    Every change of a key must be exchanged before the next decision.

    Args:
        dispatcher: The dispatcher with the keys.

    Attributes:
        has_news: A key changed here since the last exchange.
        withheld: Keys that are ready here and not used, with the ranks (by index) that
            cannot run them and why.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._registry = dispatcher, dispatcher.registry
        self.has_news: bool = True
        self.withheld: dict[GraphKey, dict[int, str]] = {}
        self._disabled_by_user: set[GraphKey] = set()
        self._is_merging = False
        self._unsubscribe = self._registry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening to the registry; withheld keys stay withheld."""
        self._unsubscribe()

    def report(self) -> str:
        """Return which keys this rank has and which it cannot run, as text."""
        self.has_news = False
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
        """Withhold keys that are not ready on every rank, and restore those that now are.

        Args:
            reports: The reports of all ranks, in order.

        Returns:
            The keys that some rank cannot run, with the ranks (by index) and the reasons.
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
                    self._give_back(key)
                    continue
                self.withheld[key] = why
                if self._registry.is_enabled(key):
                    self._registry.set_enabled(False, key=key)
        return lost

    def give_all_back(self) -> None:
        """Restore all withheld keys, before captures."""
        with self._merging():
            for key in tuple(self.withheld):
                self._give_back(key)

    # -- inside -------------------------------------------------------------------------

    @contextmanager
    def _merging(self) -> Iterator[None]:
        # Holds the registry's lock: changes by other threads meanwhile wait, and count as news.
        with self._registry.lock:
            self._is_merging = True
            try:
                yield
            finally:
                self._is_merging = False

    def _give_back(self, key: GraphKey) -> None:
        """Restore a withheld key; a key that the user disabled stays disabled."""
        if self.withheld.pop(key, None) is not None and key not in self._disabled_by_user:
            self._registry.set_enabled(True, key=key)

    def _why_not(self, key: GraphKey) -> str | None:
        """Return why a key cannot run here, ignoring what is withheld for other ranks."""
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
        self.has_news = True
        if event.after is None:
            self.withheld.pop(event.key, None)
            self._disabled_by_user.discard(event.key)
        if event.before is event.after and not event.by_mode:
            # The user enabled or disabled the key, which may be withheld at the same time.
            if event.reason == "disabled":
                self._disabled_by_user.add(event.key)
            elif event.reason == "enabled":
                self._disabled_by_user.discard(event.key)
