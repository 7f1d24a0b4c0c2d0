"""Collectives on the tape are recorded, waited for in replays, and undone after the capture."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import CaptureError  # noqa: E402


@pytest.fixture
def group():
    """Yield a gloo process group of this process alone."""
    if dist.is_initialized():
        pytest.skip("torch.distributed is in use")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def captured(run):
    backend = TapeBackend()
    return backend.capture(run, stream=backend.new_stream(), pool=backend.new_pool())


def test_a_replay_runs_the_collective_again(group):
    given, gathered = torch.arange(4.0), [torch.zeros(4)]

    def run():
        part = given * 2
        dist.all_reduce(part)
        dist.all_gather(gathered, part)
        work = dist.broadcast(part, 0, async_op=True)
        work.wait()
        return part + 1

    graph = captured(run)
    assert gathered[0].tolist() == [0.0] * 4  # as before the capture
    for scale in (1.0, 10.0):
        given.copy_(torch.arange(4.0) * scale)
        graph.replay()
        assert gathered[0].tolist() == (given * 2).tolist()
        assert graph.outputs.tolist() == (given * 2 + 1).tolist()


def test_what_a_collective_gave_back_is_waited_for(group, monkeypatch):
    """The operation returns before it completes, and later operations read its result."""
    waits = []
    real = dist.Work.unbox

    def unbox(work):
        waits.append(1)
        return real(work)

    monkeypatch.setattr(dist.Work, "unbox", staticmethod(unbox))
    given = torch.ones(3)
    graph = captured(lambda: dist.all_reduce(given, async_op=True) and None)
    at_capture = len(waits)
    graph.replay()
    assert (at_capture, len(waits)) == (1, 2)


def functional(given, group):
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(given, "sum", group) + 1


def barrier(given, group):
    dist.barrier(group)


@pytest.mark.parametrize(
    ("run", "why"), [(functional, "functional collective"), (barrier, "torch.distributed.barrier")]
)
def test_what_the_tape_cannot_replay_is_refused(group, run, why):
    with pytest.raises((CaptureError, RuntimeError), match=why):
        captured(lambda: run(torch.ones(3), group))
