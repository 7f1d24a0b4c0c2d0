"""Determine whether and how a transformers model can decode with a static cache."""

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
from dispatchkit_transformers.layers.layer_tensors import SUPPORTED_LAYERS
from dispatchkit_transformers.layers.masks import MASK_FORMATS, MaskByLayerType
from dispatchkit_transformers.layers.positions import embeddings_per_row, position_embeddings
from dispatchkit_transformers.slot_cache import SlotCache

# Attention implementations that accept a separate mask for each row.
_ATTENTION = ("sdpa", "eager", DECODE_ATTENTION)
#: Names of the cache argument: in transformers from about 5.20 on, in earlier releases, and in the
#: Mamba models of earlier releases.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_ADVICE = "Call the model's own generate()."

# The sequences of a trial have different lengths, to reveal errors for rows at different positions.
TRIALS = (((3, 5, 4, 6), (7, 2, 3)), ((1, 4, 2, 5), (6, 3, 1)), ((2, 7, 5, 1), (4, 6, 2)))
_TRIAL_SOURCE = 6
#: Exceptions that models raise if they are called in an unsupported way.
CALL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


def _same(mask: torch.Tensor) -> torch.Tensor:
    return mask


@attrs.frozen
class Source:
    """The encoder output that an encoder-decoder model attends to.

    Attributes:
        states: Last hidden states of the encoder (B, T, size).
        mask: True where a source has a position (B, T).
    """

    states: torch.Tensor
    mask: torch.Tensor


@attrs.frozen
class PromptOutput:
    """The output of a model for prompts.

    Attributes:
        layers: Layers of the returned cache.
        cross: Layers of the returned cross-attention cache; empty for decoder-only models.
        logits: Logits of the next token (B, V), float32.
    """

    layers: Sequence[Any]
    cross: Sequence[Any]
    logits: torch.Tensor


@attrs.frozen
class Probe:
    """A description of how a model must be called.

    Attributes:
        model: The described transformers model.
        layers: Layers of the model's cache after a prompt of one token.
        cross: Layers of the model's cross-attention cache; empty for decoder-only models.
        dtype: The dtype of the parameters.
        device: The device of the parameters.
        convert_mask: Function that converts a boolean mask, True where a token may attend, to the
            format of the attention implementation.
        mask_format: The mask format that the model expects, one of ``MASK_FORMATS``.
        prefix: Prefix of the decoder's argument names: ``decoder_`` or empty.
        cache_name: Name of the cache argument, one of ``CACHE_NAMES``.
        takes_logits_to_keep: Whether the model can return the logits of the last positions only.
        takes_positions: Whether the model accepts the positions of its tokens.
        embeddings: Position embeddings of a model that does not accept positions.
        has_one_source_length: Whether the model ignores the source mask and attends to all
            positions of a source.
    """

    model: Any
    dtype: torch.dtype
    device: torch.device
    convert_mask: Callable[[torch.Tensor], torch.Tensor]
    prefix: str
    cache_name: str
    takes_logits_to_keep: bool
    takes_positions: bool
    embeddings: Sequence[torch.nn.Module]
    layers: Sequence[Any] = ()
    cross: Sequence[Any] = ()
    mask_format: type[Any] = MaskByLayerType
    has_one_source_length: bool = False

    @property
    def vocabulary(self) -> int:
        """Number of rows in the decoder's token embedding."""
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
        """Return the arguments shared by all steps on a cache.

        Args:
            cache: The step's view of the cache.
            num_logits: Number of last tokens per row to return logits for.
        """
        last = self._last(num_logits)
        return {self.cache_name: cache, "use_cache": True, "return_dict": True, **last}

    def prompt(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        source: Source | None = None,
    ) -> PromptOutput:
        """Run prompts with the unmodified model.

        Args:
            input_ids: Prompts of the decoder (B, T).
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
        layers, cross = _layers_of(output, self.cache_name, type(self.model).__name__)
        return PromptOutput(layers, cross, output.logits[:, -1].float())

    def step(
        self,
        memory: SlotCache,
        length: int,
        forward: Callable[..., Any],
        num_tokens: int = 1,
        past: int = 0,
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a function that runs T tokens per row and returns logits (B, T, V), float32.

        The function takes tokens and positions (B, T). The logits of each token predict the next
        token.

        Args:
            memory: Cache that the function reads and writes.
            length: Number of cache positions to read.
            forward: The model, or a compiled version of it.
            num_tokens: Number of tokens per row, T.
            past: Number of past positions to report to a model that accepts positions.
        """
        cache, step_rows = memory.view(length)
        layers = getattr(cache, "self_attention_cache", cache).layers
        for one in layers:
            one.past = past if self.takes_positions else None
        masks = self.masks_for(layers)
        ahead = torch.arange(length, device=self.device)
        last = memory.length - 1
        arguments = self.step_arguments(cache, num_tokens)
        # Models use only the shape of the encoder output: its keys and values are already in the
        # cache.
        states = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)

        def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            step_rows.begin(positions)
            given = dict(arguments)
            if self.takes_positions:
                # Rows without a sequence have a position that some models have no embedding for.
                given[f"{self.prefix}position_ids"] = positions.clamp(max=last)
            if memory.has_sources:
                mask = memory.source_mask[: step_rows.num_rows]
                given["attention_mask"] = self.convert_mask(mask[:, None, None])
                given["encoder_outputs"] = BaseModelOutput(
                    last_hidden_state=states.expand(*mask.shape, 1)
                )
            given[f"{self.prefix}attention_mask"] = masks.masks(positions, ahead, self.convert_mask)
            given[f"{self.prefix}input_ids"] = tokens
            if self.embeddings:
                with embeddings_per_row(self.embeddings, tokens.shape):
                    output = forward(**given)
            else:
                output = forward(**given)
            # A step that keeps tensors cannot be captured.
            step_rows.end()
            logits: torch.Tensor = output.logits.float()
            return logits

        return run

    def masks_for(self, layers: Sequence[Any]) -> Any:
        """Return the object that makes attention masks for steps on these layers."""
        return self.mask_format(_text(self.model), layers)

    def _last(self, number: int) -> dict[str, Any]:
        return {"logits_to_keep": number} if self.takes_logits_to_keep else {}


