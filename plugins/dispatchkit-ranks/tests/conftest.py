"""Add the helpers' folder to the path, because importlib mode does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def worlds():
    """Start ranks as processes and end them after the tests."""
    # Imported only by the interpreter that forks ranks.
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    from rank_processes import Worlds

    with Worlds() as started:
        yield started
