"""Run prompts through graphs, in chunks of several rows.

A chunk is a step with T tokens for each of B prompts. It writes keys and values to the prompts'
slots and attends to the contents of the slots. Recurrent layers continue from the states in the
slots. Prompts are padded on the left. Padding therefore comes before the first token, while the
states are still zero, and every prompt ends in the last chunk.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from dispatchkit.dispatch import Reason
from dispatchkit.errors import ConfigError
from dispatchkit.execute import GraphRunner, StaticInput
from dispatchkit.keys import Axis, check_counts

from dispatchkit_transformers.decode_step import length_to_read
from dispatchkit_transformers.layers import ChunkStates, chunk_layer
from dispatchkit_transformers.slot_cache import SlotCache
from dispatchkit_transformers.static_models import (
    CALL_ERRORS,
    TRIALS,
    Probe,
    is_close,
    trial_prompts,
)

#: Name under which prompts that ran through graphs are counted.
GRAPHS = "graphs"
#: Reason for running all prompts eager if there are no ``prompt_sizes``.
NO_PROMPT_SIZES = "no_prompt_sizes"
#: Function that takes the first slot, prompts (B, T) and their lengths, runs the prompts, and
#: returns their logits (B, V).
Run = Callable[[int, torch.Tensor, Sequence[int]], torch.Tensor]

# Chunks of up to about this many tokens take equally long, because each chunk reads all weights.
# Measured in docs/measurements/decoding.md, "Prompts through graphs".
_SAME_TIME = 512

# Functions of transformers that create masks for windows and attention chunks.
_WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")


def check_prompt_sizes(sizes: Sequence[int] | str, max_length: int) -> tuple[int, ...]:
    """Return the validated chunk sizes, ascending.

    Raises:
        ConfigError: A size is invalid or exceeds ``max_length``.
    """
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ConfigError(
            "prompt_sizes", sizes, "a list of chunk sizes in tokens, such as [16, 64, 256]"
        )
    made = tuple(sorted(set(check_counts(sizes, "prompt_sizes"))))
    if made and made[-1] > max_length:
        raise ConfigError("prompt_sizes", made, f"a list of sizes up to max_length ({max_length})")
    return made


@functools.lru_cache(maxsize=64)
def plan_chunks(
    sizes: tuple[int, ...], rows: int, most: int, *, whole: bool = False
) -> list[tuple[int, ...]]:
    """Return the chunk sizes to use for each prompt length from 0 to ``most``.

    The sizes minimize the estimated time and, if times are equal, the number of chunks. If the
    sum of the sizes exceeds the prompt length, the first chunk is padded. An entry is empty if no
    chunks fit.

    Args:
        sizes: Allowed chunk sizes.
        rows: Number of prompts that run together.
        most: Maximum number of tokens of a prompt.
        whole: Whether a prompt must be a single chunk.
    """
    times = {size: max(size * rows, _SAME_TIME) for size in sizes}
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for tokens in range(1, most + 1):
        found = []
        for size in sizes:
            if whole and tokens > size:
                continue
            time, number, rest = best[max(tokens - size, 0)]
            # Only the first chunk is padded.
            chunks = (*rest, size) if tokens > size else (size,)
            found.append((time + times[size], number + 1, chunks))
        best.append(min(found, default=best[0]))
    return [chunks for _, _, chunks in best]


def prompt_step(
    probe: Probe, memory: SlotCache, lengths: Sequence[int]
) -> Callable[..., torch.Tensor]:
    """Return a function that runs one chunk.

    The function takes tokens and positions (B, T), the slot of each prompt (B,), and the cache
    length to read. Padding tokens have position ``memory.sink``. The function returns the logits
    after the last token (B, V), float32.

    Args:
        probe: Description of how the model must be called.
        memory: Cache that the chunks read and write.
        lengths: Cache lengths that a chunk may read, ascending.
    """
    last = memory.length - 1
    ahead = torch.arange(memory.length, device=probe.device)
    views, masks_of, rows_of = {}, {}, {}
    for length in lengths:
        view, rows_of[length] = memory.view(length)
        views[length] = Cache(layers=[chunk_layer(one) for one in view.layers])
        masks_of[length] = probe.masks_for(views[length].layers)

    def step(
        tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, length: int
    ) -> torch.Tensor:
        length = length_to_read(lengths, length)
        step_rows, cache = rows_of[length], views[length]
        states = [one for one in cache.layers if isinstance(one, ChunkStates)]
        step_rows.begin(positions, slots)
        for one in states:
            one.load()
        given = probe.step_arguments(cache)
        if probe.takes_positions:
            given["position_ids"] = positions.clamp(max=last)
        masks = masks_of[length].masks(positions, ahead, probe.convert_mask)
        if states:
            masks = _with_padding(masks, positions < memory.sink)
        output = probe.model(input_ids=tokens, attention_mask=masks, **given)
        for one in states:
            one.store()
        # A step that keeps tensors cannot be captured.
        step_rows.end()
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    return step


def _with_padding(masks: Any, tokens: torch.Tensor) -> Any:
    """Return masks in which layers without keys get the padding mask.

    States are zero before a prompt, and masked padding keeps them zero. The model's own
    ``generate`` passes the same mask to these layers.

    Args:
        masks: Masks of the layers with keys, in the model's format.
        tokens: False at padding (B, T).
    """
    if isinstance(masks, dict):
        return {name: tokens if mask is None else mask for name, mask in masks.items()}
    return tokens if masks is None else masks


def split_into_chunks(
    input_ids: torch.Tensor, lengths: Sequence[int], chunks: Sequence[int], sink: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield tokens and positions (B, T) of each chunk, and the cache length that it needs.

    Args:
        input_ids: Prompts (B, T), padded on the left.
        lengths: Number of tokens of each prompt.
        chunks: Chunk sizes; their sum must be at least the length of the longest prompt.
        sink: Position assigned to padding tokens.
    """
    width, total = max(lengths), sum(chunks)
    tokens = pad(input_ids[:, -width:], (total - width, 0))
    ends = torch.tensor(lengths, dtype=torch.int64, device=input_ids.device)
    # Prompts end in the last column.
    positions = ends.unsqueeze(1) + torch.arange(-total, 0, device=input_ids.device)
    positions.masked_fill_(positions < 0, sink)
    begin = 0
    for size in chunks:
        end = begin + size
        yield tokens[:, begin:end], positions[:, begin:end], end - (total - width)
        begin = end


