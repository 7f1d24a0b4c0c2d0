"""Tests of memory, streams and threads, for BackendTests."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dispatchkit.errors import ConfigError, ReplayError
from dispatchkit.testing.backend_rig import PlannedError, Rig


def refuses(problem: str, error: type[Exception], call: Callable[[], Any]) -> None:
    """Check that a call raises an error of a given type; otherwise report the problem."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"{problem}, but must raise {error.__name__}.")


class StreamTests:
    """Tests of releases, pools, streams, events, warmups and threads."""

    def release_unused_memory(self, rig: Rig) -> None:
        """Return unused memory to the device; see BackendTests."""
        raise NotImplementedError

    # -- release --------------------------------------------------------------------------

    def test_a_released_graph_refuses_to_replay(self, rig: Rig) -> None:
        """The memory of a released graph may belong to other graphs."""
        x = rig.zeros(2)
        graph, other = rig.capture(lambda: x + 1), rig.capture(lambda: x + 2)
        graph.replay()
        graph.release()
        graph.release()
        refuses("A released graph replayed", ReplayError, graph.replay)
        refuses("A released graph returned outputs", ReplayError, lambda: graph.outputs)
        assert rig.read(rig.replayed(other)) == [2.0, 2.0]

    def test_release_right_after_replay_is_safe(self, rig: Rig) -> None:
        """A graph may be evicted while its replays are still running."""
        counter = rig.zeros(4)
        graph = rig.capture(lambda: counter.add_(1))
        graph.replay()
        graph.replay()
        graph.release()
        assert rig.read(counter) == [2.0] * 4

    def test_many_captures_and_releases_leave_nothing(self, rig: Rig) -> None:
        """Graphs may be evicted and recaptured for weeks, so memory must not leak."""
        x = rig.zeros(256)
        sizes: list[int] = []
        for _ in range(30):
            graph = rig.capture(lambda: (x + 1) * 2)
            graph.replay()
            sizes.append(rig.backend.pool_bytes(rig.pool))
            graph.release()
        grown = (
            f"The pool grew from {sizes[0]} to {max(sizes)} bytes, although each graph was "
            "released."
        )
        assert max(sizes) == sizes[0], grown
        del graph
        self.release_unused_memory(rig)
        left = rig.backend.pool_bytes(rig.pool)
        assert left == 0, f"The pool still reserves {left} bytes after all graphs were released."

    # -- pools ----------------------------------------------------------------------------

    def test_a_pool_counts_what_it_reserves(self, rig: Rig) -> None:
        """Memory budgets rely on ``pool_bytes``."""
        assert rig.backend.pool_bytes(rig.pool) == 0
        x = rig.zeros(1 << 16)
        graph = rig.capture(lambda: (x + 1) * 2)
        counted = rig.backend.pool_bytes(rig.pool)
        assert counted >= x.nbytes, (
            f"pool_bytes is {counted}, but the output alone takes {x.nbytes} bytes."
        )
        graph.release()
        self.release_unused_memory(rig)
        assert rig.backend.pool_bytes(rig.pool) == 0

    def test_a_shared_pool_is_smaller_than_a_pool_each(self, rig: Rig) -> None:
        """If the largest graph is captured first, the other graphs add little to the pool."""
        base = rig.zeros(1 << 22)
        sizes = [1 << shift for shift in (22, 21, 20, 19)]

        def run(size: int) -> Callable[[], Any]:
            part = base[:size]
            return lambda: rig.torch.sum((((part + 1) * 2).relu() - 3) * part)

        pools = [rig.backend.new_pool() for _ in sizes]
        graphs = [
            rig.backend.capture(run(size), stream=rig.stream, pool=pool)
            for size, pool in zip(sizes, pools, strict=True)
        ]
        graphs += [rig.capture(run(size)) for size in sizes]
        alone = [rig.backend.pool_bytes(pool) for pool in pools]
        shared = rig.backend.pool_bytes(rig.pool)
        assert shared < sum(alone), (
            "The shared pool is not smaller than all separate pools together."
        )
        assert shared <= 1.25 * alone[0]
        base.fill_(2)
        # (relu((2 + 1) * 2) - 3) * 2 is 6 for each element.
        assert [rig.read(rig.replayed(graph)) for graph in graphs[4:]] == [6.0 * n for n in sizes]

    # -- streams and events ---------------------------------------------------------------

    def test_use_stream_sets_and_restores_the_current_stream(self, rig: Rig) -> None:
        """Nested blocks, and blocks that raise, restore the previous stream."""
        backend = rig.backend
        other = backend.new_stream()
        start = backend.current_stream_handle()
        assert len({start, rig.stream.handle, other.handle}) == 3
        with backend.use_stream(rig.stream):
            assert backend.current_stream_handle() == rig.stream.handle
            with backend.use_stream(other):
                assert backend.current_stream_handle() == other.handle
                assert backend.current_stream().handle == other.handle
            assert backend.current_stream_handle() == rig.stream.handle
        with pytest.raises(PlannedError), backend.use_stream(rig.stream):
            raise PlannedError
        assert backend.current_stream_handle() == start

    def test_the_current_stream_is_the_threads_own(self, rig: Rig) -> None:
        """Each thread has its own current stream."""
        seen: list[int] = []
        start = rig.backend.current_stream_handle()
        with rig.backend.use_stream(rig.stream):
            thread = threading.Thread(
                target=lambda: seen.append(rig.backend.current_stream_handle())
            )
            thread.start()
            thread.join()
        assert seen == [start], "use_stream changed another thread's current stream."

    def test_streams_are_distinct_up_to_the_limit(self, rig: Rig) -> None:
        """Lanes that share a stream would silently wait for each other."""
        limit = rig.backend.capabilities.max_streams
        if limit is None:
            pytest.skip(f"Backend {rig.backend.name!r} reports no limit on the number of streams.")
        streams = [rig.stream, *(rig.backend.new_stream() for _ in range(limit - 1))]
        distinct = len({stream.handle for stream in streams})
        assert distinct == limit, f"Only {distinct} of {limit} streams are distinct."
        with pytest.raises(ConfigError, match=str(limit)):
            rig.backend.new_stream()
        streams.pop()
        gc.collect()
        assert rig.backend.new_stream().handle

    def test_a_graph_replays_on_any_stream(self, rig: Rig) -> None:
        """A replay runs on the caller's current stream."""
        x = rig.zeros(4)
        graph = rig.capture(lambda: x * 2)
        for value in range(5):
            x.fill_(value)
            graph.replay()
            assert rig.read(graph.outputs.clone()) == [2.0 * value] * 4

    def test_work_ordered_by_waits_gives_the_right_data(self, rig: Rig) -> None:
        """The caller's stream writes the inputs of another stream and reads its results."""
        backend = rig.backend
        caller = backend.new_stream()
        x = rig.zeros(1 << 12)
        graph = rig.capture(lambda: (x * 2 + 1) * 2)
        results = []
        backend.synchronize()
        for value in range(12):
            with backend.use_stream(caller):
                # Otherwise, the next input would overwrite an input that is still being read.
                caller.wait_stream(rig.stream)
                x.fill_(value)
                rig.stream.wait_stream(caller)
                with backend.use_stream(rig.stream):
                    graph.replay()
                caller.wait_stream(rig.stream)
                results.append(graph.outputs.clone())
        backend.synchronize()
        assert [result.unique().tolist() for result in results] == [
            [4.0 * value + 2] for value in range(12)
        ]

    def test_events_order_two_streams(self, rig: Rig) -> None:
        """Work after ``wait_event`` runs after the work before ``record``; events can be reused."""
        backend = rig.backend
        other, event = backend.new_stream(), backend.new_event()
        x = rig.zeros(1 << 12)
        results = []
        backend.synchronize()
        for value in range(1, 8):
            with backend.use_stream(rig.stream):
                x.add_(1)
                event.record()
            with backend.use_stream(other):
                other.wait_event(event)
                results.append((value, x * 2))
            rig.stream.wait_stream(other)
        backend.synchronize()
        for value, result in results:
            assert result.unique().tolist() == [2.0 * value]

    def test_events_tell_when_work_is_done(self, rig: Rig) -> None:
        """An event that was never recorded counts as done."""
        event = rig.backend.new_event()
        assert event.query()
        event.record(rig.stream)
        event.synchronize()
        assert event.query()
        assert rig.stream.query()

    def test_timing_events_measure(self, rig: Rig) -> None:
        """``elapsed_us`` returns the time between two events in microseconds."""
        start, end = (rig.backend.new_event(timing=True) for _ in range(2))
        x = rig.zeros(1 << 16)
        start.record()
        for _ in range(20):
            x.add_(1)
        end.record()
        end.synchronize()
        assert start.elapsed_us(end) > 0.0

    def test_events_without_timing_refuse_to_measure(self, rig: Rig) -> None:
        """A returned time of zero would look like a fast step."""
        start, end = rig.backend.new_event(), rig.backend.new_event(timing=True)
        start.record()
        end.record()
        end.synchronize()
        problem = "elapsed_us() of an event without timing returned a time"
        refuses(problem, ConfigError, lambda: start.elapsed_us(end))

    def test_a_time_that_was_never_taken_is_an_error(self, rig: Rig) -> None:
        """Both events must be recorded before the time is read."""
        start, end = (rig.backend.new_event(timing=True) for _ in range(2))
        start.record()
        problem = "elapsed_us() returned the time to an event that was never recorded"
        refuses(problem, ReplayError, lambda: start.elapsed_us(end))

    # -- warmup ---------------------------------------------------------------------------

    def test_warmup_runs_on_the_given_stream_in_the_callers_order(self, rig: Rig) -> None:
        """A warmup runs after the caller's earlier work and before the caller's later work."""
        seen: list[int] = []
        x = rig.zeros(1 << 12)
        start = rig.backend.current_stream_handle()

        def run() -> Any:
            seen.append(rig.backend.current_stream_handle())
            return x + len(seen)

        x.fill_(5)
        result = rig.backend.warmup(run, stream=rig.stream, iterations=3)
        after = result * 2
        assert seen == [rig.stream.handle] * 3, "The warmup did not run on the given stream."
        assert rig.read(after[:2]) == [16.0, 16.0]
        assert rig.backend.current_stream_handle() == start

    def test_a_failing_warmup_raises_what_the_callable_raised(self, rig: Rig) -> None:
        """The step itself failed, so the error is not a CaptureError."""
        start = rig.backend.current_stream_handle()

        def run() -> None:
            raise PlannedError("on purpose")

        with pytest.raises(PlannedError):
            rig.backend.warmup(run, stream=rig.stream)
        assert rig.backend.current_stream_handle() == start

    # -- threads --------------------------------------------------------------------------

    def test_threads_capture_and_replay_without_harm_to_each_other(self, rig: Rig) -> None:
        """Each device runs one capture at a time, while other threads replay graphs."""
        backend = rig.backend
        results: dict[int, list[float]] = {}
        errors: list[BaseException] = []
        streams = [backend.new_stream() for _ in range(4)]
        inputs = [rig.zeros(64) for _ in range(4)]
        backend.synchronize()

        def work(number: int) -> None:
            try:
                x, stream, pool = inputs[number], streams[number], backend.new_pool()
                got = []
                with backend.use_stream(stream):
                    for turn in range(5):
                        graph = backend.capture(
                            lambda: rig.torch.relu((x + 1) * (number + 1)), stream=stream, pool=pool
                        )
                        x.fill_(turn)
                        graph.replay()
                        got.append(graph.outputs.clone())
                stream.synchronize()
                results[number] = [float(part[0]) for part in got]
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [], f"A capture or replay failed in a thread: {errors[0]!r}"
        assert results == {
            number: [(turn + 1.0) * (number + 1) for turn in range(5)] for number in range(4)
        }
        assert gc.isenabled()
