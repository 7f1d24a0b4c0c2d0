"""Transports: copy a batch into the memory that a graph reads.

``transport_of`` returns the one for a graph's ``InputPath``: ``CopyTransport`` copies on the device
before the launch, ``StagedTransport`` writes host inputs to pinned memory that the graph copies,
and ``NodeTransport`` sets the graph's copy node.

A transport serves batches of one size, so that its views are cached and a step slices nothing.
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
from dispatchkit.execute.io.inputs import TensorGuards, is_flagged, never
from dispatchkit.execute.io.staging import Staging

_copy: Any = torch._foreach_copy_  # its stub accepts only lists and tuples


class Transport(Protocol):
    """Copies batches of one size into the memory that one graph reads.

    Either method is called under the runner's lock, right before the launch. After the launch's own
    copies, the graph reads the rows of this batch and, from there to its bucket, each input's fill.

    Attributes:
        buffers: The memory.
        overlapping: The inputs that may be in memory that ``load`` writes before it has read all of
            them, since code with access to the buffers may pass parts of them as inputs. Host
            inputs are included only if they are written to pinned memory.
    """

    buffers: InputBuffers
    overlapping: Sequence[int]

    def load(self, values: Sequence[Any], readable: bool) -> None:
        """Copy a batch in.

        Args:
            values: Device tensors, and arrays for host inputs, in declared order.
            readable: As returned by ``InputSet.check`` for these values.

        Raises:
            ReplayError: A copy set by the last call can neither be replaced nor stopped.
        """

    def load_in_place(self) -> None:
        """Copy in the rows that the caller wrote into the runner's own static inputs.

        Raises:
            ReplayError: As for ``load``.
            InputError: The runner's static inputs have fewer rows.
        """


def transport_of(path: InputPath, num_rows: int) -> Transport:
    """Return the transport for batches of ``num_rows`` rows into a graph."""
    # Also if setting the node failed: a launch must not copy inputs of an earlier call.
    if path.node is not None:
        return NodeTransport(path, path.node, num_rows)
    return _without_node(path, num_rows)


def _without_node(
    path: InputPath, num_rows: int, indices: Sequence[int] | None = None
) -> CopyTransport | StagedTransport:
    """Return the transport for a batch, or some of its inputs, without a node."""
    buffers, bucket = path.buffers, path.bucket
    if path.staging is not None:
        return StagedTransport(buffers, path.staging, num_rows, bucket, indices=indices)
    return CopyTransport(buffers, num_rows, bucket, indices=indices, source=path.source)


class CopyTransport:
    """Copies a batch on the device, with one fused copy per dtype.

    The rows after a batch are filled in the same copy, but only if they may hold anything else.
    Host inputs are first moved to the device; the pinned memory that other graphs copy from is not
    updated.

    Args:
        buffers: The buffers that the graph reads.
        num_rows: Rows of the batches.
        bucket: Rows that the graph reads.
        indices: The inputs to copy; by default all.
        source: The buffers that steps in place write; by default the same.
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
        self.overlapping: Sequence[int] = inputs.on_device  # host inputs are moved first
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
        # A whole batch in declared order: nothing to select.
        is_whole = indices is None and len(self._groups) == 1 and not self._moves_host
        self._all: list[torch.Tensor] | None = self._copies[0][0] if is_whole else None
        self._kept_tails: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None

    def load(self, values: Sequence[Any], readable: bool) -> None:
        """Copy a batch, and fill the rows after it."""
        buffers, num_rows, bucket = self.buffers, self.num_rows, self.bucket
        if self._leaves_pinned:
            buffers.mark_unknown()
        elif num_rows == bucket or (buffers.clean_from <= num_rows and bucket <= buffers.clean_to):
            if buffers.clean_from < num_rows:
                buffers.clean_from = num_rows  # before the copy, which may fail half-way
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
        """Fill the rows after existing ones, which are copied here first if necessary."""
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
        """Copy a batch and optionally fill the rows after it, without marking the buffers."""
        if self._moves_host:
            values = self.buffers.inputs.to_tensors(values)
        if not fill:
            for targets, pick in self._copies:
                _copy(targets, pick(values))
            return
        for (targets, pick), (stale, fills) in zip(self._copies, self._tails(), strict=True):
            _copy([*targets, *stale], [*pick(values), *fills])

    def fill(self) -> None:
        """Fill the rows after a batch, without marking the buffers."""
        for stale, fills in self._tails():
            if stale:
                _copy(stale, fills)

    def _tails(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return, for each dtype, the rows after a batch and as many rows of fill."""
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
    """Writes host inputs to pinned memory that the launch copies; copies device inputs.

    Args:
        buffers: The buffers that the graph reads.
        staging: Their pinned memory.
        num_rows: Rows of the batches.
        bucket: Rows that the graph reads.
        indices: The device inputs to copy; by default all.
    """

    def __init__(
        self,
        buffers: InputBuffers,
        staging: Staging,
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
        """Write and copy a batch, and fill the rows after it."""
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
        """Fill the rows after existing ones."""
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
        """Write and copy a batch and optionally fill the rows after it, without marking."""
        self._staging.wait()
        for index, rows in self._rows:
            rows[...] = values[index]
        if fill:
            self._fill_pinned()
        if self._device is not None:
            self._device.copy(values, fill=fill)

    def fill(self) -> None:
        """Fill the rows after a batch, without marking."""
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
    """Sets the graph's copy node for a batch, and copies the other inputs.

    Later batches never rely on rows filled by a launch, since it is not known whether the launch
    happened when they are loaded.

    A step in place also sets the node if it has host inputs, whose rows are in pinned memory until
    then. Rows of device inputs are already in place, and the node only fills the rows after them.

    Args:
        path: The input path of the graph.
        node: The path's node.
        num_rows: Rows of the batches.
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
        beside = [index for index in range(len(views)) if index not in by_node]
        self._beside = _without_node(path, num_rows, beside) if beside else None
        regions = [self._region(index) for index in by_node]
        self._set = node.setter(regions, tuple(path.host_offsets.values()))
        self._fits: Callable[..., bool] = never
        self._filler: StagedTransport | None = None
        self._fallback: CopyTransport | StagedTransport | None = None

    def load(self, values: Sequence[Any], readable: bool) -> None:
        """Make the next launch copy a batch in.

        Raises:
            ReplayError: The node can neither be set nor stopped.
        """
        buffers, path = self.buffers, self._path
        if self._beside is not None:
            self._load_beside(self._beside, values)
        if buffers.clean_from < self.num_rows:
            buffers.clean_from = self.num_rows
        picked: Sequence[Any] = values
        if not self._takes_all:
            for index, rows in self._host_rows:
                rows[...] = values[index]
            picked = () if self._pick is None else self._pick(values)
        if not readable and picked and not self._fits(*picked):
            picked = self._made_readable(picked)
        path.is_idle = False
        code = self._set(picked)
        if code:
            path.node_failed(code)
            self._by_torch().load(values, readable)
            path.stop_node()

    def load_in_place(self) -> None:
        """Make the next launch copy host inputs in; fill the rows after existing ones.

        Raises:
            ReplayError: The node can neither be set nor stopped.
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
            self._by_torch().load_in_place()
            return
        if self._beside is None:
            buffers.mark_written(num_rows)
        else:
            self._fill_by_torch()
        for rows, pinned in self._pinned_rows:
            rows[...] = pinned
        path.is_idle = False
        code = self._set(self._views)
        if code:
            path.node_failed(code)
            self._by_torch().load_in_place()
            path.stop_node()

    def _load_beside(self, beside: CopyTransport | StagedTransport, values: Sequence[Any]) -> None:
        """Copy inputs that the node does not, and fill after them unless already filled."""
        buffers, num_rows, bucket = self.buffers, self.num_rows, self.bucket
        is_clean = buffers.clean_from <= num_rows and bucket <= buffers.clean_to
        buffers.mark_written(num_rows)  # before the copy, which may fail half-way
        beside.copy(values, fill=num_rows < bucket and not is_clean)

    def _by_torch(self) -> CopyTransport | StagedTransport:
        """Return the transport of all inputs without the node."""
        if self._fallback is None:
            self._fallback = _without_node(self._path, self.num_rows)
        return self._fallback

    def _fill_by_torch(self) -> None:
        """Fill the rows after all inputs, for later steps."""
        if self._filler is None:
            staging = cast(Staging, self.buffers.staging)  # host inputs have pinned memory
            self._filler = StagedTransport(self.buffers, staging, self.num_rows, self.bucket)
        self._filler.load_in_place()

    def _data_rows(self, node: CopyNode, index: int, offset: int) -> Any:
        """Return the rows of a host input in the node's data, as an array."""
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

    def _made_readable(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return tensors that the node can read, copying those that it cannot.

        A copied tensor is replaced by its target, which the node leaves unchanged.
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
    """Return a function that selects a group's values from a call."""
    if len(group) == 1:
        index = group[0]
        return lambda values: (values[index],)
    return itemgetter(*group)


def _is_readable(value: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds its values directly, row by row."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.is_contiguous()
        and not is_flagged(value)
    )
