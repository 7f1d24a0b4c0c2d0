"""Tapes with one realistic mistake each, and the backend test that must find it."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import torch
from offering_tape import OfferingTape

from dispatchkit.backends.tape import TapeBackend
from dispatchkit.backends.tape.pool import TapePool
from dispatchkit.backends.tape.streams import TapeEvent
from dispatchkit.errors import CaptureError, ReplayError

#: (faulty backend, test that finds it, arguments of that test, pattern of the message)
PLANTED: list[tuple[type[TapeBackend], str, dict[str, Any], str]] = []


def planted(test, message, **arguments):
    def add(backend):
        PLANTED.append((backend, test, arguments, message))
        return backend

    return add


class Graph:
    """A captured graph with some methods replaced."""

    def __init__(self, graph, **changed):
        self.graph, self.changed = graph, changed

    def __getattr__(self, name):
        return self.changed[name] if name in self.changed else getattr(self.graph, name)

    @property
    def outputs(self):
        return self.graph.outputs

    @property
    def has_random_state(self):
        return self.changed.get("draws", self.graph.has_random_state)

    def replay(self):
        self.changed.get("replay", self.graph.replay)()

    def release(self):
        self.changed.get("release", self.graph.release)()


@planted("test_python_runs_once", r"Python .* ran again during a replay")
class CallsAgainBackend(TapeBackend):
    """A replay also calls the function again."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        return Graph(graph, replay=lambda: (run(), graph.replay()))


@planted("test_outputs_keep_their_addresses", r"A replay replaced the object in ``outputs``")
class FreshOutputsBackend(TapeBackend):
    """``outputs`` returns a copy on every access."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)

        class Fresh(Graph):
            @property
            def outputs(self):
                copies = [each.clone() for each in torch.utils._pytree.tree_leaves(graph.outputs)]
                return (copies[0], copies[1:])

        return Fresh(graph)


@planted("test_a_capture_changes_no_state_and_each_replay_does_once", r"capture changed state")
class CaptureIsAStepBackend(TapeBackend):
    """A capture also runs the step and does not put state back."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        run()
        return graph


@planted(
    "test_new_values_of_weights_are_seen_by_the_next_replay",
    r"values that the weights had during the capture",
)
class FoldsConstantsBackend(TapeBackend):
    """Computes once and keeps the result, as if weights never changed."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        graph.replay()
        return Graph(graph, replay=lambda: None)


@planted("test_outputs_are_not_computed_at_capture", r"before the first replay", dtype="float32")
class NoPoisonBackend(TapeBackend):
    """Replays once after the capture, "to be sure that it works"."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        graph.replay()
        return graph


@planted("test_grad_mode_is_the_callers", r"autograd modes .* differ from the caller's")
class NoGradBackend(TapeBackend):
    """Captures without gradients, because inference needs none."""

    def capture(self, run, **options):
        def quiet():
            with torch.no_grad():
                return run()

        return super().capture(quiet, **options)


@planted(
    "test_replays_draw_the_sequence_of_eager",
    r"capture advanced the generator",
    name="rand",
    own_generator=False,
)
class DrawsAtCaptureBackend(TapeBackend):
    """A capture leaves the generator advanced by its draw."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        torch.rand(1)
        return graph


@planted("test_seeding_again_repeats_the_replays", r"consecutive replays drew the same numbers")
class SeedIsBakedBackend(TapeBackend):
    """The graph contains the generator's state at capture."""

    def capture(self, run, **options):
        state = torch.default_generator.get_state()
        graph = super().capture(run, **options)
        seeded = torch.default_generator.get_state

        def replay():
            before = seeded()
            torch.default_generator.set_state(state)
            graph.replay()
            torch.default_generator.set_state(before)

        return Graph(graph, replay=replay)


class SharedSeedBackend(TapeBackend):
    """Graphs share one seed and offset, which the stream of each launch fills in."""

    fills_at_capture = False

    def __init__(self):
        super().__init__(scheduler=2)
        self.place = [torch.default_generator.get_state()]

    def fill(self, state):
        self.current_stream().submit(lambda: self.place.__setitem__(0, state))

    def capture(self, run, *, stream, **options):
        if self.fills_at_capture:
            with self.use_stream(stream):
                self.fill(torch.default_generator.get_state())
        graph = super().capture(run, stream=stream, **options)
        return Graph(graph, replay=lambda: self.replay(graph)) if graph.has_random_state else graph

    def replay(self, graph):
        generator = torch.default_generator
        self.fill(generator.get_state())
        torch.rand(16)  # the host's offset advances immediately
        for launch in graph._launches:

            def launched(launch=launch):
                before = generator.get_state()
                generator.set_state(self.place[0])
                launch()
                generator.set_state(before)

            self.current_stream().submit(launched)


