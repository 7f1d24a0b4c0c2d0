"""Detect whether the time of the host is hidden behind that of the device.

A host that submits steps well before the device reaches them does not delay the device. Only the
device time of a step counts then, so the policy prefers the arm with the least device time. That
arm is often eager and slow to submit, which may let the host fall behind. Therefore host and device
time are averaged for the arms with the least device time, whichever arms are in use, so that the
answer does not depend on earlier answers.
"""

from __future__ import annotations

import attrs

__all__ = ["HostLoad"]

#: Number of outcomes in the averages: of host and device time per step; of submit times and late
#: steps.
_MEMORY, _SHORT_MEMORY = 32, 8
#: Thresholds: host time relative to device time, and share of steps not submitted ahead. The host
#: becomes hidden below both of the first pair, and visible above either of the second pair.
_HIDDEN, _VISIBLE = (0.8, 0.2), (0.95, 0.5)
#: Minimum number of steps between changes of the answer; doubled when a hidden host becomes
#: visible.
_PATIENCE = 16


@attrs.define
class HostLoad:
    """Host and device time of recent steps, as if each used its arm with the least device time.

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
        """Add the host time of a step in microseconds, clipped to twice the average."""
        usual = self._submit_us.setdefault(is_eager, host_us)
        self._submit_us[is_eager] += (min(host_us, 2.0 * usual) - usual) / _SHORT_MEMORY

    def add_step(self, device_us: float, *, is_eager: bool, was_ahead: bool) -> bool:
        """Add a step that was not a probe; return whether ``is_hidden`` changed.

        Args:
            device_us: Device time of the fastest arm on the device, in microseconds.
            is_eager: Whether that arm is eager.
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
