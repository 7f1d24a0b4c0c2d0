"""Tests to subclass for every GraphBackend.

    class TestMyBackend(BackendTests):
        def make_backend(self):
            return MyBackend()

The tape and cuda backends pass the same tests. The tests import torch when they run; this module
does not.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

# Register the modules with the tests, so that pytest rewrites their asserts to show values.
_PARTS = (
    "capture_tests",
    "failure_tests",
    "optional_tests",
    "random_tests",
    "segment_tests",
    "stream_tests",
)
pytest.register_assert_rewrite(*(f"dispatchkit.testing.backend_{part}" for part in _PARTS))

from dispatchkit.backends.base import GraphBackend  # noqa: E402
from dispatchkit.testing.backend_capture_tests import CaptureTests  # noqa: E402
from dispatchkit.testing.backend_failure_tests import FailureTests  # noqa: E402
from dispatchkit.testing.backend_optional_tests import OptionalTests  # noqa: E402
from dispatchkit.testing.backend_random_tests import RandomTests  # noqa: E402
from dispatchkit.testing.backend_rig import Rig  # noqa: E402
from dispatchkit.testing.backend_segment_tests import SegmentTests  # noqa: E402
from dispatchkit.testing.backend_stream_tests import StreamTests  # noqa: E402

__all__ = ["BackendTests", "Rig"]


class BackendTests(
    CaptureTests, RandomTests, FailureTests, StreamTests, OptionalTests, SegmentTests
):
    """Tests of GraphBackend and of the optional protocols that a backend offers.

    Subclass it and define ``make_backend``.
    """

    def make_backend(self) -> GraphBackend:
        """Return a new backend."""
        raise NotImplementedError("Define make_backend() in the subclass of BackendTests.")

    def release_unused_memory(self, rig: Rig) -> None:
        """Return unused memory to the device, if the backend caches it."""
        gc.collect()

    @pytest.fixture
    def rig(self) -> Any:
        """Return the backend with a stream and a pool."""
        torch = pytest.importorskip("torch")
        backend = self.make_backend()
        yield Rig(torch, backend, backend.new_stream(), backend.new_pool())
        backend.synchronize()
