"""Tests of random numbers, for BackendTests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dispatchkit.backends.base import CapturedGraph
from dispatchkit.testing.backend_rig import DRAWS, Rig


def drawing(rig: Rig, generator: Any = None, work: int = 0) -> Callable[[], Any]:
    """Return a callable that draws 16 random numbers after some work."""
    device = rig.backend.torch_device

    def run() -> Any:
        rig.occupy(work)
        return rig.torch.rand(16, device=device, generator=generator)

    return run


def capture_into_new_pool(rig: Rig, run: Callable[[], Any], generator: Any = None) -> CapturedGraph:
    """Capture into a new pool, so that the graph may run concurrently with others."""
    return rig.backend.capture(
        run,
        stream=rig.stream,
        pool=rig.backend.new_pool(),
        generators=[] if generator is None else [generator],
    )


def equal_draws(rig: Rig, drawn: Sequence[Any], expected: Sequence[Any]) -> list[bool]:
    """Synchronize, and return for each draw whether it equals the expected draw."""
    return [rig.equal(one, other) for one, other in zip(drawn, expected, strict=True)]


class RandomTests:
    """Tests that replays draw the same numbers as eager runs, and that captures draw none."""

    # -- random numbers -------------------------------------------------------------------

    @pytest.mark.parametrize("own_generator", [False, True], ids=["default", "own"])
    @pytest.mark.parametrize("name", DRAWS)
    def test_replays_draw_the_sequence_of_eager(
        self, rig: Rig, name: str, own_generator: bool
    ) -> None:
        """A mix of eager steps and replays neither repeats nor skips numbers."""
        device = rig.backend.torch_device
        generator = rig.generator() if own_generator else None
        source = generator if generator is not None else rig.default_generator()
        draw = DRAWS[name]
        source.manual_seed(11)
        expected = [draw(rig.torch, device, generator).clone() for _ in range(4)]
        source.manual_seed(11)
        before = source.get_state()
        graph = rig.capture(
            lambda: draw(rig.torch, device, generator),
            generators=[] if generator is None else [generator],
        )
        assert rig.torch.equal(source.get_state(), before), "The capture advanced the generator."
        drawn = [rig.replayed(graph), draw(rig.torch, device, generator).clone()]
        drawn += [rig.replayed(graph), rig.replayed(graph)]
        assert [rig.equal(a, b) for a, b in zip(drawn, expected, strict=True)] == [True] * 4

    def test_dropout_draws_the_sequence_of_eager(self, rig: Rig) -> None:
        """Replays of dropout draw the same numbers as eager runs."""
        x = rig.torch.ones(64, device=rig.backend.torch_device)

        def drop() -> Any:
            return rig.torch.nn.functional.dropout(x, 0.5)

        rig.default_generator().manual_seed(3)
        expected = [drop().clone() for _ in range(3)]
        rig.default_generator().manual_seed(3)
        graph = rig.capture(drop)
        drawn = [rig.replayed(graph) for _ in range(3)]
        assert [rig.equal(a, b) for a, b in zip(drawn, expected, strict=True)] == [True] * 3

    def test_seeding_again_repeats_the_replays(self, rig: Rig) -> None:
        """Replays use the current seed, not the seed at the capture."""
        graph = rig.capture(lambda: rig.torch.rand(8, device=rig.backend.torch_device))
        rig.default_generator().manual_seed(5)
        first = rig.replayed(graph)
        rig.default_generator().manual_seed(5)
        assert rig.equal(rig.replayed(graph), first)
        assert not rig.equal(rig.replayed(graph), first), (
            "Two consecutive replays drew the same numbers."
        )

    def test_a_graph_says_whether_it_draws(self, rig: Rig) -> None:
        """Graphs without random state may be launched directly."""
        x = rig.zeros(4)
        quiet = rig.capture(lambda: x + 1)
        drawing = rig.capture(lambda: rig.torch.rand(4, device=rig.backend.torch_device))
        quiet.replay()
        drawing.replay()
        assert not quiet.has_random_state, "has_random_state is True for a graph without draws."
        assert drawing.has_random_state, "has_random_state is False for a graph that draws."

    # -- several streams ------------------------------------------------------------------

    @pytest.mark.parametrize("own_generator", [False, True], ids=["default", "own"])
    def test_replays_on_two_streams_draw_in_the_order_they_were_asked_for(
        self, rig: Rig, own_generator: bool
    ) -> None:
        """No number is repeated or skipped, even while one stream is busy."""
        generator = rig.generator() if own_generator else None
        source = generator if generator is not None else rig.default_generator()
        source.manual_seed(11)
        eager = drawing(rig, generator)
        expected = [eager().clone() for _ in range(8)]
        # The first graph draws long after the second graph is launched.
        graphs = [
            capture_into_new_pool(rig, drawing(rig, generator, work), generator) for work in (1, 0)
        ]
        streams = [rig.backend.new_stream() for _ in graphs]
        rig.backend.synchronize()
        source.manual_seed(11)
        drawn = []
        for _ in range(4):
            for graph, stream in zip(graphs, streams, strict=True):
                with rig.backend.use_stream(stream):
                    graph.replay()
                    drawn.append(graph.outputs.clone())
        right = equal_draws(rig, drawn, expected)
        assert right == [True] * 8, (
            f"Only {sum(right)} of 8 draws on two streams equal the eager draws."
        )

    def test_one_graph_draws_anew_on_another_stream(self, rig: Rig) -> None:
        """Replays of one graph on two streams must run in order, even if it has no outputs."""
        source = rig.default_generator()
        place = rig.zeros(4, 16)
        turn = rig.zeros(1, dtype=rig.torch.int64)
        draw = drawing(rig, work=1)

        def run() -> None:
            place.index_copy_(0, turn, draw()[None])
            turn.add_(1)

        graph = rig.capture(run)
        source.manual_seed(4)
        expected = [drawing(rig)().clone() for _ in range(4)]
        streams = [rig.backend.new_stream() for _ in range(2)]
        rig.backend.synchronize()
        source.manual_seed(4)
        for number in range(4):
            with rig.backend.use_stream(streams[number % 2]):
                graph.replay()
        right = equal_draws(rig, list(place), expected)
        assert right == [True] * 4, (
            f"Only {sum(right)} of 4 draws of a graph on two streams equal the eager draws."
        )

    def test_a_capture_leaves_draws_in_flight_alone(self, rig: Rig) -> None:
        """The setup of a capture must not change a seed that replays in flight have yet to read."""
        source, stream = rig.default_generator(), rig.backend.new_stream()
        source.manual_seed(6)
        expected = [drawing(rig)().clone() for _ in range(3)]
        graph = capture_into_new_pool(rig, drawing(rig, work=3))
        rig.backend.synchronize()
        source.manual_seed(6)
        drawn = [drawing(rig)().clone()]
        rig.backend.synchronize()
        with rig.backend.use_stream(stream):
            graph.replay()
            drawn.append(graph.outputs.clone())
        other = capture_into_new_pool(rig, drawing(rig))
        other.replay()
        drawn.append(other.outputs.clone())
        right = equal_draws(rig, drawn, expected)
        assert right == [True] * 3, (
            f"After a capture during a replay, only {sum(right)} of 3 draws equal the eager draws."
        )

    def test_a_replay_after_a_capture_draws_with_its_own_seed(self, rig: Rig) -> None:
        """Work queued before the capture may still be running when the replay is launched."""
        source, stream = rig.default_generator(), rig.backend.new_stream()
        graph = capture_into_new_pool(rig, drawing(rig, work=4))
        source.manual_seed(9)
        expected = drawing(rig)().clone()
        source.manual_seed(8)
        rig.backend.synchronize()
        with rig.backend.use_stream(rig.stream):
            rig.occupy(2)
        other = capture_into_new_pool(rig, drawing(rig))
        source.manual_seed(9)
        with rig.backend.use_stream(stream):
            graph.replay()
        right = rig.equal(graph.outputs, expected)
        assert right, "A replay drew with the seed of the preceding capture."
        other.release()

    def test_release_right_after_a_replay_that_draws_is_safe(self, rig: Rig) -> None:
        """The memory of the seed must not be reused before the replay has read the seed."""
        source, target = rig.default_generator(), rig.zeros(16)
        source.manual_seed(2)
        expected = drawing(rig)().clone()
        draw = drawing(rig, work=2)
        graph = rig.capture(lambda: target.copy_(draw()))
        rig.backend.synchronize()
        source.manual_seed(2)
        with rig.backend.use_stream(rig.backend.new_stream()):
            graph.replay()
        graph.release()
        streams = [rig.stream, rig.backend.current_stream()]
        taken = []
        for stream in streams:
            with rig.backend.use_stream(stream):
                taken += [rig.zeros(1, dtype=rig.torch.int64).fill_(77) for _ in range(64)]
        assert rig.equal(target, expected), (
            "A replay in flight drew different numbers after its graph was released."
        )

    def test_threads_draw_no_number_twice(self, rig: Rig) -> None:
        """All replays together draw the same numbers as eager runs, in any order."""
        source = rig.default_generator()
        source.manual_seed(12)
        expected = [drawing(rig)().clone() for _ in range(16)]
        graphs = [capture_into_new_pool(rig, drawing(rig)) for _ in range(2)]
        streams = [rig.backend.new_stream() for _ in graphs]
        for graph in graphs:
            graph.replay()  # some backends cannot detect random draws before this replay
        rig.backend.synchronize()
        source.manual_seed(12)
        drawn: list[Any] = []
        errors: list[BaseException] = []

        def work(graph: CapturedGraph, stream: Any) -> None:
            try:
                with rig.backend.use_stream(stream):
                    for _ in range(8):
                        graph.replay()
                        drawn.append(graph.outputs.clone())
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(graphs, streams, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rig.backend.synchronize()
        assert errors == [], f"A replay failed in a thread: {errors[0]!r}"
        numbers = sorted(tuple(one.tolist()) for one in drawn)
        wanted = sorted(tuple(one.tolist()) for one in expected)
        assert numbers == wanted, (
            "Threads drew numbers twice, or numbers that eager runs do not draw."
        )
