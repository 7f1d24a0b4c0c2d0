"""The tape keeps the promises of every backend."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from dispatchkit.backends.tape import TapeBackend
from dispatchkit.testing.backend_tests import BackendTests


class TestTapeAtOnce(BackendTests):
    def make_backend(self):
        return TapeBackend()


@pytest.mark.slow
class TestTapeDeferred(BackendTests):
    def make_backend(self):
        return TapeBackend(scheduler=1)
