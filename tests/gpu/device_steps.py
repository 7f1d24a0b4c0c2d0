"""Runners and threads for tests of steps on a device; import it only if torch is available."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import attrs

from dispatchkit import BatchDescriptor, GraphKey, GraphRunner, RunnerOptions, RuntimeMode
from dispatchkit.backends.cuda import CudaBackend
from dispatchkit.testing import OneBucketPolicy

SIZES = (1, 2, 4, 8, 16, 32)


def unproven(options=None):
    """Return options without the proof of rows, for steps that expose padding or count copies."""
    options = options or RunnerOptions()
    return attrs.evolve(options, capture=attrs.evolve(options.capture, prove_rows=False))


def runner_of(step, inputs, **settings):
    """Return a runner that has captured all sizes."""
    settings["options"] = unproven(settings.get("options"))
    settings.setdefault("sizes", SIZES)
    settings.setdefault("policy", OneBucketPolicy())
    settings.setdefault("mode", "FULL")
    settings.setdefault("backend", CudaBackend(0))
    runner = GraphRunner(step, inputs, **settings)
    assert runner.capture().failed == {}
    return runner


def key_of(size):
    return GraphKey(RuntimeMode.FULL, BatchDescriptor(size))


def in_threads(number, work):
    """Run ``work(index)`` in threads that start together; return the results in order."""
    start = threading.Barrier(number)

    def run(index):
        start.wait()
        return work(index)

    with ThreadPoolExecutor(number) as pool:
        return [future.result() for future in [pool.submit(run, i) for i in range(number)]]
