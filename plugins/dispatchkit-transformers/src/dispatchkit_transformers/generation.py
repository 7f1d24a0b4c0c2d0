"""The decoding loop of ``generate``, with a decoder that runs the steps.

transformers prepares the prompt, the logits processors and the stopping criteria. Processors and
criteria receive all rows in every step, as they do in transformers. Finished rows leave the decoder
once the other rows fit into a smaller graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    MaxLengthCriteria,
)

from dispatchkit.errors import ConfigError, InputError
from dispatchkit.keys import has_members

from dispatchkit_transformers.static_models import CACHE_NAMES

# Arguments that generate() may prepare for the model in addition to the prompt.
_MODEL_INPUTS = frozenset(
    {
        *CACHE_NAMES,
        "attention_mask",
        "cache_position",
        "decoder_attention_mask",
        "logits_to_keep",
        "position_ids",
        "use_cache",
    }
)


_NOT_STEPWISE = (
    "This option needs a different decoding loop. Omit it, or call the model's own generate()."
)
_COUNTS = ("num_beams", "num_beam_groups")
_DRAFTS = "To decode with drafts, call SpeculativeDecoder(decoder, {}).generate()."
_NO_RESULT = "Graphs return only tokens and logits. Call the model's own generate()."

#: Unsupported options, with the alternative to suggest.
_UNSUPPORTED = {
    **dict.fromkeys(
        (
            "assistant_early_exit",
            "constraints",
            "dola_layers",
            "force_words_ids",
            "penalty_alpha",
            "speculation_type",
            "use_mtp",
        ),
        _NOT_STEPWISE,
    ),
    **dict.fromkeys(_COUNTS, "For beam search, call the model's own generate()."),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "return_legacy_cache"), _NO_RESULT
    ),
    "assistant_model": _DRAFTS.format("DraftModel(decoder, GraphDecoder(assistant_model, ...))"),
    "prompt_lookup_num_tokens": _DRAFTS.format("PromptLookup(decoder)"),
    "compile_config": "To compile the step, create GraphDecoder(..., compile=True).",
    "prefill_chunk_size": "For chunked prompts, create GraphDecoder(..., prompt_sizes=...).",
    "stop_strings": "Pass stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)] instead.",
    "streamer": "To stream tokens, call admit() and step() of the decoder.",
    "synced_gpus": "Omit it, or call the model's own generate().",
    "token_healing": "Pass model.heal_tokens(input_ids, tokenizer) as input_ids.",
}
#: Unsupported values of ``cache_implementation`` start with one of these prefixes.
_OTHER_CACHES = ("paged", "quantized", "offloaded")


def check_options(given: Mapping[str, Any]) -> None:
    """Check that all options of ``generate`` are supported.

    Args:
        given: The options of the call and of the generation configuration.

    Raises:
        ConfigError: An option is not supported; the message suggests an alternative.
    """
    for name, hint in _UNSUPPORTED.items():
        value = given.get(name)
        if value is None or value is False or (name in _COUNTS and value == 1):
            continue
        allowed = "1" if name in _COUNTS else "omitted"
        raise ConfigError(name, value, allowed, hint)
    cache = given.get("cache_implementation")
    if cache is not None and str(cache).startswith(_OTHER_CACHES):
        raise ConfigError(
            "cache_implementation", cache, "omitted", "Steps read only the decoder's own cache."
        )


class RowDecoder(Protocol):
    """The methods that ``generate`` requires of a decoder."""

    tokens: torch.Tensor
    """The current token of each live row (rows,), input of the next step; assignable."""

    @property
    def model(self) -> Any:
        """The transformers model that decodes."""
        ...

    @property
    def num_rows(self) -> int:
        """Number of live sequences."""
        ...

    def check_fits(self, rows: int, longest: int) -> None:
        """Raise DescriptorError if ``rows`` more rows of length ``longest`` do not fit."""
        ...

    def admit(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        encoder_outputs: Any = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run prompts (B, T); return the logits of each row's first new token (B, V)."""
        ...

    def step(self) -> torch.Tensor:
        """Decode one token per row; return the most likely tokens (rows,)."""
        ...

    def bucket(self, num_rows: int) -> int:
        """Return the batch size that a step of ``num_rows`` rows is padded to."""
        ...

    def drop(self, rows: Iterable[int]) -> list[int]:
        """Drop rows; return the previous index of each remaining row."""
        ...

    def reset(self) -> None:
        """Drop all rows."""
        ...