planted(
    "test_replays_on_two_streams_draw_in_the_order_they_were_asked_for",
    r"on two streams equal the eager draws",
    own_generator=False,
)(SharedSeedBackend)


@planted("test_a_capture_leaves_draws_in_flight_alone", r"After a capture during a replay, only")
class CaptureResetsSeedBackend(SharedSeedBackend):
    """A capture fills in the shared seed too, without waiting for draws in flight."""

    fills_at_capture = True


@planted("test_a_replay_after_a_capture_draws_with_its_own_seed", r"of the preceding capture")
class CaptureFillsLateBackend(CaptureResetsSeedBackend):
    """The capture's slow stream fills in the shared seed after a replay has."""


@planted("test_a_graph_says_whether_it_draws", r"False for a graph that draws")
class NeverDrawsBackend(TapeBackend):
    """Never reports random state, so a quick launch would skip it."""

    def capture(self, run, **options):
        return Graph(super().capture(run, **options), draws=False)


@planted(
    "test_a_capture_that_fails_leaves_everything_as_before",
    r"current stream .* after a failed capture",
    num_steps=2,
)
class StaysOnItsStreamBackend(TapeBackend):
    """Restores the caller's stream only if the capture succeeded."""

    def capture(self, run, *, stream, **options):
        before = self._thread.stream
        self._thread.stream = stream
        graph = super().capture(run, stream=stream, **options)
        self._thread.stream = before
        return graph


@planted(
    "test_the_collector_is_held_and_put_back",
    r"changed whether the garbage collector",
    enabled=True,
    fails=True,
)
class LosesTheCollectorBackend(TapeBackend):
    """Disables the collector and does not enable it again when the capture fails."""

    def capture(self, run, **options):
        was_enabled = gc.isenabled()
        try:
            graph = super().capture(run, **options)
        except CaptureError:
            gc.disable()
            raise
        if was_enabled:
            gc.enable()
        return graph


@planted(
    "test_calls_that_wait_for_the_device_are_refused",
    r"reason is 'error', but must be 'host_sync'",
    name="item",
)
class AllErrorsAreOneBackend(TapeBackend):
    """Reports every failure with the reason "error"."""

    def capture(self, run, **options):
        try:
            return super().capture(run, **options)
        except CaptureError as error:
            raise CaptureError(str(error), reason="error") from error.__cause__


@planted("test_a_refused_call_that_the_callable_catches_still_fails", r"did not raise CaptureError")
class BelievesTheCallableBackend(TapeBackend):
    """Ignores a refused call that user code catches, and bakes in its host value."""

    def capture(self, run, **options):
        try:
            return super().capture(run, **options)
        except CaptureError:
            return super().capture(lambda: torch.zeros(3), **options)


@planted("test_captures_do_not_nest", r"did not raise CaptureError")
class NestsBackend(TapeBackend):
    """A capture inside a capture runs the inner function plainly."""

    def capture(self, run, **options):
        return run() if self.is_capturing() else super().capture(run, **options)


@planted(
    "test_an_interrupt_passes_through_and_leaves_everything_as_before",
    r"KeyboardInterrupt .* swallowed",
)
class SwallowsInterruptBackend(TapeBackend):
    """Catches BaseException and converts it to a CaptureError."""

    def capture(self, run, **options):
        try:
            return super().capture(run, **options)
        except KeyboardInterrupt as error:
            raise CaptureError("The capture failed.", reason="error") from error


@planted(
    "test_an_interrupt_passes_through_and_leaves_everything_as_before",
    r"KeyboardInterrupt .* swallowed",
)
class IgnoresInterruptBackend(TapeBackend):
    """Returns an empty graph if the captured function is interrupted."""

    def capture(self, run, **options):
        try:
            return super().capture(run, **options)
        except KeyboardInterrupt:
            return super().capture(lambda: None, **options)


@planted("test_is_capturing_is_true_only_inside", r"is_capturing\(\) is False inside a capture")
class NeverCapturingBackend(TapeBackend):
    """Queries the device's default stream, which is never captured."""

    def is_capturing(self):
        return False


@planted("test_a_released_graph_refuses_to_replay", r"released graph replayed")
class ReplaysReleasedBackend(TapeBackend):
    """``release`` does nothing."""

    def capture(self, run, **options):
        return Graph(super().capture(run, **options), release=lambda: None)


