"""Every transport of inputs into a graph, on tapes with and without copy nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from played_tape import PlayedTape

from dispatchkit.testing import InputTransportTests
from dispatchkit.testing.input_transport_tests import WAYS

# The other transports handle a part of the same inputs in the same way. tests/gpu runs all of them
# on a device.
FAST = (
    "copied, of one type",
    "staged, with device inputs",
    "by a node, all, with others",
    "moved by torch",
)
SLOW = ("by a node, staged", "staged, into pieces", "by a node or staged", "moved from elsewhere")


class TestInputsOnATape(InputTransportTests):
    """Uses CUDA's copy nodes, with the tape in place of the driver."""

    @pytest.fixture(params=[*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
    def way(self, request):
        return WAYS[request.param]

    def make_backend(self):
        return PlayedTape()
