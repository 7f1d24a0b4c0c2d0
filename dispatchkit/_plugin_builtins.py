"""What dispatchkit itself brings, registered through the same hooks as any plugin's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dispatchkit._plugin_catalog import check_options
from dispatchkit.hookspecs import BackendSpec, hookimpl


def _by_name(backend: str, class_name: str) -> Callable[..., Any]:
    """Return a factory that imports a backend when it is called.

    Some need torch, so they are named by string: what decides does not import them.
    """

    def factory(**options: Any) -> Any:
        made = getattr(importlib.import_module(f"dispatchkit.backends.{backend}"), class_name)
        check_options(f"backend {backend!r}", made, options)
        return made(**options)

    return factory


@hookimpl
def dispatchkit_register_backends() -> list[BackendSpec]:
    """Return the backends of this distribution."""
    return [
        BackendSpec(
            "tape",
            _by_name("tape", "TapeBackend"),
            summary="CUDA-graph semantics on a CPU, with torch",
        ),
        BackendSpec(
            "cuda",
            _by_name("cuda", "CudaBackend"),
            summary="CUDA graphs through torch.cuda",
        ),
    ]
