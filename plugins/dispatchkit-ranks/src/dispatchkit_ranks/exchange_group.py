"""The collective of an agreement: a maximum over all ranks, with a time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class ExchangeGroup:
    """A process group for the exchanges of one agreement: gloo on the CPU, NCCL on CUDA devices.

    It does not use ``torch.distributed.new_group``. If only the members create a group, that
    function derives the group's name from the ranks of the members. A second group of the same
    members would then read the first group's addresses from the store.

    Args:
        store: The store for exchanging addresses.
        rank: Index of this rank.
        size: Number of ranks.
        device: The device of the exchange.
        width: Number of integers in one exchange.
        seconds: Time limit for connecting.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, width: int, seconds: float
    ) -> None:
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        make = _gloo if self._is_on_cpu else _nccl
        self._group: Any = make(store, rank, size, seconds)
        self._row = torch.zeros(width, dtype=torch.int64)
        self._as_array = self._row.numpy()
        self._device_row = self._row if self._is_on_cpu else self._row.to(device)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._seconds = 0.0

    def merge(self, row: Sequence[int], seconds: float) -> list[int]:
        """Return the maximum of each column over all ranks.

        Raises:
            RuntimeError: Other ranks did not arrive in time, or the connection broke.
        """
        self._as_array[:] = row
        if self._is_on_cpu:
            self._allreduce(self._row, seconds)
        else:
            self._device_row.copy_(self._row)
            self._allreduce(self._device_row, seconds)
            self._row.copy_(self._device_row)
        merged: list[int] = self._row.tolist()
        return merged

    def merge_bytes(self, table: np.ndarray[Any, Any], seconds: float) -> np.ndarray[Any, Any]:
        """Return the maximum of each byte of a table over all ranks.

        Raises:
            RuntimeError: Other ranks did not arrive in time, or the connection broke.
        """
        tensor = torch.from_numpy(table).to(self._device)
        self._allreduce(tensor, seconds)
        found: np.ndarray[Any, Any] = tensor.cpu().numpy()
        return found

    def close(self) -> None:
        """Close the group's connections, which wakes ranks waiting in a collective."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._is_on_cpu:
            group.shutdown()
        else:
            # shutdown() would wait for an NCCL collective that other ranks do not join.
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _allreduce(self, tensor: torch.Tensor, seconds: float) -> None:
        if seconds != self._seconds:
            self._options.timeout, self._seconds = timedelta(seconds=seconds), seconds
        work = self._group.allreduce([tensor], self._options)
        if self._is_on_cpu:
            work.wait()
            return
        # NCCL's wait() only orders streams; it has no time limit on the host.
        deadline = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"NCCL did not finish within {seconds:.3g} s")
        # A failed collective also counts as completed, and wait() with a timeout raises its error.
        # wait() does not block here, because the collective has ended.
        work.wait(self._options.timeout)


def _gloo(store: Any, rank: int, size: int, seconds: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))


def _nccl(store: Any, rank: int, size: int, seconds: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # NCCL's watchdog terminates the process at a time limit, which must exceed the limit of the
    # agreement.
    options._timeout = timedelta(seconds=2 * seconds)  # noqa: SLF001 - there is no public name
    return ProcessGroupNCCL(store, rank, size, options)
