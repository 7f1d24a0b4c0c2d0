"""Released streams are reused; torch's stream ring is simulated, so no device is needed."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dispatchkit.backends.cuda import streams as cuda_streams
from dispatchkit.backends.cuda.streams import CudaStream, return_when_unused, unused_streams

RING = 32


@pytest.fixture(autouse=True)
def ring(monkeypatch):
    """Torch's ring: the 33rd stream of a priority is the first stream again."""
    turns = itertools.count()

    def next_stream(device, priority):
        handle = next(turns) % RING + 1
        return SimpleNamespace(
            cuda_stream=handle, device_index=device, device=device, priority=priority
        )

    monkeypatch.setattr(cuda_streams.torch.cuda, "Stream", next_stream)
    monkeypatch.setattr(cuda_streams, "_idle", defaultdict(dict))


def take(held, priority=0, device=0):
    """Acquire a stream that is not held yet, as a backend does."""
    for raw in unused_streams(device, priority):
        stream = CudaStream(raw)
        if stream.handle not in {one.handle for one in held}:
            return_when_unused(stream, priority)
            return stream
    return None


def test_a_stream_that_was_let_go_of_is_taken_before_a_new_one():
    """Torch's libraries keep memory for every stream ever used."""
    assert {take([]).handle for _ in range(100)} == {1}


def test_all_of_the_ring_can_be_held_and_no_more():
    held = []
    for _ in range(RING):
        held.append(take(held))
    assert {one.handle for one in held} == set(range(1, RING + 1))
    assert take(held) is None
    freed = held.pop(7).handle
    assert take(held).handle == freed


def test_streams_of_other_priorities_and_devices_are_not_mixed_up():
    raw = take([], priority=1).raw
    assert (raw.priority, raw.device) == (-1, 0)
    assert take([], priority=0).raw.priority == 0
    assert take([], priority=1, device=1).raw.device == 1
    assert take([], priority=1).raw is raw


def test_a_stream_is_idle_once_although_two_let_go_of_it():
    first, second = take([]), None
    for _ in range(RING):
        second = CudaStream(cuda_streams.torch.cuda.Stream(0, 0))
    assert second.handle == first.handle
    return_when_unused(second, 0)
    handle = first.handle
    del first, second
    assert [raw.cuda_stream for raw in itertools.islice(unused_streams(0, 0), 2)] != [handle] * 2
