"""Count and report faults of policies; raise them in strict mode."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

from dispatchkit.errors import PolicyError
from dispatchkit.once import Once

_CONSEQUENCES = {
    "observe": "Decisions that the policy learned earlier stay in the table.",
    "pace": "Steps are measured as if the policy had no `pace`.",
}


class PolicyFaults:
    """A counter and reporter of policy faults.

    Args:
        strict: Whether to raise each fault.
        on_fault: Function that ``report`` calls with each fault, the number of tokens of its batch
            (None without a batch) and the epoch.

    Attributes:
        count: Number of faults.
    """

    def __init__(
        self, *, strict: bool, on_fault: Callable[[PolicyError, int | None, int], None] | None
    ) -> None:
        self.count: int = 0
        self._strict, self._on_fault = strict, on_fault
        self._once = Once()
        self._unreported: deque[tuple[PolicyError, int | None, int]] = deque()

    def add(self, error: PolicyError, num_tokens: int | None, epoch: int) -> None:
        """Count a fault; raise it in strict mode, otherwise warn once per policy and method."""
        self.count += 1
        if self._on_fault is not None:
            self._unreported.append((error, num_tokens, epoch))
        if self._strict:
            raise error
        if self._once.first((error.policy, error.hook)):
            after = "Affected steps run eager, with reason policy_error."
            message = f"{error} {_CONSEQUENCES.get(error.hook, after)}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def report(self) -> None:
        """Call ``on_fault`` for each fault that has not been reported yet.

        The caller must hold no lock, because ``on_fault`` may wait.
        """
        while self._unreported and self._on_fault is not None:
            try:
                fault = self._unreported.popleft()
            except IndexError:  # another thread reported it
                return
            self._on_fault(*fault)
