"""Every way that inputs come into a graph, on tapes without and with copy nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from played_tape import PlayedTape

from dispatchkit.testing import InputTransportTests


class TestInputsOnATape(InputTransportTests):
    """The copy nodes are those of CUDA; the tape plays the driver's part."""

    def make_backend(self):
        return PlayedTape()
