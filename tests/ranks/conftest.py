"""The helpers lie beside the tests; with importlib mode nothing else finds them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def worlds():
    """Starts ranks as processes; all of them are gone afterwards."""
    pytest.importorskip("torch")
    from rank_processes import Worlds

    with Worlds() as started:
        yield started
