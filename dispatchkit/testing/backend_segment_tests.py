"""Tests of captures in segments, for BackendTests."""

from __future__ import annotations

from typing import Any

import pytest

from dispatchkit.backends.optional import features_of
from dispatchkit.errors import CaptureError
from dispatchkit.testing.backend_optional_tests import assert_refused
from dispatchkit.testing.backend_rig import PlannedError, Rig


def in_segments(rig: Rig, run: Any, **options: Any) -> Any:
    """Capture a callable in segments; skip the test if the backend does not support this."""
    segments = features_of(rig.backend).segments
    if segments is None:
        pytest.skip(f"Backend {rig.backend.name!r} does not support captures in segments.")
    return segments.capture_segments(run, stream=rig.stream, pool=rig.pool, **options)


class SegmentTests:
    """Tests of captures in segments; skipped if the backend does not support them."""

    def test_segments_and_what_runs_between_them_are_eager(self, rig: Rig) -> None:
        """After a segment has been replayed, the host can read its results."""
        x, seen = rig.zeros(4).add_(1), []

        def run(capture: Any) -> Any:
            hidden = x * 2
            first = capture.end()
            first.replay()
            seen.append(hidden.sum().item())
            between = rig.zeros(4).copy_(hidden).add_(1)
            capture.begin()
            result = hidden + between
            last = capture.end()
            last.replay()
            return first, last, hidden, between, result

        rig.backend.warmup(lambda: x * 2 + 1, stream=rig.stream)
        first, last, hidden, between, result = in_segments(rig, run)
        assert seen == [8.0], f"The host read {seen[0]} between two segments, but must read 8."
        assert rig.read(result) == [5.0] * 4
        x.fill_(3)
        first.replay()
        between.copy_(hidden)
        last.replay()
        assert rig.read(result) == [12.0] * 4, "Replays of segments differ from an eager run."
        assert first.num_operations > 0, "A segment with kernels reports no operations."
        assert last.num_operations > 0, "A segment with kernels reports no operations."

    def test_a_segment_changes_nothing_until_it_is_replayed(self, rig: Rig) -> None:
        """Only replays change state, and each replay changes it once."""
        state, seen = rig.zeros(4), []

        def run(capture: Any) -> Any:
            state.add_(1)
            first = capture.end()
            seen.append(rig.read(state))
            first.replay()
            seen.append(rig.read(state))
            capture.begin()
            state.mul_(3)
            return capture.end()

        last = in_segments(rig, run)
        problem = f"The capture of the first segment changed the state to {seen[0]}."
        assert seen[0] == [0.0] * 4, problem
        assert seen[1] == [1.0] * 4
        assert rig.read(state) == [1.0] * 4, "The capture of the last segment changed the state."
        last.replay()
        assert rig.read(state) == [3.0] * 4

    def test_what_crosses_a_break_outlives_other_captures(self, rig: Rig) -> None:
        """Later segments of a capture do not reuse the memory of live tensors."""
        x = rig.zeros(1 << 12).add_(1)

        def run(capture: Any) -> Any:
            kept = x * 3
            graphs = [capture.end()]
            graphs[0].replay()
            for _ in range(3):
                capture.begin()
                other = (x + 5) * 2
                graphs.append(capture.end())
                del other
            capture.begin()
            result = kept + 1
            graphs.append(capture.end())
            return graphs, result

        graphs, result = in_segments(rig, run)
        x.fill_(2)
        for graph in graphs:
            graph.replay()
        assert rig.read(result[:2]) == [7.0] * 2, (
            "A later segment overwrote a live tensor of an earlier segment."
        )

    def test_memory_from_elsewhere_is_not_kept(self, rig: Rig) -> None:
        """``keeps`` is False for memory allocated before the capture or between segments."""
        x = rig.zeros(1 << 12).add_(1)

        def earlier(capture: Any) -> Any:
            result = x + 1
            return capture.end(), result

        graph, alive = in_segments(rig, earlier)
        graph.replay()

        def run(capture: Any) -> Any:
            hidden = x * 3
            first = capture.end()
            first.replay()
            between = hidden * 2
            elsewhere = {
                "a tensor from before the capture": x,
                "an output of an earlier capture": alive,
                "a tensor created between segments": between,
            }
            found = [what for what, one in elsewhere.items() if capture.keeps(one)]
            kept = capture.keeps(hidden)
            capture.begin()
            result = hidden + between
            return found, kept, (first, capture.end()), (hidden if not kept else None, result)

        found, kept, graphs, _ = in_segments(rig, run)
        assert not found, f"keeps() is True for {' and for '.join(found)}."
        assert isinstance(kept, bool)
        assert rig.read(alive[:2]) == [2.0] * 2
        del graphs

    def test_a_segment_without_work_says_so(self, rig: Rig) -> None:
        """The runner omits empty segments from replays."""
        x = rig.zeros(4)

        def run(capture: Any) -> Any:
            x.view(2, 2)
            empty = capture.end()
            capture.begin()
            result = x + 1
            return empty, capture.end(), result

        empty, last, result = in_segments(rig, run)
        assert empty.num_operations == 0, "A segment that only creates views reports operations."
        assert last.num_operations > 0
        empty.replay()
        last.replay()
        assert rig.read(result) == [1.0] * 4

    def test_what_fails_in_a_segment_leaves_nothing_behind(self, rig: Rig) -> None:
        """After a failure, earlier segments are released and later captures work."""
        state, ended = rig.zeros(4), []

        def fail(capture: Any, *, between: bool) -> None:
            state.add_(1)
            ended.append(capture.end())
            if between:
                raise PlannedError("between two segments")
            capture.begin()
            state.add_(1)
            raise PlannedError("in a segment")

        for between in (False, True):
            with pytest.raises(CaptureError) as caught:
                in_segments(rig, lambda capture, where=between: fail(capture, between=where))
            assert isinstance(caught.value.__cause__, PlannedError)
            assert not rig.backend.is_capturing()
        assert rig.read(state) == [0.0] * 4, "A segment that was never replayed changed the state."
        for graph in ended:
            assert_refused(graph.replay, "A segment of a failed capture can still be replayed.")
        graph = rig.capture(lambda: state + 1)
        assert rig.read(rig.replayed(graph)) == [1.0] * 4

    def test_the_host_waits_between_segments_alone(self, rig: Rig) -> None:
        """Inside a segment, calls that wait for the device are refused."""
        x = rig.zeros(4)

        def run(capture: Any) -> Any:
            capture.end()
            x.sum().item()
            capture.begin()
            return x.sum().item(), capture.end()

        with pytest.raises(CaptureError) as caught:
            in_segments(rig, run)
        assert caught.value.reason == "host_sync", (
            f"The reason is {caught.value.reason!r}, but must be 'host_sync'."
        )

    def test_segments_draw_as_eager_draws(self, rig: Rig) -> None:
        """Numbers drawn in and between segments have the same order as in an eager run."""
        torch, device = rig.torch, rig.backend.torch_device
        generator = rig.default_generator()

        def draw() -> Any:
            return torch.rand(4, device=device)

        def run(capture: Any) -> Any:
            one = draw()
            first = capture.end()
            capture.begin()
            two = draw()
            return first, capture.end(), one, two

        generator.manual_seed(3)
        want = [rig.read(draw()) for _ in range(3)]
        generator.manual_seed(3)
        first, last, one, two = in_segments(rig, run)
        first.replay()
        got = [rig.read(one), rig.read(draw())]
        last.replay()
        got.append(rig.read(two))
        assert got == want, f"Segments draw {got}, but eager runs draw {want}."

    def test_captures_do_not_nest_between_segments(self, rig: Rig) -> None:
        """Between segments, the capture continues, so a second capture is refused."""
        x = rig.zeros(4)

        def run(capture: Any) -> Any:
            capture.end()
            error = rig.refused("A capture between two segments", lambda: x + 1, reason="nested")
            capture.begin()
            return error, capture.end()

        assert "nest" in str(in_segments(rig, run)[0])