def probe(model: Any, max_length: int) -> Probe:
    """Determine how a model can decode with a static cache.

    A few tokens run both as prompts and as steps, and the results are compared.

    Args:
        model: The transformers model.
        max_length: Maximum number of positions of a sequence.

    Raises:
        ConfigError: The model cannot decode with a static cache, its settings do not allow it, or
            ``max_length`` is too large.
    """
    name = type(model).__name__
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        raise ConfigError(
            "model",
            name,
            "a transformers model that can generate text",
            "Load one with AutoModelForCausalLM.from_pretrained(), for example.",
        )
    text = _text(model)
    if model.training:
        raise in_training_mode()
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        raise ConfigError(
            "attn_implementation",
            attention,
            f"one of {', '.join(_ATTENTION)}",
            "Other implementations do not accept a separate mask for each row. Call "
            "model.set_attn_implementation('sdpa').",
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise ConfigError(
            "max_length", max_length, f"at most {limit} (the max_position_embeddings of {name})"
        )
    parameters = inspect.signature(model.forward).parameters
    cache_name = next((one for one in CACHE_NAMES if one in parameters), None)
    if cache_name is None:
        raise ConfigError(
            "model",
            name,
            f"a transformers model whose forward() accepts {', '.join(CACHE_NAMES[:-1])} or "
            f"{CACHE_NAMES[-1]}",
            _ADVICE,
        )
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    takes_positions = f"{prefix}position_ids" in parameters
    first = next(model.parameters())
    found = Probe(
        model=model,
        dtype=first.dtype,
        device=first.device,
        # With DECODE_ATTENTION, additive masks save one operation per layer, compared to boolean
        # masks. The eager implementation supports only additive masks.
        convert_mask=_same
        if attention == "sdpa"
        else functools.partial(additive, dtype=first.dtype),
        prefix=prefix,
        cache_name=cache_name,
        takes_logits_to_keep="logits_to_keep" in parameters,
        takes_positions=takes_positions,
        embeddings=() if takes_positions else position_embeddings(model),
    )
    with torch.no_grad():
        tokens = torch.ones(1, 1, dtype=torch.int64, device=first.device)
        try:
            seen = found.prompt(tokens, None, _trial_source(found, _TRIAL_SOURCE))
        except (torch.OutOfMemoryError, ConfigError):
            raise  # not caused by the model, or already explained
        except CALL_ERRORS as error:
            allowed = "a model that returns its cache for a prompt of one token"
            raise ConfigError("model", name, allowed, f"{_cause(error)}{_ADVICE}") from error
        made = _with_mask_format(
            attrs.evolve(found, layers=seen.layers, cross=seen.cross), max_length
        )
        if _depends_on_past(made, max_length):
            raise ConfigError(
                "max_length",
                max_length,
                f"smaller for {name}",
                "From some length on, the model's logits depend on the number of cached tokens. "
                "This number differs between the rows of a batch. One cause is an attention "
                "temperature, as in Llama 4. Pass a smaller max_length, or call the model's own "
                "generate().",
            )
        return made


def _with_mask_format(found: Probe, length: int) -> Probe:
    """Return the probe with the mask format for which steps match prompts.

    The steps read a cache of ``length`` positions, as in decoding. This detects models that
    derive a property, such as a window, from the number of keys: a static cache always has
    ``length`` keys.
    """
    wrong: Exception | None = None
    candidates = [
        attrs.evolve(found, mask_format=mask_format, has_one_source_length=has_one)
        for mask_format in MASK_FORMATS
        for has_one in ((False, True) if found.cross else (False,))
        if mask_format is not MaskByLayerType or hasattr(_text(found.model), "layer_types")
    ]
    for made in candidates:
        try:
            if any(_matches_prompts(made, length, trial) for trial in TRIALS):
                return made
        except torch.OutOfMemoryError:
            raise  # not caused by the model
        except CALL_ERRORS as error:
            wrong = wrong or error
    raise ConfigError(
        "model",
        type(found.model).__name__,
        "a model whose steps on a static cache, with rows at different positions, return the same "
        "logits as whole sequences",
        f"{_cause(wrong)}{_ADVICE}",
    )


def _cause(error: Exception | None) -> str:
    """Return a sentence about a model's exception, followed by a space; empty for None."""
    if error is None:
        return ""
    return f"It raised {type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}. "


def in_training_mode() -> ConfigError:
    """Return the error for a model in training mode."""
    return ConfigError(
        "model",
        "training mode",
        "in evaluation mode",
        "Call model.eval().",
        message="The model must be in evaluation mode, but is in training mode.",
    )


def _depends_on_past(found: Probe, length: int) -> bool:
    """Return whether a step's logits depend on the reported number of past positions."""
    if not found.takes_positions:
        return False
    token = torch.ones(1, 1, dtype=torch.int64, device=found.device)
    # Use position 1: at position 0, a token attends only to itself, so scaling has no effect.
    position = token.clamp(max=length - 1)
    logits = []
    for past in (0, 0, length - 1):
        memory = found.cache(1, length, _TRIAL_SOURCE if found.cross else 0)
        memory.source_mask.fill_(True)
        logits.append(found.step(memory, length, found.model, past=past)(token, position))
    first, again, last = logits
    # With nondeterministic kernels, different logits prove nothing.
    return torch.equal(first, again) and not torch.equal(first, last)


def supports_drafts(found: Probe, length: int) -> bool:
    """Return whether a step of several tokens returns the same logits as prompts.

    Args:
        found: Description of how the model must be called.
        length: Number of positions of the cache.
    """
    try:
        with torch.no_grad():
            # Three rows of two tokens each: if both numbers were equal, a model that swaps rows and
            # tokens would pass.
            trials = [(*trial, trial[0][1:]) for trial in TRIALS]
            return any(_matches_prompts(found, length, trial, 2) for trial in trials)
    except torch.OutOfMemoryError:
        raise  # not caused by the model
    except CALL_ERRORS:
        return False


def _matches_prompts(
    found: Probe, length: int, trial: tuple[tuple[int, ...], ...], num_tokens: int = 1
) -> bool:
    """Return whether running the last two tokens in steps gives the logits of whole prompts."""
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
                if not is_close(one, want, found.dtype):
                    return False
    return True


def trial_prompts(
    found: Probe, trial: tuple[tuple[int, ...], ...], most: int
) -> list[torch.Tensor]:
    """Return the tokens (1, T) of each sequence in a trial, T at most ``most``."""
    return [torch.tensor([one], device=found.device)[:, :most] % found.vocabulary for one in trial]


def is_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether logits (V,) differ only by rounding in ``dtype``."""
    allowed = 4 * torch.finfo(dtype).eps ** 0.5
    return bool((got - want).norm() <= allowed * (want - want.mean()).norm())


def _trial_source(found: Probe, length: int) -> Source | None:
    """Return a random encoder output; None for decoder-only models."""
    if not found.prefix:
        return None
    size = found.model.get_encoder().config.hidden_size
    maker = torch.Generator().manual_seed(length)
    states = torch.randn(1, length, size, generator=maker).to(found.device, found.dtype)
    return Source(states, torch.ones(1, length, dtype=torch.bool, device=found.device))


def _layers_of(output: Any, cache_name: str, model: str) -> tuple[list[Any], list[Any]]:
    """Return the layers of the cache in ``output``, and of its cross-attention cache.

    Raises:
        ConfigError: The output has no cache, or a layer is unsupported.
    """
    cache = output.get(cache_name)
    cross = getattr(getattr(cache, "cross_attention_cache", None), "layers", [])
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if not layers:
        raise ConfigError(
            "model",
            model,
            "a model that returns a cache with layers",
            _ADVICE,
            message=f"The model must return a cache with layers, but {model} returned {cache_name} "
            f"of type {type(cache).__name__}, which has no layers.",
        )
    odd = sorted({type(one).__name__ for one in (*layers, *cross)} - set(SUPPORTED_LAYERS))
    if odd:
        raise ConfigError(
            "model",
            model,
            f"a model whose cache has only layers of {', '.join(SUPPORTED_LAYERS)}",
            _ADVICE,
            message=f"The cache of {model} contains unsupported types of layers: {', '.join(odd)}. "
            f"Supported types: {', '.join(SUPPORTED_LAYERS)}.",
        )
    return list(layers), list(cross)


def _text(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)
