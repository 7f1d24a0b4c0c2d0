"""Check that CUDA is available, and resolve a device to its index."""

from __future__ import annotations

import os
from typing import Any

import torch

from dispatchkit.errors import BackendUnavailableError, ConfigError
from dispatchkit.keys.checks import whole_number


def require_cuda() -> None:
    """Raise BackendUnavailableError if torch cannot use a CUDA device."""
    if not torch.backends.cuda.is_built():
        raise BackendUnavailableError(
            "The backend 'cuda' requires a build of torch with CUDA, but torch "
            f"{torch.__version__} was built without it. Install a build with CUDA, or use the "
            "backend 'tape'."
        )
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        unset = "" if visible is None else "unset CUDA_VISIBLE_DEVICES, "
        raise BackendUnavailableError(
            "The backend 'cuda' requires a CUDA device, but torch found no driver or device"
            f"{hidden}. Check the driver with nvidia-smi, {unset}or use the backend 'tape'."
        )


def device_index(device: Any) -> int:
    """Return the index of a CUDA device.

    Args:
        device: Index, ``"cuda"``, ``"cuda:1"`` or torch.device; None for the current device.

    Raises:
        ConfigError: The value is not a CUDA device, or no device has this index.
    """
    count = torch.cuda.device_count()
    several = f"a CUDA device from 'cuda:0' to 'cuda:{count - 1}'"
    allowed = "the CUDA device 'cuda:0'" if count == 1 else several
    if device is None or str(device) == "cuda":
        return int(torch.cuda.current_device())
    index = whole_number(device)
    if index is None and isinstance(device, (str, torch.device)):
        try:
            parsed = torch.device(device)
        except RuntimeError as error:
            raise ConfigError("device", device, allowed) from error
        if parsed.type == "cuda":
            index = parsed.index
    if index is None or not 0 <= index < count:
        raise ConfigError("device", device, allowed)
    return index
