"""Growth of a graph pool, from snapshots as the allocator gives them; needs no device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from dispatchkit.backends.cuda_memory import growth  # noqa: E402

MIB = 1 << 20


def segment(size, *, used=(), kind="large", stream=7):
    """A segment with blocks of the sizes given in use, the rest one free block."""
    blocks = [{"size": one, "state": "active_allocated"} for one in used]
    if rest := size - sum(used):
        blocks.append({"size": rest, "state": "inactive"})
    return {
        "total_size": size,
        "segment_type": kind,
        "stream": stream,
        "device": 0,
        "segment_pool_id": (0, 1),
        "blocks": blocks,
    }


def test_empty_pool_grows_by_all_that_is_needed():
    assert growth([segment(20 * MIB), segment(2 * MIB, kind="small")], []) == 22 * MIB


def test_free_segments_are_used_again():
    """What a smaller graph needs fits into what a larger one took."""
    present = [segment(34 * MIB), segment(20 * MIB), segment(2 * MIB, kind="small")]
    needed = [segment(20 * MIB), segment(26 * MIB), segment(2 * MIB, kind="small")]
    assert growth(needed, present) == 0


def test_each_free_block_serves_once():
    assert growth([segment(20 * MIB)] * 3, [segment(20 * MIB)] * 2) == 20 * MIB


def test_what_is_left_of_a_block_serves_too():
    assert growth([segment(20 * MIB)] * 2, [segment(42 * MIB)]) == 0


@pytest.mark.parametrize(
    "present",
    [
        segment(20 * MIB, used=[MIB]),  # what lives in it may be anywhere
        segment(20 * MIB, kind="small"),
        segment(20 * MIB, stream=8),
    ],
)
def test_blocks_that_are_used_or_of_another_kind_or_stream_do_not_serve(present):
    assert growth([segment(20 * MIB)], [present]) == 20 * MIB


SIZES = st.lists(st.sampled_from([2, 20, 22, 24, 30, 44]), max_size=8)


@given(needed=SIZES, present=SIZES)
def test_growth_is_between_nothing_and_all(needed, present):
    """Never less than what no arrangement could avoid, and nothing for what is there."""
    segments = [segment(size * MIB) for size in needed]
    have = [segment(size * MIB) for size in present]
    found = growth(segments, have)
    assert max(0, sum(needed) - sum(present)) * MIB <= found <= sum(needed) * MIB
    assert growth(have, have) == 0
    assert growth(segments, [*have, segment(sum(needed) * MIB)]) == 0
