"""An attention function for decoding; it reads the static cache in place.

The ``sdpa`` of transformers passes one mask per row, which some kernels do not support. Some
releases also repeat keys and values for grouped-query attention. cuDNN's kernel supports a separate
mask for each row, and keys that several query heads share. This kernel is used on CUDA devices with
compute capability 8.0 or higher, for 16-bit dtypes and head sizes that are multiples of 8 up to
128, if cuDNN is newer than 9.15.0. Otherwise, two small matrix products per key head compute the
result. They do not repeat or copy the cache, but they store a score for each query head, token and
cache position.

``model.set_attn_implementation(DECODE_ATTENTION)`` selects this implementation from the registry
of transformers. Prompts, and calls with options that only ``sdpa`` supports, fall back to ``sdpa``.
Logit softcapping and attention sinks raise an error, because ``sdpa`` may ignore them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dispatchkit.errors import ConfigError

#: Name of this implementation in the registry of transformers.
DECODE_ATTENTION = "dispatchkit_decode"

# Options that change scores. Models that do not use an option pass None. Some releases of ``sdpa``
# silently ignore the options in ``_UNSUPPORTED``.
_UNSUPPORTED = {"softcap": "logit softcapping", "s_aux": "attention sinks"}
_SDPA_ONLY = ("position_bias", "head_mask")

# Calls with more tokens per row are treated as prompts. A decoding step has one token per row, plus
# drafts.
_MOST_TOKENS = 8

# Limits of cuDNN's kernel, from torch (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). cuDNN
# up to 9.15.0 returns wrong results for key lengths that are not multiples of 128. Some devices do
# not support heads larger than 128.
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
    """Compute attention, with the signature of transformers' attention functions.

    Shapes: query (B, heads, T, size), key (B, key heads, positions, size), value (B, key heads,
    positions, value size), mask (B or 1, 1, T, positions). A boolean mask is True where a token
    may attend; other masks are added to the scores. Without cuDNN, scores are rounded to the
    model's dtype before the softmax, as in transformers' ``eager`` implementation.

    Returns:
        The attention output (B, T, heads, value size), and None.

    Raises:
        ConfigError: The model uses logit softcapping or attention sinks.
    """
    for name, feature in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(
                "attn_implementation",
                DECODE_ATTENTION,
                f"an attention implementation that supports {feature} ({name})",
                "Call model.set_attn_implementation('eager').",
            )
    rows, heads, length, size = query.shape
    bias = kwargs.get("position_bias")
    if length == 1 and isinstance(bias, torch.Tensor) and bias.shape[2] == rows > 1:
        # If rows have different positions, transformers puts the rows' biases along the query
        # dimension.
        kwargs["position_bias"] = bias.permute(2, 1, 0, 3)
    # A fully causal prompt has no mask.
    is_prompt = length > _MOST_TOKENS or (length > 1 and attention_mask is None)
    if (
        is_prompt
        or dropout
        or (attention_mask is not None and attention_mask.shape[1] != 1)
        or any(kwargs.get(name) is not None for name in _SDPA_ONLY)
        or kwargs.get("output_attentions")  # sdpa warns about this option
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
        # Call the kernel directly, because torch's sdpa may choose a different kernel or repeat
        # keys.
        one: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, False, scale=scaling
        )[0]
        return one.transpose(1, 2), None
    shared = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    # Scale the query instead of the scores: the products then stay within the dtype's range, and
    # the query has fewer elements. Use few operations, because their number determines the time
    # that a small model takes.
    grouped = query.reshape(rows, shared, heads // shared * length, size)
    scores = (grouped * scale) @ key.transpose(2, 3)
    if mask is not None:
        allowed, each = mask.unsqueeze(2), scores.view(rows, shared, -1, length, key.shape[2])
        if mask.dtype == torch.bool:
            each.masked_fill_(~allowed, torch.finfo(scores.dtype).min)
        else:
            each.add_(allowed)
    # For 16-bit dtypes, softmax accumulates in float32.
    found = scores.softmax(-1).to(value.dtype) @ value
    return found.view(rows, heads, length, value.shape[-1]).transpose(1, 2), None


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask, True where a token may attend, to an additive mask."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _for_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Return whether to use cuDNN's kernel for these tensors."""
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


# torch.compile cannot trace this function, so it calls the function once and keeps the result.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_cudnn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether cuDNN is enabled and supports shared key heads with a mask."""
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
