"""From a name to a backend; no torch until one is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dispatchkit.backends.base import GraphBackend
from dispatchkit.errors import BackendUnavailableError, ConfigError, UnknownNameError

_logger = logging.getLogger(__name__)

AUTO = "auto"
BUILT_IN_BACKENDS = ("cuda", "tape")

_REQUIRED = tuple(name for name in vars(GraphBackend) if not name.startswith("_"))


def resolve_backend(
    spec: str | GraphBackend = AUTO,
    *,
    device: Any = None,
    registered: Mapping[str, Callable[..., GraphBackend]] | None = None,
) -> GraphBackend:
    """Return the backend that a name stands for, or the object given.

    Args:
        spec: ``"auto"`` (cuda where torch finds a device, else tape; which one is logged),
            a built-in name, a device such as ``"cuda:1"`` or ``"cpu"``, a registered name,
            or a backend, which is returned as it is.
        device: The device, where the name leaves it open: an index, ``"cuda:1"`` or a
            torch.device. None: the current one.
        registered: Backends of plugins, from name to a callable that takes ``device=`` and
            returns the backend. One under a built-in name takes its place, also where
            ``"auto"`` or a device stands for that name: whoever gives it has asked for that.

    Raises:
        UnknownNameError: No backend goes by that name.
        ConfigError: The object is no backend, or name and device contradict each other.
        BackendUnavailableError: torch, a driver or the device is missing.
    """
    if not isinstance(spec, str):
        missing = [name for name in _REQUIRED if not hasattr(spec, name)]
        if missing:
            raise ConfigError(
                "backend", spec, "a name or a GraphBackend", f"It has no {', '.join(missing)}."
            )
        if device is not None:
            raise ConfigError("device", device, "left out where the backend is an object")
        return spec
    registered = dict(registered or {})
    name, _, index = spec.partition(":")
    if name == AUTO and not index:
        name = _choose(device)
    if name == "cuda":
        if index and device is not None:
            raise ConfigError("device", device, f"left out where the backend is {spec!r}")
        return (registered.get(name) or _cuda)(device=spec if index else device)
    if name in ("tape", "cpu") and not index:
        return (registered.get("tape") or _tape)(device=device)
    if spec in registered:
        return registered[spec](device=device)
    known = {AUTO, "cpu", *BUILT_IN_BACKENDS, *registered}
    raise UnknownNameError("backend", spec, known)


def _choose(device: Any) -> str:
    """Return the name of the backend that "auto" stands for here."""
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
            "The backends need torch, which cannot be imported here "
            f"({error}). Install it: pip install 'dispatchkit[torch]'."
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
            "device", device, "'cpu' or left out for the tape", "For a GPU ask for 'cuda'."
        )
    from dispatchkit.backends.tape import TapeBackend

    return TapeBackend()
