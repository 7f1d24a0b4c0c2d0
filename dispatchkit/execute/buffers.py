"""The memory that graphs read their inputs from, and how a call gets in.

A graph reads its inputs at the addresses of the capture. Each lane holds one buffer per
input, as large as its largest bucket; a call copies its rows to the front. Behind them a
graph must see nothing but fill, up to its bucket: what an earlier, larger call left there is
set back together with the copy, in the same operation, and only where something is stale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, KeysView, Sequence
from operator import itemgetter
from typing import Any

import torch

from dispatchkit.backends.base import GraphBackend
from dispatchkit.errors import ConfigError, InputError, UnknownNameError
from dispatchkit.execute.inputs import InputSet
from dispatchkit.execute.staging import Staging

_copy: Any = torch._foreach_copy_  # its stub takes lists and tuples only


class InputBuffers:
    """The memory that graphs read their inputs from.

    Args:
        inputs: What is declared.
        num_rows: Rows to make room for.
        tensors: Memory made elsewhere, in declared order; new memory by default.
        backend: The device; needed where host inputs are declared.

    Attributes:
        tensors: One buffer per input, in declared order.
        num_rows: Rows there is room for.
        staging: The host memory of host inputs; None without.
        clean_from: Rows from here on hold fill in every batched buffer,
        clean_to: up to here. Of others nothing is known.
    """

    clean_to: int
    clean_from: int

    def __init__(
        self,
        inputs: InputSet,
        num_rows: int,
        tensors: Sequence[torch.Tensor] | None = None,
        backend: GraphBackend | None = None,
    ) -> None:
        self.inputs = inputs
        self.num_rows = num_rows
        self.staging: Staging | None = None
        self.clean_from, self.clean_to = 0, num_rows
        if tensors is not None:
            self.tensors: list[torch.Tensor] = list(tensors)
            self.clean_to = 0  # what they hold is not known
        else:
            if inputs.host and backend is not None:
                host = {name: spec for name, spec in inputs.specs.items() if spec.host}
                self.staging = Staging(host, num_rows, backend)
            staged = {} if self.staging is None else self.staging.device
            # Not under the caller's inference mode: such memory could not be written outside.
            with torch.inference_mode(False):
                self.tensors = [
                    staged[name] if name in staged else spec.full(num_rows, inputs.device)
                    for name, spec in inputs.specs.items()
                ]
        self._fills: list[torch.Tensor | None] = [None] * len(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row_bytes(self, index: int) -> int:
        """Return the bytes of one row of an input; of all of it where it is not batched."""
        spec = self.inputs.specs[self.inputs.names[index]]
        return spec.sized(1).numel() * spec.dtype.itemsize

    def views(self, num_rows: int) -> list[torch.Tensor]:
        """Return the first rows of each batched buffer, and the others whole.

        Raises:
            ConfigError: There is no room for so many rows.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise ConfigError("rows", num_rows, f"0..{self.num_rows}, the rows of the buffers")
        views = list(self.tensors)
        for index, dim in self.inputs.batched:
            views[index] = views[index].narrow(dim, 0, num_rows)
        return views

    def fill_of(self, index: int, num_rows: int) -> torch.Tensor:
        """Return so many rows of an input's fill, to copy from."""
        source = self._fills[index]
        spec = self.inputs.specs[self.inputs.names[index]]
        if source is None:
            with torch.inference_mode(False):
                source = spec.full(self.num_rows, self.inputs.device)
            self._fills[index] = source
        return source.narrow(spec.batch_dim or 0, 0, num_rows)

    def copies(self, num_rows: int) -> list[torch.Tensor]:
        """Return copies of what the buffers hold for a call of so many rows, on the device.

        Raises:
            InputError: The buffers do not hold so many rows.
        """
        if not 0 <= num_rows <= self.num_rows:
            raise InputError(
                self.inputs.names[0],
                f"A step of {num_rows} rows cannot run in place: the buffers hold "
                f"{self.num_rows} rows, those of the largest graph. Call the runner with tensors.",
            )
        sources = list(self.tensors)
        if self.staging is not None:
            for index in self.inputs.host:
                sources[index] = self.staging.host[self.inputs.names[index]]
        for index, dim in self.inputs.batched:
            sources[index] = sources[index].narrow(dim, 0, num_rows)
        return [source.to(self.inputs.device, copy=True) for source in sources]

    def reset(self) -> None:
        """Set every row that holds anything else back to fill."""
        if self.clean_from == 0 and self.clean_to == self.num_rows:
            return
        if self.staging is not None:
            self.staging.wait()
        for index, _ in self.inputs.batched:
            name = self.inputs.names[index]
            fill = self.inputs.specs[name].fill
            self.tensors[index].fill_(fill)
            if self.staging is not None and name in self.staging.host:
                self.staging.host[name].fill_(fill)
        self.clean_from, self.clean_to = 0, self.num_rows

    def poison(self, value: float = float("nan")) -> None:
        """Overwrite all rows with what no call gives; the next use must not show it."""
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
        self.clean_from = self.clean_to = 0

    def written(self, num_rows: int) -> None:
        """Note that the first rows are about to be overwritten."""
        self.clean_from = max(self.clean_from, num_rows)

    def filled(self, start: int, stop: int) -> None:
        """Note that the rows from start to stop hold fill, and those before start do not."""
        if self.clean_from <= stop:
            self.clean_to = max(self.clean_to, stop)
        else:
            self.clean_to = stop
        self.clean_from = start


