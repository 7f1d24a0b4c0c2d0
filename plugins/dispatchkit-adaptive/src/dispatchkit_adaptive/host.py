"""Whether the host's time is hidden behind the device's.

A host that is far enough ahead of the device does not delay it, so that only the device's time of
a step counts. It stays ahead only if it submits steps faster than the device runs them, also if
each step uses the arm of the least device time, which is often eager and slow to submit. So both
times are averaged for those arms, whichever arms are in use: the answer then does not depend on
itself.
"""

from __future__ import annotations

import attrs

__all__ = ["HostLoad"]

#: Numbers of latest outcomes that are averaged: times of the traffic; host times and late steps.
_MEMORY, _SHORT_MEMORY = 32, 8
#: Shares of the device's time that the host needs, and of steps that it did not submit ahead: below
#: the first pair, the host becomes hidden; above one of the second pair, it no longer is.
_HIDDEN, _VISIBLE = (0.8, 0.2), (0.95, 0.5)
#: Outcomes after which the answer may change; twice as many after each return to a visible host.
_PATIENCE = 16


@attrs.define
class HostLoad:
    """The host's and the device's time of recent steps, each in its arm of least device time.

    Attributes:
        is_hidden: Whether only the device's time counts.
    """

    is_hidden: bool = False
    _host_us: float = 0.0
    _device_us: float = 0.0
    _late: float = 0.0
    _submit_us: dict[bool, float] = attrs.field(factory=dict)
    _num_steps: int = 0
    _last_change: int = 0
    _patience: int = _PATIENCE

    def add_submission(self, host_us: float, *, is_eager: bool) -> None:
        """Add the host time of a step; a longer time than usual counts at most twice the usual."""
        usual = self._submit_us.setdefault(is_eager, host_us)
        self._submit_us[is_eager] += (min(host_us, 2.0 * usual) - usual) / _SHORT_MEMORY

    def add_step(self, device_us: float, *, is_eager: bool, was_ahead: bool) -> bool:
        """Add a regular step; return whether the answer changes.

        Args:
            device_us: The least device time of its arms.
            is_eager: Whether the arm of that time is eager.
            was_ahead: Whether the host had submitted the step before the device reached it.
        """
        self._num_steps += 1
        weight = 1.0 / min(self._num_steps, _MEMORY)
        self._host_us += weight * (self._submit_us.get(is_eager, 0.0) - self._host_us)
        self._device_us += weight * (device_us - self._device_us)
        self._late += ((not was_ahead) - self._late) / min(self._num_steps, _SHORT_MEMORY)
        if self._num_steps - self._last_change < self._patience:
            return False
        load, late = _VISIBLE if self.is_hidden else _HIDDEN
        can_hide = self._host_us < load * self._device_us and self._late < late
        if can_hide is self.is_hidden:
            return False
        if self.is_hidden:
            self._patience *= 2
        self.is_hidden, self._last_change = can_hide, self._num_steps
        return True
