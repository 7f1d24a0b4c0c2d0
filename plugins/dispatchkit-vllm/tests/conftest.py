"""Add the helpers' folder to the path, because importlib mode does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _file in ("helpers", "rivals", "modules"):
    _name = f"vllm_test_{_file}"
    if _name not in sys.modules:
        _path = Path(__file__).with_name(f"{_file}.py")
        _spec = importlib.util.spec_from_file_location(_name, _path)
        assert _spec is not None
        assert _spec.loader is not None
        _module = importlib.util.module_from_spec(_spec)
        sys.modules[_name] = _module
        _spec.loader.exec_module(_module)
