"""A step with graph breaks, on the tape; and faults of its capture, each of which is detected."""

from __future__ import annotations

import functools

import attrs
import pytest

torch = pytest.importorskip("torch")

from break_cases import BreakCases, calls_of  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dispatchkit import eager_region  # noqa: E402
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.execute.capture import eager_call, segments  # noqa: E402

twice = eager_region(lambda x: x * 2)
LAYERS = ["matmul", "eager", "two", "into", "nested", "break", "first"]


@pytest.fixture
def backend():
    return TapeBackend()


class TestBreaks(BreakCases):
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=6))
    def test_programs_with_breaks_anywhere_equal_eager(self, layers):
        BreakCases.test_programs_with_breaks_anywhere_equal_eager(self, TapeBackend(), layers)

    @pytest.mark.slow_except("FULL_AND_PIECEWISE")
    @pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
    def test_the_decoder_gives_the_numbers_of_pieces_cut_by_hand(self, backend, mode):
        """Cache included; both kinds of steps in one runner first."""
        BreakCases.test_the_decoder_gives_the_numbers_of_pieces_cut_by_hand(self, backend, mode)


def plant_other_arguments(patch):
    """The arguments' memory has been reused at the time of a replay (SGLang 37606)."""

    def make(args, **rest):
        copies = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in args)
        return eager_call.EagerCall(args=copies, **rest)

    patch.setattr(segments, "EagerCall", make)


def plant_freed_result(patch):
    """Results are written to memory that the next segment does not read (TensorRT-LLM 16609)."""

    def make(results, **rest):
        moved = tuple(attrs.evolve(one, value=one.value.clone()) for one in results)
        return eager_call.EagerCall(results=moved, **rest)

    patch.setattr(segments, "EagerCall", make)


def plant_undefined_tail(patch):
    """Rows after the batch keep the values of the call (tokenspeed 741)."""
    views = eager_call.EagerCall._views_at
    patch.setattr(eager_call.EagerCall, "_views_at", lambda call, rows: (views(call, rows)[0], []))


def plant_stale_arguments(patch):
    """A replay uses Python values of the capture (SGLang 38943)."""

    def make(fn, **rest):
        return eager_call.EagerCall(fn=functools.cache(fn), **rest)

    patch.setattr(segments, "EagerCall", make)


@pytest.mark.parametrize(
    ("plant", "test"),
    [
        (plant_other_arguments, "test_what_crosses_a_break_is_held"),
        (plant_freed_result, "test_what_runs_eager_reads_what_is_there_at_each_replay"),
        (plant_undefined_tail, "test_rows_behind_a_batch_are_cleared_after_each_call"),
        (plant_stale_arguments, "test_what_runs_eager_reads_what_is_there_at_each_replay"),
    ],
)
def test_a_planted_fault_is_found(plant, test, backend, monkeypatch):
    """Each of these faults was a real bug that computed wrong results silently."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        getattr(TestBreaks(), test)(backend)


def test_segments_without_work_are_not_replayed(backend):
    """Consecutive calls have no segment in between."""
    case = TestBreaks()
    runner = case.make(backend, lambda x: twice(twice(x)), sizes=(4,))
    assert not runner.capture().failed
    graph = case.graph_of(runner, 4)
    assert len(calls_of(graph)) == 2
    assert graph.pieces.segments == ()
    case.check(backend, runner, lambda x: twice(twice(x)), (4, 2))


def test_only_a_function_is_an_eager_region():
    with pytest.raises(
        ConfigError, match=r"fn must be a function or omitted, got 3\. For a block, write"
    ):
        eager_region(3)
