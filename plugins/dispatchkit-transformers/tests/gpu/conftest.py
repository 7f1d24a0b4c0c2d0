"""The helpers lie beside the tests; with importlib mode nothing else finds them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
