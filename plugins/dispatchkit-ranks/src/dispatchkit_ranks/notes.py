"""Notes that ranks write to the store when they stop.

A failed collective does not show which rank caused the failure, but the notes do. A rank whose
collective failed writes a note right after the failure. A rank that raised an error or left the
agreement wrote its note earlier. A rank without a note did not reach the collective.
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

from dispatchkit_ranks.verdict import (
    Note,
    Verdict,
    join_ranks,
    rank_subject,
    store_verdict,
    verdict,
)

_T = TypeVar("_T")
# Key that is set with every note, so that a single query shows whether any rank has stopped.
_STOPPED = "stopped"


class Notes:
    """The notes of one agreement in a torch.distributed store.

    If the process that hosts the store is frozen, a call to the store never returns. Each call
    therefore runs in a thread, which is abandoned after a time limit.

    Args:
        store: Any torch.distributed store.
        prefix: Prefix of this agreement's keys in the store.
        members: Global ranks of the members.
        rank: Index of this rank in ``members``.
    """

    def __init__(self, store: Any, prefix: str, members: Sequence[int], rank: int) -> None:
        self._host = _host_of(store)
        # A separate connection, so that a hanging call does not block the caller's connection.
        self._store = PrefixStore(prefix, store.clone())
        self._members, self._rank = tuple(members), rank

    def group_store(self) -> Any:
        """Return the store that the agreement's process group is created with."""
        return PrefixStore("group", self._store)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every rank has joined the agreement.

        Raises:
            RankError: Some ranks did not join in time, and the error names them; or the store
                failed or did not answer.
        """
        limit = _call_limit(seconds)
        present = self._call_with_limit(limit, lambda: self._all("here", "1", seconds))
        if present is None:
            raise RankError(
                "At start-up, the torch.distributed store failed, or did not answer within "
                f"{limit:g} s. Check that the process that hosts the store is running.",
                reason="connection",
            )
        missing = [number for number in self._members if number not in present]
        if missing:
            raise RankError(
                f"{rank_subject(missing)} did not join the agreement of ranks "
                f"{join_ranks(self._members)} within {seconds:g} s. Create a RankAgreement on all "
                "of these ranks, or increase setup_timeout.",
                ranks=missing,
            )

    def leave(self, note: Note, seconds: float | None = None) -> None:
        """Write a note for the other ranks.

        Args:
            note: The note, which says why this rank stopped.
            seconds: Time limit for writing the note; None means 2 seconds.
        """
        text = json.dumps(attrs.asdict(note))

        def write() -> None:
            # First, so that a rank that finds the note also finds that a rank has stopped.
            self._store.set(_STOPPED, "1")
            self._store.set(self._key("stop", self._me), text)

        self._call_with_limit(_call_limit(0) if seconds is None else seconds, write)

    def has_stopped_ranks(self) -> bool:
        """Return whether a rank has stopped.

        A rank has stopped if it has written a note, or if it hosts the store and the store does not
        answer.
        """
        found = self._call_with_limit(_call_limit(0), lambda: self._store.check([_STOPPED]))
        # A store that no rank hosts may end before the ranks do.
        return self._host is not None if found is None else found

    def wait_for_readers(self, seconds: float) -> None:
        """Wait until the other ranks have read the notes, if this process hosts the store."""
        self._call_with_limit(
            _call_limit(seconds), lambda: self._wait_for_readers(self._members, seconds)
        )

    def find_cause(self, own: Note, seconds: float, where: str) -> Verdict:
        """Write a note, read the notes of other ranks, and determine which rank failed.

        Args:
            own: The note of this rank.
            seconds: Time to wait for the notes of the other ranks.
            where: The point that this rank reached, in words.
        """
        text = json.dumps(attrs.asdict(own))

        def read() -> dict[int, str]:
            found = self._all("stop", text, seconds)
            self._store.set(self._key("read", self._me), "1")
            self._wait_for_readers(found, seconds)
            return found

        found = self._call_with_limit(_call_limit(2 * seconds), read)
        if found is None:
            return store_verdict(self._host, own, where)
        notes = {number: Note(**json.loads(value)) for number, value in found.items()}
        return verdict(notes, self._members, self._me, where)

    # -- internals ----------------------------------------------------------------------

    @property
    def _me(self) -> int:
        return self._members[self._rank]

    def _key(self, kind: str, number: int) -> str:
        return f"{kind}/{number}"

    def _all(self, kind: str, value: str, seconds: float) -> dict[int, str]:
        """Set this rank's value; return the values of all ranks that set one in time."""
        store = self._store
        store.set(self._key(kind, self._me), value)
        keys = {number: self._key(kind, number) for number in self._members}
        if not self._are_set(list(keys.values()), seconds):
            # If the store was blocked, it now answers all waiting ranks. Let them set their
            # values before the check.
            time.sleep(0.05)
            keys = {number: key for number, key in keys.items() if store.check([key])}
        return {number: store.get(key).decode() for number, key in keys.items()}

    def _wait_for_readers(self, readers: Iterable[int], seconds: float) -> None:
        """Wait until ``readers`` have read the notes, if this process hosts the store."""
        if self._host == self._me:
            others = [self._key("read", number) for number in readers if number != self._me]
            self._are_set(others, seconds)

    def _are_set(self, keys: list[str], seconds: float) -> bool:
        """Wait until keys are set; return whether all are set in time.

        Polls the store, because the store's own ``wait`` never times out if the store is frozen.
        """
        deadline, pause = time.monotonic() + seconds, 0.002
        while keys and not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        return True

    def _call_with_limit(self, seconds: float, call: Callable[[], _T]) -> _T | None:
        """Return the result of a call, or None if the store fails or does not answer in time."""
        found: list[_T] = []

        def run() -> None:
            # The store raises only RuntimeError. If it does, the method returns None.
            with contextlib.suppress(RuntimeError):
                found.append(call())

        thread = threading.Thread(target=run, name="dispatchkit-ranks-notes", daemon=True)
        thread.start()
        thread.join(seconds)
        return found[0] if found else None


def _call_limit(seconds: float) -> float:
    """Return the time limit of a store call that itself waits up to ``seconds``."""
    # Allow more time, because a TCPStore blocks all other clients while it resolves a client's
    # host name for its log.
    return seconds + max(2.0, seconds)


def _host_of(store: Any) -> int | None:
    """Return the rank that hosts the store, or None if no rank does.

    Source: the rendezvous code of torch.distributed. Rank 0 hosts a TCPStore, unless torchrun's
    agent does; a file store has no host.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return 0 if isinstance(store, TCPStore) and not by_agent else None