class StaticBuffers:
    """The static inputs of a runner by name, for callers that write them in place.

    A device input is a tensor on the device: write its first rows on the stream that the
    steps run on. A host input is pinned memory: write its first rows after ``wait()``.

    Args:
        buffers: Whose memory.
    """

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers = buffers
        tensors = dict(zip(buffers.inputs.names, buffers.tensors, strict=True))
        if buffers.staging is not None:
            tensors |= buffers.staging.host
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise UnknownNameError("input", name, self._tensors) from None

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
        """Rows there is room for: those of the largest graph."""
        return self._buffers.num_rows

    def wait(self) -> None:
        """Return once host inputs may be written again: the last step's copy has run."""
        if self._buffers.staging is not None:
            self._buffers.staging.wait()


class Loader:
    """Brings calls of one size into the buffers, for graphs of one bucket.

    Views are kept, so that a call slices nothing. Device inputs go in one fused copy for
    each dtype, since torch fuses copies of one dtype only.

    Args:
        buffers: Where to.
        num_rows: Rows of the calls.
        bucket: Rows that the graph reads.
        skip: Inputs to leave alone, by index: somebody else brings them.
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
    ) -> None:
        self.buffers, self.num_rows, self.bucket = buffers, num_rows, bucket
        views = buffers.views(num_rows)
        inputs = buffers.inputs
        staging = buffers.staging
        self._staging = staging
        self._to_host: list[tuple[int, Any]] = []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, (name, spec) in enumerate(inputs.specs.items()):
            if staging is not None and spec.host:
                array = staging.arrays[name]
                dim = spec.batch_dim
                cut = () if dim is None else (slice(None),) * dim + (slice(0, num_rows),)
                # Three dots: a view, also where an index would give a plain number.
                self._to_host.append((index, array[(*cut, ...)]))
            elif index not in skip:
                by_dtype.setdefault(spec.dtype, []).append(index)
        self._groups = list(by_dtype.values())
        self._copies = [
            ([views[index] for index in group], picker(group)) for group in self._groups
        ]
        # A graph captured elsewhere reads device tensors, also for inputs given on the host.
        self._must_move = bool(inputs.host) and staging is None
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
                        cut = (slice(None),) * dims[index] + (slice(self.num_rows, self.bucket),)
                        self._host_tails.append((self._staging.arrays[name][cut], fill))
        return self._tails


def picker(group: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return what takes a group's values out of a call."""
    if len(group) == 1:
        index = group[0]
        return lambda values: (values[index],)
    return itemgetter(*group)
