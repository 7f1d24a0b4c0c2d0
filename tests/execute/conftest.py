"""Shared fixtures of the runner's tests: a small policy, faulty devices, a reference model."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from dispatchkit import (  # noqa: E402
    BatchDescriptor,
    GraphKey,
    GraphRunner,
    RunnerOptions,
    RuntimeMode,
    StaticInput,
    plugins,
)
from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.execute import EagerStepWarning  # noqa: E402
from dispatchkit.testing import OneBucketPolicy  # noqa: E402


class FaultyGraph:
    """A tape graph that raises on demand, before or after it runs."""

    def __init__(self, graph, backend):
        self._graph, self._backend = graph, backend

    @property
    def outputs(self):
        return self._graph.outputs

    @property
    def has_random_state(self):
        return self._graph.has_random_state

    def replay(self):
        self._backend.replays += 1
        if self._backend.replay_fault == "before":
            raise RuntimeError("launch refused")
        self._graph.replay()
        if self._backend.replay_fault == "after":
            raise RuntimeError("launch broke")

    def release(self):
        self._backend.live -= 1
        self._graph.release()


class WatchedTape(TapeBackend):
    """A tape that fails on demand and counts live graphs."""

    def __init__(self, **options):
        super().__init__(**options)
        self.capture_fault = None
        self.replay_fault = ""
        self.live = self.most_live = self.replays = 0
        self.streams_used = []

    def warmup(self, run, *, stream, iterations=1):
        self.streams_used.append(("warmup", stream.handle))
        return super().warmup(run, stream=stream, iterations=iterations)

    def capture(self, run, *, stream, pool, generators=()):
        self.streams_used.append(("capture", stream.handle))
        if self.capture_fault is not None:
            raise self.capture_fault
        graph = super().capture(run, stream=stream, pool=pool, generators=generators)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        return FaultyGraph(graph, self)


@pytest.fixture(scope="session", autouse=True)
def _plugins_are_loaded_once():
    """Load the plugins once; loading takes as long as a capture."""
    load, loaded = plugins.load_plugins, plugins.load_plugins()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            plugins, "load_plugins", lambda **options: load(**options) if options else loaded
        )
        yield


@pytest.fixture
def policy():
    return OneBucketPolicy()


@pytest.fixture
def backend():
    return WatchedTape()


@pytest.fixture
def make_runner(backend):
    """Return a factory of runners on the tape with the small policy and sizes 1, 2, 4, 8.

    With ``proves=False``, graphs may read padding rows, and only the test's own steps replay them.
    """

    def make(step, inputs=None, *, proves=True, **settings):
        if not proves:
            options = settings.get("options", RunnerOptions())
            capture = attrs.evolve(options.capture, prove_rows=False)
            settings["options"] = attrs.evolve(options, capture=capture)
        settings.setdefault("policy", OneBucketPolicy())
        settings.setdefault("backend", backend)
        settings.setdefault("sizes", (1, 2, 4, 8))
        if inputs is None and "example" not in settings:
            inputs = {"tokens": StaticInput((None,), "int64")}
        return GraphRunner(step, inputs, **settings)

    return make


@pytest.fixture
def quiet():
    """Allow warnings of downgrades, which this test expects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerStepWarning)
        yield


@pytest.fixture
def keys():
    """Return full(size) and piecewise(size)."""
    return SimpleNamespace(
        full=lambda size: GraphKey(RuntimeMode.FULL, BatchDescriptor(size)),
        piecewise=lambda size: GraphKey(RuntimeMode.PIECEWISE, BatchDescriptor(size)),
    )
