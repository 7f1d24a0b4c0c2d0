"""Attention of a few new tokens per sequence over a static cache, read once and in place.

The library's ``sdpa`` passes kernels a separate mask for each row, which some kernels do not
support, and some of its releases first repeat keys and values for heads that share them. cuDNN's
kernel supports both, so it runs where it is available: CUDA devices from compute capability 8.0
on, 16-bit types. Elsewhere two small matrix products run for each head of the cache: they do not
repeat or copy the cache either, and the intermediate scores are one number per position for each
token.

``model.set_attn_implementation(DECODE_ATTENTION)`` selects it, through the library's own registry
of attention functions. Prompts, and everything else it does not support, use the library's
``sdpa``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dispatchkit.errors import ConfigError

#: The name that selects it.
DECODE_ATTENTION = "dispatchkit_decode"

# Options that change scores other than by a mask; None if a model has none. Some releases' ``sdpa``
# do not know the first ones, and would silently ignore them.
_REFUSED = ("softcap", "s_aux")
_OTHERWISE = ("position_bias", "head_mask")

# A step has at most this many tokens: one, and drafts. More are a prompt.
_MOST_TOKENS = 8

# torch's own conditions for cuDNN (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): up to
# this release, lengths that 128 does not divide give wrong results, and only some devices support
# larger heads.
_CUDNN_WRONG_TO, _CUDNN_LARGEST = 91500, 128


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention, with the signature of the library's attention functions.

    Shapes: query (B, heads, T, size), key (B, key heads, positions, size), value (B, key heads,
    positions, value size), mask (B or 1, 1, T, positions), True where a token may attend, or added
    to scores. Without cuDNN, scores are rounded to the model's type before the softmax, as in the
    library's ``eager``.

    Returns:
        The attention output (B, T, heads, value size), and None.

    Raises:
        ConfigError: The model limits its scores, or has attention sinks.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                "attn_implementation",
                DECODE_ATTENTION,
                f"used with models without {name}, which it does not support",
                "model.set_attn_implementation('eager') supports it.",
            )
    rows, heads, length, size = query.shape
    bias = kwargs.get("position_bias")
    if length == 1 and isinstance(bias, torch.Tensor) and bias.shape[2] == rows > 1:
        # For rows at different positions, the library makes one query after the other.
        kwargs["position_bias"] = bias.permute(2, 1, 0, 3)
    # A prompt in which each token may attend to all tokens before it has no mask.
    is_prompt = length > _MOST_TOKENS or (length > 1 and attention_mask is None)
    if (
        is_prompt
        or dropout
        or (attention_mask is not None and attention_mask.shape[1] != 1)
        or any(kwargs.get(name) is not None for name in _OTHERWISE)
        or kwargs.get("output_attentions")  # sdpa warns that it has none
    ):
        given = {"dropout": dropout, "scaling": scaling, **kwargs}
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **given
        )
        return result
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    if _for_cudnn(query, key, value, mask):
        if mask is not None and mask.dtype == torch.bool:
            mask = additive(mask, query.dtype)
        # Called directly: torch's sdpa has an order of kernels, and repeats keys for its last one.
        one: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, False, scale=scaling
        )[0]
        return one.transpose(1, 2), None
    shared = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    # Scale first: no product exceeds the type's range, and fewer numbers are multiplied. For a
    # small model the number of operations matters more than the cost of each.
    grouped = query.reshape(rows, shared, heads // shared * length, size)
    scores = (grouped * scale) @ key.transpose(2, 3)
    if mask is not None:
        looks, each = mask.unsqueeze(2), scores.view(rows, shared, -1, length, key.shape[2])
        if mask.dtype == torch.bool:
            each.masked_fill_(~looks, torch.finfo(scores.dtype).min)
        else:
            each.add_(looks)
    # softmax computes in float32 internally, whatever the type.
    found = scores.softmax(-1).to(value.dtype) @ value
    return found.view(rows, heads, length, value.shape[-1]).transpose(1, 2), None


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask, True where a token may attend, to one that is added to scores."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _for_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Return whether cuDNN supports this, with correct results."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype == key.dtype == value.dtype
        and (mask is None or mask.dtype in (torch.bool, query.dtype))
        and value.shape == key.shape
        and key.stride(-1) == value.stride(-1) == 1
        and size % 8 == 0
        and size <= _CUDNN_LARGEST
        and not (torch.is_grad_enabled() and query.requires_grad)
        and _has_cudnn(query.device, query.dtype)
    )


# Compiled code calls this while it is traced, where the check itself is not understood.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch may and can use cuDNN for heads that share keys, with a mask."""
    return torch.backends.cuda.cudnn_sdp_enabled() and _can_have_cudnn(device, dtype)


@functools.cache
def _can_have_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    version = torch.backends.cudnn.version() or 0
    if torch.version.hip is not None or version <= _CUDNN_WRONG_TO:
        return False
    query = torch.empty(1, 2, 1, 64, dtype=dtype, device=device)
    key = torch.empty(1, 1, 128, 64, dtype=dtype, device=device)
    mask = torch.empty(1, 1, 1, 128, dtype=dtype, device=device)
    given = torch.backends.cuda.SDPAParams(query, key, key, mask, 0.0, False, True)
    found: bool = torch.backends.cuda.can_use_cudnn_attention(given)
    return found


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
