"""How calls get into the memory that graphs read, by copies of torch and by the host.

Rows that an earlier, larger call left behind those of a call are set back to fill together with
the copy, in the same operation, and only where something is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any

import torch

from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.host_arrays import as_array

_copy: Any = torch._foreach_copy_  # its stub takes lists and tuples only


class Loader:
    """Brings calls of one size into the buffers, for graphs of one bucket.

    Views are kept, so that a call slices nothing. Device inputs go in one fused copy for
    each dtype, since torch fuses copies of one dtype only.

    Args:
        buffers: Where to.
        num_rows: Rows of the calls.
        bucket: Rows that the graph reads.
        skip: Inputs to leave alone, by index: somebody else brings them.
        staged: Host inputs are written to their pinned memory, for the launch to copy.
            Otherwise they are brought to the device here.
    """

    buffers: InputBuffers
    num_rows: int
    bucket: int

    def __init__(
        self,
        buffers: InputBuffers,
        num_rows: int,
        bucket: int,
        skip: Collection[int] = (),
        *,
        staged: bool = True,
    ) -> None:
        self.buffers, self.num_rows, self.bucket = buffers, num_rows, bucket
        views = buffers.views(num_rows)
        inputs = buffers.inputs
        own_host = not set(inputs.host) <= set(skip)
        staging = self._staging = buffers.staging if staged and own_host else None
        self._to_host: list[tuple[int, Any]] = []
        if staging is not None:
            self._to_host = [
                (index, as_array(rows))
                for index, rows in buffers.host_rows(num_rows)
                if index not in skip
            ]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, spec in enumerate(inputs):
            if index not in skip and (staging is None or not spec.host):
                by_dtype.setdefault(spec.dtype, []).append(index)
        self._groups = list(by_dtype.values())
        self._copies = [
            ([views[index] for index in group], picker(group)) for group in self._groups
        ]
        # A graph captured elsewhere reads device tensors, also for inputs given on the host.
        self._must_move = own_host and staging is None
        is_one = len(self._groups) == 1 and not (self._to_host or self._must_move or skip)
        # All of a call in declared order: nothing to pick.
        self._all: list[torch.Tensor] | None = self._copies[0][0] if is_one else None
        self._tails: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None
        self._host_tails: list[tuple[Any, Any]] = []

    def load(self, values: Sequence[Any]) -> None:
        """Copy a checked call in, and set stale rows behind it back to fill."""
        buffers = self.buffers
        buffers.inputs.plain = None
        if buffers.clean_from <= self.num_rows and self.bucket <= buffers.clean_to:
            buffers.clean_from = self.num_rows  # before the copy: one that fails leaves dirt
            if self._all is not None:
                _copy(self._all, values)
                return
            is_stale = False
        else:
            is_stale = self.num_rows < self.bucket
            buffers.written(self.num_rows)
        if self._must_move:
            values = buffers.inputs.to_tensors(values)
        if self._staging is not None:
            self._staging.wait()
            for index, view in self._to_host:
                view[...] = values[index]
        tails = self._ready_tails() if is_stale else None
        for number, (targets, pick) in enumerate(self._copies):
            sources = pick(values)
            if tails is None:
                _copy(targets, sources)
            else:
                stale, fills = tails[number]
                _copy([*targets, *stale], [*sources, *fills])
        if is_stale:
            self._end_tails()

    def is_settled(self) -> bool:
        """Note a call whose rows are in the buffers already; True if those behind are fill."""
        buffers = self.buffers
        if buffers.clean_from <= self.num_rows and self.bucket <= buffers.clean_to:
            buffers.clean_from = self.num_rows
            return True
        return False

    def settle(self) -> None:
        """Set stale rows behind a call whose rows are in the buffers already back to fill."""
        self.buffers.written(self.num_rows)
        if self.num_rows < self.bucket:
            tails = self._ready_tails()
            if self._staging is not None:
                self._staging.wait()
            for stale, fills in tails:
                if stale:
                    _copy(stale, fills)
            self._end_tails()

    def _end_tails(self) -> None:
        for view, fill in self._host_tails:
            view[...] = fill
        self.buffers.filled(self.num_rows, self.bucket)

    def _ready_tails(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return, for each dtype, the rows behind a call and as many rows of fill."""
        if self._tails is None:
            length = self.bucket - self.num_rows
            dims = dict(self.buffers.inputs.batched)
            self._tails = [
                (
                    [
                        self.buffers.tensors[index].narrow(dims[index], self.num_rows, length)
                        for index in group
                        if index in dims
                    ],
                    [self.buffers.fill_of(index, length) for index in group if index in dims],
                )
                for group in self._groups
            ]
            if self._staging is not None:
                for index in self.buffers.inputs.host:
                    if index in dims:
                        name = self.buffers.inputs.names[index]
                        fill = self._staging.fill_arrays[name]
                        stale = self._staging.host[name].narrow(dims[index], self.num_rows, length)
                        self._host_tails.append((as_array(stale), fill))
        return self._tails


class UnstagedLoader(Loader):
    """As ``Loader``, for graphs that no copy of pinned memory belongs to: torch moves it.

    The memory of the host is not what graphs with such a copy take it for, afterwards.
    """

    def __init__(self, buffers: InputBuffers, num_rows: int, bucket: int) -> None:
        super().__init__(buffers, num_rows, bucket, staged=False)

    def load(self, values: Sequence[Any]) -> None:
        """Copy a checked call in, and fill behind it."""
        self.buffers.clean_from = self.buffers.clean_to = 0
        super().load(values)
        self.buffers.clean_from = self.buffers.clean_to = 0

    def is_settled(self) -> bool:
        """Return False: what the host wrote in place is never on the device yet."""
        return False

    def settle(self) -> None:
        """Bring to the device what the host wrote in place, and fill behind all rows."""
        buffers, views = self.buffers, self.buffers.views(self.num_rows)
        for index, rows in buffers.host_rows(self.num_rows):
            views[index].copy_(rows)
        super().settle()
        buffers.clean_from = buffers.clean_to = 0


class ForeignLoader(Loader):
    """As ``Loader``, for graphs captured elsewhere, which read other memory than the runner's.

    Args:
        buffers: What the graph reads.
        own: What steps in place write.
        num_rows: Rows of the calls.
        bucket: Rows that the graph reads.
    """

    def __init__(
        self, buffers: InputBuffers, own: InputBuffers, num_rows: int, bucket: int
    ) -> None:
        super().__init__(buffers, num_rows, bucket)
        self._own = own

    def is_settled(self) -> bool:
        """Return False: what was written in place is not where the graph reads."""
        return False

    def settle(self) -> None:
        """Bring in what was written in place.

        Raises:
            InputError: The runner's own memory does not hold so many rows.
        """
        self.load(self._own.copies(self.num_rows))


def picker(group: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes a group's values out of a call."""
    if len(group) == 1:
        index = group[0]
        return lambda values: (values[index],)
    return itemgetter(*group)
