"""Every way that inputs come into a graph, on tapes without and with copy nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from played_tape import PlayedTape

from dispatchkit.testing import InputTransportTests
from dispatchkit.testing.input_transport_tests import WAYS

# Inputs of the other ways go as they do in one of these. A device runs all of them: tests/gpu.
FAST = (
    "copied, of one type",
    "staged, with device inputs",
    "by a node, all, with others",
    "moved by torch",
)
SLOW = ("by a node, staged", "staged, into pieces", "by a node or staged", "moved from elsewhere")


class TestInputsOnATape(InputTransportTests):
    """The copy nodes are those of CUDA; the tape plays the driver's part."""

    @pytest.fixture(params=[*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
    def way(self, request):
        return WAYS[request.param]

    def make_backend(self):
        return PlayedTape()
