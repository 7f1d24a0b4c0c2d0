"""Staging buffers: pinned memory for host inputs, copied to the device by the graph itself.

Graphs use them if a copy node cannot copy their host inputs (see ``input_path``). Steps that
consist of pieces or segments always use them.

The pinned memory is one block with a region for each host input. A call writes its rows into the
block in a fraction of a microsecond, and the graph begins by copying the block to the device. If
the step consists of pieces or segments, the copy precedes the first of them. A small block is
copied whole, because each additional copy costs more time, on host and device, than copying fewer
bytes saves.

The next call must not overwrite the block before the copy has run. An event recorded after the step
shows whether the copy has run. Querying the event takes a quarter of a microsecond. If the previous
step is still running, the call waits for it. Unless other work is queued, the device is then idle
from the end of that step to the next launch.

On one H200 (torch 2.11), with inputs of 512 rows, one copy adds nothing to a launch of 3.2 us,
3 copies add 2.5 us, and 8 copies add 8.6 us. A flag that the graph copies to the host after the
inputs could replace the event. In a test, the flag made steps 10 us slower on the device. In one
run, the host read it too early, and 5 of 100 steps were wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dispatchkit.backends.base import GraphBackend, Stream
from dispatchkit.backends.watching.dispatch_mode import inference_mode
from dispatchkit.execute.io.host_arrays import as_array
from dispatchkit.execute.io.static_input import Allocate, StaticInput, allocate_default

# Blocks up to this size are copied whole, even for small batches.
WHOLE_BLOCK_BYTES = 256 << 10
# Alignment of the regions in bytes, equal to that of device allocations.
_ALIGNMENT = 256


class StagingBuffers:
    """Pinned memory for the host inputs of a lane, and the device memory that it is copied to.

    Args:
        specs: Host inputs by name.
        num_rows: Number of rows in each batched input.
        backend: Backend of the device.
        allocate: Function that allocates device tensors, for example in a graph pool.

    Attributes:
        host: Pinned tensors by input name, with the shapes of ``device``.
        fill_arrays: Fill values by input name, as 0-d arrays.
        device: Device tensors that graphs read, by input name.
    """

    def __init__(
        self,
        specs: Mapping[str, StaticInput],
        num_rows: int,
        backend: GraphBackend,
        allocate: Allocate = allocate_default,
    ) -> None:
        device = torch.device(backend.torch_device)
        starts: dict[str, tuple[int, int]] = {}
        end = 0
        for name, spec in specs.items():
            num_bytes = spec.sized(num_rows).numel() * spec.dtype.itemsize
            starts[name] = (end, num_bytes)
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._is_whole = end <= WHOLE_BLOCK_BYTES
        with inference_mode(False):
            self._host_block = torch.zeros(
                max(end, 1), dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
            self._device_block = allocate(
                lambda: torch.zeros(max(end, 1), dtype=torch.uint8, device=device)
            )
            self.host: dict[str, torch.Tensor] = _regions(self._host_block, specs, starts, num_rows)
            self.device: dict[str, torch.Tensor] = _regions(
                self._device_block, specs, starts, num_rows
            )
            for name, spec in specs.items():
                self.host[name].fill_(spec.fill_value)
                self.device[name].fill_(spec.fill_value)
        self.fill_arrays: dict[str, Any] = {
            name: as_array(torch.full((), spec.fill_value, dtype=spec.dtype))
            for name, spec in specs.items()
        }
        self._specs = specs
        self._used = backend.new_event()
        self._is_used = False

    def queue_copy(self, num_rows: int) -> None:
        """Queue the copy of the first rows, or of a whole small block, on the current stream.

        The stream may be capturing.
        """
        if self._is_whole:
            self._device_block.copy_(self._host_block, non_blocking=True)
        else:
            for name, spec in self._specs.items():
                target, source = self.device[name], self.host[name]
                if spec.batch_dim == 0:  # rows are contiguous only along dimension 0
                    target, source = target[:num_rows], source[:num_rows]
                target.copy_(source, non_blocking=True)

    def record_launch(self, stream: Stream) -> None:
        """Record that the last launch on a stream reads the pinned memory."""
        self._used.record(stream)
        self._is_used = True  # never reset, because another thread may be waiting

    def wait(self) -> None:
        """Wait until no launched step reads the pinned memory."""
        if self._is_used and not self._used.query():
            self._used.synchronize()


def _regions(
    block: torch.Tensor,
    specs: Mapping[str, StaticInput],
    starts: Mapping[str, tuple[int, int]],
    num_rows: int,
) -> dict[str, torch.Tensor]:
    return {
        name: block[start : start + num_bytes]
        .view(specs[name].dtype)
        .view(specs[name].sized(num_rows))
        for name, (start, num_bytes) in starts.items()
    }
