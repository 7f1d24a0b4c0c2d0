"""Attention of one new token for each sequence over a static cache, read once and as it lies.

The library's ``sdpa`` hands kernels a mask of each row's own, for which the fast ones are not made,
and some of its releases first repeat keys and values for the heads that share them. A single query
is two small matrix products for each head of the cache, so that is what runs here: nothing is
repeated or copied, and the scores in between are as many as the positions.

On CUDA devices torch has something better for types of 16 bits: its flash attention for sequences
of different lengths, which reads of each row what is in use and no more. A step of
``GraphDecoder`` tells how much that is (``Reads``); the rows of its cache lie in one memory, at
equal distances, which is all that the kernel asks for.

``model.set_attn_implementation(DECODE_ATTENTION)`` chooses it, by the library's own register of
attention functions. Prompts, and whatever else it is not for, are the library's ``sdpa``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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

#: The argument that models hand on to their attention, by which a step tells what it reads.
READS = "decode_reads"
_HALVES = (torch.float16, torch.bfloat16)
# One group of threads reads a row of one head of the cache, so many positions at a time; from here
# on many short products of matrices are faster than few long rows.
_LONGEST_ALONE = 128


class Reads(NamedTuple):
    """What a step reads of a ``SlotCache``, for kernels that take no mask.

    Attributes:
        mask: The mask that says the same.
        used: Positions of each row, from the first on (B,), int32.
        queries: Where each row's query begins, and where the last one ends (B + 1,), int32.
        starts: Where each row begins in the cache, in positions (B + 1,), int32.
        apart: Positions from one row to the next.
    """

    mask: torch.Tensor
    used: torch.Tensor
    queries: torch.Tensor
    starts: torch.Tensor
    apart: int


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
    reads: Reads | None = kwargs.get(READS)
    scale = size**-0.5 if scaling is None else scaling
    if reads is not None and _is_for_kernel(reads, query, key, value, attention_mask):
        one = attend_used(query, key, value, reads.used, reads.queries, reads.starts, scale)
        return one.unsqueeze(1), None
    # Scaled before: no product is out of a type's range, and fewer numbers are multiplied. How many
    # operations there are counts more for a small model than how much each does.
    grouped = query.reshape(rows, shared, heads // shared, size)
    scores = (grouped * scale) @ key.transpose(2, 3)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        else:
            scores.add_(mask)
    # Computed in float32 inside, whatever the type.
    found = scores.softmax(-1).to(value.dtype) @ value
    return found.reshape(rows, 1, heads, value.shape[-1]), None


def has_kernel(states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return whether torch has its kernel for such keys and values of each layer.

    Source: torch.backends.cuda.is_flash_attention_available, and what
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp checks.
    """
    return torch.version.hip is None and all(
        keys.is_cuda
        and keys.dtype == values.dtype
        and keys.dtype in _HALVES
        and keys.shape == values.shape
        and keys.shape[-1] % 8 == 0
        and keys.shape[-1] <= 256
        and torch.cuda.get_device_capability(keys.device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
        for keys, values in states
    )


def _is_for_kernel(
    reads: Reads,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> bool:
    """Return whether a layer reads just the cache, by the mask of the step, and is soon done."""
    rows, shared, length, size = key.shape
    return (
        mask is reads.mask
        and query.dtype == key.dtype
        and key.stride() == value.stride() == (reads.apart * size, key.stride(1), size, 1)
        and length <= _LONGEST_ALONE * rows * shared
    )


@torch.library.custom_op("dispatchkit::attend_used", mutates_args=(), device_types="cuda")
def attend_used(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    used: torch.Tensor,
    queries: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return what single tokens attend to (B, heads, size), of the positions in use alone.

    Shapes: query (B, heads, 1, size), key and value (B, key heads, positions, size) with sizes as
    strides of positions; the others as in ``Reads``. It is an operation of its own, since a view
    of all rows as one would be copied by compiled code.
    """
    rows, heads, _, size = query.shape
    # Nothing public takes lengths in use before torch 2.13.
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query.reshape(rows, heads, size),
        _as_one(key),
        _as_one(value),
        queries,
        starts,
        1,
        key.shape[2],
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=used,
    )[0]
    return found


@attend_used.register_fake
def _(query: torch.Tensor, *others: Any) -> torch.Tensor:
    rows, heads, _, size = query.shape
    return query.new_empty(rows, heads, size)


def _as_one(states: torch.Tensor) -> torch.Tensor:
    """Return all rows as one sequence (positions, key heads, size); what lies between is in it."""
    rows, shared, length, size = states.shape
    row, head, position, one = states.stride()
    total = (rows - 1) * (row // position) + length
    return states.as_strided((total, shared, size), (position, head, one))


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