def chunks_match_prompts(probe: Probe, length: int, *, whole: bool) -> bool:
    """Return whether chunks return the same logits as whole prompts.

    The prompts have different lengths, so that chunks contain padding.

    Args:
        probe: Description of how the model must be called.
        length: Number of positions of the cache.
        whole: Whether to run each prompt in one chunk instead of two.
    """
    try:
        with torch.no_grad():
            return any(_matches_prompts(probe, length, trial, whole=whole) for trial in TRIALS)
    except torch.OutOfMemoryError:
        raise  # not caused by the model
    except CALL_ERRORS:
        return False


def _matches_prompts(
    probe: Probe, length: int, trial: tuple[tuple[int, ...], ...], *, whole: bool
) -> bool:
    rows = trial_prompts(probe, trial, length)
    lengths = [row.shape[1] for row in rows]
    ids = torch.cat([pad(row, (max(lengths) - row.shape[1], 0)) for row in rows])
    memory = probe.cache(len(rows), length)
    step, slots = prompt_step(probe, memory, [length]), torch.arange(len(rows), device=ids.device)
    size = max(lengths) if whole else (max(lengths) + 1) // 2
    *first, last = split_into_chunks(ids, lengths, [size] * (1 if whole else 2), length)
    for tokens, positions, _ in first:
        step(tokens, positions, slots, length)
    found = [one.clone() for one in memory.states]
    logits = step(*last[:2], slots, length)
    if first and not _continues(memory, found, lambda: step(*last[:2], slots, length), logits):
        return False
    return all(
        is_close(got, probe.prompt(row, None).logits[0], probe.dtype)
        for got, row in zip(logits, rows, strict=True)
    )


def _continues(
    memory: SlotCache,
    found: Sequence[torch.Tensor],
    run: Callable[[], torch.Tensor],
    logits: torch.Tensor,
) -> bool:
    """Return whether a chunk's logits depend on each of its initial states.

    Some model classes use states only for single tokens, and ignore them in longer calls. In 16-bit
    dtypes, comparing logits with a tolerance does not detect this. Zeroing each state does: if the
    state is ignored, the logits do not change.

    Args:
        memory: Cache whose states are zeroed, one at a time.
        found: The states before the chunk.
        run: Function that runs the chunk again and returns its logits.
        logits: The logits of the first run.
    """
    for ignored in range(len(found)):
        for number, (states, before) in enumerate(zip(memory.states, found, strict=True)):
            states.copy_(before).mul_(number != ignored)
        if torch.equal(run(), logits):
            return False
    return True


