"""Run the examples of the tutorial if sybil, torch and dispatchkit-vllm are installed."""

from __future__ import annotations

import importlib.util

if all(importlib.util.find_spec(name) for name in ("sybil", "torch", "dispatchkit_vllm")):
    from sybil import Sybil
    from sybil.parsers.myst import PythonCodeBlockParser

    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser()], patterns=["tutorial.md"]
    ).pytest()
