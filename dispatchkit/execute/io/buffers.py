"""Static input buffers: the memory that graphs read and ``transports`` write.

A graph reads its inputs at the addresses used in its capture. Each lane has one buffer per input,
and batched buffers have at least as many rows as the largest bucket. A batch occupies the first
rows, and the padding rows after it must contain the input's fill value.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, KeysView, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.backends.watching.dispatch_mode import inference_mode
from dispatchkit.errors import ConfigError, InputError, UnknownNameError, counted
from dispatchkit.execute.io.host_arrays import numpy_module
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.staging import StagingBuffers
from dispatchkit.execute.io.static_input import Allocate, allocate_default


class InputBuffers:
    """The input buffers of a lane, or of a graph captured outside the runner.

    Args:
        inputs: Declared inputs.
        num_rows: Number of rows in each batched buffer.
        tensors: Existing buffers in declared order; allocated by default.
        backend: Backend of the device; required with host inputs, unless ``tensors`` is given.
        allocate: Function that allocates device tensors, for example in a graph pool.

    Attributes:
        tensors: One device tensor per input, in declared order.
        num_rows: Number of rows in each batched buffer.
        staging: Staging buffers of the host inputs; None if there are none.
        clean_from: First row of the range that is known to contain only fill values in every
            batched buffer. For host inputs with staging buffers, the range applies to their pinned
            memory.
        clean_to: End of this range (exclusive).
        are_shared: Whether code outside the runner has access to the buffers. A call's inputs might
            then be views of them.
    """

    clean_to: int
    clean_from: int

    def __init__(
        self,
        inputs: InputSet,
        num_rows: int,
        tensors: Sequence[torch.Tensor] | None = None,
        backend: GraphBackend | None = None,
        allocate: Allocate = allocate_default,
    ) -> None:
        self.inputs = inputs
        self.num_rows = num_rows
        self.staging: StagingBuffers | None = None
        self.are_shared: bool = tensors is not None
        self.clean_from, self.clean_to = 0, num_rows
        if tensors is not None:
            self.tensors: list[torch.Tensor] = list(tensors)
            self.clean_to = 0  # their contents are unknown
        else:
            if inputs.host and backend is not None:
                host = {name: spec for name, spec in inputs.specs.items() if spec.host}
                self.staging = StagingBuffers(host, num_rows, backend, allocate)
            staged = {} if self.staging is None else self.staging.device
            # Inference tensors cannot be modified outside inference mode.
            with inference_mode(False):
                self.tensors = [
                    staged[name]
                    if name in staged
                    else allocate(partial(spec.full, num_rows, inputs.device))
                    for name, spec in inputs.specs.items()
                ]
        self._fills: list[torch.Tensor | None] = [None] * len(self.tensors)
        self._edges: list[int] | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the device buffers in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row_bytes(self, index: int) -> int:
        """Return the size in bytes of one row of a batched input, or of a whole unbatched input."""
        spec = self.inputs.specs[self.inputs.names[index]]
        return spec.sized(1).numel() * spec.dtype.itemsize

    def views(self, num_rows: int) -> list[torch.Tensor]:
        """Return views of the first rows of batched buffers, and whole unbatched buffers.

        Raises:
            ConfigError: The buffers have fewer than ``num_rows`` rows.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise ConfigError(
                "num_rows",
                num_rows,
                f"a number from 0 to {self.num_rows}, the number of rows in the buffers",
            )
        views = list(self.tensors)
        for index, dim in self.inputs.batched:
            views[index] = views[index].narrow(dim, 0, num_rows)
        return views

    def host_rows(self, num_rows: int) -> list[tuple[int, torch.Tensor]]:
        """Return the index of each host input and a view of its first rows in pinned memory."""
        if self.staging is None:
            return []
        dims = dict(self.inputs.batched)
        found = [(index, self.staging.host[self.inputs.names[index]]) for index in self.inputs.host]
        return [
            (index, rows.narrow(dims[index], 0, num_rows) if index in dims else rows)
            for index, rows in found
        ]

    def fill_of(self, index: int, num_rows: int) -> torch.Tensor:
        """Return a tensor with ``num_rows`` rows of an input's fill value."""
        source = self._fills[index]
        spec = self.inputs.specs[self.inputs.names[index]]
        if source is None:
            with inference_mode(False):
                source = spec.full(self.num_rows, self.inputs.device)
            self._fills[index] = source
        return source.narrow(spec.batch_dim or 0, 0, num_rows)

    def copies(self, num_rows: int) -> list[torch.Tensor]:
        """Return device copies of the first rows of all inputs.

        Host inputs are copied from pinned memory.

        Raises:
            InputError: The buffers have fewer than ``num_rows`` rows.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise InputError(
                self.inputs.names[0],
                f"An in-place step can have at most {counted(self.num_rows, 'row')}, the size of "
                f"the static inputs, got {num_rows}. Call the runner with tensors instead.",
            )
        sources = self.views(num_rows)
        for index, rows in self.host_rows(num_rows):
            sources[index] = rows
        return [source.to(self.inputs.device, copy=True) for source in sources]

    def mark_shared_results(self, leaves: Iterable[Any]) -> None:
        """Set ``are_shared`` if a result returned without a copy is stored in the buffers."""
        storages = {tensor.untyped_storage()._cdata for tensor in self.tensors}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in storages:
                self.are_shared = True

    def copy_overlapping(
        self, values: Sequence[Any], indices: Iterable[int] | None = None
    ) -> Sequence[Any]:
        """Return a batch with copies instead of the values that are stored in these buffers.

        Otherwise, loading the batch into the buffers could overwrite a value before it is read.

        Args:
            values: Device tensors, and arrays for host inputs, in declared order.
            indices: Indices of the inputs to check; by default all.
        """
        edges = self._edges
        if edges is None:
            edges = self._edges = self._find_edges()
        made: list[Any] | None = None
        for index in range(len(values)) if indices is None else indices:
            value = values[index]
            is_tensor = isinstance(value, torch.Tensor)
            # The address is inside a buffer if an odd number of edges precede or equal it.
            if bisect_right(edges, value.data_ptr() if is_tensor else _address_of(value)) & 1:
                if made is None:
                    made = list(values)
                made[index] = value.clone() if is_tensor else value.copy()
        return values if made is None else made

    def _find_edges(self) -> list[int]:
        """Return the start and end addresses of all buffers, in ascending order."""
        pinned = () if self.staging is None else tuple(self.staging.host.values())
        storages = [tensor.untyped_storage() for tensor in (*self.tensors, *pinned)]
        ranges = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages})
        return [edge for both in ranges for edge in both]

    @contextmanager
    def preserved(self, num_rows: int) -> Iterator[None]:
        """Save the first rows, and restore them on exit after a capture has overwritten them."""
        places = self.views(num_rows)
        places += [rows for _, rows in self.host_rows(num_rows)]
        copies = [place.clone() for place in places]
        try:
            yield
        finally:
            if self.staging is not None:
                self.staging.wait()
            for place, rows in zip(places, copies, strict=True):
                place.copy_(rows)
            self.mark_written(num_rows)

    def reset(self) -> None:
        """Write fill values to all rows of batched buffers, unless they already contain them."""
        if self.clean_from == 0 and self.clean_to == self.num_rows:
            return
        if self.staging is not None:
            self.staging.wait()
        for index, _ in self.inputs.batched:
            name = self.inputs.names[index]
            fill = self.inputs.specs[name].fill_value
            self.tensors[index].fill_(fill)
            if self.staging is not None and name in self.staging.host:
                self.staging.host[name].fill_(fill)
        self.clean_from, self.clean_to = 0, self.num_rows

    def refill(self) -> None:
        """Write fill values to all device buffers after their memory lost its contents."""
        for name, tensor in zip(self.inputs.names, self.tensors, strict=True):
            tensor.copy_(self.inputs.specs[name].full(self.num_rows, self.inputs.device))

    def poison(self, value: float = float("nan")) -> None:
        """Overwrite all rows of batched float inputs, so that tests detect reads of stale rows."""
        if self.staging is not None:
            self.staging.wait()
        for index, _ in self.inputs.batched:
            name = self.inputs.names[index]
            places = [self.tensors[index]]
            if self.staging is not None and name in self.staging.host:
                places.append(self.staging.host[name])
            for place in places:
                if place.is_floating_point():
                    place.fill_(value)
        self.mark_unknown()

    def mark_written(self, num_rows: int) -> None:
        """Record that the first ``num_rows`` rows are not known to contain fill values."""
        self.clean_from = max(self.clean_from, num_rows)

    def mark_filled(self, start: int, stop: int) -> None:
        """Record that rows ``start`` to ``stop`` contain fill values.

        Earlier rows then count as unknown.
        """
        if self.clean_from <= stop:
            self.clean_to = max(self.clean_to, stop)
        else:
            self.clean_to = stop
        self.clean_from = start

    def mark_unknown(self) -> None:
        """Record that no row is known to contain fill values."""
        self.clean_from = self.clean_to = 0


def _address_of(array: Any) -> int:
    """Return an address inside the memory of an array, or 0 if numpy owns the memory."""
    owner, array_type = array.base, numpy_module().ndarray
    while isinstance(owner, array_type):  # a view of a view
        owner = owner.base
    if owner is None:
        return 0
    if isinstance(owner, torch.Tensor):
        return owner.data_ptr()
    # Slow, but used only if another library owns the memory.
    address: int = array.__array_interface__["data"][0]
    return address


class StaticBuffers:
    """Mapping of input names to static input buffers, for callers that write inputs in place.

    The buffer of a device input is a device tensor: write its first rows on the stream of the
    steps. The buffer of a host input is pinned memory: call ``wait()`` before writing its first
    rows. Write all inputs before each step, because the buffers may no longer contain the inputs of
    earlier steps.

    Args:
        buffers: Buffers to expose.
    """

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers = buffers
        tensors = dict(zip(buffers.inputs.names, buffers.tensors, strict=True))
        if buffers.staging is not None:
            tensors |= buffers.staging.host
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            found = self._tensors[name]
        except (KeyError, TypeError):
            raise UnknownNameError("input", name, self._tensors) from None
        self._buffers.are_shared = True
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def keys(self) -> KeysView[str]:
        """Return the input names in declared order."""
        return self._tensors.keys()

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def num_rows(self) -> int:
        """The number of rows in each batched buffer, at least the size of the largest graph."""
        return self._buffers.num_rows

    def wait(self) -> None:
        """Wait until the last copy of the host inputs has finished; they may then be written."""
        if self._buffers.staging is not None:
            self._buffers.staging.wait()
