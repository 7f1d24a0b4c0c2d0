"""Transports: copy batches into the static input buffers of a graph.

``transport_of`` returns the transport for the ``InputPath`` of a graph. ``CopyTransport`` copies on
the device before the launch. ``StagedTransport`` writes host inputs to pinned memory that the graph
copies. ``NodeTransport`` sets the graph's copy node.

A transport serves batches of one size, so its views are cached and a step does no slicing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol, cast

import torch

from dispatchkit.backends.optional import CopyNode, CopyRegion
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.host_arrays import array_dtype, as_array, numpy_module
from dispatchkit.execute.io.input_path import FILL_BYTES, InputPath
from dispatchkit.execute.io.inputs import TensorGuards, has_lazy_bits, never
from dispatchkit.execute.io.staging import StagingBuffers

_copy: Any = torch._foreach_copy_  # Any, because its stub accepts only lists and tuples


class Transport(Protocol):
    """Protocol for copying batches of one size into the static input buffers of one graph.

    Both methods are called under the runner's lock, immediately before the launch. The graph then
    reads the rows of the batch, followed by fill values up to its bucket.

    Attributes:
        buffers: Static input buffers of the graph.
        overlapping: Indices of the inputs whose values may be views of the buffers. ``load`` could
            overwrite such a value before reading it. Host inputs are included only if they are
            written to pinned memory.
    """

    buffers: InputBuffers
    overlapping: Sequence[int]

    def load(self, values: Sequence[Any], readable: bool) -> None:
        """Copy a batch into the buffers.

        Args:
            values: Device tensors, and arrays for host inputs, in declared order.
            readable: Second result of ``InputSet.check`` for these values.

        Raises:
            ReplayError: The copy node cannot be disabled, so a launch would copy inputs of an
                earlier call.
        """

    def load_in_place(self) -> None:
        """Prepare a batch that the caller wrote into the runner's static inputs.

        Raises:
            ReplayError: The copy node cannot be disabled.
            InputError: The runner's static inputs have too few rows.
        """


def transport_of(path: InputPath, num_rows: int) -> Transport:
    """Return the transport for batches of ``num_rows`` rows."""
    # Use a ``NodeTransport`` even if the node has failed. No other transport disables the node, and
    # an enabled node would copy inputs of an earlier call.
    if path.node is not None:
        return NodeTransport(path, path.node, num_rows)
    return _without_node(path, num_rows)


def _without_node(
    path: InputPath, num_rows: int, indices: Sequence[int] | None = None
) -> CopyTransport | StagedTransport:
    """Return a transport that copies all or some inputs without the node."""
    buffers, bucket = path.buffers, path.bucket
    if path.staging is not None:
        return StagedTransport(buffers, path.staging, num_rows, bucket, indices=indices)
    return CopyTransport(buffers, num_rows, bucket, indices=indices, source=path.source)


class CopyTransport:
    """Transport that copies batches on the device, with one fused copy per dtype.

    The padding rows are filled in the same copy, unless they are known to hold fill values. Host
    inputs are moved to the device first. The pinned memory that other graphs copy from is not
    updated.

    Args:
        buffers: Buffers that the graph reads.
        num_rows: Number of rows in each batch.
        bucket: Number of rows that the graph reads.
        indices: Indices of the inputs to copy; by default all.
        source: Buffers to which callers write the rows of in-place steps; by default ``buffers``.
    """

    def __init__(
        self,
        buffers: InputBuffers,
        num_rows: int,
        bucket: int,
        *,
        indices: Sequence[int] | None = None,
        source: InputBuffers | None = None,
    ) -> None:
        self.buffers, self.num_rows, self.bucket = buffers, num_rows, bucket
        inputs, views = buffers.inputs, buffers.views(num_rows)
        self.overlapping: Sequence[int] = inputs.on_device  # host inputs are copied first
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, spec in enumerate(inputs):
            if indices is None or index in indices:
                by_dtype.setdefault(spec.dtype, []).append(index)
        self._groups = list(by_dtype.values())
        self._copies = [
            ([views[index] for index in group], _picker(group)) for group in self._groups
        ]
        self._moves_host = any(index in group for group in self._groups for index in inputs.host)
        self._leaves_pinned = self._moves_host and buffers.staging is not None
        is_elsewhere = source is not None and source is not buffers
        self._source = (source or buffers) if is_elsewhere or self._moves_host else None
        # If one group contains all inputs in declared order, a call need not select its values.
        is_whole = indices is None and len(self._groups) == 1 and not self._moves_host
        self._all: list[torch.Tensor] | None = self._copies[0][0] if is_whole else None
        self._kept_tails: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None

    def load(self, values: Sequence[Any], readable: bool) -> None:
        """Copy a batch and fill the padding rows."""
        buffers, num_rows, bucket = self.buffers, self.num_rows, self.bucket
        if self._leaves_pinned:
            buffers.mark_unknown()
        elif num_rows == bucket or (buffers.clean_from <= num_rows and bucket <= buffers.clean_to):
            if buffers.clean_from < num_rows:
                buffers.clean_from = num_rows  # before the copy, which may fail halfway
            if self._all is not None:
                _copy(self._all, values)
            else:
                self.copy(values, fill=False)
            return
        buffers.mark_written(num_rows)
        self.copy(values, fill=num_rows < bucket)
        if not self._leaves_pinned:
            buffers.mark_filled(num_rows, bucket)

    def load_in_place(self) -> None:
        """Copy rows that are not yet in the graph's buffers, and fill the padding rows."""
        buffers, num_rows = self.buffers, self.num_rows
        if self._source is not None:
            self.load(self._source.copies(num_rows), readable=True)
            return
        if num_rows == self.bucket or (
            buffers.clean_from <= num_rows and self.bucket <= buffers.clean_to
        ):
            if buffers.clean_from < num_rows:
                buffers.clean_from = num_rows
            return
        buffers.mark_written(num_rows)
        self.fill()
        buffers.mark_filled(num_rows, self.bucket)

    def copy(self, values: Sequence[Any], *, fill: bool) -> None:
        """Copy a batch; if ``fill``, also fill the padding rows, without marking them as filled."""
        if self._moves_host:
            values = self.buffers.inputs.to_tensors(values)
        if not fill:
            for targets, pick in self._copies:
                _copy(targets, pick(values))
            return
        for (targets, pick), (stale, fills) in zip(self._copies, self._tails(), strict=True):
            _copy([*targets, *stale], [*pick(values), *fills])

    def fill(self) -> None:
        """Fill the padding rows; do not mark them as filled."""
        for stale, fills in self._tails():
            if stale:
                _copy(stale, fills)

    def _tails(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return, for each dtype, views of the padding rows and the fill values to copy there."""
        if self._kept_tails is None:
            buffers, length = self.buffers, self.bucket - self.num_rows
            dims = dict(buffers.inputs.batched)
            self._kept_tails = [
                (
                    [
                        buffers.tensors[index].narrow(dims[index], self.num_rows, length)
                        for index in group
                        if index in dims
                    ],
                    [buffers.fill_of(index, length) for index in group if index in dims],
                )
                for group in self._groups
            ]
        return self._kept_tails


class StagedTransport:
    """Transport that writes host inputs to pinned memory, which the graph copies.

    Device inputs are copied on the device before the launch.

    Args:
        buffers: Buffers that the graph reads.
        staging: Pinned memory of ``buffers``.
        num_rows: Number of rows in each batch.
        bucket: Number of rows that the graph reads.
        indices: Indices of the device inputs to copy; by default all.
    """

    def __init__(
        self,
        buffers: InputBuffers,
        staging: StagingBuffers,
        num_rows: int,
        bucket: int,
        *,
        indices: Sequence[int] | None = None,
    ) -> None:
        self.buffers, self.num_rows, self.bucket = buffers, num_rows, bucket
        self._staging = staging
        self._rows = [(index, as_array(rows)) for index, rows in buffers.host_rows(num_rows)]
        self.overlapping: Sequence[int] = range(len(buffers.tensors))
        host = buffers.inputs.host
        chosen = range(len(buffers.tensors)) if indices is None else indices
        on_device = [index for index in chosen if index not in host]
        self._device = (
            CopyTransport(buffers, num_rows, bucket, indices=on_device) if on_device else None
        )
        self._kept_tails: list[tuple[Any, Any]] | None = None

    def load(self, values: Sequence[Any], readable: bool) -> None:
        """Write host inputs, copy device inputs, and fill the padding rows."""
        buffers, num_rows, bucket = self.buffers, self.num_rows, self.bucket
        if num_rows == bucket or (buffers.clean_from <= num_rows and bucket <= buffers.clean_to):
            if buffers.clean_from < num_rows:
                buffers.clean_from = num_rows
            self.copy(values, fill=False)
            return
        buffers.mark_written(num_rows)
        self.copy(values, fill=True)
        buffers.mark_filled(num_rows, bucket)

    def load_in_place(self) -> None:
        """Fill the padding rows."""
        buffers, num_rows = self.buffers, self.num_rows
        if num_rows == self.bucket or (
            buffers.clean_from <= num_rows and self.bucket <= buffers.clean_to
        ):
            if buffers.clean_from < num_rows:
                buffers.clean_from = num_rows
            return
        buffers.mark_written(num_rows)
        self.fill()
        buffers.mark_filled(num_rows, self.bucket)

    def copy(self, values: Sequence[Any], *, fill: bool) -> None:
        """Copy a batch; if ``fill``, also fill the padding rows, without marking them as filled."""
        self._staging.wait()
        for index, rows in self._rows:
            rows[...] = values[index]
        if fill:
            self._fill_pinned()
        if self._device is not None:
            self._device.copy(values, fill=fill)

    def fill(self) -> None:
        """Fill the padding rows; do not mark them as filled."""
        self._staging.wait()
        self._fill_pinned()
        if self._device is not None:
            self._device.fill()

    def _fill_pinned(self) -> None:
        if self._kept_tails is None:
            inputs, staging = self.buffers.inputs, self._staging
            length = self.bucket - self.num_rows
            self._kept_tails = []
            for index, dim in inputs.batched:
                if index in inputs.host:
                    name = inputs.names[index]
                    stale = staging.host[name].narrow(dim, self.num_rows, length)
                    self._kept_tails.append((as_array(stale), staging.fill_arrays[name]))
        for stale, fill in self._kept_tails:
            stale[...] = fill


class NodeTransport:
    """Transport that sets the graph's copy node and copies the remaining inputs.

    Padding rows that the node fills are not marked as filled, because the launch might not take
    place.

    In-place steps with host inputs set the node too, because these inputs are still in pinned
    memory. For device inputs, which are already in place, the node only fills the padding rows.

    Args:
        path: Input path of the graph.
        node: Copy node of the path.
        num_rows: Number of rows in each batch.
    """

    def __init__(self, path: InputPath, node: CopyNode, num_rows: int) -> None:
        buffers = self.buffers = path.buffers
        self.num_rows, self.bucket = num_rows, path.bucket
        all_inputs = range(len(buffers.tensors))
        self.overlapping: Sequence[int] = (
            buffers.inputs.on_device if path.staging is None else all_inputs
        )
        self._path = path
        views = buffers.views(num_rows)
        self._views = [views[index] for index in path.device_inputs]
        self._takes_all = path.device_inputs == tuple(range(len(views)))
        self._pick = _picker(path.device_inputs) if path.device_inputs else None
        self._host_rows = [
            (index, self._data_rows(node, index, offset))
            for index, offset in path.host_offsets.items()
        ]
        pinned = dict(buffers.host_rows(num_rows))
        self._pinned_rows = [(rows, as_array(pinned[index])) for index, rows in self._host_rows]
        by_node = (*path.device_inputs, *path.host_offsets)
        others = [index for index in range(len(views)) if index not in by_node]
        self._others = _without_node(path, num_rows, others) if others else None
        regions = [self._region(index) for index in by_node]
        self._set = node.setter(regions, tuple(path.host_offsets.values()))
        self._fits: Callable[..., bool] = never
        self._filler: StagedTransport | None = None
        self._fallback: CopyTransport | StagedTransport | None = None

    def load(self, values: Sequence[Any], readable: bool) -> None:
        """Set the node to copy a batch in the next launch, and copy the remaining inputs.

        Raises:
            ReplayError: Setting the node failed, and the node cannot be disabled.
        """
        buffers, path = self.buffers, self._path
        if self._others is not None:
            self._load_others(self._others, values)
        if buffers.clean_from < self.num_rows:
            buffers.clean_from = self.num_rows
        picked: Sequence[Any] = values
        if not self._takes_all:
            for index, rows in self._host_rows:
                rows[...] = values[index]
            picked = () if self._pick is None else self._pick(values)
        if not readable and picked and not self._fits(*picked):
            picked = self._copy_unreadable(picked)
        path.is_idle = False
        code = self._set(picked)
        if code:
            path.record_node_failure(code)
            self._get_fallback().load(values, readable)
            path.stop_node()

    def load_in_place(self) -> None:
        """Fill the padding rows, and set the node to copy host inputs, if any, in the next launch.

        Raises:
            ReplayError: The node cannot be disabled.
        """
        buffers, path, num_rows = self.buffers, self._path, self.num_rows
        if not self._host_rows:
            if path.is_idle and (
                num_rows == self.bucket
                or (buffers.clean_from <= num_rows and self.bucket <= buffers.clean_to)
            ):
                if buffers.clean_from < num_rows:
                    buffers.clean_from = num_rows
                return
            path.stop_node()
            self._get_fallback().load_in_place()
            return
        if self._others is None:
            buffers.mark_written(num_rows)
        else:
            self._fill_all()
        for rows, pinned in self._pinned_rows:
            rows[...] = pinned
        path.is_idle = False
        code = self._set(self._views)
        if code:
            path.record_node_failure(code)
            self._get_fallback().load_in_place()
            path.stop_node()

    def _load_others(self, others: CopyTransport | StagedTransport, values: Sequence[Any]) -> None:
        """Copy the remaining inputs, and fill their padding rows if necessary."""
        buffers, num_rows, bucket = self.buffers, self.num_rows, self.bucket
        is_clean = buffers.clean_from <= num_rows and bucket <= buffers.clean_to
        buffers.mark_written(num_rows)  # before the copy, which may fail halfway
        others.copy(values, fill=num_rows < bucket and not is_clean)

    def _get_fallback(self) -> CopyTransport | StagedTransport:
        """Return the transport that copies all inputs without the node."""
        if self._fallback is None:
            self._fallback = _without_node(self._path, self.num_rows)
        return self._fallback

    def _fill_all(self) -> None:
        """Fill the padding rows of all inputs, on the device and in pinned memory."""
        if self._filler is None:
            # Not None, because there are host inputs.
            staging = cast(StagingBuffers, self.buffers.staging)
            self._filler = StagedTransport(self.buffers, staging, self.num_rows, self.bucket)
        self._filler.load_in_place()

    def _data_rows(self, node: CopyNode, index: int, offset: int) -> Any:
        """Return a view of a host input's rows in the node's host buffer."""
        spec = self.buffers.inputs.specs[self.buffers.inputs.names[index]]
        shape, dtype = tuple(spec.sized(self.num_rows)), array_dtype(spec.dtype)
        return numpy_module().ndarray(shape, dtype, node.data, offset)

    def _region(self, index: int) -> CopyRegion:
        buffers = self.buffers
        spec = buffers.inputs.specs[buffers.inputs.names[index]]
        row, target = buffers.row_bytes(index), buffers.tensors[index].data_ptr()
        if spec.batch_dim is None:
            return CopyRegion(target, row, 0, 0)
        element = torch.full((1,), spec.fill_value, dtype=spec.dtype).view(torch.uint8).tolist()
        fill = int.from_bytes(bytes(element * (FILL_BYTES // len(element))), "little")
        return CopyRegion(target, row * self.num_rows, row * (self.bucket - self.num_rows), fill)

    def _copy_unreadable(self, values: Sequence[Any]) -> Sequence[Any]:
        """Copy tensors that the node cannot read directly; return the sources for the node.

        For a copied tensor, the source is its target buffer, which the node does not copy again.
        """
        are_readable = [_is_readable(value) for value in values]
        if all(are_readable):
            if TensorGuards is not None and self._fits is never:
                self._fits = TensorGuards(
                    *values,
                    dynamic_dims_sizes=[list(value.shape) for value in values],
                    dynamic_dims_strides=[list(value.stride()) for value in values],
                ).check
            return values
        made = list(values)
        for number, (view, is_readable) in enumerate(zip(self._views, are_readable, strict=True)):
            if not is_readable:
                view.copy_(made[number])
                made[number] = view
        return made


def _picker(group: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that returns the values at some indices as a tuple."""
    if len(group) == 1:
        index = group[0]
        return lambda values: (values[index],)
    return itemgetter(*group)


def _is_readable(value: torch.Tensor) -> bool:
    """Return whether a copy node can read a tensor's values directly from its memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_contiguous()
        and not has_lazy_bits(value)
    )
