"""Retry failed captures a few times, with increasing intervals."""

from __future__ import annotations

from collections import Counter

from dispatchkit.dispatch import Reason
from dispatchkit.keys.batch import GraphKey
from dispatchkit.registry import GraphEntry, KeyState

#: Capture attempts for one key before giving up.
MAX_ATTEMPTS = 3
#: Steps before a failed key is retried; four times as many after each failure.
RETRY_AFTER = 64


class Retries:
    """Counts the steps since the last failure of each key."""

    def __init__(self) -> None:
        self._since_failure: Counter[GraphKey] = Counter()
        # Steps that ran eager for a failed key: the current count, and the count at each key's last
        # failure.
        self._num_eager = 0
        self._eager_before: Counter[GraphKey] = Counter()

    def note_failure(self, key: GraphKey) -> None:
        """Restart the count for a key."""
        self._since_failure[key] = 0
        self._eager_before[key] = self._num_eager

    @staticmethod
    def is_over(entry: GraphEntry) -> bool:
        """Return whether a key failed so often that it is no longer retried."""
        return entry.attempts >= MAX_ATTEMPTS

    @classmethod
    def may_try(cls, entry: GraphEntry) -> bool:
        """Return whether a failed key may be retried at some time."""
        return entry.state is KeyState.FAILED and not cls.is_over(entry)

    @classmethod
    def waits_for_first_call(cls, entry: GraphEntry) -> bool:
        """Return whether a key must be captured after the step's first call."""
        return cls.may_try(entry) and entry.reason.startswith(Reason.FIRST_CALL)

    def is_due(self, entry: GraphEntry) -> bool:
        """Count a step that would have used a failed key; return whether to retry now."""
        if not self.may_try(entry):
            return False
        is_due = not self.steps_left(entry)
        if not is_due:
            self.note_steps(entry.key, 1)
        return is_due

    def steps_left(self, entry: GraphEntry) -> int:
        """Return the remaining steps before a failed key is retried; 0 in other states."""
        if not self.may_try(entry):
            return 0
        if self.waits_for_first_call(entry):  # counted across keys
            return int(self._num_eager == self._eager_before[entry.key])
        wait: int = RETRY_AFTER * 4 ** (entry.attempts - 1)
        return max(0, wait - self._since_failure[entry.key])

    def note_steps(self, key: GraphKey, num_steps: int) -> None:
        """Count steps that would have used a failed key."""
        self._since_failure[key] += num_steps
        self._num_eager += num_steps
