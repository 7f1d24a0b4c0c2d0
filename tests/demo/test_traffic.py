"""Requests that are generated from a trace's counts fit the cache."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.demo.traffic import Traffic, plan_traffic
from dispatchkit.errors import TraceError
from dispatchkit.observe.trace import StepTrace, read_trace

DATA = files("dispatchkit.demo") / "data" / "azure_conv_high.csv"


def trace(*rows: tuple[int, int, int, int]) -> StepTrace:
    """Return a trace of (num_tokens, num_reqs, max_query_len, uniform_decode)."""
    names = ("num_tokens", "num_reqs", "max_query_len", "uniform_decode")
    return StepTrace(dict(zip(names, zip(*rows, strict=True), strict=True)))


def plan(*rows: tuple[int, int, int, int], **options: Any) -> Traffic:
    settings = {"num_slots": 8, "cache_len": 16, "vocab": 50, **options}
    return plan_traffic(trace(*rows), **settings)


@st.composite
def step_rows(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Draw a valid step: uniform, or with some prompts."""
    num_reqs = draw(st.integers(1, 12))
    query_len = draw(st.integers(1, 30))
    if draw(st.booleans()):
        return num_reqs * query_len, num_reqs, query_len, 1
    num_tokens = draw(st.integers(max(num_reqs, query_len), num_reqs * query_len + query_len))
    return num_tokens, num_reqs, query_len, 0


@given(st.lists(step_rows(), min_size=1, max_size=30))
def test_every_request_advances_token_by_token_within_its_slot(
    rows: list[tuple[int, int, int, int]],
) -> None:
    """A gap or repeat in a request's positions would read another cache entry."""
    traffic = plan(*rows)
    reached: dict[int, int] = {}
    for step in traffic.steps:
        by_slot: dict[int, list[int]] = {}
        for position, slot in zip(step.positions, step.slots, strict=True):
            assert 0 <= slot < 8
            assert 0 <= position < 16
            by_slot.setdefault(slot, []).append(position)
        assert len(by_slot) == step.num_reqs
        for slot, positions in by_slot.items():
            start = positions[0]
            assert positions == list(range(start, start + len(positions)))
            assert start in (0, reached.get(slot, 0))
            reached[slot] = positions[-1] + 1


@given(st.lists(step_rows(), min_size=1, max_size=30))
def test_tokens_are_kept_or_counted_as_cut(rows: list[tuple[int, int, int, int]]) -> None:
    """The report counts every token that was cut."""
    traffic = plan(*rows)
    assert traffic.num_tokens + traffic.cut_tokens == sum(row[0] for row in rows)
    assert all(step.cut_tokens >= 0 for step in traffic.steps)
    for step in traffic.steps:
        if step.uniform:
            assert step.num_tokens == step.num_reqs * step.query_len


def test_what_fits_keeps_the_counts_of_the_trace() -> None:
    """Nothing that fits is cut."""
    rows = [(3, 3, 1, 1), (13, 4, 10, 0), (4, 4, 1, 1), (2, 2, 1, 1), (5, 5, 1, 1)]
    traffic = plan(*rows)
    assert [(step.num_tokens, step.num_reqs, step.uniform) for step in traffic.steps] == [
        (3, 3, True),
        (13, 4, False),
        (4, 4, True),
        (2, 2, True),
        (5, 5, True),
    ]
    assert traffic.cut_tokens == 0


def test_prompts_are_as_few_as_possible_and_belong_to_new_requests() -> None:
    """One token each; the others form prompts of at most max_query_len."""
    traffic = plan((4, 4, 1, 1), (4 + 5 + 2, 4, 6, 0))
    step = traffic.steps[1]
    per_slot = [step.slots.count(slot) for slot in dict.fromkeys(step.slots)]
    assert per_slot == [1, 1, 6, 3]
    prompts = [slot for slot in dict.fromkeys(step.slots) if step.slots.count(slot) > 1]
    assert [step.positions[step.slots.index(slot)] for slot in prompts] == [0, 0]
    assert traffic.num_requests == 6


def test_the_oldest_request_leaves_first() -> None:
    """A remaining request continues at its position."""
    traffic = plan((2, 2, 1, 1), (3, 3, 1, 1), (1, 1, 1, 1))
    assert traffic.steps[2].positions == (1,)
    assert traffic.steps[2].slots == (2,)


def test_a_full_cache_ends_a_request_and_a_new_one_takes_its_place() -> None:
    """Positions never exceed the slot."""
    traffic = plan(*[(1, 1, 1, 1)] * 20)
    assert [step.positions[0] for step in traffic.steps] == [*range(16), *range(4)]
    assert traffic.num_requests == 2


def test_long_prompts_many_requests_and_large_steps_are_cut() -> None:
    """Each of the three limits is counted."""
    assert plan((41, 1, 41, 0)).steps[0].num_tokens == 14  # 7/8 of the cache
    crowded = plan((12, 12, 1, 1))
    assert (crowded.steps[0].num_reqs, crowded.cut_requests) == (8, 4)
    large = plan((42, 4, 12, 0), max_step_tokens=20)
    assert large.steps[0].num_tokens == 20
    assert large.cut_tokens == 22


def test_a_uniform_step_of_longer_queries_stays_uniform() -> None:
    """Steps that verify drafts have several tokens per request."""
    traffic = plan((8, 2, 4, 1), (8, 2, 4, 1))
    assert [(step.uniform, step.query_len) for step in traffic.steps] == [(True, 4)] * 2
    assert traffic.steps[1].positions == (4, 5, 6, 7, 4, 5, 6, 7)
    assert traffic.query_len == 4


def test_steps_without_tokens_are_left_out() -> None:
    """Idle steps run nothing; a trace of only idle steps is an error."""
    assert len(plan((0, 0, 0, 0), (2, 2, 1, 1)).steps) == 1
    with pytest.raises(TraceError, match="no step has both tokens and requests"):
        plan((0, 0, 0, 0))


@pytest.mark.parametrize("missing", ["num_reqs", "max_query_len", "uniform_decode"])
def test_a_trace_without_a_needed_column_is_refused(missing: str) -> None:
    """Requests cannot be derived from tokens alone."""
    columns = {"num_tokens": [2], "num_reqs": [2], "max_query_len": [1], "uniform_decode": [1]}
    del columns[missing]
    with pytest.raises(TraceError, match=missing):
        plan_traffic(StepTrace(columns), num_slots=4, cache_len=8, vocab=10)


def test_the_excerpt_has_decode_and_mixed_steps_and_names_its_licence() -> None:
    """The demo runs real traffic of both kinds."""
    rows = read_trace(str(DATA))
    assert len(rows) == 300
    uniform = list(rows.column("uniform_decode"))
    assert 30 <= uniform.count(0) <= 200
    note = (files("dispatchkit.demo") / "data" / "README.md").read_text()
    assert "CC-BY-4.0" in note
    assert "Patel et al." in note


def test_the_same_trace_gives_the_same_traffic() -> None:
    """Runs of the demo are thereby comparable."""
    rows = read_trace(str(DATA))[:50]
    settings = {"num_slots": 128, "cache_len": 512, "vocab": 256}
    assert plan_traffic(rows, **settings) == plan_traffic(rows, **settings)
