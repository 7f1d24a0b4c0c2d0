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
    "copied, one dtype",
    "staged, with device inputs",
    "node, with host and unsupported inputs",
    "node not found",
)
SLOW = (
    "node, host inputs staged",
    "staged, into pieces",
    "node or staged",
    "registered graphs, with host inputs",
)


class TestInputsOnATape(InputTransportTests):
    """Uses CUDA's copy nodes, with the tape in place of the driver."""

    @pytest.fixture(params=[*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
    def way(self, request):
        return WAYS[request.param]

    def make_backend(self):
        return PlayedTape()
