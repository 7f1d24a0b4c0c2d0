"""Which transformers models can be decoded on a static cache, and how to call each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from transformers.modeling_outputs import BaseModelOutput

from dispatchkit.errors import ConfigError

from dispatchkit_transformers.decode_attention import DECODE_ATTENTION, additive
from dispatchkit_transformers.layers.kept import KNOWN
from dispatchkit_transformers.layers.masks import FORMS, ByLayerType
from dispatchkit_transformers.layers.positions import one_for_each_row, position_embeddings
from dispatchkit_transformers.slot_cache import SlotCache

# Attention implementations that take a step's own mask, and how to convert the mask for each.
_ATTENTION = ("sdpa", "eager", DECODE_ATTENTION)
#: Models' names of the cache argument: since about 5.20, before that, and Mamba's before.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_ADVICE = "Decode it with the model's own generate()."

# Two sequences of different length show what is wrong for rows at different positions.
TRIALS = (((3, 5, 4, 6), (7, 2, 3)), ((1, 4, 2, 5), (6, 3, 1)), ((2, 7, 5, 1), (4, 6, 2)))
_TRIAL_SOURCE = 6
#: Exceptions of models that are called in a way they do not support.
MISFITS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


def _same(mask: torch.Tensor) -> torch.Tensor:
    return mask


@attrs.frozen
class Source:
    """An encoder's output for the inputs of an encoder-decoder model.

    Attributes:
        states: Its last hidden states (B, T, size).
        mask: True where a source has a position (B, T).
    """

    states: torch.Tensor
    mask: torch.Tensor


@attrs.frozen
class Prompted:
    """A model's results for prompts.

    Attributes:
        layers: The layers of the library's cache.
        cross: The layers of its cross-attention cache; empty for decoder-only models.
        logits: Logits of the next token (B, V), float32.
    """

    layers: Sequence[Any]
    cross: Sequence[Any]
    logits: torch.Tensor


@attrs.frozen
class Probe:
    """The properties of a model that decide how it is called.

    Attributes:
        model: The model.
        layers: The library's layers of a cache that has seen a prompt of one token.
        cross: The layers of its cross-attention cache; empty for decoder-only models.
        dtype: The type of its parameters.
        device: The device of its parameters.
        mask_of: Converts a boolean mask, True where it may attend, to the format of its attention.
        form: The mask format for layers that differ.
        prefix: The prefix of the decoder's argument names.
        cache_name: The argument that takes the cache, one of ``CACHE_NAMES``.
        takes_last: Whether it can return the logits of the last position only.
        takes_positions: Whether it takes the positions of its tokens.
        embeddings: Its position embeddings, if it does not take positions.
        has_one_source_length: Whether it attends to all positions of a source, ignoring its mask.
    """

    model: Any
    dtype: torch.dtype
    device: torch.device
    mask_of: Callable[[torch.Tensor], torch.Tensor]
    prefix: str
    cache_name: str
    takes_last: bool
    takes_positions: bool
    embeddings: Sequence[torch.nn.Module]
    layers: Sequence[Any] = ()
    cross: Sequence[Any] = ()
    form: type[Any] = ByLayerType
    has_one_source_length: bool = False

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the decoder has embeddings for."""
        owner = self.model.get_decoder() if self.prefix else self.model
        size: int = owner.get_input_embeddings().weight.shape[0]
        return size

    def cache(
        self, num_slots: int, length: int, source_length: int = 0, spare: int = 0
    ) -> SlotCache:
        """Return a cache for ``num_slots`` sequences of ``length`` positions each."""
        return SlotCache(
            self.layers,
            num_slots,
            length,
            cross=self.cross,
            source_length=source_length,
            spare=spare,
        )

    def step_arguments(self, cache: Any, num_logits: int = 1) -> dict[str, Any]:
        """Return the arguments that all steps on one cache share.

        Args:
            cache: The step's view of the cache.
            num_logits: Number of last tokens of each row to return logits for.
        """
        last = self._last(num_logits)
        return {self.cache_name: cache, "use_cache": True, "return_dict": True, **last}

    def prompt(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        source: Source | None = None,
    ) -> Prompted:
        """Run prompts with the unmodified model.

        Args:
            input_ids: Prompts (B, T), of the decoder.
            attention_mask: 0 at padding (B, T); None without padding.
            source: The encoder output, for encoder-decoder models.
        """
        given: dict[str, Any] = {f"{self.prefix}input_ids": input_ids}
        if attention_mask is not None:
            given[f"{self.prefix}attention_mask"] = attention_mask
            if self.takes_positions:
                positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
                given[f"{self.prefix}position_ids"] = positions
        if source is not None:
            given["encoder_outputs"] = BaseModelOutput(last_hidden_state=source.states)
            given["attention_mask"] = source.mask.long()
        output = self.model(use_cache=True, return_dict=True, **given, **self._last(1))
        layers, cross = _layers_of(output, self.cache_name)
        return Prompted(layers, cross, output.logits[:, -1].float())

    def step(
        self,
        memory: SlotCache,
        length: int,
        forward: Callable[..., Any],
        num_tokens: int = 1,
        past: int = 0,
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a function that runs tokens of each row and returns logits (B, T, V), float32.

        It takes tokens and positions (B, T). The logits are those of the token after each.

        Args:
            memory: The cache.
            length: Number of positions of it to read.
            forward: The model, or its compiled form.
            num_tokens: Number of tokens of each row, T.
            past: Number of past positions to report to a model that takes positions.
        """
        cache, place = memory.view(length)
        layers = getattr(cache, "self_attention_cache", cache).layers
        for one in layers:
            one.past = past if self.takes_positions else None
        form = self.masks_for(layers)
        ahead = torch.arange(length, device=self.device)
        last = memory.length - 1
        arguments = self.step_arguments(cache, num_tokens)
        # Only its size is used: the keys and values of the source exist already.
        states = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)

        def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            place.enter(positions)
            given = dict(arguments)
            if self.takes_positions:
                # Rows without a sequence are at a position for which models have no embedding.
                given[f"{self.prefix}position_ids"] = positions.clamp(max=last)
            if memory.has_sources:
                mask = memory.source_mask[: place.num_rows]
                given["attention_mask"] = self.mask_of(mask[:, None, None])
                given["encoder_outputs"] = BaseModelOutput(
                    last_hidden_state=states.expand(*mask.shape, 1)
                )
            given[f"{self.prefix}attention_mask"] = form.masks(positions, ahead, self.mask_of)
            given[f"{self.prefix}input_ids"] = tokens
            if self.embeddings:
                with one_for_each_row(self.embeddings, tokens.shape):
                    output = forward(**given)
            else:
                output = forward(**given)
            # State that a step leaves behind would prevent its capture.
            place.leave()
            logits: torch.Tensor = output.logits.float()
            return logits

        return run

    def masks_for(self, layers: Sequence[Any]) -> Any:
        """Return the maker of attention masks for steps on these layers."""
        return self.form(_text(self.model), layers)

    def _last(self, number: int) -> dict[str, Any]:
        return {"logits_to_keep": number} if self.takes_last else {}


def probe(model: Any, max_length: int) -> Probe:
    """Determine how a model is decoded on a static cache.

    A few tokens run both as prompts and as steps, and the results are compared.

    Args:
        model: The model.
        max_length: The most positions it is to be used with.

    Raises:
        ConfigError: It cannot be decoded so, or not with its settings; with the next step.
    """
    name = type(model).__name__
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        raise ConfigError("model", name, "a model of transformers that generates text")
    text = _text(model)
    if model.training:
        raise ConfigError(
            "model", f"{name} in training mode", "in evaluation mode", "model.eval()."
        )
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        raise ConfigError(
            "attn_implementation",
            attention,
            f"{', '.join(_ATTENTION)}: those that take a separate mask for each row",
            "model.set_attn_implementation('sdpa') changes it.",
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise ConfigError("max_length", max_length, f"at most {limit}, the positions of {name}")
    parameters = inspect.signature(model.forward).parameters
    cache_name = next((one for one in CACHE_NAMES if one in parameters), None)
    if cache_name is None:
        raise ConfigError("model", name, f"one that takes {' or '.join(CACHE_NAMES)}", _ADVICE)
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    takes_positions = f"{prefix}position_ids" in parameters
    first = next(model.parameters())
    found = Probe(
        model=model,
        dtype=first.dtype,
        device=first.device,
        # One operation fewer for each layer than with a boolean mask.
        mask_of=_same if attention == "sdpa" else functools.partial(additive, dtype=first.dtype),
        prefix=prefix,
        cache_name=cache_name,
        takes_last="logits_to_keep" in parameters,
        takes_positions=takes_positions,
        embeddings=() if takes_positions else position_embeddings(model),
    )
    with torch.no_grad():
        tokens = torch.ones(1, 1, dtype=torch.int64, device=first.device)
        try:
            seen = found.prompt(tokens, None, _trial_source(found, _TRIAL_SOURCE))
        except torch.OutOfMemoryError:
            raise  # it says nothing about the model
        except MISFITS as error:
            allowed = f"one that returns its cache for a prompt of one token{_because(error)}"
            raise ConfigError("model", name, allowed, _ADVICE) from error
        made = _proven(attrs.evolve(found, layers=seen.layers, cross=seen.cross), max_length)
        if _depends_on_past(made, max_length):
            raise ConfigError(
                "max_length",
                max_length,
                f"smaller: from some length on, the logits of {name} depend on how many tokens its "
                "cache has, as the temperature of attention in Llama 4. That is one number for "
                "all rows, which are at different positions",
                _ADVICE,
            )
        return made


def _proven(found: Probe, length: int) -> Probe:
    """Return the probe with the mask format with which steps give the results of prompts.

    Steps read a cache of the actual length: what a model derives from the length of keys, such as a
    window, is wrong on a static cache.
    """
    wrong: Exception | None = None
    forms = [
        attrs.evolve(found, form=form, has_one_source_length=has_one)
        for form in FORMS
        for has_one in ((False, True) if found.cross else (False,))
        if form is not ByLayerType or hasattr(_text(found.model), "layer_types")
    ]
    for made in forms:
        try:
            if any(_gives_what_prompts_give(made, length, trial) for trial in TRIALS):
                return made
        except torch.OutOfMemoryError:
            raise  # it says nothing about the model
        except MISFITS as error:
            wrong = wrong or error
    raise ConfigError(
        "model",
        type(found.model).__name__,
        "one whose steps on a static cache, with rows at different positions, give the logits "
        f"of the whole sequence{_because(wrong)}",
        _ADVICE,
    )


def _because(error: Exception | None) -> str:
    """Return a model's exception as the end of a sentence, in one line."""
    return f": {type(error).__name__}: {str(error).partition(chr(10))[0]}" if error else ""


def _depends_on_past(found: Probe, length: int) -> bool:
    """Return whether a step's logits depend on the number of positions that its cache reports."""
    if not found.takes_positions:
        return False
    token = torch.ones(1, 1, dtype=torch.int64, device=found.device)
    # With a single position to attend to, scaling scores has no effect.
    position = token.clamp(max=length - 1)
    logits = []
    for past in (0, 0, length - 1):
        memory = found.cache(1, length, _TRIAL_SOURCE if found.cross else 0)
        memory.source_mask.fill_(True)
        logits.append(found.step(memory, length, found.model, past=past)(token, position))
    first, again, last = logits
    # Kernels whose sums differ in every run prove nothing.
    return torch.equal(first, again) and not torch.equal(first, last)


def takes_drafts(found: Probe, length: int) -> bool:
    """Return whether one step of several tokens gives the logits of prompts after each of them.

    Args:
        found: The probe of the model.
        length: Number of positions of the cache.
    """
    try:
        with torch.no_grad():
            # Three rows: if their number equals that of tokens, mixing both up does not show.
            trials = [(*trial, trial[0][1:]) for trial in TRIALS]
            return any(_gives_what_prompts_give(found, length, trial, 2) for trial in trials)
    except torch.OutOfMemoryError:
        raise  # it says nothing about the model
    except MISFITS:
        return False


def _gives_what_prompts_give(
    found: Probe, length: int, trial: tuple[tuple[int, ...], ...], num_tokens: int = 1
) -> bool:
    """Return whether two tokens after two prompts give the logits of the sequences as prompts."""
    rows = trial_prompts(found, trial, length - 1)
    memory = found.cache(
        len(rows), length, _TRIAL_SOURCE if found.cross else 0, spare=num_tokens - 1
    )
    step = found.step(memory, length, found.model, num_tokens)
    starts = [row.shape[1] - 2 for row in rows]
    shorter = 0 if found.has_one_source_length else 1
    sources = [_trial_source(found, _TRIAL_SOURCE - shorter * slot) for slot in range(len(rows))]
    for slot, (row, start, source) in enumerate(zip(rows, starts, sources, strict=True)):
        seen = found.prompt(row[:, :start], None, source)
        memory.fill(slot, seen.layers, [0], start)
        if source is not None:
            memory.fill_sources(slot, seen.cross, source.mask)
    for number in range(0, 2, num_tokens):
        at = [[start + number + one for one in range(num_tokens)] for start in starts]
        tokens = torch.cat([row[:, one] for row, one in zip(rows, at, strict=True)])
        got = step(tokens, torch.tensor(at, device=found.device))
        for logits, row, ends, source in zip(got, rows, at, sources, strict=True):
            for one, end in zip(logits, ends, strict=True):
                want = found.prompt(row[:, : end + 1], None, source).logits[0]
                if not is_near(one, want, found.dtype):
                    return False
    return True


def trial_prompts(
    found: Probe, trial: tuple[tuple[int, ...], ...], most: int
) -> list[torch.Tensor]:
    """Return the tokens (1, T) of each sequence of a trial, with T at most ``most``."""
    return [torch.tensor([one], device=found.device)[:, :most] % found.vocabulary for one in trial]


def is_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits (V,) differ by no more than rounding in a type."""
    allowed = 4 * torch.finfo(dtype).eps ** 0.5
    return bool((got - want).norm() <= allowed * (want - want.mean()).norm())


def _trial_source(found: Probe, length: int) -> Source | None:
    """Return a plausible encoder output; None for decoder-only models."""
    if not found.prefix:
        return None
    size = found.model.get_encoder().config.hidden_size
    maker = torch.Generator().manual_seed(length)
    states = torch.randn(1, length, size, generator=maker).to(found.device, found.dtype)
    return Source(states, torch.ones(1, length, dtype=torch.bool, device=found.device))


def _layers_of(output: Any, cache_name: str) -> tuple[list[Any], list[Any]]:
    """Return the layers of the cache that a model returns, and of its cross-attention cache.

    Raises:
        ConfigError: It has none, or one of an unsupported kind.
    """
    cache = output.get(cache_name)
    cross = getattr(getattr(cache, "cross_attention_cache", None), "layers", [])
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if not layers:
        raise ConfigError(
            "model",
            f"one that returns {type(cache).__name__} as its cache",
            "one whose cache has layers",
            _ADVICE,
        )
    odd = sorted({type(one).__name__ for one in (*layers, *cross)} - set(KNOWN))
    if odd:
        raise ConfigError(
            "model", f"one with layers of {', '.join(odd)}", f"with {', '.join(KNOWN)}", _ADVICE
        )
    return list(layers), list(cross)


def _text(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)
