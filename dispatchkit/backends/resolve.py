"""Resolve backend names, importing torch only when a backend is requested."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dispatchkit.backends.base import GraphBackend
from dispatchkit.errors import BackendUnavailableError, ConfigError, UnknownNameError
from dispatchkit.keys.checks import check_instance

_logger = logging.getLogger(__name__)

AUTO = "auto"
BUILT_IN_BACKENDS = ("cuda", "tape")


def resolve_backend(
    spec: str | GraphBackend = AUTO,
    *,
    device: Any = None,
    registered: Mapping[str, Callable[..., GraphBackend]] | None = None,
) -> GraphBackend:
    """Return the backend for a name; a backend object is returned unchanged.

    Args:
        spec: A backend object, a built-in or registered name, a device (``"cuda:1"``, ``"cpu"``),
            or ``"auto"``. ``"auto"`` selects the backend of ``device``. Without a device, it
            selects ``cuda`` if torch finds a GPU, otherwise ``tape``. The choice is logged.
        device: The device, if the name does not specify it: an index, ``"cuda:1"`` or a
            torch.device; None for the current device.
        registered: Factories of plugin backends by name, which accept ``device=``. A factory with a
            built-in name replaces the built-in backend, even if ``"auto"`` or a device selects the
            name.

    Raises:
        UnknownNameError: No backend has this name.
        ConfigError: The object is not a backend, or ``device`` conflicts with ``spec``.
        BackendUnavailableError: torch, a driver or the device is missing.
    """
    if not isinstance(spec, str):
        allowed = "a name, such as 'cuda' or 'tape', or a GraphBackend"
        check_instance(spec, GraphBackend, "backend", allowed=allowed)
        if device is not None:
            hint = f"The object runs on {spec.torch_device}."
            raise ConfigError("device", device, "omitted if the backend is an object", hint)
        return spec
    registered = dict(registered or {})
    name, _, index = spec.partition(":")
    if name == AUTO and not index:
        name = _choose(device)
    if name == "cuda":
        if index and device is not None:
            hint = f"To choose the device separately, use the backend {name!r}."
            raise ConfigError("device", device, f"omitted if the backend is {spec!r}", hint)
        return (registered.get(name) or _cuda)(device=spec if index else device)
    if name in ("tape", "cpu") and not index:
        return (registered.get("tape") or _tape)(device=device)
    if spec in registered:
        return registered[spec](device=device)
    known = {AUTO, "cpu", *BUILT_IN_BACKENDS, *registered}
    raise UnknownNameError("backend", spec, known)


def _choose(device: Any) -> str:
    """Return the name of the backend that "auto" selects."""
    torch = _torch()
    wanted = None if device is None else str(device)
    if wanted is not None:
        name = "tape" if wanted == "cpu" else "cuda"
    else:
        name = "cuda" if torch.cuda.is_available() else "tape"
    _logger.info("Backend %r chosen for 'auto'", name)
    return name


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailableError(
            f"Backends require torch, which cannot be imported ({error}). Run: pip install "
            "'dispatchkit[torch]'."
        ) from error
    return torch


def _cuda(device: Any) -> GraphBackend:
    _torch()
    from dispatchkit.backends.cuda import CudaBackend

    return CudaBackend(device)


def _tape(device: Any) -> GraphBackend:
    _torch()
    if device is not None and str(device) not in ("cpu", "tape"):
        raise ConfigError(
            "device", device, "'cpu' or omitted for the tape", "For a GPU, use the backend 'cuda'."
        )
    from dispatchkit.backends.tape import TapeBackend

    return TapeBackend()
