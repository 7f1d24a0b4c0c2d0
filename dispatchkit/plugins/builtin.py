"""The built-in backends, registered through the same hooks as plugin backends."""

from __future__ import annotations

from typing import Any

from dispatchkit.hookspecs import BackendSpec, hookimpl
from dispatchkit.plugins.catalog import check_options


def _tape(**options: Any) -> Any:
    from dispatchkit.backends.tape import TapeBackend

    check_options("backend 'tape'", TapeBackend, options)
    return TapeBackend(**options)


def _cuda(**options: Any) -> Any:
    from dispatchkit.backends.cuda import CudaBackend

    check_options("backend 'cuda'", CudaBackend, options)
    return CudaBackend(**options)


@hookimpl
def dispatchkit_register_backends() -> list[BackendSpec]:
    """Return the built-in backends."""
    return [
        BackendSpec("tape", _tape, summary="CUDA-graph semantics on a CPU"),
        BackendSpec("cuda", _cuda, summary="CUDA graphs through torch.cuda"),
    ]
