"""Load the real dispatchers of published releases, if fetched (``make rivals``).

Only the dispatcher's module is executed unchanged. Stand-ins replace its imports. They hold the
real descriptor, mode and counting function, each extracted from its module, because these modules
import much of vLLM.
"""

from __future__ import annotations

import ast
import enum
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[3] / ".rivals"
RELEASES = ("0.33.0", "0.13.0")


def folder(release: str) -> Path:
    return FOLDER / f"vllm-{release}" / "vllm"


def is_fetched(release: str) -> bool:
    return (folder(release) / "v1" / "cudagraph_dispatcher.py").is_file()


def runner_tree(release: str) -> ast.Module:
    """Return the syntax tree of the model runner, which is too large to execute here."""
    return ast.parse((folder(release) / "v1" / "worker" / "gpu_model_runner.py").read_text())


def _definition(release: str, file: str, name: str) -> Any:
    tree = ast.parse((folder(release) / file).read_text())
    node = next(each for each in tree.body if getattr(each, "name", "") == name)
    scope: dict[str, Any] = {
        "__name__": f"vllm_{release}",
        "dataclass": dataclass,
        "enum": enum,
        "NamedTuple": NamedTuple,
        "Any": Any,
    }
    code = compile(ast.Module([node], []), file, "exec", dont_inherit=True)
    exec(code, scope)  # noqa: S102 - a published class, run as it is
    return scope[name]


@contextmanager
def loaded(release: str) -> Iterator[ModuleType]:
    """Install a release's dispatcher under vLLM's name within the block."""
    stubs: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.config": {
            "CUDAGraphMode": _definition(release, "config/compilation.py", "CUDAGraphMode"),
            "VllmConfig": SimpleNamespace,
        },
        "vllm.forward_context": {
            "BatchDescriptor": _definition(release, "forward_context.py", "BatchDescriptor"),
        },
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.compilation": {},
        "vllm.compilation.breakable_cudagraph": {"is_breakable_cudagraph_enabled": lambda: False},
        "vllm.lora": {},
    }
    if release == "0.33.0":
        counts = _definition(release, "lora/utils.py", "get_captured_lora_counts")
        stubs["vllm.lora.utils"] = {"get_captured_lora_counts": counts}
    name = "vllm.v1.cudagraph_dispatcher"
    before = {key: sys.modules.get(key) for key in (*stubs, name)}
    for key, names in stubs.items():
        module = ModuleType(key)
        vars(module).update(names)
        sys.modules[key] = module
    module = ModuleType(name)
    sys.modules[name] = module
    try:
        source = (folder(release) / "v1" / "cudagraph_dispatcher.py").read_text()
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))  # noqa: S102
        yield module
    finally:
        for key, value in before.items():
            if value is None:
                sys.modules.pop(key, None)
            else:
                sys.modules[key] = value
