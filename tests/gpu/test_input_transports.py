"""Every transport of inputs into a graph, on a device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.execute.io.staging import StagingBuffers  # noqa: E402
from dispatchkit.testing import InputTransportTests  # noqa: E402

pytestmark = pytest.mark.gpu


class TestInputsOnADevice(InputTransportTests):
    def make_backend(self):
        return CudaBackend(0)

    def test_what_a_node_takes_needs_no_event(self, bench, monkeypatch):
        """There are no host inputs, or they are the node's own data."""
        if any(bench.runner().controls.input_path(bench.key(size)) != "node" for size in (1, 8)):
            pytest.skip("Its graphs copy pinned memory, or have no node.")
        monkeypatch.setattr(StagingBuffers, "record_launch", None)
        runner = bench.runner()
        for number in range(20):
            kind = "in place" if number % 3 == 1 else "call"
            bench.run_and_compare(runner, number * 5 % 8 + 1, number, kind)
        # Its first replay shows that an unwatched graph draws nothing.
        assert {runner.controls.launch_path(bench.key(size)) for size in (1, 8)} == {"direct"}