@planted("test_many_captures_and_releases_leave_nothing", r"The pool grew")
class KeepsEveryGraphBackend(TapeBackend):
    """A list "for debugging" keeps every graph alive."""

    def __init__(self, **options):
        super().__init__(**options)
        self.made = []

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        self.made.append(graph.outputs)
        return graph


@planted("test_a_pool_counts_what_it_reserves", r"pool_bytes is \d+, but the output alone")
class CountsNothingBackend(TapeBackend):
    """Counts the bytes reserved before the capture."""

    def pool_bytes(self, pool):
        return min(super().pool_bytes(pool), 0)


@planted("test_a_shared_pool_is_smaller_than_a_pool_each", r"shared pool is not smaller")
class PoolForEachBackend(TapeBackend):
    """Every graph gets its own memory instead of the given pool."""

    def new_pool(self):
        return [TapePool()]

    def pool_bytes(self, pool):
        return sum(super(PoolForEachBackend, self).pool_bytes(each) for each in pool)

    def capture(self, run, *, pool, **options):
        pool.append(TapePool())
        return super().capture(run, pool=pool[-1], **options)


@planted("test_the_current_stream_is_the_threads_own", r"changed another thread's")
class OneCurrentStreamBackend(TapeBackend):
    """The current stream is an attribute of the backend instead of the thread."""

    class _Shared:
        stream = None

    def __init__(self, **options):
        super().__init__(**options)
        self._thread = self._Shared()


@planted("test_streams_are_distinct_up_to_the_limit", r"streams are distinct")
class HandsOutInTurnsBackend(TapeBackend):
    """Returns the same few streams in turns."""

    def __init__(self, **options):
        super().__init__(**options)
        self.few = []

    def new_stream(self):
        if len(self.few) < 4:
            self.few.append(super().new_stream())
        self.few.append(self.few.pop(0))
        return self.few[-1]


@planted("test_events_without_timing_refuse_to_measure", r"returned a time")
class MeasuresAnywayBackend(TapeBackend):
    """An event without timing returns zero."""

    def new_event(self, *, timing=False):
        class Anyway(TapeEvent):
            def elapsed_us(self, end):
                return super().elapsed_us(end) if timing else 0.0

        return Anyway(self.current_stream, timing=timing)


@planted(
    "test_a_time_that_was_never_taken_is_an_error", r"elapsed_us\(\) returned the time to an event"
)
class TimeOfNothingBackend(TapeBackend):
    """Returns zero for an event that was not recorded."""

    def new_event(self, *, timing=False):
        class Zero(TapeEvent):
            def elapsed_us(self, end):
                try:
                    return super().elapsed_us(end)
                except ReplayError:
                    return 0.0

        return Zero(self.current_stream, timing=timing)


@planted(
    "test_warmup_runs_on_the_given_stream_in_the_callers_order",
    r"warmup did not run on the given stream",
)
class WarmsUpWhereItIsBackend(TapeBackend):
    """Warms up on the caller's stream."""

    def warmup(self, run, *, stream, iterations=1):
        return super().warmup(run, stream=self.current_stream(), iterations=iterations)


@planted("test_threads_capture_and_replay_without_harm_to_each_other", r"failed in a thread")
class OneAtATimeElseErrorBackend(TapeBackend):
    """Refuses a second concurrent capture instead of waiting."""

    def __init__(self, **options):
        super().__init__(**options)
        self.guard = threading.Lock()
        self.busy = 0
        self.both = threading.Barrier(2)

    def capture(self, run, **options):
        with self.guard:
            self.busy += 1
            number = self.busy
        if number <= 2:
            self.both.wait(timeout=30)  # forces two captures to overlap on any machine
        if number == 2:
            raise RuntimeError("The device is capturing already.")
        return super().capture(run, **options)


# -- optional parts -----------------------------------------------------------------------------


@planted("test_a_rehearsal_measures_the_growth_of_the_pool", r"left \d+ bytes in the pool")
class RehearsesInThePoolBackend(TapeBackend):
    """A rehearsal is a capture that is released later."""

    def rehearse(self, run, *, stream, pool, generators=()):
        self.kept = self.capture(run, stream=stream, pool=pool, generators=generators)
        return self.pool_bytes(pool)


@planted(
    "test_streams_of_every_priority_are_distinct_and_capture", r"Only \d of 5 streams are distinct"
)
class OneUrgentStreamBackend(TapeBackend):
    """All urgent work shares a stream."""

    def new_stream(self, *, priority=0):
        if priority:
            if not hasattr(self, "urgent"):
                self.urgent = super().new_stream()
            return self.urgent
        return super().new_stream()


