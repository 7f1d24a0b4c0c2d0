"""Run the kit for backends, and test logging and delays."""

from __future__ import annotations

import ctypes
import gc
import time

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import (  # noqa: E402
    CaptureOptions,
    GraphRunner,
    RunnerOptions,
    StaticInput,
    load_plugins,
)
from dispatchkit.backends import resolve_backend  # noqa: E402
from dispatchkit.errors import ConfigError  # noqa: E402
from dispatchkit.testing import BackendTests  # noqa: E402

from dispatchkit_launchlog import Launch, LaunchLogBackend, plugin  # noqa: E402


@pytest.mark.slow
class TestKit(BackendTests):
    def make_backend(self) -> LaunchLogBackend:
        return LaunchLogBackend("tape")


@pytest.mark.gpu
class TestKitOnADevice(BackendTests):
    def make_backend(self) -> LaunchLogBackend:
        return LaunchLogBackend("cuda")

    def release_unused_memory(self, rig) -> None:
        gc.collect()
        rig.backend.synchronize()
        torch.cuda.empty_cache()


def run_steps(backend: LaunchLogBackend) -> None:
    inputs = {"x": StaticInput((None, 4), "float32")}
    # The proof that padding changes no row launches graphs, too.
    options = RunnerOptions(capture=CaptureOptions(prove_rows=False))
    runner = GraphRunner(
        lambda x: x + 1, inputs, sizes=[2, 4], mode="FULL", backend=backend, options=options
    )
    runner.capture()
    for rows in (1, 2, 4):
        assert torch.equal(runner(torch.zeros(rows, 4)), torch.ones(rows, 4))


def test_each_replay_is_logged_with_its_stream() -> None:
    backend = LaunchLogBackend("tape", capacity=2)
    stream = backend.new_stream()
    with backend.use_stream(stream):
        run_steps(backend)
    assert list(backend.launches) == [Launch(stream.handle, is_direct=False)] * 2


def test_a_direct_launch_is_logged_too() -> None:
    class Direct:
        """Tape with direct launches."""

        def __init__(self) -> None:
            self.tape = resolve_backend("tape")

        def __getattr__(self, name: str) -> object:
            return getattr(self.tape, name)

        def direct_launch(self, graph):
            def launch(handle: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
                graph.replay()
                return 0

            return launch, ctypes.c_void_p(1)

    backend = LaunchLogBackend(Direct())
    run_steps(backend)
    assert list(backend.launches) == [Launch(0, is_direct=True)] * 3


def test_each_launch_waits_as_long_as_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    run_steps(LaunchLogBackend("tape", delay_us=50))
    assert waits == pytest.approx([50e-6] * 3)
    for wrong in ({"delay_us": -1}, {"delay_us": "x"}, {"capacity": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LaunchLogBackend("tape", **wrong)


def test_it_is_chosen_by_name() -> None:
    plugins = load_plugins(allow=[], extra=[("launchlog", plugin)], strict=True)
    backend = plugins.create_backend("launchlog", device="cpu")
    assert isinstance(backend, LaunchLogBackend)
    assert backend.name == "launchlog on tape"
