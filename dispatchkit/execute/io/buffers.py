"""Static input buffers: the memory that graphs read, filled by ``transports``.

A graph reads its inputs at the addresses of the capture. Each lane has one buffer per
input, as large as its largest bucket; a batch is at the front. The rows after it, up to the bucket,
must hold the input's fill value.
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
from dispatchkit.errors import ConfigError, InputError, UnknownNameError
from dispatchkit.execute.io.host_arrays import numpy_module
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.staging import Staging
from dispatchkit.execute.io.static_input import Allocate, plainly


class InputBuffers:
    """The static inputs of one lane, or of a graph captured elsewhere.

    Args:
        inputs: The declared inputs.
        num_rows: Rows that each batched buffer has.
        tensors: Existing memory, in declared order; allocated by default.
        backend: The device; required with host inputs, unless ``tensors`` are given.
        allocate: Calls a function that creates tensors, in a pool's memory.

    Attributes:
        tensors: One device tensor per input, in declared order.
        num_rows: Rows that each batched buffer has.
        staging: Pinned memory of the host inputs; None without host inputs.
        clean_from: First row known to hold fill in every batched buffer (in pinned memory, for host
            inputs that have it).
        clean_to: First row after those.
        are_shared: Others have access to the memory, and may pass it as an input.
    """

    clean_to: int
    clean_from: int

    def __init__(
        self,
        inputs: InputSet,
        num_rows: int,
        tensors: Sequence[torch.Tensor] | None = None,
        backend: GraphBackend | None = None,
        allocate: Allocate = plainly,
    ) -> None:
        self.inputs = inputs
        self.num_rows = num_rows
        self.staging: Staging | None = None
        self.are_shared: bool = tensors is not None
        self.clean_from, self.clean_to = 0, num_rows
        if tensors is not None:
            self.tensors: list[torch.Tensor] = list(tensors)
            self.clean_to = 0  # their contents are unknown
        else:
            if inputs.host and backend is not None:
                host = {name: spec for name, spec in inputs.specs.items() if spec.host}
                self.staging = Staging(host, num_rows, backend, allocate)
            staged = {} if self.staging is None else self.staging.device
            # Not in the caller's inference mode: such memory could not be written outside.
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
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row_bytes(self, index: int) -> int:
        """Return the bytes of one row of an input; of the whole input if it is not batched."""
        spec = self.inputs.specs[self.inputs.names[index]]
        return spec.sized(1).numel() * spec.dtype.itemsize

    def views(self, num_rows: int) -> list[torch.Tensor]:
        """Return the first rows of each batched buffer, and the others whole.

        Raises:
            ConfigError: The buffers have fewer rows.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise ConfigError("rows", num_rows, f"0..{self.num_rows}, the rows of the buffers")
        views = list(self.tensors)
        for index, dim in self.inputs.batched:
            views[index] = views[index].narrow(dim, 0, num_rows)
        return views

    def host_rows(self, num_rows: int) -> list[tuple[int, torch.Tensor]]:
        """Return the first rows of each host input in its pinned memory, with its index."""
        if self.staging is None:
            return []
        dims = dict(self.inputs.batched)
        found = [(index, self.staging.host[self.inputs.names[index]]) for index in self.inputs.host]
        return [
            (index, rows.narrow(dims[index], 0, num_rows) if index in dims else rows)
            for index, rows in found
        ]

    def fill_of(self, index: int, num_rows: int) -> torch.Tensor:
        """Return ``num_rows`` rows of an input's fill, to copy from."""
        source = self._fills[index]
        spec = self.inputs.specs[self.inputs.names[index]]
        if source is None:
            with inference_mode(False):
                source = spec.full(self.num_rows, self.inputs.device)
            self._fills[index] = source
        return source.narrow(spec.batch_dim or 0, 0, num_rows)

    def copies(self, num_rows: int) -> list[torch.Tensor]:
        """Copy the first rows of each input, on the device; host inputs from pinned memory.

        Raises:
            InputError: The buffers have fewer rows.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise InputError(
                self.inputs.names[0],
                f"A step of {num_rows} rows cannot run in place: the buffers have {self.num_rows} "
                "rows, those of the largest graph. Call the runner with tensors instead.",
            )
        sources = self.views(num_rows)
        for index, rows in self.host_rows(num_rows):
            sources[index] = rows
        return [source.to(self.inputs.device, copy=True) for source in sources]

    def note_results(self, leaves: Iterable[Any]) -> None:
        """Note results returned without a copy, since a step may return its input."""
        storages = {tensor.untyped_storage()._cdata for tensor in self.tensors}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata in storages:
                self.are_shared = True

    def apart(self, values: Sequence[Any], indices: Iterable[int] | None = None) -> Sequence[Any]:
        """Return a batch with copies of values in these buffers, which it will overwrite.

        Args:
            values: Device tensors, and arrays for host inputs, in declared order.
            indices: The inputs to check; by default all.
        """
        edges = self._edges
        if edges is None:
            edges = self._edges = self._find_edges()
        made: list[Any] | None = None
        for index in range(len(values)) if indices is None else indices:
            value = values[index]
            is_tensor = isinstance(value, torch.Tensor)
            # An odd number of edges before it: after a beginning and before its end.
            if bisect_right(edges, value.data_ptr() if is_tensor else _address_of(value)) & 1:
                if made is None:
                    made = list(values)
                made[index] = value.clone() if is_tensor else value.copy()
        return values if made is None else made

    def _find_edges(self) -> list[int]:
        """Return the begin and end addresses of each buffer, in order."""
        pinned = () if self.staging is None else tuple(self.staging.host.values())
        storages = [tensor.untyped_storage() for tensor in (*self.tensors, *pinned)]
        ranges = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages})
        return [edge for both in ranges for edge in both]

    @contextmanager
    def kept(self, num_rows: int) -> Iterator[None]:
        """Restore the rows of a step in place after a capture, which fills the buffers."""
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
        """Fill every row that may hold anything else."""
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
        """Fill every row on the device, whose memory has lost its contents."""
        for name, tensor in zip(self.inputs.names, self.tensors, strict=True):
            tensor.copy_(self.inputs.specs[name].full(self.num_rows, self.inputs.device))

    def poison(self, value: float = float("nan")) -> None:
        """Overwrite all rows of floating-point inputs; no later result may depend on them."""
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
        """Note that the first rows are about to be overwritten."""
        self.clean_from = max(self.clean_from, num_rows)

    def mark_filled(self, start: int, stop: int) -> None:
        """Note that rows ``start`` to ``stop`` hold fill, and those before ``start`` do not."""
        if self.clean_from <= stop:
            self.clean_to = max(self.clean_to, stop)
        else:
            self.clean_to = stop
        self.clean_from = start

    def mark_unknown(self) -> None:
        """Note that any row may hold anything."""
        self.clean_from = self.clean_to = 0


def _address_of(array: Any) -> int:
    """Return an address in the memory of an array; 0 if it owns its memory."""
    owner, array_type = array.base, numpy_module().ndarray
    while isinstance(owner, array_type):  # a view of a view
        owner = owner.base
    if owner is None:
        return 0
    if isinstance(owner, torch.Tensor):
        return owner.data_ptr()
    address: int = array.__array_interface__["data"][0]  # another library's memory; slow
    return address


class StaticBuffers:
    """The static inputs of a runner, by name, for callers that write them in place.

    A device input is a tensor on the device: write its first rows on the stream that the
    steps run on. A host input is pinned memory: write its first rows after ``wait()``. Write every
    input of a step, since calls may not leave theirs here.

    Args:
        buffers: The memory.
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
        except KeyError:
            raise UnknownNameError("input", name, self._tensors) from None
        self._buffers.are_shared = True
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def keys(self) -> KeysView[str]:
        """Return the names, in declared order."""
        return self._tensors.keys()

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def num_rows(self) -> int:
        """Rows of each batched input: those of the largest graph."""
        return self._buffers.num_rows

    def wait(self) -> None:
        """Wait until host inputs may be written again, after their last copy."""
        if self._buffers.staging is not None:
            self._buffers.staging.wait()
