"""The kit for runners on a device, where graphs can be launched directly."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from dispatchkit.backends import resolve_backend
from dispatchkit.testing import RunnerTests

pytestmark = pytest.mark.gpu


class TestVllmOnADevice(RunnerTests):
    num_steps = 12

    def make_backend(self):
        return resolve_backend("cuda")
