"""GraphMemory: memory shared by the runners of a process, with a common budget.

Runners with the same object share a pool wherever possible. Evicting one graph of a shared pool
frees almost nothing, so whole pools are evicted to free memory, each as a group, beginning with the
one whose lanes have been idle longest. Put runners that are used and can be evicted together into
one group.
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

#: Advice if memory cannot sleep.
_INSTEAD = (
    "Without it, runner.invalidate() frees the memory of graphs, and runner.capture() captures "
    "them again."
)


@refuses_unknown_names
class GraphMemory:
    """The memory of the graphs of several runners: ``lanes=Lanes(memory=memory)``.

    ``print(memory)`` shows how the memory of each device is used.

    Args:
        max_bytes: Most bytes, per device, of pools, outputs, static inputs, workspaces and the
            driver's memory for graphs; None for no limit.
        sleeps: Its memory can be released temporarily, see ``sleep``.

    Raises:
        ConfigError: ``max_bytes`` is not a whole number of at least 0.

    Thread safety: any thread may use it. Steps of runners that share a pool run one at a time.
    """

    def __init__(self, *, max_bytes: int | None = None, sleeps: bool = False) -> None:
        self._sleeps = check_flag(sleeps, "sleeps")
        self.max_bytes: int | None = (
            None if max_bytes is None else check_count(max_bytes, "max_bytes")
        )
        self._guard = threading.RLock()
        self._backends: dict[tuple[str, str], GraphBackend] = {}
        self._open: dict[tuple[str, int], PoolGroup] = {}
        # Groups of lanes that do not share, which are freed with their runners.
        self._apart: weakref.WeakSet[PoolGroup] = weakref.WeakSet()
        self._devices: dict[str, _Device] = {}
        self._num_looks = 0

    def group(self, name: str) -> MemoryGroup:
        """Return a group for runners that share a pool and are evicted together.

        Raises:
            ConfigError: The name is invalid.
        """
        return MemoryGroup(self, name)

    def account(self) -> tuple[MemoryAccount, ...]:
        """Return the memory account of each device that a runner uses."""
        with self._guard:
            devices = tuple(self._devices.values())
        return tuple(self._account_of(device) for device in devices)

    def num_bytes(self, device: str | None = None) -> int:
        """Return the bytes that count in the budget.

        Args:
            device: One device, such as ``cuda:0``; None for all devices.
        """
        with self._guard:
            devices = tuple(self._devices.values())
        return sum(self._bytes_of(one) for one in devices if device is None or one.name == device)

    def sleep(self) -> int:
        """Temporarily release the memory of pools, static inputs and outputs.

        Addresses stay, so that graphs need not be captured again. Waits until no step runs and all
        work of the devices is done. Until ``wake``, a step that would use the memory raises
        ``ReplayError``, and results that are views of it, and ``runner.buffers``, must not be
        accessed.

        Returns:
            The bytes released.

        Raises:
            ConfigError: It was not created with ``sleeps=True``.
            ReplayError: It was called inside a step.
        """
        if not self._sleeps:
            raise ConfigError("sleeps", False, "True for a memory that can sleep", _INSTEAD)
        total = 0
        for group in self._groups():
            if _is_held_here(group.lock):
                raise ReplayError(
                    "sleep() was called inside a step, whose memory it would release."
                )
            with group.lock:
                group.turns.wait()
                num_bytes = group.sleep()
                self._devices[group.backend.torch_device].asleep_bytes += num_bytes
                total += num_bytes
        return total

    def wake(self) -> None:
        """Map memory to the same addresses again.

        Static inputs hold their fill again, host inputs keep their contents, and declared state is
        not affected. Other contents of the memory are lost: outputs, and rows written to
        ``runner.buffers``, until the next step computes or writes them.

        Raises:
            ReplayError: The device does not have enough free memory. Memory that could not be
                mapped stays asleep; free some and call it again.
        """
        for group in self._groups():
            with group.lock:
                group.wake()
        for device in tuple(self._devices.values()):
            device.asleep_bytes = 0

    @property
    def is_asleep(self) -> bool:
        """Whether any of it is currently asleep."""
        return any(group.is_asleep for group in self._groups())

    # -- for runners --------------------------------------------------------------------

    def shared_backend(self, backend: GraphBackend) -> GraphBackend:
        """Return the shared backend of a name and device, which allows sharing pools."""
        with self._guard:
            return self._backends.setdefault((backend.name, backend.torch_device), backend)

    def open_group(self, backend: GraphBackend, name: str) -> PoolGroup:
        """Return the pool that a group's lanes share on a device, created for the first of them."""
        with self._guard:
            place = (name, id(backend))
            group = self._open.get(place)
            if group is None:
                self._begin_on(backend)
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
        """Return a separate pool for a lane, within this budget."""
        with self._guard:
            self._begin_on(backend)
            sleeper = self._sleeper(backend)
            group = PoolGroup(backend, lock, name=name, memory=self, turns=turns, sleeper=sleeper)
            self._apart.add(group)
            return group

    def expected_bytes(self, group: PoolGroup) -> int:
        """Return the memory that a capture in a group may take besides its pool and outputs.

        Estimated from earlier captures: a driver occasionally takes whole blocks.
        """
        return self._devices[group.backend.torch_device].driver_step

    def make_room(self, group: PoolGroup, num_bytes: int, what: str) -> None:
        """Evict idle pools until this many bytes may be taken outside pools.

        Args:
            group: The group of the lane that takes them.
            num_bytes: The bytes.
            what: Their purpose, for errors.

        Raises:
            ConfigError: They exceed the budget.
        """
        if self.max_bytes is None:
            return
        while (need := self.num_bytes(group.backend.torch_device) + num_bytes) > self.max_bytes:
            if not self.evict_idle_group(group):
                raise ConfigError(
                    "max_bytes",
                    self.max_bytes,
                    f"at least {need}, with {num_bytes} bytes of {what}",
                    "Raise max_bytes of the GraphMemory, or use fewer or smaller runners.",
                )

    def evict_idle_group(self, keep: PoolGroup) -> bool:
        """Evict all graphs of the pool idle longest; return False if there is none.

        A pool whose lanes are running a step is not idle, and not waited for.

        Args:
            keep: The group that needs the memory, which is not evicted here.
        """
        device = keep.backend.torch_device
        with self._guard:
            groups = [one for one in self._groups() if one.backend.torch_device == device]
            self._num_looks += 1
            for group in groups:
                group.note_use(self._num_looks)
        groups = [one for one in groups if one is not keep and one.num_graphs()]
        for group in sorted(groups, key=lambda one: one.idle_since):
            if not _is_held_here(group.lock) and _clear_if_free(group):
                return True
        return False

    @contextmanager
    def measuring(self, backend: GraphBackend, part: str) -> Iterator[None]:
        """Record memory that the driver takes or frees in a block.

        Args:
            backend: The device.
            part: What for: ``driver``, for graphs, or ``library``, in warmups.
        """
        device = self._devices[backend.torch_device]
        before = device.outside()
        try:
            yield
        finally:
            device.note(part, device.outside() - before)

    # -- inside -------------------------------------------------------------------------

    def _sleeper(self, backend: GraphBackend) -> SleepingBackend | None:
        """Return the backend if its memory is to sleep.

        Raises:
            ConfigError: Its memory cannot sleep.
        """
        if not self._sleeps:
            return None
        sleeper = features_of(backend).sleepers
        why = (
            f"backend {backend.name!r} has no such memory"
            if sleeper is None
            else sleeper.sleep_problem()
        )
        if why or sleeper is None:
            raise ConfigError("sleeps", True, f"False here: {why}", _INSTEAD)
        return sleeper

    def _begin_on(self, backend: GraphBackend) -> None:
        self._devices.setdefault(backend.torch_device, _Device(backend))

    def _groups(self) -> list[PoolGroup]:
        with self._guard:
            return [*self._open.values(), *sorted(self._apart, key=lambda one: one.name)]

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
        """Pickle with the same budget, without contents."""
        return _remake, (self.max_bytes, self._sleeps)

    def __copy__(self) -> GraphMemory:
        return self

    def __deepcopy__(self, memo: Any) -> GraphMemory:
        """Return itself: copies of a runner use the same memory."""
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
    """Runners of one ``GraphMemory`` that share a pool; created by ``memory.group(name)``.

    Attributes:
        memory: The memory.
        name: Name of the group.
    """

    memory: GraphMemory
    name: str = attrs.field()

    @name.validator
    def _check_name(self, _: Any, value: Any) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigError("group", value, "a name")

    @classmethod
    def of(cls, given: Any) -> MemoryGroup | None:
        """Return the group given to a runner, or the default group of a memory.

        Raises:
            ConfigError: It is neither.
        """
        if given is None or isinstance(given, MemoryGroup):
            return given
        if isinstance(given, GraphMemory):
            return cls(given, DEFAULT_GROUP)
        raise ConfigError(
            "memory",
            type(given).__name__,
            "a GraphMemory, or one of its groups",
            "Limits of this runner alone go into options=RunnerOptions(memory=MemoryOptions(...)).",
        )


