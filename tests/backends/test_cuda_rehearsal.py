"""Copies of a graph pool in a simulated allocator; needs no device."""

from __future__ import annotations

import bisect
import ctypes
import sys
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from dispatchkit.backends.cuda import rehearsal, segments

MIB = 1 << 20


class Allocator:
    """Imitates torch's caching allocator on one stream: segments, blocks, best fit, coalescing.

    As in c10/cuda/CUDACachingAllocator.cpp, requests up to 1 MiB use segments of 2 MiB, requests
    below 10 MiB use segments of 20 MiB, and larger requests get their own segment, rounded up to 2
    MiB. Small blocks are split if anything remains, large ones if more than 1 MiB remains.
    """

    def __init__(self):
        self.segments = []  # [address, kind, [[size, is_used], ...]]
        self.next_address = 0

    def take(self, size):
        size = -(-size // 512) * 512
        kind = "small" if size <= MIB else "large"
        fitting = [
            (block[0], address, index, blocks)
            for address, one, blocks in self.segments
            if one == kind
            for index, block in enumerate(blocks)
            if not block[1] and block[0] >= size
        ]
        if not fitting:
            length = 2 * MIB if kind == "small" else 20 * MIB
            if size >= 10 * MIB:
                length = -(-size // (2 * MIB)) * 2 * MIB
            blocks = [[length, False]]
            bisect.insort(self.segments, (self.next_address, kind, blocks))
            self.next_address += 1 << 30
            fitting = [(length, self.next_address, 0, blocks)]
        found, _, index, blocks = min(fitting, key=lambda one: one[:3])
        rest = found - size
        if rest >= 512 if kind == "small" else rest > MIB:
            blocks[index][0] = size
            blocks.insert(index + 1, [rest, False])
        blocks[index][1] = True
        return blocks, blocks[index]

    @staticmethod
    def give_back(taken):
        blocks, block = taken
        block[1] = False
        index = next(at for at, one in enumerate(blocks) if one is block)
        for left in (index, index - 1):
            if 0 <= left < len(blocks) - 1 and not blocks[left][1] and not blocks[left + 1][1]:
                blocks[left][0] += blocks.pop(left + 1)[0]

    def snapshot(self):
        return [
            {
                "address": address,
                "segment_type": kind,
                "total_size": sum(size for size, _ in blocks),
                "blocks": [
                    {"size": size, "state": "active_allocated" if used else "inactive"}
                    for size, used in blocks
                ],
            }
            for address, kind, blocks in self.segments
        ]

    @property
    def num_bytes(self):
        return sum(one["total_size"] for one in self.snapshot())


class Played:
    """Memory that returns to the allocator when it is dropped."""

    def __init__(self, allocator, size):
        self.allocator, self.taken = allocator, allocator.take(size)

    def __del__(self):
        self.allocator.give_back(self.taken)


def shape_of(allocator):
    return [
        (one["segment_type"], [(block["size"], block["state"]) for block in one["blocks"]])
        for one in allocator.snapshot()
    ]


SIZES = st.sampled_from([1, 512, 700_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB])
PROGRAM = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 99)), max_size=30)


def play(allocator, program, alive):
    """Allocate and free memory as a step would."""
    for takes, size, which in program:
        if takes or not alive:
            alive.append(allocator.take(size))
        else:
            allocator.give_back(alive.pop(which % len(alive)))


class PlayedCuda:
    """Imitates the part of torch.cuda that a rehearsal uses, with pools of the allocator above."""

    def __init__(self, make_allocator=Allocator):
        self.current = None
        cuda = self

        class MemPool:
            def __init__(self):
                self.allocator = make_allocator()
                cuda.pools.append(self.allocator)
                self.id = (0, 1000 + len(cuda.pools))

        self.MemPool = MemPool
        self.pools = []

        @contextmanager
        def use_mem_pool(pool, device_index):
            assert cuda.current is None, "torch would go on with the outer pool"
            cuda.current = pool.allocator
            yield
            cuda.current = None

        self.use_mem_pool = use_mem_pool

    def memory_snapshot(self, mempool_id, include_traces):
        assert not include_traces
        return snapshot_of(self.pools[mempool_id[1] - 1001])


def snapshot_of(allocator, stream=7):
    return [{**one, "stream": stream, "device": 0} for one in allocator.snapshot()]


def rehearse(cuda, program, present):
    alive = []

    def run():
        play(cuda.current, program, alive)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal.torch, "cuda", cuda)
        patch.setattr(rehearsal, "_block", lambda size, device: Played(cuda.current, size))
        return rehearsal.growth(run, present, 0, 7)


@given(before=PROGRAM, program=PROGRAM)
def test_rehearsal_tells_exactly_what_the_pool_grows_by(before, program):
    """This holds for any state that earlier graphs left and any requests of the step."""
    pool = Allocator()
    play(pool, before, [])
    told = rehearse(PlayedCuda(), program, snapshot_of(pool))
    had = pool.num_bytes
    play(pool, program, [])
    assert pool.num_bytes - had == told


@given(before=PROGRAM)
def test_copy_of_a_pool_has_the_same_segments(before):
    pool, cuda = Allocator(), PlayedCuda()
    play(pool, before, [])
    rehearse(cuda, [], snapshot_of(pool))
    kinds = [[kind for kind, _ in shape_of(one)] for one in (cuda.pools[0], pool)]
    assert kinds[0] == kinds[1]
    assert cuda.pools[0].num_bytes == pool.num_bytes


class Other(Allocator):
    """An allocator whose segments are larger than this code expects."""

    def take(self, size):
        return super().take(max(size, 50 * MIB))


def test_allocator_of_other_habits_is_taken_for_an_empty_pool():
    """The result is an upper bound instead of a wrong number."""
    pool = Allocator()
    play(pool, [(True, 3 * MIB, 0), (True, 33 * MIB, 0)], [])
    cuda = PlayedCuda(Other)
    assert rehearse(cuda, [(True, 3 * MIB, 0)], snapshot_of(pool)) == 50 * MIB
    assert len(cuda.pools) == 2


def test_segments_of_another_stream_do_not_serve():
    pool = Allocator()
    alive = []
    play(pool, [(True, 33 * MIB, 0), (False, 0, 0)], alive)
    program = [(True, 33 * MIB, 0)]
    assert rehearse(PlayedCuda(), program, snapshot_of(pool)) == 0
    assert rehearse(PlayedCuda(), program, snapshot_of(pool, stream=8)) == 34 * MIB


@pytest.mark.parametrize("drops", [True, False])
def test_asking_torch_for_segments_keeps_the_count_of_references(monkeypatch, drops):
    """Torch drops references to items of its answer; versions that do not are handled too."""

    def drop(part):
        if drops:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(part))

    def memory_snapshot(mempool_id, include_traces):
        drop(mempool_id[0])
        drop(mempool_id[1])
        drop(include_traces)
        return [{"total_size": 5}]  # contains no part of the handle

    monkeypatch.setattr(rehearsal.torch.cuda, "memory_snapshot", memory_snapshot)
    before = sys.getrefcount(False), sys.getrefcount(0)
    for number in range(1000, 1200):
        assert segments.segments_of((0, number)) == [{"total_size": 5}]
    # Of 200 each; other code uses these objects too.
    assert abs(sys.getrefcount(False) - before[0]) < 100
    assert abs(sys.getrefcount(0) - before[1]) < 100
    parts = (int("12345"), int("54321"))
    spare = [*parts]
    before = segments._references(parts)
    drop(parts[1])
    segments._put_back(parts, before)
    assert segments._references(parts) == before
    assert spare == [12345, 54321]
