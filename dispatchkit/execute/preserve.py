"""Run a step any number of times and undo its effects at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dispatchkit.execute.runner import GraphRunner
from dispatchkit.execute.step.state import Snapshot, StorageSet, restored


@contextmanager
def preserved_state(runner: GraphRunner) -> Iterator[None]:
    """Restore at the end all state that the runner's step changes, declared or detected at capture.

    This includes its state (a key/value cache), undeclared writes that its graphs keep alive, and
    random generators. It first waits for the device.

    Args:
        runner: A captured runner, so that its undeclared writes are known.
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
