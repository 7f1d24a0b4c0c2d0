"""Which models of transformers can be decoded on a static cache, and how each is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.errors import ConfigError

from dispatchkit_transformers.decode_attention import DECODE_ATTENTION, additive
from dispatchkit_transformers.slot_cache import states_of

# Kinds of attention that take a mask of a step's own, and what it is made of.
_ATTENTION = ("sdpa", "eager", DECODE_ATTENTION)
_ADVICE = "Decode it with the model's own generate()."


def _same(mask: torch.Tensor) -> torch.Tensor:
    return mask


@attrs.frozen
class Probe:
    """What was found out about a model.

    Attributes:
        model: The model.
        states: Keys and values of one position for each layer.
        dtype: The type of its parameters.
        device: Where they are.
        mask_of: Makes the mask its attention takes of one that is True where it may look.
        cache_name: The argument that takes the cache, which changed its name.
        takes_last: It can be asked for the logits of the last position alone.
    """

    model: Any
    states: Sequence[tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype
    device: torch.device
    mask_of: Callable[[torch.Tensor], torch.Tensor]
    cache_name: str
    takes_last: bool

    def step_arguments(self, cache: Any) -> dict[str, Any]:
        """Return the arguments that every step of one cache has."""
        return {self.cache_name: cache, "use_cache": True, "return_dict": True, **self._last()}

    def prompt(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Run prompts by the model as it is.

        Args:
            input_ids: Prompts (B, T).
            attention_mask: 0 where padding is (B, T); None where there is none.

        Returns:
            Each layer's keys and values (B, heads, T, head size), and the logits of the next
            token (B, V), float32.
        """
        positions = None
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **self._last(),
        )
        return list(states_of(output[self.cache_name])), output.logits[:, -1].float()

    def _last(self) -> dict[str, Any]:
        return {"logits_to_keep": 1} if self.takes_last else {}


def probe(model: Any, max_length: int) -> Probe:
    """Find out how a model is decoded on a static cache.

    Args:
        model: The model.
        max_length: Positions that it is to be used at.

    Raises:
        ConfigError: It cannot be, or not as it is set; with the next step.
    """
    name = type(model).__name__
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        raise ConfigError("model", name, "a model of transformers that generates text")
    text = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ConfigError("model", name, "a decoder-only model", _ADVICE)
    if model.training:
        raise ConfigError(
            "model", f"{name} in training mode", "in evaluation mode", "model.eval()."
        )
    # The library's own statement that a class works on static caches.
    if not getattr(model, "_can_compile_fullgraph", False):
        raise ConfigError(
            "model", name, "one that transformers can run on a static cache, which it denies for "
            "this class", _ADVICE,
        )  # fmt: skip
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    if kinds or getattr(text, "attention_chunk_size", None):
        raise ConfigError(
            "model",
            f"{name} with layers of {', '.join(kinds) or 'chunked_attention'}",
            "one whose layers all are full_attention",
            f"Other layers keep something else than one position for each token. {_ADVICE}",
        )
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        raise ConfigError(
            "attn_implementation",
            attention,
            f"{', '.join(_ATTENTION)}: those that take a mask of its own for each row",
            "model.set_attn_implementation('sdpa') changes it.",
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise ConfigError("max_length", max_length, f"at most {limit}, the positions of {name}")
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    first = next(model.parameters())
    found = Probe(
        model=model,
        states=(),
        dtype=first.dtype,
        device=first.device,
        # One operation less for each layer than with a mask of true and false.
        mask_of=_same if attention == "sdpa" else functools.partial(additive, dtype=first.dtype),
        cache_name=cache_name,
        takes_last="logits_to_keep" in parameters,
    )
    with torch.no_grad():
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=first.device)
        states, _ = found.prompt(tokens, None)
    kept: list[Any] = [one for pair in states for one in pair]
    if not all(isinstance(one, torch.Tensor) and one.dim() == 4 for one in kept):
        raise ConfigError(
            "model", name, "one that keeps keys and values of shape (B, heads, T, size)", _ADVICE
        )
    return attrs.evolve(found, states=states)
