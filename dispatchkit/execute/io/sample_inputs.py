"""Inputs for measuring steps on dummy rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dispatchkit.execute.io.static_input import StaticInput


def sample_inputs(
    specs: Mapping[str, StaticInput], size: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return inputs of ``size`` rows: random floating-point numbers, fill in other dtypes.

    Random, because a device computes zeros with less power, and therefore faster.

    Args:
        specs: Static inputs by name.
        size: Rows.
        device: The device of the tensors; host inputs are in host memory.
    """
    made = {}
    for name, spec in specs.items():
        place = torch.device("cpu") if spec.host else device
        tensor = spec.full(size, place)
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            generator = torch.Generator(place).manual_seed(size)
            tensor.normal_(generator=generator)
        made[name] = tensor
    return made
