"""Results of failed collectives."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


class Failed:
    """Failed NCCL work: completed, and silent unless its wait has a timeout.

    Source: torch's ProcessGroupNCCL.cpp, WorkNCCL::isCompleted and WorkNCCL::wait.
    """

    def is_completed(self):
        return True

    def wait(self, timeout=None):
        if timeout is not None:
            raise torch.distributed.DistBackendError("unhandled system error")
        return True


class Group:
    def allreduce(self, tensors, options):
        return Failed()

    def abort(self):
        pass


@pytest.mark.parametrize("merge", ["merge", "merge_bytes"])
def test_a_collective_of_nccl_that_failed_gives_no_numbers(monkeypatch, merge):
    """The row would be this rank's own, as if all had agreed."""
    import numpy as np

    from dispatchkit_ranks import exchange_group as module

    monkeypatch.setattr(module, "_nccl", lambda *_: Group())
    group = module.ExchangeGroup(None, 0, 2, torch.device("meta"), 3, 1.0)
    given = [1, 2, 3] if merge == "merge" else np.zeros((1, 4), dtype=np.uint8)
    with pytest.raises(RuntimeError, match="unhandled system error"):
        getattr(group, merge)(given, 1.0)
