"""Account of a device's memory since a ``GraphMemory`` began to count."""

from __future__ import annotations

import attrs

_MIB = 1 << 20


@attrs.frozen
class PoolAccount:
    """One pool.

    Attributes:
        name: Name of its group.
        num_bytes: Bytes that it reserves.
        num_lanes: Lanes that share it.
        num_graphs: Graphs in it.
    """

    name: str
    num_bytes: int
    num_lanes: int
    num_graphs: int


@attrs.frozen(kw_only=True)
class MemoryAccount:
    """Memory of graphs on one device, in bytes, and other memory taken since counting began.

    Attributes:
        device: The device.
        max_bytes: The budget; None for no limit.
        pools: Memory of intermediates, and of outputs that graphs keep.
        output_bytes: Outputs shared by the graphs of a lane.
        static_bytes: Static inputs.
        workspace_bytes: Workspaces of libraries on the streams of the pools.
        driver_bytes: Memory that the driver took while graphs were captured, less the memory it
            freed when they were released.
        library_bytes: Memory that the driver took during warmups, which load kernels and libraries.
            Evicting graphs does not free it, and eager steps need it, too, so it is not in the
            budget.
        other_bytes: Other memory of torch: weights, activations, and memory cached by its
            allocator.
        unexplained_bytes: The rest: the driver at other times, and other processes. Negative if
            earlier memory was freed.
        is_metered: The backend reports the device memory in use. Otherwise the last five are 0 and
            add nothing to a budget.
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
        """Bytes of all pools."""
        return sum(pool.num_bytes for pool in self.pools)

    @property
    def num_bytes(self) -> int:
        """Bytes that count in the budget: pools, outputs, static inputs, workspaces, driver."""
        return (
            self.pool_bytes
            + self.output_bytes
            + self.static_bytes
            + self.workspace_bytes
            + self.driver_bytes
        )

    @property
    def gone_bytes(self) -> int:
        """Device memory taken since counting began."""
        return self.num_bytes + self.library_bytes + self.other_bytes + self.unexplained_bytes

    def lines(self) -> dict[str, int]:
        """Return the bytes by purpose, in the order of printing."""
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
                "other memory of torch": self.other_bytes,
                "unexplained": self.unexplained_bytes,
            }
        return lines

    def __str__(self) -> str:
        limit = "" if self.max_bytes is None else f" of {_mib(self.max_bytes)}"
        rows = [f"Graphs on {self.device}: {_mib(self.num_bytes)}{limit}"]
        for name, num_bytes in self.lines().items():
            if name == "libraries":
                rows.append("    outside the budget:")
            rows.append(f"  {name:<24}{_mib(num_bytes):>14}")
            if name == "pools":
                rows += [
                    f"    {pool.name:<22}{_mib(pool.num_bytes):>14}"
                    f"   {pool.num_graphs} graphs, {pool.num_lanes} lanes"
                    for pool in self.pools
                ]
        return "\n".join(rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.2f} MiB"
