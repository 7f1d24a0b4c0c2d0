"""Keys whose capture failed are remembered, and tried again a few times, ever more rarely."""

from __future__ import annotations

from collections import Counter

from dispatchkit.dispatch import Reason
from dispatchkit.keys.batch import GraphKey
from dispatchkit.registry import GraphEntry, KeyState

#: Captures tried for one key before it is left alone.
MAX_ATTEMPTS = 3
#: Steps that go by before a failed key is tried again; four times as many each time.
RETRY_AFTER = 64


class Retries:
    """Counts the steps that go by since the last failure of each key."""

    def __init__(self) -> None:
        self._since_failure: Counter[GraphKey] = Counter()
        # Steps that ran eager for some failed key, now and when each key failed last.
        self._num_eager = 0
        self._eager_before: Counter[GraphKey] = Counter()

    def note_failure(self, key: GraphKey) -> None:
        """Start to count anew for a key."""
        self._since_failure[key] = 0
        self._eager_before[key] = self._num_eager

    @staticmethod
    def is_over(entry: GraphEntry) -> bool:
        """Return whether a key failed so often that nobody tries it again unasked."""
        return entry.attempts >= MAX_ATTEMPTS

    @classmethod
    def may_try(cls, entry: GraphEntry) -> bool:
        """Return whether a failed key may be tried again some time."""
        return entry.state is KeyState.FAILED and not cls.is_over(entry)

    @classmethod
    def waits_for_first_call(cls, entry: GraphEntry) -> bool:
        """Return whether a key is to be captured once the step was called for the first time."""
        return cls.may_try(entry) and entry.reason.startswith(Reason.FIRST_CALL)

    def is_due(self, entry: GraphEntry) -> bool:
        """Count a step that would have used a failed key; return whether to try it now."""
        if not self.may_try(entry):
            return False
        is_due = not self.steps_left(entry)
        if not is_due:
            self.note_steps(entry.key, 1)
        return is_due

    def steps_left(self, entry: GraphEntry) -> int:
        """Return how many steps a failed key waits for yet; 0 for a key in another state."""
        if not self.may_try(entry):
            return 0
        if self.waits_for_first_call(entry):  # which any key's step makes
            return int(self._num_eager == self._eager_before[entry.key])
        wait: int = RETRY_AFTER * 4 ** (entry.attempts - 1)
        return max(0, wait - self._since_failure[entry.key])

    def note_steps(self, key: GraphKey, num_steps: int) -> None:
        """Count steps that would have used a failed key."""
        self._since_failure[key] += num_steps
        self._num_eager += num_steps
