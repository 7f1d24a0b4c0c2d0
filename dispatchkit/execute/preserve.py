"""preserved_state: run steps, then restore the state that they changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dispatchkit.execute.runner import GraphRunner
from dispatchkit.execute.step.state import Snapshot, StorageSet, restored


@contextmanager
def preserved_state(runner: GraphRunner) -> Iterator[None]:
    """Restore all state that the step changes when the ``with`` block ends.

    This includes declared state such as a KV cache, memory whose writes were detected at capture,
    and random generators. On entry, it synchronizes with the device.

    Args:
        runner: The runner of the step. Undeclared writes are detected only for captured graphs.
    """
    state = runner.spec.state
    snapshot = Snapshot(torch.device(runner.backend.torch_device), state.generators)
    for storage in StorageSet(state.tensors):
        snapshot.save(storage)
    for captured in runner.lanes[0].lifecycle.live().values():
        for held in captured.holds:
            if isinstance(held, torch.UntypedStorage):
                snapshot.save(held)
    with restored(snapshot):
        yield
        runner.backend.synchronize()
