"""preserved_state: run steps, then restore the state that they changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dispatchkit.execute.runner import GraphRunner
from dispatchkit.execute.step.state import Snapshot, StorageSet, restored


@contextmanager
def preserved_state(runner: GraphRunner) -> Iterator[None]:
    """Restore, after a ``with`` block, the state that steps change inside it.

    This includes declared state (a KV cache, for example), other memory that the captured graphs
    of the first lane keep alive, and random generators. The context manager waits for the device
    before and after it saves the state, and, even if the block raises, before and after it restores
    the state.

    Args:
        runner: The runner whose steps run in the block. Writes to undeclared memory are undone only
            if a captured graph of the first lane keeps that memory alive.
    """
    state = runner.spec.state
    runner.backend.synchronize()  # steps in flight on other streams may still write state
    snapshot = Snapshot(torch.device(runner.backend.torch_device), state.generators)
    for storage in StorageSet(state.tensors):
        snapshot.save(storage)
    for captured in runner.lanes[0].lifecycle.live().values():
        for held in captured.holds:
            if isinstance(held, torch.UntypedStorage):
                snapshot.save(held)
    runner.backend.synchronize()  # steps of the block may run on any stream
    try:
        with restored(snapshot):
            try:
                yield
            finally:
                runner.backend.synchronize()
    finally:
        runner.backend.synchronize()  # because the next step may be on any stream
