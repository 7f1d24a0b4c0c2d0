"""The tape passes the tests of every backend."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.tape import TapeBackend  # noqa: E402
from dispatchkit.backends.tape.backend import DRIVER_BYTES  # noqa: E402
from dispatchkit.testing.backend_tests import BackendTests  # noqa: E402


class TestTapeAtOnce(BackendTests):
    def make_backend(self):
        return TapeBackend()


@pytest.mark.slow
class TestTapeDeferred(BackendTests):
    def make_backend(self):
        return TapeBackend(scheduler=1)


def test_a_replay_overwrites_outputs_of_graphs_that_were_captured_later():
    """They may reuse its intermediates; outputs of earlier graphs stay."""
    tape = TapeBackend()
    stream, pool, x = tape.new_stream(), tape.new_pool(), torch.ones(8)
    first = tape.capture(lambda: (x + 1) * 2, stream=stream, pool=pool)
    second = tape.capture(lambda: (x + 2) * 3, stream=stream, pool=pool)
    first.replay()
    second.replay()
    assert first.outputs.tolist() == [4.0] * 8
    assert second.outputs.tolist() == [9.0] * 8
    first.replay()
    assert first.outputs.tolist() == [4.0] * 8
    assert second.outputs.isnan().all()
    apart = tape.capture(lambda: (x + 3) * 4, stream=stream, pool=tape.new_pool())
    apart.replay()
    first.replay()
    assert apart.outputs.tolist() == [16.0] * 8


def test_the_device_of_a_tape_counts_what_the_driver_would_keep():
    tape = TapeBackend()
    stream, pool, x = tape.new_stream(), tape.new_pool(), torch.ones(64)
    assert tape.device_memory() == (0, 0, 0)
    graph = tape.capture(lambda: (x + 1) * 2, stream=stream, pool=pool)
    used, reserved, held = tape.device_memory()
    assert reserved == tape.pool_bytes(pool) + tape.workspace_bytes(stream)
    assert held == x.nbytes + tape.workspace_bytes(stream)
    assert used - reserved == 2 * DRIVER_BYTES
    graph.release()
    del graph
    assert tape.device_memory()[0] == tape.workspace_bytes(stream)
