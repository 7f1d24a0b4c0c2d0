"""Attention of one new token for each sequence over a static cache, read once and as it lies.

The library's ``sdpa`` first repeats keys and values for the heads that share them, and hands
kernels a mask of each row's own, for which the fast ones are not made. A single query is two small
matrix products for each head of the cache, so that is what runs here: nothing is repeated or
copied, and the scores in between are as many as the positions.

``model.set_attn_implementation(DECODE_ATTENTION)`` chooses it, by the library's own register of
attention functions. Whatever it is not for, such as prompts, is the library's ``sdpa``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

#: The name it is chosen by.
DECODE_ATTENTION = "dispatchkit_decode"

# What changes scores in other ways than a mask; None where a model has none.
_OTHERWISE = ("softcap", "position_bias", "s_aux", "head_mask")


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
    """Be an attention function of the library.

    Shapes: query (B, heads, T, head size), key and value (B, key heads, positions, head size),
    mask (B or 1, 1, T, positions), True where a token may look, or added to scores. Scores are
    rounded to the model's type before they are weighed, as by the library's ``eager``.

    Returns:
        What the tokens attended to (B, T, heads, head size), and None.
    """
    rows, heads, length, size = query.shape
    if (
        length != 1
        or dropout
        or (attention_mask is not None and attention_mask.shape[1] != 1)
        or any(kwargs.get(name) is not None for name in _OTHERWISE)
    ):
        given = {"dropout": dropout, "scaling": scaling, **kwargs}
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **given
        )
        return result
    shared = key.shape[1]
    grouped = query.reshape(rows, shared, heads // shared, size)
    scores = (grouped @ key.transpose(2, 3)).float() * (size**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        else:
            scores = scores + mask
    found = scores.softmax(-1).to(value.dtype) @ value
    return found.reshape(rows, 1, heads, size), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