class LogitsDecoder(RowDecoder, Protocol):
    """A decoder that can also return a step's logits, for sampling and logits processors."""

    def logits(self) -> torch.Tensor:
        """Return the logits of each row's next token (rows, V)."""
        ...


def call_generate(model: Any, decoder: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the model's own ``generate`` with a decoder as its ``custom_generate``.

    Raises:
        ConfigError: An option is not supported.
        InputError: The prompts are not a tensor of tokens (B, T), or their mask is not a tensor of
            the same shape.
    """
    name = "inputs" if args or kwargs.get("inputs") is not None else "input_ids"
    prompts = args[0] if args else kwargs.get(name)
    if prompts is not None and model.main_input_name == "input_ids":
        check_prompts(prompts, name)
        if (mask := kwargs.get("attention_mask")) is not None:
            check_mask(mask, prompts, name)
    # Check here, because for some options, transformers decodes without calling custom_generate.
    config = kwargs.get("generation_config") or model.generation_config
    options = {**vars(config), **kwargs}
    check_options(options)
    if options.get("cache_implementation") == "static":
        # The decoder already has a static cache. For a second one, transformers would allocate
        # memory and set an attribute of the model. The new attribute would make graphs outdated.
        kwargs["cache_implementation"] = "dynamic"
    return model.generate(*args, custom_generate=decoder, **kwargs)


def is_greedy(config: Any, processors: Any) -> bool:
    """Return whether a call needs only the most likely tokens, without scores or logits."""
    wants = config.return_dict_in_generate
    return (
        not config.do_sample
        and not len(processors)
        and not (wants and (config.output_scores or config.output_logits))
    )


def generate(
    decoder: RowDecoder,
    model: Any,
    input_ids: torch.Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **prepared: Any,
) -> Any:
    """Decode until the stopping criteria are met, like ``generate`` of transformers.

    Args:
        decoder: The decoder with the graphs and the cache.
        model: The decoder's model.
        input_ids: Prompts (B, T), padded on the left.
        logits_processor: Processor that changes scores (B, V) before tokens are chosen.
        stopping_criteria: Criteria that determine which rows are finished.
        generation_config: The options of the call.
        prepared: The arguments that transformers prepared for the model.

    Returns:
        Prompts and new tokens (B, T + N), or a transformers output object that contains them.

    Raises:
        ConfigError: An option or argument is not supported.
        DescriptorError: The batch exceeds ``max_batch_size``, or a sequence exceeds ``max_length``.
        InputError: The prompts, their mask or the encoder output are invalid.
    """
    source = _source(model, prepared)
    _check(decoder, model, generation_config, prepared)
    end = next((one.max_length for one in stopping_criteria if _is_max_length(one)), None)
    mask = prepared.get("decoder_attention_mask" if source else "attention_mask")
    if end is not None:
        # The last token is never an input, so it is not stored. Neither is padding.
        needed = end - 1 - (_shortest_padding(mask) if mask is not None else 0)
        decoder.check_fits(input_ids.shape[0], needed)
    try:
        return _Loop(
            decoder,
            input_ids,
            mask,
            source,
            logits_processor,
            stopping_criteria,
            generation_config,
        ).run()
    finally:
        decoder.reset()


def _source(model: Any, prepared: dict[str, Any]) -> dict[str, Any]:
    """Remove the encoder output from ``prepared`` and return it; {} for decoder-only models."""
    if not model.config.is_encoder_decoder:
        return {}
    return {
        "encoder_outputs": prepared.pop("encoder_outputs"),
        "encoder_attention_mask": _of_states(prepared.pop("attention_mask", None)),
    }


def _of_states(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.dim() == 2 else None


def _check(decoder: RowDecoder, model: Any, config: Any, prepared: dict[str, Any]) -> None:
    if model is not decoder.model:
        raise ConfigError(
            "custom_generate",
            decoder,
            "a decoder of the model whose generate() is called",
            f"Create a decoder for the {type(model).__name__} on which generate() was called, or "
            "call generate() of the given decoder.",
            message="custom_generate must be a decoder of the model whose generate() is called, "
            f"got a decoder of another model ({type(decoder.model).__name__}).",
        )
    if decoder.num_rows:
        raise ConfigError(
            "decoder.num_rows",
            decoder.num_rows,
            "0 when generate() is called",
            "To drop all rows, call reset() of this GraphDecoder or SpeculativeDecoder.",
        )
    check_options({**vars(config), **prepared})
    for name in CACHE_NAMES:
        given = prepared.get(name)
        if given is not None and _has_seen(given):
            raise ConfigError(
                name,
                given,
                "omitted or empty",
                "Omit the cache, and pass whole prompts instead of only their last tokens.",
                message="A cache passed to generate() must be empty, got a "
                f"{type(given).__name__} that already contains tokens.",
            )
    odd = sorted(
        name
        for name, value in prepared.items()
        if name not in _MODEL_INPUTS and isinstance(value, torch.Tensor)
    )
    if odd:
        raise ConfigError(
            "inputs",
            odd,
            f"among {', '.join(sorted(_MODEL_INPUTS))}",
            f"Omit {', '.join(odd)}, or call the model's own generate().",
            message=f"The decoder supports only the model inputs "
            f"{', '.join(sorted(_MODEL_INPUTS))}, not {', '.join(odd)}.",
        )


def _has_seen(cache: Any) -> bool:
    """Return whether a transformers cache contains part of a sequence."""
    return any(
        any(one.has_previous_state.values())
        if hasattr(one, "has_previous_state")
        else int(one.get_seq_length())
        for one in getattr(cache, "self_attention_cache", cache).layers
        if hasattr(one, "get_seq_length") or hasattr(one, "has_previous_state")
    )


def _is_max_length(criterion: Any) -> bool:
    return isinstance(criterion, MaxLengthCriteria)


def _shortest_padding(mask: torch.Tensor) -> int:
    return int((mask.shape[1] - mask.sum(-1)).min())


def _logits_of(decoder: RowDecoder, config: Any, processors: Any) -> Callable[[], torch.Tensor]:
    """Return the decoder's ``logits`` method.

    Raises:
        ConfigError: The decoder does not return logits.
    """
    if not has_members(decoder, LogitsDecoder):
        needs = ["sampling"] if config.do_sample else []
        needs += [type(one).__name__ for one in processors]
        asked = ", ".join(needs) or "scores or logits"
        raise ConfigError(
            "generate",
            asked,
            "called for greedy decoding without scores, logits or logits processors",
            "Pass do_sample=False and omit output_scores, output_logits and options that need a "
            "logits processor, such as repetition_penalty; or call generate() of a GraphDecoder.",
            message=f"This decoder supports only greedy decoding, but the call needs {asked}.",
        )
    return decoder.logits


class _Loop:
    """The decoding loop of one call of ``generate``."""

    def __init__(
        self,
        decoder: RowDecoder,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        source: dict[str, Any],
        processors: Any,
        criteria: Any,
        config: Any,
    ) -> None:
        self.decoder, self.mask, self.source = decoder, mask, source
        self.processors, self.criteria, self.config = processors, criteria, config
        self.ids = input_ids
        self.pad = config._pad_token_tensor
        self.may_end_early = not all(_is_max_length(one) for one in criteria)
        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)
        wants = config.return_dict_in_generate
        self.scores: list[torch.Tensor] | None = [] if wants and config.output_scores else None
        self.raw: list[torch.Tensor] | None = [] if wants and config.output_logits else None
        # A greedy step chooses the tokens itself and returns no logits.
        self._next_logits = (
            None if is_greedy(config, processors) else _logits_of(decoder, config, processors)
        )
        rows = input_ids.shape[0]
        self.unfinished = torch.ones(rows, dtype=torch.int64, device=input_ids.device)
        # The output row of each live row, as a list and as a tensor (None while all rows are live).
        self.live = list(range(rows))
        self.index: torch.Tensor | None = None
        self.full: torch.Tensor | None = None

    def run(self) -> Any:
        """Decode until all rows are finished."""
        decoder = self.decoder
        logits = decoder.admit(self.ids, self.mask, **self.source)
        tokens = decoder.tokens if self._next_logits is None else self._choose(logits)
        while not self._take(tokens):
            if self._next_logits is None:
                tokens = self._widen(decoder.step())
            else:
                tokens = self._choose(self._widen(self._next_logits()))
        if not self.config.return_dict_in_generate:
            return self.ids
        kind = GenerateEncoderDecoderOutput if self.source else GenerateDecoderOnlyOutput
        return kind(
            sequences=self.ids,
            scores=None if self.scores is None else tuple(self.scores),
            logits=None if self.raw is None else tuple(self.raw),
        )

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose a token for each output row (B,) from its logits (B, V)."""
        # Processors may write to the logits, whose memory belongs to a graph.
        logits = logits.clone()
        scores: torch.Tensor = self.processors(self.ids, logits)
        if self.scores is not None:
            self.scores.append(scores)
        if self.raw is not None:
            self.raw.append(logits)
        if self.config.do_sample:
            chances = torch.nn.functional.softmax(scores, dim=-1)
            return torch.multinomial(chances, num_samples=1).squeeze(1)
        return scores.argmax(-1)

    def _take(self, tokens: torch.Tensor) -> bool:
        """Append a token to each output row, and pass the tokens of live rows to the decoder.

        Returns:
            Whether all rows are finished.
        """
        if self.pads:
            tokens = torch.where(self.unfinished.bool(), tokens, self.pad.to(tokens.device))
        self.ids = torch.cat((self.ids, tokens.unsqueeze(1)), dim=-1)
        flags: list[int] = []
        if self.may_end_early:
            done = self.criteria(self.ids, None if self.scores is None else tuple(self.scores))
            self.unfinished = self.unfinished & ~done
            flags = self.unfinished.tolist()
            if not any(flags):
                return True
        elif self.ids.shape[1] >= min(one.max_length for one in self.criteria):
            return True
        self.decoder.tokens = tokens if self.index is None else tokens.index_select(0, self.index)
        if flags:
            self._compact(flags)
        return False

    def _compact(self, flags: list[int]) -> None:
        """Drop finished rows if the other rows fit into a smaller graph."""
        finished = [row for row, place in enumerate(self.live) if not flags[place]]
        if not finished:
            return
        left = len(self.live) - len(finished)
        if self.decoder.bucket(left) >= self.decoder.bucket(len(self.live)):
            return
        order = self.decoder.drop(finished)
        self.live = [self.live[row] for row in order]
        self.index = torch.tensor(self.live, dtype=torch.int64, device=self.ids.device)

    def _widen(self, values: torch.Tensor) -> torch.Tensor:
        """Arrange the values of live rows in output order; dropped rows get an old value or 0."""
        if self.index is None:
            return values
        if self.full is None or self.full.dtype is not values.dtype:
            shape = (self.ids.shape[0], *values.shape[1:])
            self.full = torch.zeros(shape, dtype=values.dtype, device=values.device)
        self.full.index_copy_(0, self.index, values)
        return self.full


def check_prompts(input_ids: Any, name: str = "input_ids") -> None:
    """Check that prompts are a tensor of tokens (B, T).

    Args:
        input_ids: The prompts.
        name: Name of the argument, for messages.

    Raises:
        InputError: The prompts have the wrong type, dtype or shape.
    """
    if not isinstance(input_ids, torch.Tensor):
        hint = "For a list of tokens, pass torch.tensor([tokens])."
        if hasattr(input_ids, "keys"):
            hint = "Call inputs = tokenizer(..., return_tensors='pt') and pass **inputs."
        got = type(input_ids).__name__
    elif input_ids.dtype not in (torch.int32, torch.int64):
        got, hint = str(input_ids.dtype), f"If the values are tokens, pass {name}.long()."
    else:
        got = hint = ""
    if got:
        raise InputError(
            name, f"{name} must be an int64 or int32 tensor of tokens (B, T), got {got}. {hint}"
        )
    if input_ids.dim() != 2 or not input_ids.shape[1]:
        hint = f"For a single prompt, pass {name}[None]." if input_ids.dim() == 1 else ""
        shape = tuple(input_ids.shape)
        text = f"{name} must have shape (B, T) with T at least 1, got {shape}. {hint}"
        raise InputError(name, text.strip())


def check_mask(attention_mask: Any, input_ids: torch.Tensor, name: str = "input_ids") -> None:
    """Check that an attention mask is a tensor with the shape of its prompts.

    Args:
        attention_mask: The mask.
        input_ids: The prompts (B, T).
        name: Name of the argument with the prompts, for messages.

    Raises:
        InputError: The mask has a different shape, or is not a tensor.
    """
    is_tensor = isinstance(attention_mask, torch.Tensor)
    if not is_tensor or attention_mask.shape != input_ids.shape:
        got = tuple(attention_mask.shape) if is_tensor else type(attention_mask).__name__
        raise InputError(
            "attention_mask",
            f"attention_mask must be a tensor with the shape of {name}, {tuple(input_ids.shape)}, "
            f"got {got}.",
        )


def left_paddings(input_ids: Any, attention_mask: torch.Tensor | None) -> list[int]:
    """Return the number of padding tokens before each prompt. With a mask, waits for the device.

    Raises:
        InputError: The tokens or the mask are invalid, or padding is not on the left.
    """
    check_prompts(input_ids)
    rows, width = input_ids.shape
    if attention_mask is None:
        return [0] * rows
    check_mask(attention_mask, input_ids)
    counts = attention_mask.sum(-1)
    # If padding is only on the left, all ones of a mask row are at its end.
    ahead = torch.arange(width, device=attention_mask.device) >= (width - counts).unsqueeze(1)
    is_wrong = (attention_mask.bool() != ahead).any(-1) | (counts <= 0)
    if bool(is_wrong.any()):
        row = int(is_wrong.nonzero()[0])
        hint = "Tokenize with padding_side='left'."
        got = "is not"
        if not bool(attention_mask[row].any()):
            got, hint = "is all zeros", "Omit empty prompts."
        raise InputError(
            "attention_mask",
            "Each row of attention_mask must be zeros followed by one or more ones, but row "
            f"{row} {got}. {hint}",
        )
    return [width - int(count) for count in counts.tolist()]


def check_tokens(input_ids: torch.Tensor, vocabulary: int) -> None:
    """Check that all tokens are in the vocabulary; waits for the device.

    On a CUDA device, an invalid token would trigger an assertion, after which the process cannot
    use the device.

    Raises:
        InputError: A token is less than 0 or greater than ``vocabulary`` - 1.
    """
    if not input_ids.numel():
        return
    least, most = torch.stack(torch.aminmax(input_ids)).tolist()
    if least < 0 or most >= vocabulary:
        raise InputError(
            "input_ids",
            f"input_ids must be tokens from 0 to {vocabulary - 1} (the model's vocabulary), got "
            f"{least if least < 0 else most}. Check that the tokenizer belongs to the model.",
        )
