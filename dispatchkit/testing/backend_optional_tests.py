"""Tests of the optional protocols, for BackendTests."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest

from dispatchkit.backends.optional import (
    CopyRegion,
    LaunchCall,
    UnwatchedCaptureBackend,
    features_of,
)
from dispatchkit.errors import ReplayError
from dispatchkit.testing.backend_rig import Rig


def offered(rig: Rig, part: str) -> Any:
    """Return an optional feature of the backend; skip the test if it is not offered."""
    found = getattr(features_of(rig.backend), part)
    if found is None:
        pytest.skip(f"Backend {rig.backend.name!r} does not offer BackendFeatures.{part}.")
    return found


def direct_launch(rig: Rig, graph: Any) -> tuple[LaunchCall, Any]:
    """Return a graph's direct launch; skip the test if only ``replay`` can launch the graph."""
    found = offered(rig, "direct_launches").direct_launch(graph)
    if found is None:
        pytest.skip(f"Backend {rig.backend.name!r} launches this graph only through replay.")
    return found  # type: ignore[no-any-return]


def assert_refused(ask: Callable[[], Any], problem: str) -> None:
    """Check that a call raises ReplayError."""
    try:
        ask()
    except ReplayError:
        return
    raise AssertionError(problem)


class OptionalTests:
    """Tests of the optional protocols; protocols that a backend does not offer are skipped."""

    # -- rehearsals -----------------------------------------------------------------------

    def test_a_rehearsal_measures_the_growth_of_the_pool(self, rig: Rig) -> None:
        """Before a capture, a memory budget must know how much the pool will grow."""
        rehearsals = offered(rig, "rehearsals")
        x = rig.zeros(1 << 18)

        def run() -> Any:
            y = (x + 1) * 2
            return y.relu() + y

        rig.backend.warmup(run, stream=rig.stream)
        expected = rehearsals.rehearse(run, stream=rig.stream, pool=rig.pool)
        left = rig.backend.pool_bytes(rig.pool)
        assert left == 0, f"The rehearsal left {left} bytes in the pool."
        graph = rig.capture(run)
        grown = rig.backend.pool_bytes(rig.pool)
        assert grown >= x.nbytes, (
            f"The pool grew by {grown} bytes, but the output alone takes {x.nbytes} bytes."
        )
        assert grown <= expected, (
            f"The pool grew by {grown} bytes, but the rehearsal predicted only {expected}."
        )
        assert rig.read(rig.replayed(graph)[:2]) == [4.0, 4.0]

    # -- meters ---------------------------------------------------------------------------

    def test_a_meter_sees_what_graphs_take(self, rig: Rig) -> None:
        """Reports of the memory in use must include pools."""
        meter = offered(rig, "meters")
        x = rig.zeros(1 << 20)
        run = lambda: ((x + 1) * 2).sum() + x  # noqa: E731
        rig.backend.warmup(run, stream=rig.stream)
        rig.backend.pool_bytes(rig.pool)  # frees unused memory
        before = meter.device_memory()
        graph = rig.capture(run)
        after, grown = meter.device_memory(), rig.backend.pool_bytes(rig.pool)
        reserved = after.reserved_bytes - before.reserved_bytes
        assert grown > 0, "pool_bytes() did not grow in a capture."
        assert reserved >= grown, (
            f"The pool grew by {grown} bytes, but reserved_bytes grew by only {reserved}."
        )
        assert after.held_bytes - before.held_bytes >= x.nbytes, (
            "held_bytes does not include the output."
        )
        for one in (before, after):
            assert one.used_bytes >= one.reserved_bytes >= one.held_bytes >= 0, (
                f"{one} violates used_bytes >= reserved_bytes >= held_bytes >= 0."
            )
        graph.release()

    def test_workspaces_belong_to_streams_that_were_captured(self, rig: Rig) -> None:
        """Workspaces of a stream are kept as long as graphs captured on it may use them."""
        meter = offered(rig, "meters")
        stream, square = rig.backend.new_stream(), rig.randn(16, 16)
        assert meter.workspace_bytes(stream) >= 0
        run = lambda: square @ square  # noqa: E731
        rig.backend.warmup(run, stream=stream)
        graph = rig.backend.capture(run, stream=stream, pool=rig.pool)
        assert meter.workspace_bytes(stream) > 0, (
            "workspace_bytes() is 0 after the capture of a matrix product."
        )
        graph.release()

    # -- sleeping memory ------------------------------------------------------------------

    def test_graphs_whose_memory_slept_replay_at_their_addresses(self, rig: Rig) -> None:
        """Sleep discards the contents of memory, but the graphs that use it stay valid."""
        sleeper = self._sleeper(rig)
        graphs, tensors = sleeper.new_sleeping_pool(), sleeper.new_sleeping_pool()
        x = sleeper.allocate(tensors, lambda: rig.zeros(1 << 20))
        outside = rig.torch.full_like(x, 3.0)

        def run() -> Any:
            y = (x + 1) * 2
            return y.relu() + outside

        rig.backend.warmup(run, stream=rig.stream)
        graph = rig.backend.capture(run, stream=rig.stream, pool=graphs)
        address = x.data_ptr()
        assert rig.read(rig.replayed(graph)[:2]) == [5.0, 5.0]
        for value in (1.0, 2.0):
            given_back = sleeper.sleep([graphs, tensors])
            assert given_back >= x.nbytes, (
                f"sleep() released {given_back} bytes, but the tensor alone takes {x.nbytes}."
            )
            assert rig.backend.pool_bytes(graphs) == 0, "A sleeping pool still uses memory."
            sleeper.wake([graphs, tensors])
            assert x.data_ptr() == address
            x.fill_(value)
            assert rig.read(rig.replayed(graph)[:2]) == [2 * value + 5] * 2
        assert rig.read(outside[:1]) == [3.0], (
            "sleep() also put memory outside the given pools to sleep."
        )
        graph.release()

    def test_a_graph_may_be_released_while_its_memory_sleeps(self, rig: Rig) -> None:
        """A runner may release graphs at any time, even while their memory sleeps."""
        sleeper = self._sleeper(rig)
        pool, x = sleeper.new_sleeping_pool(), rig.zeros(1 << 20)
        rig.backend.warmup(lambda: x + 1, stream=rig.stream)
        graph = rig.backend.capture(lambda: x + 1, stream=rig.stream, pool=pool)
        sleeper.sleep([pool])
        graph.release()
        del graph
        sleeper.wake([pool])
        again = rig.backend.capture(lambda: x + 2, stream=rig.stream, pool=pool)
        assert rig.read(rig.replayed(again)[:1]) == [2.0]
        again.release()

    @staticmethod
    def _sleeper(rig: Rig) -> Any:
        sleeper = offered(rig, "sleepers")
        if problem := sleeper.sleep_problem():
            pytest.skip(
                f"Memory of backend {rig.backend.name!r} cannot sleep: {problem.rstrip('.')}."
            )
        return sleeper

    # -- priorities -----------------------------------------------------------------------

    def test_streams_of_every_priority_are_distinct_and_capture(self, rig: Rig) -> None:
        """Lanes must not share a stream, even with priorities beyond the device's range."""
        priorities = offered(rig, "priorities")
        streams = [priorities.new_stream(priority=priority) for priority in (0, 1, 1, 99)]
        distinct = len({one.handle for one in (*streams, rig.stream)})
        assert distinct == 5, f"Only {distinct} of 5 streams are distinct."
        x = rig.zeros(4)
        for stream in streams:
            graph = rig.backend.capture(lambda: x * 2 + 1, stream=stream, pool=rig.pool)
            x.add_(1)
            stream.wait_stream(rig.backend.current_stream())
            with rig.backend.use_stream(stream):
                graph.replay()
            stream.synchronize()
            assert rig.equal(graph.outputs, x * 2 + 1)

    # -- direct launches ------------------------------------------------------------------

    def test_a_direct_launch_does_what_a_replay_does(self, rig: Rig) -> None:
        """Each direct launch runs the graph once, on the given stream."""
        x, count = rig.zeros(4), rig.zeros(1)
        graph = rig.warm_capture(lambda: (count.add_(1), x * 2 + 1))
        graph.replay()  # some backends cannot detect random draws before this replay
        assert not graph.has_random_state
        launch, handle = direct_launch(rig, graph)
        count.zero_()
        rig.backend.synchronize()
        for value, stream in enumerate((rig.stream, rig.backend.new_stream()), 1):
            with rig.backend.use_stream(stream):
                x.fill_(value)
                code = launch(handle, ctypes.c_void_p(stream.handle))
            assert not code, f"The launch failed with error code {code}."
            stream.synchronize()
            assert rig.read(graph.outputs[1]) == [2.0 * value + 1] * 4
        assert rig.read(count) == [2.0], "Two direct launches did not run the graph twice."

    def test_a_graph_of_somebody_else_has_no_direct_launch(self, rig: Rig) -> None:
        """A runner also accepts graphs captured by other code, which offer only ``replay``."""
        launches = offered(rig, "direct_launches")

        class Foreign:
            outputs = None
            has_random_state = False

            def replay(self) -> None: ...

            def release(self) -> None: ...

        assert launches.direct_launch(Foreign()) is None

    def test_a_released_graph_has_no_direct_launch(self, rig: Rig) -> None:
        """After a release, the graph's handle may identify another graph."""
        launches = offered(rig, "direct_launches")
        x = rig.zeros(2)
        graph = rig.capture(lambda: x + 1)
        graph.replay()
        direct_launch(rig, graph)
        graph.release()
        assert_refused(
            lambda: launches.direct_launch(graph), "direct_launch() accepted a released graph."
        )

    # -- uploads --------------------------------------------------------------------------

    def test_an_uploaded_graph_has_not_run_and_replays(self, rig: Rig) -> None:
        """An upload must not run the step."""
        uploads = offered(rig, "uploads")
        count = rig.zeros(1)
        graph = rig.warm_capture(lambda: count.add_(1) * 1)
        count.zero_()
        rig.backend.synchronize()
        assert isinstance(uploads.upload(graph, rig.stream), bool)
        assert rig.read(count) == [0.0], "The upload ran the graph."
        assert rig.read(rig.replayed(graph)) == [1.0]

    def test_a_released_graph_is_not_uploaded(self, rig: Rig) -> None:
        """After a release, the graph's handle may identify another graph."""
        uploads = offered(rig, "uploads")
        x = rig.zeros(2)
        graph = rig.capture(lambda: x + 1)
        if not uploads.upload(graph, rig.stream):
            pytest.skip(f"Backend {rig.backend.name!r} cannot upload this graph.")
        graph.release()
        assert_refused(
            lambda: uploads.upload(graph, rig.stream), "upload() accepted a released graph."
        )

    # -- copy nodes -----------------------------------------------------------------------

    def test_a_copy_node_does_what_it_was_set_to_last(self, rig: Rig) -> None:
        """In padding rows, a graph reads the fill value, not rows of earlier batches."""
        torch = rig.torch
        x, host = rig.zeros(8, 4), rig.zeros(8)
        node = offered(rig, "copy_nodes").copy_node(2, x.nbytes, data_bytes=host.nbytes)
        if isinstance(node, str):
            pytest.skip(f"Backend {rig.backend.name!r} cannot create a copy node: {node}.")

        def run() -> Any:
            return x * 2, host * 2

        def run_behind_node() -> Any:
            node.record(rig.backend.current_stream_handle())
            return run()

        rig.backend.warmup(run, stream=rig.stream)
        graph = rig.capture(run_behind_node)
        problem = node.attach(graph)
        assert not problem, f"The copy node was not attached to its graph: {problem}."
        graph.replay()
        assert rig.read(graph.outputs[1]) == [0.0] * 8, (
            "The copy node copied data before its parameters were set."
        )

        sevens = int.from_bytes(struct.pack("<ff", 7.0, 7.0), "little")
        regions = [
            CopyRegion(x.data_ptr(), x[:3].nbytes, x[3:].nbytes, sevens),
            CopyRegion(host.data_ptr(), host[:3].nbytes, host[3:].nbytes, sevens),
        ]
        set_node = node.setter(regions, offsets=[0])
        data = torch.frombuffer(node.data, dtype=torch.float32, count=3)
        for batch in (rig.randn(3, 4), rig.randn(3, 4)):
            data.copy_(torch.arange(3.0))
            code = set_node([batch])
            assert not code, (
                f"Setting the parameters of the copy node failed with error code {code}."
            )
            data.fill_(-1)  # no effect, because set_node has already read the data
            graph.replay()
            assert rig.equal(graph.outputs[0][:3], batch * 2), (
                "The graph did not read the rows of the batch."
            )
            assert rig.read(graph.outputs[0][3:]) == [[14.0] * 4] * 5, (
                "The graph did not read the fill value in the padding rows."
            )
            assert rig.read(graph.outputs[1]) == [0.0, 2.0, 4.0, *[14.0] * 5]
        x.fill_(1)
        assert not set_node([x[:3]])
        graph.replay()
        assert rig.read(graph.outputs[0]) == [[2.0] * 4] * 3 + [[14.0] * 4] * 5
        x.fill_(5)
        assert not node.stop()
        graph.replay()
        assert rig.read(graph.outputs[0]) == [[10.0] * 4] * 8, (
            "The copy node still copies after stop()."
        )

    # -- captures without a watch -----------------------------------------------------------

    @pytest.mark.parametrize(
        "options",
        [{"watched": True}, {"watched": False}, {"compiled": True}],
        ids=["watched", "unwatched", "compiled"],
    )
    def test_captures_give_the_same_graph_watched_or_not(
        self, rig: Rig, options: dict[str, bool]
    ) -> None:
        """Watching operations does not change the captured graph."""
        offered(rig, "unwatched_captures")
        x, weight = rig.randn(4, 8), rig.randn(8, 8)
        graph: Any = rig.warm_capture(lambda: (x @ weight).relu() + 1, **options)
        assert [type(graph.holds), type(graph.host_tensors)] == [list, list]
        assert graph.num_plain_operations == 0
        x.copy_(rig.randn(4, 8))
        rig.torch.testing.assert_close(rig.replayed(graph), (x @ weight).relu() + 1)

    def test_a_watched_graph_holds_what_it_reads_until_release(self, rig: Rig) -> None:
        """A graph keeps the memory of a weight alive, even if the model replaces the weight."""
        offered(rig, "unwatched_captures")
        x, weights = rig.zeros(64), [rig.torch.ones(64, device=rig.backend.torch_device)]
        graph: Any = rig.warm_capture(lambda: x + weights[0])
        self._assert_holds(rig, graph, x, weights)
        graph.release()
        assert graph.holds == [], "A released graph still holds memory."

    def test_notes_of_a_warmup_take_the_place_of_a_watch(self, rig: Rig) -> None:
        """A capture need not be watched if a warmup took notes of the operations."""
        unwatched = offered(rig, "unwatched_captures")
        x, weights = rig.zeros(64), [rig.torch.ones(64, device=rig.backend.torch_device)]

        def run() -> Any:
            return (x + weights[0]).relu()

        notes = self._noted(rig, unwatched, run)
        if not notes.is_plain:
            pytest.skip("The notes of this warmup do not allow a capture without a watch.")
        graph: Any = rig.capture(run, notes=notes)
        self._assert_holds(rig, graph, x, weights)

    @staticmethod
    def _noted(rig: Rig, unwatched: UnwatchedCaptureBackend, run: Callable[[], Any]) -> Any:
        """Run a warmup and return its notes; skip the test if notes are not supported."""
        from torch.utils._python_dispatch import TorchDispatchMode

        notes: Any = unwatched.new_notes()
        if notes is None:
            pytest.skip(f"Backend {rig.backend.name!r} does not support warmup notes.")

        class RecordingMode(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                notes.record(func, args, kwargs or {})
                return func(*args, **(kwargs or {}))

        def noted() -> Any:
            with RecordingMode():  # type: ignore[no-untyped-call]
                return run()

        rig.backend.warmup(noted, stream=rig.stream)
        return notes

    @staticmethod
    def _assert_holds(rig: Rig, graph: Any, x: Any, weights: list[Any]) -> None:
        """Check that a graph that reads ``weights[0]`` keeps this weight alive."""
        address = weights[0].untyped_storage().data_ptr()
        held = {storage.data_ptr() for storage in graph.holds}
        assert address in held, "The graph does not keep alive a weight that it reads."
        weights.clear()
        others = [rig.zeros(64) - 5 for _ in range(8)]
        x.fill_(2)
        assert rig.read(rig.replayed(graph)) == [3.0] * 64
        assert len(others) == 8
