"""Detect whether host time is hidden behind device time.

If the host submits steps well before the device reaches them, host time causes no delay. Only
device time counts then, and the policy prefers the arm with the least device time. This arm is
often eager, and submitting eager steps may take the host so long that it falls behind. ``HostLoad``
therefore always averages the times of the arms with the least device time, even while other arms
are in use. If it averaged the times of the arms in use, the averages would shift with each change
of arms, and the policy would switch back and forth.
"""

from __future__ import annotations

import attrs

__all__ = ["HostLoad"]

#: Numbers of outcomes in the averages: ``_MEMORY`` for host and device time, ``_SHORT_MEMORY`` for
#: submit times and the share of late steps.
_MEMORY, _SHORT_MEMORY = 32, 8
#: Thresholds of the ratio of host to device time, and of the share of late steps (not submitted
#: ahead of the device). Host time becomes hidden if both values are below ``_HIDDEN``, and visible
#: if either value reaches ``_VISIBLE``.
_HIDDEN, _VISIBLE = (0.8, 0.2), (0.95, 0.5)
#: Minimum number of steps between changes of ``is_hidden``; doubled whenever host time becomes
#: visible.
_PATIENCE = 16


@attrs.define
class HostLoad:
    """The average host and device times per step of the arms with the least device time.

    Attributes:
        is_hidden: Whether host time is hidden, so that only device time counts.
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
        """Add the time of submitting a step, clipped to twice the average submit time."""
        usual = self._submit_us.setdefault(is_eager, host_us)
        self._submit_us[is_eager] += (min(host_us, 2.0 * usual) - usual) / _SHORT_MEMORY

    def add_step(self, device_us: float, *, is_eager: bool, was_ahead: bool) -> bool:
        """Add a step that was not a probe; return whether ``is_hidden`` changed.

        Args:
            device_us: Expected device time of the arm that is fastest on the device, in
                microseconds.
            is_eager: Whether this arm is eager.
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
