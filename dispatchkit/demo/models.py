"""Functions that return runners of models, for measurements.

``dispatchkit calibrate`` accepts functions of this kind by name, as ``module:function``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache
from dispatchkit.demo.replay import CUDA_SHAPE, TAPE_SHAPE, resolve_device
from dispatchkit.execute import GraphRunner, StaticInput
from dispatchkit.keys import CaptureSizeWarning, DispatchConfig
from dispatchkit.options import RunnerOptions

__all__ = ["decoder", "mlp"]

#: Default capture sizes on a GPU. The distance between sizes grows with the size.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_TAPE_SIZES = (1, 2, 4, 8, 16)


def decoder(
    device: str = "auto",
    *,
    shape: DecoderShape | None = None,
    sizes: Sequence[int] | None = None,
    max_num_tokens: int | None = None,
    options: RunnerOptions | None = None,
    **settings: Any,
) -> GraphRunner:
    """Return a runner of the demo's decoder with a new cache.

    Args:
        device: ``auto``, ``tape``, ``cpu``, ``cuda`` or ``cuda:N``.
        shape: Sizes of the model; by default chosen for the device.
        sizes: Capture sizes in tokens; by default chosen for the device.
        max_num_tokens: Maximum tokens per step. The default is 2048 on a GPU and the largest
            capture size on the tape.
        options: Options of the runner; ``config`` and ``device`` are replaced according to the
            other arguments.
        settings: Additional arguments of the runner.
    """
    place, is_gpu, backend = _place(device)
    shape = shape or (CUDA_SHAPE if is_gpu else TAPE_SHAPE)
    cache = KVCache(shape, place)
    sizes = tuple(sizes or (SIZES if is_gpu else _TAPE_SIZES))
    limit = max_num_tokens or (2048 if is_gpu else max(sizes))
    config = _config(
        sizes=sizes,
        max_num_tokens=limit,
        max_num_seqs=shape.num_slots,
        mode="FULL_AND_PIECEWISE",
    )
    return GraphRunner(
        Decoder(shape, device=place).step(cache),
        inputs={
            "tokens": StaticInput((None,), "int64"),
            "positions": StaticInput((None,), "int64"),
            "slots": StaticInput((None,), "int64", fill=shape.sink_slot),
        },
        backend=backend,
        state=cache.tensors,
        options=attrs.evolve(options or RunnerOptions(), config=config, device=place),
        **settings,
    )


def mlp(
    device: str = "auto",
    *,
    num_layers: int = 8,
    width: int | None = None,
    sizes: Sequence[int] | None = None,
    max_num_tokens: int | None = None,
    options: RunnerOptions | None = None,
    **settings: Any,
) -> GraphRunner:
    """Return a runner of an MLP whose input and output have the shape (rows, width).

    Args:
        device: ``auto``, ``tape``, ``cpu``, ``cuda`` or ``cuda:N``.
        num_layers: Number of linear layers, each followed by a ReLU.
        width: Width of all layers; by default chosen for the device.
        sizes: Capture sizes in tokens; by default chosen for the device.
        max_num_tokens: Maximum tokens per step. The default is 2048 on a GPU and the largest
            capture size on the tape.
        options: Options of the runner; ``config`` and ``device`` are replaced according to the
            other arguments.
        settings: Additional arguments of the runner.
    """
    place, is_gpu, backend = _place(device)
    width = width or (4096 if is_gpu else 32)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    generator = torch.Generator(place).manual_seed(0)
    weights = [
        torch.randn(width, width, generator=generator, device=place).mul_(width**-0.5).to(dtype)
        for _ in range(num_layers)
    ]

    def step(hidden: Tensor) -> Tensor:
        for weight in weights:
            hidden = torch.relu(nn.functional.linear(hidden, weight))
        return hidden

    sizes = tuple(sizes or (SIZES if is_gpu else _TAPE_SIZES))
    limit = max_num_tokens or (2048 if is_gpu else max(sizes))
    config = _config(sizes=sizes, max_num_tokens=limit, mode="FULL")
    return GraphRunner(
        step,
        inputs={"hidden": StaticInput((None, width), dtype)},
        backend=backend,
        options=attrs.evolve(options or RunnerOptions(), config=config, device=place),
        **settings,
    )


def _config(**fields: Any) -> DispatchConfig:
    with warnings.catch_warnings():
        # Capture sizes may end below max_num_tokens, so that larger, eager steps can be measured.
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return DispatchConfig(**fields)


def _place(device: str) -> tuple[torch.device, bool, str]:
    place = resolve_device(device)
    is_gpu = place.type == "cuda"
    return place, is_gpu, "cuda" if is_gpu else "tape"
