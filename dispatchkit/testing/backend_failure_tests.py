"""Tests of failed captures, for BackendTests."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from dispatchkit.errors import CaptureError
from dispatchkit.testing.backend_rig import HOST_SYNCS, PlannedError, Rig

_WAITS: dict[str, Callable[[Rig], Any]] = {
    "Stream.synchronize": lambda rig: rig.stream.synchronize(),
    "GraphBackend.synchronize": lambda rig: rig.backend.synchronize(),
    "Event.synchronize": lambda rig: rig.backend.new_event().synchronize(),
    "Stream.query": lambda rig: rig.stream.query(),
}


class FailureTests:
    """Tests that a failed capture reports a reason and has no side effects."""

    def release_unused_memory(self, rig: Rig) -> None:
        """Return unused memory to the device; see BackendTests."""
        raise NotImplementedError

    # -- failed captures ------------------------------------------------------------------

    def _program(self, rig: Rig, state: Any, generator: Any) -> list[Callable[[], Any]]:
        """Return operations that create tensors, write in place or draw random numbers."""
        device = rig.backend.torch_device
        torch = rig.torch
        return [
            lambda: state * 2,
            lambda: state.add_(1),
            lambda: state.view(2, 4)[1].mul_(3),
            lambda: torch.rand(8, device=device),
            lambda: torch.rand(8, device=device, generator=generator),
            lambda: torch.nn.functional.dropout(state, 0.5),
            lambda: state.uniform_(generator=generator),
            lambda: state.index_copy_(0, torch.arange(2, device=device), state[:2] + 1),
            lambda: torch.add(state, 1, out=state),
            lambda: state.exp_().log_(),
        ]

    @pytest.mark.parametrize("num_steps", range(11))
    def test_a_capture_that_fails_leaves_everything_as_before(
        self, rig: Rig, num_steps: int
    ) -> None:
        """State, generators, stream, garbage collector and other graphs must not change."""
        backend, torch = rig.backend, rig.torch
        state, generator = rig.randn(8), rig.generator()
        x = rig.zeros(8)
        healthy = rig.capture(lambda: (x + 1) * 2)
        default_before = rig.default_generator().get_state()
        own_before = generator.get_state()
        state_before = state.clone()
        handle = backend.current_stream_handle()
        program = self._program(rig, state, generator)

        def run() -> None:
            for step in program[:num_steps]:
                step()
            raise PlannedError("on purpose")

        with pytest.raises(CaptureError) as caught:
            rig.capture(run, generators=[generator])
        after = "differs after a failed capture"
        assert isinstance(caught.value.__cause__, PlannedError)
        assert caught.value.reason == "error"
        assert backend.current_stream_handle() == handle, f"The current stream {after}."
        assert not backend.is_capturing(), "is_capturing() is True after a failed capture."
        assert gc.isenabled(), "The garbage collector is disabled after a failed capture."
        same = torch.equal(rig.default_generator().get_state(), default_before)
        assert same, f"The state of the default generator {after}."
        same = torch.equal(generator.get_state(), own_before)
        assert same, f"The state of a generator passed to capture() {after}."
        assert rig.equal(state, state_before), f"A tensor outside the graph {after}."
        torch.rand(2, device=backend.torch_device)  # eager draws still work
        x.fill_(4)
        assert rig.read(rig.replayed(healthy)) == [10.0] * 8
        again = rig.capture(lambda: x - 1)
        assert rig.read(rig.replayed(again)) == [3.0] * 8

    @pytest.mark.parametrize("name", HOST_SYNCS)
    def test_calls_that_wait_for_the_device_are_refused(self, rig: Rig, name: str) -> None:
        """The error has the reason ``host_sync``, and later work is not affected."""
        x = rig.torch.ones(4, 8, device=rig.backend.torch_device)
        before = rig.default_generator().get_state()
        what = f"The host synchronization {name!r}"
        error = rig.refused(what, lambda: HOST_SYNCS[name](rig.torch, x + 1), reason="host_sync")
        assert error.__cause__ is not None
        assert rig.torch.equal(rig.default_generator().get_state(), before)
        graph = rig.capture(lambda: x + 1)
        assert rig.read(rig.replayed(graph)[0]) == [2.0] * 8

    def test_a_refused_call_is_named(self, rig: Rig) -> None:
        """The error names the call, so that users can find it in a large model."""
        x = rig.zeros(3)
        with pytest.raises(CaptureError, match=r"Tensor\.item"):
            rig.capture(lambda: x.sum().item())

    def test_a_refused_call_that_the_callable_catches_still_fails(self, rig: Rig) -> None:
        """The capture is invalid, so it must fail even if the callable catches the error."""
        x = rig.zeros(3)

        def run() -> Any:
            try:
                x.tolist()
            except RuntimeError:
                return x + 1
            return x

        what = "The callable caught the error of a refused host synchronization"
        rig.refused(what, run, reason="host_sync")

    @pytest.mark.parametrize("name", _WAITS)
    def test_waits_through_the_backend_are_refused(self, rig: Rig, name: str) -> None:
        """Devices refuse waits and queries during a capture, so every backend must refuse them."""
        rig.refused(f"{name}() in a capture", lambda: _WAITS[name](rig), reason="host_sync")
        assert rig.read(rig.replayed(rig.capture(lambda: rig.zeros(1) + 1))) == [1.0]

    def test_captures_do_not_nest(self, rig: Rig) -> None:
        """A capture inside a capture fails with the reason ``nested``."""
        x = rig.zeros(2)
        inner = "A capture inside a capture"
        rig.refused(inner, lambda: rig.capture(lambda: x + 1), reason="nested")
        assert rig.read(rig.replayed(rig.capture(lambda: x + 1))) == [1.0, 1.0]

    def test_running_out_of_memory_is_reported_as_such(self, rig: Rig) -> None:
        """The error has the reason ``out_of_memory``, and other graphs stay valid."""
        x = rig.zeros(4)
        healthy = rig.capture(lambda: x + 1)

        def run() -> Any:
            return rig.torch.empty(2**50, dtype=rig.torch.uint8, device=rig.backend.torch_device)

        rig.refused("Allocating a petabyte", run, reason="out_of_memory")
        assert rig.read(rig.replayed(healthy)) == [1.0] * 4

    def test_an_interrupt_passes_through_and_leaves_everything_as_before(self, rig: Rig) -> None:
        """Ctrl-C is not a capture error, and must leave the device usable."""
        state = rig.zeros(2)

        def run() -> None:
            state.add_(1)
            raise KeyboardInterrupt

        passed = False
        try:
            rig.capture(run)
        except KeyboardInterrupt:
            passed = True
        except CaptureError:  # converted; the assertion below fails
            pass
        assert passed, (
            "KeyboardInterrupt in a capture was swallowed or converted to another exception."
        )
        assert rig.read(state) == [0.0, 0.0]
        assert not rig.backend.is_capturing()
        assert rig.read(rig.replayed(rig.capture(lambda: state + 1))) == [1.0, 1.0]

    def test_failing_captures_reserve_no_memory(self, rig: Rig) -> None:
        """The pool does not grow while twenty captures fail in five different ways."""
        x = rig.zeros(1024)
        rig.capture(lambda: (x + 1) * 2)
        kinds: list[Callable[[], Any]] = [
            lambda: (x + 1).sum().item(),
            lambda: (x + 1)[x > 0],
            lambda: (x + 1) / PlannedError,
            lambda: (x + 1).cpu() + 1,
            lambda: (x + 1) @ rig.zeros(7),
        ]
        sizes: list[int] = []
        for turn in range(20):
            with pytest.raises(CaptureError):
                rig.capture(kinds[turn % 5])
            if turn % 5 == 4:
                self.release_unused_memory(rig)
                sizes.append(rig.backend.pool_bytes(rig.pool))
        assert len(set(sizes)) == 1

    @pytest.mark.parametrize("enabled", [True, False])
    @pytest.mark.parametrize("fails", [True, False])
    def test_the_collector_is_held_and_put_back(self, rig: Rig, enabled: bool, fails: bool) -> None:
        """Garbage collection during a capture could destroy a graph and invalidate the capture."""
        seen: list[bool] = []

        def run() -> Any:
            seen.append(gc.isenabled())
            if fails:
                raise PlannedError("on purpose")
            return rig.zeros(1) + 1

        try:
            if not enabled:
                gc.disable()
            if fails:
                with pytest.raises(CaptureError):
                    rig.capture(run)
            else:
                rig.capture(run)
            ended = "failed" if fails else "successful"
            assert gc.isenabled() == enabled, (
                f"A {ended} capture changed whether the garbage collector is enabled."
            )
        finally:
            gc.enable()
        assert seen == [False], "The garbage collector was enabled during the capture."

    def test_is_capturing_is_true_only_inside(self, rig: Rig) -> None:
        """A runner calls ``is_capturing`` to detect that other code is capturing the step."""
        seen: list[bool] = []

        def run() -> Any:
            seen.append(rig.backend.is_capturing())
            return rig.zeros(1) + 1

        rig.capture(run)
        assert seen == [True], "is_capturing() is False inside a capture."
        assert not rig.backend.is_capturing(), "is_capturing() is True after a capture."
