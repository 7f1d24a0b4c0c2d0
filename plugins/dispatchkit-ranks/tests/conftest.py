"""The helpers lie beside the tests; with importlib mode nothing else finds them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def worlds():
    """Starts ranks as processes; all of them are gone afterwards."""
    # Not imported here: only the interpreter that forks ranks needs it.
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    from rank_processes import Worlds

    with Worlds() as started:
        yield started