@planted("test_a_direct_launch_does_what_a_replay_does", r"did not run the graph twice")
class LaunchesTwiceBackend(OfferingTape):
    """Precedes the first launch by another launch "to load the graph"."""

    def __init__(self):
        super().__init__()
        self.loaded = set()

    def launch(self, graph, stream):
        if graph.value not in self.loaded:
            self.loaded.add(graph.value)
            super().launch(graph, stream)
        return super().launch(graph, stream)


@planted(
    "test_a_released_graph_has_no_direct_launch", r"direct_launch\(\) accepted a released graph"
)
class LaunchesReleasedBackend(OfferingTape):
    """Looks up handles without checking whether the graph is released."""

    def direct_launch(self, graph):
        return self.launch, ctypes.c_void_p(graph.handle)


@planted("test_an_uploaded_graph_has_not_run_and_replays", r"upload ran the graph")
class UploadIsAReplayBackend(OfferingTape):
    """Uploads by replaying once."""

    def upload(self, graph, stream):
        graph.replay()
        return True


@planted("test_a_released_graph_is_not_uploaded", r"upload\(\) accepted a released graph")
class UploadsReleasedBackend(OfferingTape):
    """Uploads released graphs too."""

    def upload(self, graph, stream):
        return True


@planted(
    "test_a_watched_graph_holds_what_it_reads_until_release",
    r"does not keep alive a weight that it reads",
)
class HoldsOutputsOnlyBackend(OfferingTape):
    """Watches only for waits, and keeps none of the recorded storages."""

    def capture(self, run, **options):
        graph = super().capture(run, **options)
        graph.holds = []
        return graph


@planted(
    "test_notes_of_a_warmup_take_the_place_of_a_watch",
    r"does not keep alive a weight that it reads",
)
class ForgetsNotesBackend(OfferingTape):
    """Disables the watch if there are notes, but does not read the notes."""

    def capture(self, run, *, notes=None, watched=True, **options):
        return super().capture(run, watched=watched and notes is None, **options)


@planted("test_a_copy_node_does_what_it_was_set_to_last", r"copy node still copies after stop")
class StopsNothingBackend(OfferingTape):
    """``stop`` leaves the node as it was set."""

    def copy_node(self, num_regions, num_bytes, data_bytes=0):
        node = super().copy_node(num_regions, num_bytes, data_bytes)
        node.stop = lambda: 0
        return node


class Segments:
    """The segments of a capture with some methods replaced."""

    def __init__(self, capture, **changed):
        self.end = changed.get("end", capture.end)
        self.begin = changed.get("begin", capture.begin)


@planted("test_segments_and_what_runs_between_them_are_eager", r"Replays of segments differ from")
class LastSegmentOnlyBackend(TapeBackend):
    """Never replays the first segment."""

    def capture_segments(self, run, **options):
        made = super().capture_segments(run, **options)
        return (Graph(made[0], replay=lambda: None), *made[1:])


@planted("test_a_segment_changes_nothing_until_it_is_replayed", r"capture .* changed the state")
class SegmentIsAStepBackend(TapeBackend):
    """A segment is replayed when it is captured."""

    def capture_segments(self, run, **options):
        def run_and_replay(capture):
            def end():
                graph = capture.end()
                graph.replay()
                return graph

            return run(Segments(capture, end=end))

        return super().capture_segments(run_and_replay, **options)


@planted("test_a_segment_without_work_says_so", r"only creates views reports operations")
class CountsOneBackend(TapeBackend):
    """Reports one operation for every segment."""

    def capture_segments(self, run, **options):
        def run_counted(capture):
            return run(Segments(capture, end=lambda: Graph(capture.end(), num_operations=1)))

        return super().capture_segments(run_counted, **options)


@planted(
    "test_what_fails_in_a_segment_leaves_nothing_behind", r"failed capture can still be replayed"
)
class KeepsSegmentsBackend(TapeBackend):
    """Segments remain replayable after a later failure."""

    def capture_segments(self, run, **options):
        def run_keeping(capture):
            def end():
                graph = capture.end()
                return Graph(graph, replay=lambda: None)

            return run(Segments(capture, end=end))

        return super().capture_segments(run_keeping, **options)


@planted("test_segments_draw_as_eager_draws", r"but eager runs draw")
class DrawsTwiceBackend(TapeBackend):
    """The second segment starts from the generator's state at capture."""

    def capture_segments(self, run, **options):
        made = super().capture_segments(run, **options)
        state = torch.default_generator.get_state()

        def replay():
            torch.default_generator.set_state(state)
            made[1].replay()

        return made[0], Graph(made[1], replay=replay), *made[2:]
