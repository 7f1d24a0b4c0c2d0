"""Notes that ranks leave in the store when they stop, and the conclusions from them.

A failed collective shows only that some rank has a problem. The notes show which: a rank that
waited in vain leaves a note within moments, one that raised or left has said so, and a rank
without a note never arrived.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    TCPStore,
)

from dispatchkit.errors import RankError

from dispatchkit_ranks.verdict import Note, Verdict, listing, ranks_named, store_gone, verdict

_T = TypeVar("_T")
# One key for the notes of all ranks, so that one query finds out whether there are any.
_STOPPED = "stopped"


class Notes:
    """One agreement's part of the store.

    Every call has a time limit, even if the store's host is frozen: a client of the store
    then waits without a limit, so a thread makes the call and is abandoned if it hangs.

    Args:
        store: Any store of torch.distributed.
        prefix: Identifies this agreement among all users of the store.
        members: Global numbers of the ranks.
        rank: Index of this rank.
    """

    def __init__(self, store: Any, prefix: str, members: Sequence[int], rank: int) -> None:
        self._host = _host_of(store)
        # A separate connection, so that a call that hangs does not block the caller's.
        self._store = PrefixStore(prefix, store.clone())
        self._members, self._rank = tuple(members), rank

    def group_store(self) -> Any:
        """Return the part of the store through which the agreement's process group connects."""
        return PrefixStore("group", self._store)

    def meet(self, seconds: float) -> None:
        """Wait until every rank has arrived.

        Raises:
            RankError: Some ranks did not arrive within the limit; it names them.
        """
        present = self._within(_at_most(seconds), lambda: self._all("here", "1", seconds))
        if present is None:
            raise RankError(
                f"The store of torch.distributed did not answer within {seconds:g} s at start-up.",
                reason="connection",
            )
        missing = [number for number in self._members if number not in present]
        if missing:
            raise RankError(
                f"{ranks_named(missing)} did not reach the start-up of ranks "
                f"{listing(self._members)} within {seconds:g} s. Start them, or give a longer "
                "setup_timeout.",
                ranks=missing,
            )

    def leave(self, note: Note, seconds: float | None = None) -> None:
        """Leave a note for the other ranks.

        Args:
            note: Why this rank stops.
            seconds: Time limit for the store; by default the limit of any call.
        """
        text = json.dumps(attrs.asdict(note))

        def write() -> None:
            self._store.set(self._key("stop", self._me), text)
            self._store.set(_STOPPED, "1")

        self._within(_at_most(0) if seconds is None else seconds, write)

    def is_anyone_stopped(self) -> bool:
        """Whether a rank has left a note, or the store's host does not answer."""
        found = self._within(_at_most(0), lambda: self._store.check([_STOPPED]))
        # A store outside the ranks may end before them.
        return self._host is not None if found is None else found

    def see_out(self, seconds: float) -> None:
        """Wait for the other ranks to read the notes, if the store would end with this rank."""
        self._within(_at_most(seconds), lambda: self._see_out(self._members, seconds))

    def judge(self, own: Note, seconds: float, where: str) -> Verdict:
        """Leave a note, read those of the other ranks, and determine who stopped the ranks.

        Args:
            own: The note of this rank.
            seconds: How long to wait for the notes of other ranks.
            where: What this rank was waiting in.
        """
        text = json.dumps(attrs.asdict(own))

        def read() -> dict[int, str]:
            found = self._all("stop", text, seconds)
            self._store.set(self._key("read", self._me), "1")
            self._see_out(found, seconds)
            return found

        found = self._within(_at_most(2 * seconds), read)
        if found is None:
            return store_gone(self._host, own, where)
        notes = {number: Note(**json.loads(value)) for number, value in found.items()}
        return verdict(notes, self._members, self._me, where)

    # -- inside -------------------------------------------------------------------------

    @property
    def _me(self) -> int:
        return self._members[self._rank]

    def _key(self, kind: str, number: int) -> str:
        return f"{kind}/{number}"

    def _all(self, kind: str, value: str, seconds: float) -> dict[int, str]:
        """Set this rank's value and return those of all ranks that set one in time."""
        store = self._store
        store.set(self._key(kind, self._me), value)
        keys = {number: self._key(kind, number) for number in self._members}
        if not self._are_set(list(keys.values()), seconds):
            # A store that was blocked answers all clients at once: let the other ranks go first.
            time.sleep(0.05)
            keys = {number: key for number, key in keys.items() if store.check([key])}
        return {number: store.get(key).decode() for number, key in keys.items()}

    def _see_out(self, readers: Iterable[int], seconds: float) -> None:
        """Let the other ranks read first, if the store ends with this rank's process."""
        if self._host == self._me:
            others = [self._key("read", number) for number in readers if number != self._me]
            self._are_set(others, seconds)

    def _are_set(self, keys: list[str], seconds: float) -> bool:
        """Wait for keys; False if they are not all there in time.

        Polls: a ``wait`` of the store that times out relies on an answer, which a frozen store
        does not send.
        """
        deadline, pause = time.monotonic() + seconds, 0.002
        while keys and not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        return True

    def _within(self, seconds: float, call: Callable[[], _T]) -> _T | None:
        """Return a call's result, or None if the store is gone or does not answer in time."""
        found: list[_T] = []

        def run() -> None:
            # Every error of the store is one of these; the missing result reports it.
            with contextlib.suppress(RuntimeError):
                found.append(call())

        thread = threading.Thread(target=run, name="dispatchkit-ranks-notes", daemon=True)
        thread.start()
        thread.join(seconds)
        return found[0] if found else None


def _at_most(seconds: float) -> float:
    """Return the time limit of a call that itself waits for ``seconds``."""
    # A TCPStore resolves its clients' names for its log, and serves no other client meanwhile.
    return seconds + max(2.0, seconds)


def _host_of(store: Any) -> int | None:
    """Return the rank whose process serves the store, or None if no rank does.

    Source: torch.distributed's rendezvous: rank 0 serves a TCPStore, unless torchrun's agent
    does; a file store has no host.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return 0 if isinstance(store, TCPStore) and not by_agent else None