def _clear_if_free(group: PoolGroup) -> bool:
    """Evict all graphs of a pool unless its lanes run a step; return whether it was done.

    It does not wait for the step, whose thread may be waiting for this one. The lock is released
    even if a signal handler raises between any two instructions.
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
    """Return whether this thread is in a step that holds a lock."""
    return bool(lock._is_owned())


class _Device:
    """Counts memory on one device.

    Args:
        backend: A backend of the device.
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
        # Sleeping memory takes no space, which the allocator does not know.
        return found._replace(reserved_bytes=found.reserved_bytes - self.asleep_bytes)

    def outside(self) -> int:
        """Return the device memory in use outside torch's allocator."""
        now = self.now()
        return now.used_bytes - now.reserved_bytes

    def note(self, part: str, num_bytes: int) -> None:
        """Add memory that was seen to be taken or freed."""
        if part == "driver":
            self.driver_step = max(self.driver_step, num_bytes)
            self.driver_bytes = max(0, self.driver_bytes + num_bytes)
        else:
            self.library_bytes = max(0, self.library_bytes + num_bytes)

    def reconcile(self) -> None:
        """Subtract memory that the driver freed unnoticed, as for graphs of a dropped runner."""
        gone = self.outside() - self.start.used_bytes + self.start.reserved_bytes
        self.driver_bytes -= min(
            self.driver_bytes, max(0, self.driver_bytes + self.library_bytes - gone)
        )

    def workspace(self, group: PoolGroup) -> int:
        """Return the bytes of libraries' workspaces on the stream of a group."""
        return 0 if self.meter is None else self.meter.workspace_bytes(group.stream)
