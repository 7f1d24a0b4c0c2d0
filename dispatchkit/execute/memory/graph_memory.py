"""GraphMemory: memory shared by the runners of a process, with a common budget.

Runners in the same group of a ``GraphMemory`` share a pool where possible. Evicting a single graph
of a shared pool frees almost no memory. Eviction therefore frees whole pools, beginning with the
pool whose lanes have been idle longest. Put runners into the same group if they are used together
and their graphs may be evicted together.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.optional import (
    DeviceMemory,
    MeteringBackend,
    SleepingBackend,
    features_of,
)
from dispatchkit.errors import ConfigError, ReplayError
from dispatchkit.execute.memory.account import MemoryAccount, PoolAccount
from dispatchkit.execute.memory.pool_group import PoolGroup
from dispatchkit.execute.memory.turns import Turns
from dispatchkit.keys.checks import check_count, check_flag, refuses_unknown_names

#: Name of the default group of runners.
DEFAULT_GROUP = "default"

#: Next step in errors about memory that cannot sleep.
_INSTEAD = (
    "To free the memory of graphs without sleeping, call runner.invalidate(); runner.capture() "
    "captures them again."
)


@refuses_unknown_names
class GraphMemory:
    """Graph memory shared by several runners; pass it as ``lanes=Lanes(memory=memory)``.

    ``print(memory)`` shows how the memory of each device is used.

    Args:
        max_bytes: Budget per device in bytes for pools, outputs, static inputs, workspaces and the
            driver's memory for graphs; None for no limit.
        sleeps: Whether the memory can be released temporarily; see ``sleep``.

    Raises:
        ConfigError: ``max_bytes`` is not a positive whole number, or ``sleeps`` is not a bool.

    Thread safety: all methods may be called from any thread. Steps of runners that share a pool run
    one at a time.
    """

    def __init__(self, *, max_bytes: int | None = None, sleeps: bool = False) -> None:
        self._sleeps = check_flag(sleeps, "sleeps")
        self.max_bytes: int | None = (
            None if max_bytes is None else check_count(max_bytes, "max_bytes")
        )
        self._guard = threading.RLock()
        self._backends: dict[tuple[str, str], GraphBackend] = {}
        self._open: dict[tuple[str, int], PoolGroup] = {}
        # Groups whose pool is not shared; released with their runners.
        self._separate: weakref.WeakSet[PoolGroup] = weakref.WeakSet()
        self._devices: dict[str, _Device] = {}
        self._num_checks = 0

    def group(self, name: str) -> MemoryGroup:
        """Return a group for runners whose graphs share a pool and are evicted together.

        Raises:
            ConfigError: The name is not a string or is empty.
        """
        return MemoryGroup(self, name)

    def account(self) -> tuple[MemoryAccount, ...]:
        """Return the memory account of each device that a runner uses."""
        with self._guard:
            devices = tuple(self._devices.values())
        return tuple(self._account_of(device) for device in devices)

    def num_bytes(self, device: str | None = None) -> int:
        """Return the memory that counts toward the budget, in bytes.

        Args:
            device: Name of a device, such as ``cuda:0``; None for all devices.
        """
        with self._guard:
            devices = tuple(self._devices.values())
        return sum(self._bytes_of(one) for one in devices if device is None or one.name == device)

    def sleep(self) -> int:
        """Temporarily release the memory of pools, static inputs and outputs.

        Addresses stay reserved, so graphs need not be captured again. The method waits until no
        step runs and the devices have finished all work. Until ``wake`` is called, steps that need
        the memory raise ``ReplayError``. Do not access results that are views of the memory, or
        ``runner.buffers``, during that time.

        Returns:
            The number of bytes released.

        Raises:
            ConfigError: The memory was not created with ``sleeps=True``.
            ReplayError: The method is called inside a step.
        """
        if not self._sleeps:
            raise ConfigError(
                "sleeps",
                False,
                "True to put the memory to sleep",
                f"Create it with GraphMemory(sleeps=True). {_INSTEAD}",
                message="The memory cannot sleep, because it was created without sleeps=True.",
            )
        total = 0
        try:
            for group in self._groups():
                if _is_held_here(group.lock):
                    raise ReplayError(
                        "sleep() was called inside a step that uses the memory. Call it after the "
                        "step."
                    )
                with group.lock:
                    group.turns.wait()
                    total += group.sleep()
        finally:
            self._count_asleep()
        return total

    def wake(self) -> None:
        """Map memory to the same addresses again after ``sleep``.

        Outputs are lost. Static inputs on the device are reset to their fill value, so rows that
        the caller wrote to them through ``runner.buffers`` are lost too. Host inputs in pinned
        memory and declared state are not affected.

        Raises:
            ReplayError: The device has too little free memory. Pools that were not mapped stay
                asleep; free memory and call ``wake`` again.
        """
        try:
            for group in self._groups():
                with group.lock:
                    group.wake()
        finally:
            self._count_asleep()

    def _count_asleep(self) -> None:
        """Update the number of sleeping bytes of each device."""
        for device in tuple(self._devices.values()):
            device.asleep_bytes = sum(group.asleep_bytes for group in self._of(device))

    @property
    def is_asleep(self) -> bool:
        """Whether any pool is asleep."""
        return any(group.is_asleep for group in self._groups())

    # -- for runners --------------------------------------------------------------------

    def shared_backend(self, backend: GraphBackend) -> GraphBackend:
        """Return the backend that all runners with this backend's name and device share."""
        with self._guard:
            return self._backends.setdefault((backend.name, backend.torch_device), backend)

    def open_group(self, backend: GraphBackend, name: str) -> PoolGroup:
        """Return the group of lanes that share a pool on a device; create it on first use."""
        with self._guard:
            place = (name, id(backend))
            group = self._open.get(place)
            if group is None:
                self._track_device(backend)
                lock = threading.RLock()
                sleeper = self._sleeper(backend)
                group = PoolGroup(
                    backend, lock, name=name, memory=self, is_open=True, sleeper=sleeper
                )
                self._open[place] = group
            return group

    def closed_group(
        self, backend: GraphBackend, name: str, lock: threading.RLock, turns: Turns
    ) -> PoolGroup:
        """Create a group with an unshared pool that counts toward this budget."""
        with self._guard:
            self._track_device(backend)
            sleeper = self._sleeper(backend)
            group = PoolGroup(backend, lock, name=name, memory=self, turns=turns, sleeper=sleeper)
            self._separate.add(group)
            return group

    def expected_bytes(self, group: PoolGroup) -> int:
        """Return the driver memory in bytes that a capture may need.

        The driver allocates memory in blocks, and not every capture needs a new block. The result
        is therefore the largest amount that an earlier capture on the group's device needed.
        """
        return self._devices[group.backend.torch_device].driver_step

    def evict_until_fits(self, group: PoolGroup, num_bytes: int, what: str) -> None:
        """Evict idle pools until an allocation outside pools fits into the budget.

        Args:
            group: Group of the lane that needs the memory.
            num_bytes: Size of the allocation in bytes.
            what: Purpose of the allocation, for errors.

        Raises:
            ConfigError: The allocation does not fit even without idle pools.
        """
        if self.max_bytes is None:
            return
        while (need := self.num_bytes(group.backend.torch_device) + num_bytes) > self.max_bytes:
            if not self.evict_idle_group(group):
                raise ConfigError(
                    "max_bytes",
                    self.max_bytes,
                    f"at least {need}, including {num_bytes} bytes of {what}",
                    "Increase max_bytes of the GraphMemory, or use fewer or smaller runners.",
                )

    def evict_idle_group(self, keep: PoolGroup) -> bool:
        """Evict all graphs of the pool that has been idle longest.

        Pools whose lanes are in use by a step or a background capture are skipped.

        Args:
            keep: Group that needs the memory and is not evicted.

        Returns:
            Whether a pool was evicted.
        """
        device = keep.backend.torch_device
        with self._guard:
            groups = [one for one in self._groups() if one.backend.torch_device == device]
            self._num_checks += 1
            for group in groups:
                group.record_use(self._num_checks)
        groups = [one for one in groups if one is not keep and one.num_graphs()]
        for group in sorted(groups, key=lambda one: one.idle_since):
            if not _is_held_here(group.lock) and _clear_if_free(group):
                return True
        return False

    @contextmanager
    def measuring(self, backend: GraphBackend, part: str) -> Iterator[None]:
        """Record the memory that the driver allocates or frees inside a ``with`` block.

        Args:
            backend: Backend whose device is measured.
            part: Part of the account: ``driver`` while graphs are captured or destroyed,
                ``library`` during warmups.
        """
        device = self._devices[backend.torch_device]
        before = device.outside()
        try:
            yield
        finally:
            device.note(part, device.outside() - before)

    # -- internals ----------------------------------------------------------------------

    def _sleeper(self, backend: GraphBackend) -> SleepingBackend | None:
        """Return the backend's support for sleeping memory; None if ``sleeps`` is not set.

        Raises:
            ConfigError: The backend does not support sleeping memory.
        """
        if not self._sleeps:
            return None
        sleeper = features_of(backend).sleepers
        why = (
            f"backend {backend.name!r} does not support sleeping memory"
            if sleeper is None
            else sleeper.sleep_problem()
        )
        if why or sleeper is None:
            problem = f"The memory cannot sleep, because {why}."
            raise ConfigError(
                "sleeps", True, f"False, because {why}", f"Omit sleeps. {_INSTEAD}", message=problem
            )
        return sleeper

    def _track_device(self, backend: GraphBackend) -> None:
        self._devices.setdefault(backend.torch_device, _Device(backend))

    def _groups(self) -> list[PoolGroup]:
        with self._guard:
            return [*self._open.values(), *sorted(self._separate, key=lambda one: one.name)]

    def _of(self, device: _Device) -> list[PoolGroup]:
        return [one for one in self._groups() if one.backend.torch_device == device.name]

    def _bytes_of(self, device: _Device) -> int:
        device.reconcile()
        return device.driver_bytes + sum(
            one.pool_bytes() + one.shared_bytes() + one.static_bytes() + device.workspace(one)
            for one in self._of(device)
        )

    def _account_of(self, device: _Device) -> MemoryAccount:
        groups = self._of(device)
        pools = tuple(
            PoolAccount(one.name, one.pool_bytes(), one.num_lanes(), one.num_graphs())
            for one in groups
        )
        outputs = sum(one.shared_bytes() for one in groups)
        static = sum(one.static_bytes() for one in groups)
        workspaces = sum(device.workspace(one) for one in groups)
        ours = sum(pool.num_bytes for pool in pools) + outputs + static + workspaces
        device.reconcile()
        now = device.now()
        reserved = now.reserved_bytes - device.start.reserved_bytes
        gone = now.used_bytes - device.start.used_bytes
        known = reserved + device.driver_bytes + device.library_bytes
        return MemoryAccount(
            device=device.name,
            max_bytes=self.max_bytes,
            pools=pools,
            output_bytes=outputs,
            static_bytes=static,
            workspace_bytes=workspaces,
            driver_bytes=device.driver_bytes,
            library_bytes=device.library_bytes,
            other_bytes=max(0, reserved - ours),
            unexplained_bytes=gone - known,
            is_metered=device.meter is not None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings without the contents."""
        return _remake, (self.max_bytes, self._sleeps)

    def __copy__(self) -> GraphMemory:
        return self

    def __deepcopy__(self, memo: Any) -> GraphMemory:
        """Return the object itself, because copies of a runner share its memory."""
        return self

    def __str__(self) -> str:
        return "\n".join(map(str, self.account())) or repr(self)

    def __repr__(self) -> str:
        given = [] if self.max_bytes is None else [f"max_bytes={self.max_bytes}"]
        return f"GraphMemory({', '.join(given + ['sleeps=True'] * self._sleeps)})"


def _remake(max_bytes: int | None, sleeps: bool) -> GraphMemory:
    return GraphMemory(max_bytes=max_bytes, sleeps=sleeps)


@attrs.frozen
class MemoryGroup:
    """A group of runners that share a pool; created by ``memory.group(name)``.

    Attributes:
        memory: Memory that the group belongs to.
        name: Name of the group.
    """

    memory: GraphMemory
    name: str = attrs.field()

    @name.validator
    def _check_name(self, _: Any, value: Any) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigError(
                "name", value, "a non-empty string", "For example, write memory.group('decode')."
            )

    @classmethod
    def of(cls, given: Any) -> MemoryGroup | None:
        """Return the default group of a ``GraphMemory``; return a group or None unchanged.

        Raises:
            ConfigError: ``given`` is not a group, a memory or None.
        """
        if given is None or isinstance(given, MemoryGroup):
            return given
        if isinstance(given, GraphMemory):
            return cls(given, DEFAULT_GROUP)
        raise ConfigError(
            "memory",
            given,
            "a GraphMemory, or one of its groups",
            "To limit only this runner, pass "
            "options=RunnerOptions(memory=MemoryOptions(max_bytes=...)).",
        )


def _clear_if_free(group: PoolGroup) -> bool:
    """Evict all graphs of a pool and return True, or return False if its lanes are in use.

    The function does not wait for a step or a background capture of these lanes. Waiting could
    cause a deadlock, because the thread that runs the step or capture may be waiting for the
    calling thread. The lock is released even if a signal handler raises between any two
    instructions.
    """
    lock = group.lock
    try:
        try:
            if not lock.acquire(blocking=False) or group.turns.is_under_way:
                return False
            group.clear()
            return True
        finally:
            _release_if_held(lock)
    finally:
        _release_if_held(lock)


def _release_if_held(lock: Any) -> None:
    if _is_held_here(lock):
        lock.release()


def _is_held_here(lock: Any) -> bool:
    """Return whether this thread holds a lock, for example because it runs a step."""
    return bool(lock._is_owned())


class _Device:
    """The memory used on one device.

    Args:
        backend: Backend that reports the device's memory.
    """

    def __init__(self, backend: GraphBackend) -> None:
        self.name: str = backend.torch_device
        self.meter: MeteringBackend | None = features_of(backend).meters
        self.asleep_bytes = 0
        self.start: DeviceMemory = self.now()
        self.driver_bytes = 0
        self.library_bytes = 0
        self.driver_step = 0

    def now(self) -> DeviceMemory:
        """Return the device memory in use."""
        if self.meter is None:
            return DeviceMemory(0, 0, 0)
        found = self.meter.device_memory()
        # The allocator still counts sleeping memory as reserved.
        return found._replace(reserved_bytes=found.reserved_bytes - self.asleep_bytes)

    def outside(self) -> int:
        """Return the device memory in use outside torch's allocator."""
        now = self.now()
        return now.used_bytes - now.reserved_bytes

    def note(self, part: str, num_bytes: int) -> None:
        """Add allocated (positive) or freed (negative) bytes to a part of the account."""
        if part == "driver":
            self.driver_step = max(self.driver_step, num_bytes)
            self.driver_bytes = max(0, self.driver_bytes + num_bytes)
        else:
            self.library_bytes = max(0, self.library_bytes + num_bytes)

    def reconcile(self) -> None:
        """Subtract memory that the driver has since freed, such as memory of deleted runners."""
        gone = self.outside() - self.start.used_bytes + self.start.reserved_bytes
        self.driver_bytes -= min(
            self.driver_bytes, max(0, self.driver_bytes + self.library_bytes - gone)
        )

    def workspace(self, group: PoolGroup) -> int:
        """Return the size in bytes of library workspaces on the stream of a group."""
        return 0 if self.meter is None else self.meter.workspace_bytes(group.stream)
