"""Attention of one new token for each sequence over a static cache, read once and as it lies.

The library's ``sdpa`` hands kernels a mask of each row's own, for which the fast ones are not made,
and some of its releases first repeat keys and values for the heads that share them. A single query
is two small matrix products for each head of the cache, so that is what runs here: nothing is
repeated or copied, and the scores in between are as many as the positions.

``model.set_attn_implementation(DECODE_ATTENTION)`` chooses it, by the library's own register of
attention functions. Prompts, and whatever else it is not for, are the library's ``sdpa``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dispatchkit.errors import ConfigError

#: The name it is chosen by.
DECODE_ATTENTION = "dispatchkit_decode"

# What changes scores in other ways than a mask; None where a model has none. The first are not
# known to every release's ``sdpa``, which would leave them out without a word.
_REFUSED = ("softcap", "s_aux")
_OTHERWISE = ("position_bias", "head_mask")


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

    Shapes: query (B, heads, T, size), key (B, key heads, positions, size), value (B, key heads,
    positions, value size), mask (B or 1, 1, T, positions), True where a token may look, or added
    to scores. Scores are rounded to the model's type before they are weighed, as by the library's
    ``eager``.

    Returns:
        What the tokens attended to (B, T, heads, value size), and None.

    Raises:
        ConfigError: The model limits its scores, or has sinks.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ConfigError(
                "attn_implementation",
                DECODE_ATTENTION,
                f"used with models without {name}, which changes scores in a way that it lacks",
                "model.set_attn_implementation('eager') has it.",
            )
    rows, heads, length, size = query.shape
    if (
        length != 1
        or dropout
        or (attention_mask is not None and attention_mask.shape[1] != 1)
        or any(kwargs.get(name) is not None for name in _OTHERWISE)
        or kwargs.get("output_attentions")  # it says that it has none
    ):
        given = {"dropout": dropout, "scaling": scaling, **kwargs}
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **given
        )
        return result
    shared = key.shape[1]
    # Scaled before: no product is out of a type's range, and fewer numbers are multiplied. How many
    # operations there are counts more for a small model than how much each does.
    grouped = query.reshape(rows, shared, heads // shared, size)
    scores = (grouped * (size**-0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        else:
            scores.add_(mask)
    # Computed in float32 inside, whatever the type.
    found = scores.softmax(-1).to(value.dtype) @ value
    return found.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
