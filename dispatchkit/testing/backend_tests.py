"""BackendTests, the test kit for backends.

    class TestMyBackend(BackendTests):
        def make_backend(self):
            return MyBackend()

The tape and cuda backends pass these tests. This module does not import torch; only the tests do.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

# pytest shows the values of a failed assert only if it rewrites the asserts of the module.
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
    """Test kit for a GraphBackend and the optional protocols that it offers.

    Subclass it under a name that starts with ``Test``, and define ``make_backend``.
    """

    def make_backend(self) -> GraphBackend:
        """Return a new backend."""
        raise NotImplementedError(f"{type(self).__name__} must define make_backend().")

    def release_unused_memory(self, rig: Rig) -> None:
        """Return unused memory to the device; override this if the backend caches memory."""
        gc.collect()

    @pytest.fixture
    def rig(self) -> Any:
        """Yield the backend with a stream and a pool."""
        torch = pytest.importorskip("torch")
        backend = self.make_backend()
        yield Rig(torch, backend, backend.new_stream(), backend.new_pool())
        backend.synchronize()
