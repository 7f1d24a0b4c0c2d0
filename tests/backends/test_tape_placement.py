"""Intermediates that are alive at the same time do not overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from dispatchkit.backends.tape.placement import place
from dispatchkit.backends.tape.steps import Step, TensorRef


def ref(storage):
    return TensorRef(storage, 0, (1,), (1,), torch.float32)


def step(*storages):
    return Step(print, tuple(map(ref, storages)), {})


@given(
    uses=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=15),
    sizes=st.lists(st.integers(0, 5000), min_size=10, max_size=10),
    segments=st.lists(st.integers(1, 100).map(lambda n: n * 64), max_size=3),
)
def test_storages_alive_together_never_overlap(uses, sizes, segments):
    steps = [step(*storages) for storages in uses]
    placement = place(steps, dict(enumerate(sizes)), segments)
    alive = {
        storage: range(
            min(i for i, used in enumerate(uses) if storage in used),
            max(i for i, used in enumerate(uses) if storage in used) + 1,
        )
        for storage in {storage for used in uses for storage in used}
    }
    assert set(placement.where) == set(alive)
    bounds = [*segments, placement.new_bytes]
    for storage, (segment, start) in placement.where.items():
        assert start % 64 == 0
        assert start + sizes[storage] <= bounds[segment]
        for other, (other_segment, other_start) in placement.where.items():
            together = set(alive[storage]) & set(alive[other])
            if other != storage and together and other_segment == segment:
                apart = start + sizes[storage] <= other_start or other_start + sizes[other] <= start
                assert apart or 0 in (sizes[storage], sizes[other])


def test_a_chain_takes_the_room_of_two_links():
    steps = [step(0, 1), step(1, 2), step(2, 3), step(3, 4)]
    assert place(steps, dict.fromkeys(range(5), 640), []).new_bytes == 2 * 640


def test_memory_that_is_there_already_is_used_first():
    placement = place([step(0, 1)], {0: 640, 1: 640}, [1280])
    assert placement.new_bytes == 0


def test_storages_that_are_not_to_be_placed_are_left_alone():
    assert place([step(0, 1)], {1: 64}, []).where == {1: (0, 0)}
