"""Faults of policies: counted, warned about once and reported, or raised in strict mode."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

from dispatchkit.errors import PolicyError
from dispatchkit.once import Once

_CONSEQUENCES = {
    "observe": "The table keeps what it learned before.",
    "pace": "Steps are measured as if the policy had no `pace`.",
}


class PolicyFaults:
    """The faults of a dispatcher's policies.

    Args:
        strict: Raise each fault.
        on_fault: Called by ``report`` with each fault, the tokens of its batch (None if there is no
            batch) and the epoch.

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
        """Count a fault; raise it in strict mode, else warn once per policy and method."""
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
        """Call ``on_fault`` with new faults; hold no lock, since the callee may wait."""
        while self._unreported and self._on_fault is not None:
            try:
                fault = self._unreported.popleft()
            except IndexError:  # another thread was quicker
                return
            self._on_fault(*fault)
