"""Names of the package, loaded on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dispatchkit import observe


@pytest.mark.parametrize("name", observe.__all__)
def test_every_name_is_found(name):
    assert getattr(observe, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        observe.no_such_name  # noqa: B018  (the access is the test)


def test_counters_load_no_reader_of_traces():
    code = (
        "import sys, dispatchkit.observe as o; o.StepCounters\n"
        "assert 'dispatchkit.observe.trace' not in sys.modules\n"
        "o.read_trace; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
