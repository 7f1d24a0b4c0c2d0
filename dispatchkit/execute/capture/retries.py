"""Schedule retries of failed captures at increasing intervals."""

from __future__ import annotations

from collections import Counter

from dispatchkit.dispatch import Reason
from dispatchkit.keys.batch import GraphKey
from dispatchkit.registry import GraphEntry, KeyState

#: Maximum number of capture attempts for a key.
MAX_ATTEMPTS = 3
#: A failed key is retried after this number of steps that would have used it. Each further failure
#: quadruples the number.
RETRY_AFTER = 64


class Retries:
    """Counters of steps since the last failure of each key."""

    def __init__(self) -> None:
        self._since_failure: Counter[GraphKey] = Counter()
        # Number of steps that ran eager because a key had failed: in total, and before the last
        # failure of each key.
        self._num_eager = 0
        self._eager_before: Counter[GraphKey] = Counter()

    def note_failure(self, key: GraphKey) -> None:
        """Restart the count of steps for a key that failed."""
        self._since_failure[key] = 0
        self._eager_before[key] = self._num_eager

    @staticmethod
    def is_over(entry: GraphEntry) -> bool:
        """Return whether a key failed so often that it is no longer retried."""
        return entry.attempts >= MAX_ATTEMPTS

    @classmethod
    def may_try(cls, entry: GraphEntry) -> bool:
        """Return whether a key has failed and may be retried later."""
        return entry.state is KeyState.FAILED and not cls.is_over(entry)

    @classmethod
    def waits_for_first_call(cls, entry: GraphEntry) -> bool:
        """Return whether the next capture of a key must wait until the step has run eager once."""
        return cls.may_try(entry) and entry.reason.startswith(Reason.FIRST_CALL)

    def is_due(self, entry: GraphEntry) -> bool:
        """Return whether a key has failed and is due for a retry."""
        return self.may_try(entry) and not self.steps_left(entry)

    def steps_left(self, entry: GraphEntry) -> int:
        """Return the steps left until a failed key is retried; 0 if it is due or never retried."""
        if not self.may_try(entry):
            return 0
        if self.waits_for_first_call(entry):  # one eager step for any failed key suffices
            return int(self._num_eager == self._eager_before[entry.key])
        wait: int = RETRY_AFTER * 4 ** (entry.attempts - 1)
        return max(0, wait - self._since_failure[entry.key])

    def note_steps(self, key: GraphKey, num_steps: int) -> None:
        """Count steps that would have used a failed key."""
        self._since_failure[key] += num_steps
        self._num_eager += num_steps
