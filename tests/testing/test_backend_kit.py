"""The kit for backends rejects every planted fault with a message that names it."""

from __future__ import annotations

import gc
import re

import pytest

torch = pytest.importorskip("torch")

from faulty_backends import PLANTED  # noqa: E402
from offering_tape import OfferingTape  # noqa: E402

from dispatchkit.testing import BackendTests  # noqa: E402
from dispatchkit.testing.backend_optional_tests import OptionalTests  # noqa: E402
from dispatchkit.testing.backend_rig import Rig  # noqa: E402


def what_is_said(backend, test, arguments):
    """Run one test on a backend; return its message, or "" if it passes."""
    tests = BackendTests()
    rig = Rig(torch, backend, backend.new_stream(), backend.new_pool())
    state = torch.default_generator.get_state()
    try:
        getattr(tests, test)(rig, **arguments)
    except (AssertionError, pytest.fail.Exception) as error:
        return str(error)
    finally:
        torch.default_generator.set_state(state)
        gc.enable()
    return ""


@pytest.mark.parametrize(
    ("backend", "test", "arguments", "message"),
    PLANTED,
    ids=[backend.__name__ for backend, *_ in PLANTED],
)
def test_planted_fault_is_rejected_by_name(backend, test, arguments, message):
    said = what_is_said(backend(), test, arguments)
    assert said, f"not found: {backend.__doc__}"
    assert re.search(message, said), said


class TestEveryPart(OptionalTests):
    """A backend that offers each optional part; the tape tests the required ones."""

    @pytest.fixture
    def rig(self):
        backend = OfferingTape()
        return Rig(torch, backend, backend.new_stream(), backend.new_pool())


def test_no_two_planted_faults_are_one():
    assert len({backend for backend, *_ in PLANTED}) == len(PLANTED) >= 15
