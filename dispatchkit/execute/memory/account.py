"""Memory accounts: the memory of graphs, and other memory in use on their devices."""

from __future__ import annotations

import attrs

from dispatchkit.errors import counted

_MIB = 1 << 20


@attrs.frozen
class PoolAccount:
    """The memory account of one pool.

    Attributes:
        name: Name of the pool's group.
        num_bytes: Reserved memory in bytes.
        num_lanes: Number of lanes that share the pool.
        num_graphs: Number of graphs in the pool.
    """

    name: str
    num_bytes: int
    num_lanes: int
    num_graphs: int


@attrs.frozen(kw_only=True)
class MemoryAccount:
    """The memory account of one device: graphs, and other memory taken since counting began.

    Counting begins when a ``GraphMemory`` first uses the device. All sizes are in bytes.

    Attributes:
        device: Name of the device.
        max_bytes: Budget; None for no limit.
        pools: Accounts of the pools. A pool contains intermediates, and the outputs that its graphs
            do not write to shared output memory.
        output_bytes: Size of the output memory that the graphs of each lane share.
        static_bytes: Size of static inputs.
        workspace_bytes: Size of library workspaces on the streams of the pools.
        driver_bytes: Memory that the driver allocated during captures, minus memory that it freed
            when graphs were destroyed.
        library_bytes: Memory that the driver allocated during warmups, which load kernels and
            libraries. This memory is not part of the budget, because eager steps also need it, and
            evicting graphs does not free it.
        other_bytes: Other torch memory: weights, activations, and memory cached by torch's
            allocator.
        unexplained_bytes: Remaining memory, allocated by the driver at other times or by other
            processes. Negative if memory allocated before counting began was freed.
        is_metered: Whether the backend reports the device memory in use. If not, the five sizes
            from ``workspace_bytes`` to ``unexplained_bytes`` are 0.
    """

    device: str
    max_bytes: int | None
    pools: tuple[PoolAccount, ...]
    output_bytes: int
    static_bytes: int
    workspace_bytes: int
    driver_bytes: int
    library_bytes: int
    other_bytes: int
    unexplained_bytes: int
    is_metered: bool

    @property
    def pool_bytes(self) -> int:
        """The size of all pools in bytes."""
        return sum(pool.num_bytes for pool in self.pools)

    @property
    def num_bytes(self) -> int:
        """The memory that counts toward the budget, in bytes."""
        return (
            self.pool_bytes
            + self.output_bytes
            + self.static_bytes
            + self.workspace_bytes
            + self.driver_bytes
        )

    @property
    def taken_bytes(self) -> int:
        """The device memory taken since counting began, in bytes."""
        return self.num_bytes + self.library_bytes + self.other_bytes + self.unexplained_bytes

    def lines(self) -> dict[str, int]:
        """Return the bytes by purpose, in print order."""
        lines = {
            "pools": self.pool_bytes,
            "outputs": self.output_bytes,
            "static inputs": self.static_bytes,
            "workspaces": self.workspace_bytes,
            "driver": self.driver_bytes,
        }
        if self.is_metered:
            lines |= {
                "libraries": self.library_bytes,
                "other torch memory": self.other_bytes,
                "unexplained": self.unexplained_bytes,
            }
        return lines

    def __str__(self) -> str:
        limit = "" if self.max_bytes is None else f" of {_mib(self.max_bytes)}"
        rows = [f"Graphs on {self.device}: {_mib(self.num_bytes)}{limit}"]
        for name, num_bytes in self.lines().items():
            if name == "libraries":
                rows.append("    not part of the total:")
            rows.append(f"  {name:<24}{_mib(num_bytes):>14}")
            if name == "pools":
                rows += [
                    f"    {pool.name:<22}{_mib(pool.num_bytes):>14}"
                    f"   {counted(pool.num_graphs, 'graph')}, {counted(pool.num_lanes, 'lane')}"
                    for pool in self.pools
                ]
        return "\n".join(rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.2f} MiB"
