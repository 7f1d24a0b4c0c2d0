"""Create inputs with dummy rows for timing steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dispatchkit.execute.io.static_input import StaticInput


def sample_inputs(
    specs: Mapping[str, StaticInput], size: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return inputs with ``size`` dummy rows.

    Floating-point inputs are random, because computing with zeros takes less power and is therefore
    faster. Inputs of other dtypes, and of 8-bit floating-point dtypes, contain their fill value.

    Args:
        specs: Static inputs by name.
        size: Number of rows.
        device: Device of the tensors, except host inputs, which are in host memory.
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