class PromptRunner:
    """A runner that runs prompts through graphs, in chunks.

    Args:
        probe: Description of how the model must be called.
        memory: The cache that prompts are written to.
        lengths: Cache lengths that graphs read, ascending.
        sizes: Chunk sizes in tokens, ascending. The largest size also limits the total number of
            tokens, padding included, of prompts that run together.
        settings: Settings of the ``GraphRunner``.
        whole: Whether a prompt must be a single chunk, because layers ignore the state of an
            earlier chunk.

    Attributes:
        runner: The runner of the chunks.
    """

    def __init__(
        self,
        probe: Probe,
        memory: SlotCache,
        lengths: Sequence[int],
        sizes: tuple[int, ...],
        settings: Mapping[str, Any],
        *,
        whole: bool = False,
    ) -> None:
        self._memory, self._sizes, self._whole = memory, sizes, whole
        most = memory.num_slots
        self._rows = (*(1 << one for one in range(most.bit_length()) if 1 << one < most), most)
        self.runner: GraphRunner = GraphRunner(
            prompt_step(probe, memory, lengths),
            {
                "tokens": StaticInput((None, "chunk"), "int64"),
                "positions": StaticInput((None, "chunk"), "int64", fill=memory.sink),
                "slots": StaticInput((None,), "int64"),
            },
            axes=[Axis("chunk", sizes, exact=True), Axis("length", lengths)],
            **{**settings, "sizes": self._rows},
        )

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """The runner of the chunks, as a tuple."""
        return (self.runner,)

    def choose(self, rows: int, width: int) -> tuple[str, Run | None]:
        """Return (``graphs``, function to run) or (reason for running eager, None)."""
        if self._chunks(rows, width, whole=self._whole):
            return GRAPHS, self.run
        if self._chunks(rows, width, whole=False):
            return "states_not_continued", None
        return str(Reason.ABOVE_LARGEST), None

    def _chunks(self, rows: int, width: int, *, whole: bool) -> tuple[int, ...]:
        """Return the chunk sizes for prompts (B, T); empty if no graphs fit."""
        largest = self._sizes[-1]
        bucket = next(one for one in self._rows if one >= rows)
        fitting = tuple(size for size in self._sizes if size * bucket <= largest)
        if not fitting or rows * width > largest:
            return ()
        return plan_chunks(fitting, bucket, largest, whole=whole)[width]

    def run(self, start: int, input_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Run prompts, writing to cleared slots from ``start`` on.

        Args:
            start: The first slot.
            input_ids: Prompts (B, T) that ``choose`` accepted, padded on the left.
            lengths: Number of tokens of each prompt.

        Returns:
            Logits of the next token (B, V), float32.
        """
        rows = len(lengths)
        slots = torch.arange(start, start + rows, device=input_ids.device)
        chunks = self._chunks(rows, max(lengths), whole=self._whole)
        logits = torch.empty(0)
        for tokens, positions, length in split_into_chunks(
            input_ids, lengths, chunks, self._memory.sink
        ):
            logits = self.runner(
                tokens=tokens,
                positions=positions,
                slots=slots,
                chunk=tokens.shape[1],
                length=length,
            )
        return logits

    def capture(self, *, progress: bool = False) -> int:
        """Capture the graphs of all sizes that prompts can use, and return their number."""
        keys = [
            key
            for key in self.runner.registry
            if key.num_tokens * key.descriptor.axes[0] <= self._sizes[-1]
        ]
        return self.runner.capture(keys, progress=progress).num_graphs


@attrs.frozen
class EagerPrompts:
    """The substitute for a ``PromptRunner`` if all prompts run eager.

    Attributes:
        reason: The reason for running eager.
    """

    reason: str

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """The runners of prompts; always empty."""
        return ()

    def choose(self, rows: int, width: int) -> tuple[str, Run | None]:
        """Return the reason for running eager, and None."""
        return self.reason, None

    def capture(self, *, progress: bool = False) -> int:
        """Return 0, because there are no graphs to capture."""
        return 0


def prompt_runner(
    probe: Probe,
    memory: SlotCache,
    lengths: Sequence[int],
    sizes: tuple[int, ...],
    settings: Mapping[str, Any],
) -> PromptRunner | EagerPrompts:
    """Return a runner of prompts, or ``EagerPrompts`` with the reason why all prompts run eager.

    The arguments are those of ``PromptRunner``. Without sizes, all prompts run eager.
    """
    if not sizes:
        return EagerPrompts(NO_PROMPT_SIZES)
    if probe.cross:
        # A prompt also computes keys and values of the encoder output, which chunks cannot do.
        return EagerPrompts("encoder_decoder")
    if _passes_windows(probe, memory.length) and not _masks_windows(probe.model):
        return EagerPrompts("windows_not_masked")
    for whole in (False, True):
        if chunks_match_prompts(probe, memory.length, whole=whole):
            return PromptRunner(probe, memory, lengths, sizes, settings, whole=whole)
    return EagerPrompts("chunks_differ")


def _passes_windows(probe: Probe, length: int) -> bool:
    """Return whether ``length`` exceeds a window of the model."""
    return any(
        one.sliding_window < length for one in probe.layers if getattr(one, "is_sliding", False)
    )


def _masks_windows(model: Any) -> bool:
    """Return whether the model's prompts attend only within its windows.

    In Moshi, prompts attend to all positions, whereas single tokens attend to a window. Short
    trials do not exceed a window, so this function checks which mask functions the model's code
    imports.
    """
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__]
    return any(hasattr(one, name) for one in modules for name in _WINDOW_MASKS)
