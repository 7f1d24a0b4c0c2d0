"""Prompts through graphs: cut in chunks, each of which is one replay for some rows.

A chunk is a step of T tokens for each of B prompts. It writes their keys and values into the slots
of these prompts and attends to what the slots hold by then; recurrent layers continue from the
states in the slots. Prompts are padded on the left, and so is their first chunk: the last token of
the last chunk is the last of each prompt, and padding meets no state yet.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from dispatchkit.dispatch import Reason
from dispatchkit.errors import ConfigError
from dispatchkit.execute import GraphRunner, StaticInput
from dispatchkit.keys import Axis, check_count

from dispatchkit_transformers.layers import ChunkStates, chunk_layer
from dispatchkit_transformers.slot_cache import SlotCache
from dispatchkit_transformers.static_models import MISFITS, TRIALS, Probe, is_near, trial_prompts

#: How prompts run that do not run eager.
GRAPHS = "graphs"

# Up to about this many tokens, a chunk takes as long as one of a few, since both read all weights.
# Measured: docs/measurements/decoding.md, "Prompts through graphs".
_SAME_TIME = 512

# What the library makes masks of windows and of chunks with.
_WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")


def check_prompt_sizes(sizes: Sequence[int] | str, max_length: int) -> tuple[int, ...]:
    """Return the sizes of chunks, ascending.

    Raises:
        ConfigError: They are no sizes, or above the longest prompt.
    """
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ConfigError("prompt_sizes", sizes, "sizes of chunks in tokens, such as (16, 64, 256)")
    made = tuple(sorted({check_count(size, "prompt_sizes") for size in sizes}))
    if made and made[-1] > max_length:
        raise ConfigError("prompt_sizes", made, f"at most max_length ({max_length})")
    return made


@functools.lru_cache(maxsize=64)
def plan_chunks(
    sizes: tuple[int, ...], rows: int, most: int, *, whole: bool = False
) -> list[tuple[int, ...]]:
    """Return the chunks to run prompts in, by the tokens of each prompt; none if they do not fit.

    They take the least time, as far as sizes say that, and are the fewest that do. The first one is
    padded to its size.

    Args:
        sizes: Sizes that chunks may have.
        rows: Prompts that run together.
        most: Most tokens of a prompt.
        whole: A prompt has one chunk alone.
    """
    times = {size: max(size * rows, _SAME_TIME) for size in sizes}
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for tokens in range(1, most + 1):
        found = []
        for size in sizes:
            if whole and tokens > size:
                continue
            time, number, rest = best[max(tokens - size, 0)]
            # What is behind the padded one is full.
            chunks = (*rest, size) if tokens > size else (size,)
            found.append((time + times[size], number + 1, chunks))
        best.append(min(found, default=best[0]))
    return [chunks for _, _, chunks in best]


def prompt_step(
    probe: Probe, memory: SlotCache, lengths: Sequence[int]
) -> Callable[..., torch.Tensor]:
    """Return the step of one chunk.

    It takes tokens and positions (B, T), the slot of each prompt (B,), and how much of the cache it
    must read. Tokens of padding are at the position that is never read. It returns the logits of
    the token behind the last one (B, V), float32.

    Args:
        probe: What was found out about the model.
        memory: The cache.
        lengths: Positions that it may read, ascending.
    """
    last = memory.length - 1
    ahead = torch.arange(memory.length, device=probe.device)
    views, forms, places = {}, {}, {}
    for length in lengths:
        view, places[length] = memory.view(length)
        views[length] = Cache(layers=[chunk_layer(one) for one in view.layers])
        forms[length] = probe.masks_for(views[length].layers)

    def step(
        tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, length: int
    ) -> torch.Tensor:
        # Without a graph it is the length itself that is given.
        length = next((one for one in lengths if one >= length), lengths[-1])
        place, cache = places[length], views[length]
        states = [one for one in cache.layers if isinstance(one, ChunkStates)]
        place.enter(positions, slots)
        for one in states:
            one.enter()
        given = probe.step_arguments(cache)
        if probe.takes_positions:
            given["position_ids"] = positions.clamp(max=last)
        masks = forms[length].masks(positions, ahead, probe.mask_of)
        if states:
            masks = _with_padding(masks, positions < memory.sink)
        output = probe.model(input_ids=tokens, attention_mask=masks, **given)
        for one in states:
            one.leave()
        # State that a step leaves behind would keep it from being captured.
        place.leave()
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    return step


def _with_padding(masks: Any, tokens: torch.Tensor) -> Any:
    """Return masks in which layers without keys have that of their padding.

    Padding comes before a prompt, where states are zero: without input they stay so. It is how
    the library's own ``generate`` pads them.

    Args:
        masks: For the layers that have keys, as the model takes them.
        tokens: False where padding is (B, T).
    """
    if isinstance(masks, dict):
        return {name: tokens if mask is None else mask for name, mask in masks.items()}
    return tokens if masks is None else masks


def in_chunks(
    input_ids: torch.Tensor, lengths: Sequence[int], chunks: Sequence[int], sink: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield tokens and positions (B, T) of each chunk, and how much of the cache it must read.

    Args:
        input_ids: Prompts (B, T), padded on the left.
        lengths: Tokens of each.
        chunks: Sizes, together no less than the longest prompt.
        sink: The position of padding.
    """
    width, total = max(lengths), sum(chunks)
    tokens = pad(input_ids[:, -width:], (total - width, 0))
    ends = torch.tensor(lengths, dtype=torch.int64, device=input_ids.device)
    # The last token of each prompt is in the last column.
    positions = ends.unsqueeze(1) + torch.arange(-total, 0, device=input_ids.device)
    positions.masked_fill_(positions < 0, sink)
    begin = 0
    for size in chunks:
        end = begin + size
        yield tokens[:, begin:end], positions[:, begin:end], end - (total - width)
        begin = end


def gives_what_prompts_give(probe: Probe, length: int, *, whole: bool) -> bool:
    """Return whether chunks give the logits of whole prompts, one beside another that is shorter.

    Args:
        probe: What was found out about the model.
        length: Positions of a cache.
        whole: Try one chunk for a prompt, and not two.
    """
    try:
        with torch.no_grad():
            return any(
                _gives_what_prompts_give(probe, length, trial, whole=whole) for trial in TRIALS
            )
    except torch.OutOfMemoryError:
        raise  # it says nothing of the model
    except MISFITS:
        return False


def _gives_what_prompts_give(
    probe: Probe, length: int, trial: tuple[tuple[int, ...], ...], *, whole: bool
) -> bool:
    rows = trial_prompts(probe, trial, length)
    lengths = [row.shape[1] for row in rows]
    ids = torch.cat([pad(row, (max(lengths) - row.shape[1], 0)) for row in rows])
    memory = probe.cache(len(rows), length)
    step, slots = prompt_step(probe, memory, [length]), torch.arange(len(rows), device=ids.device)
    size = max(lengths) if whole else (max(lengths) + 1) // 2
    *first, last = in_chunks(ids, lengths, [size] * (1 if whole else 2), length)
    for tokens, positions, _ in first:
        step(tokens, positions, slots, length)
    found = [one.clone() for one in memory.states]
    logits = step(*last[:2], slots, length)
    if first and not _continues(memory, found, lambda: step(*last[:2], slots, length), logits):
        return False
    return all(
        is_near(got, probe.prompt(row, None).logits[0], probe.dtype)
        for got, row in zip(logits, rows, strict=True)
    )


def _continues(
    memory: SlotCache,
    found: Sequence[torch.Tensor],
    run: Callable[[], torch.Tensor],
    logits: torch.Tensor,
) -> bool:
    """Return whether a chunk's logits depend on each kind of state that it found.

    Some classes take a state for single tokens alone, and begin anew with every chunk. Logits
    in 16 bits differ too much for other reasons to show it; what is ignored changes no bit.

    Args:
        memory: The cache.
        found: What states were when the chunk began.
        run: Runs it again, and returns its logits.
        logits: Those it gave.
    """
    for ignored in range(len(found)):
        for number, (states, before) in enumerate(zip(memory.states, found, strict=True)):
            states.copy_(before).mul_(number != ignored)
        if torch.equal(run(), logits):
            return False
    return True


class PromptRunner:
    """Run prompts through graphs.

    Args:
        probe: What was found out about the model.
        memory: The cache that prompts are put into.
        lengths: Lengths of the cache that graphs read, ascending.
        sizes: Tokens of a chunk, ascending; the largest is also how many tokens all prompts of
            one chunk have together.
        settings: Settings of the ``GraphRunner``.
        whole: A prompt has one chunk alone: layers do not continue from the state of another.

    Attributes:
        runner: What runs the chunks.
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

    def how(self, rows: int, width: int) -> str:
        """Return how prompts (B, T) run: through graphs, or the reason why eager."""
        if self._chunks(rows, width, whole=self._whole):
            return GRAPHS
        if self._chunks(rows, width, whole=False):
            return "states_not_continued"
        return str(Reason.ABOVE_LARGEST)

    def _chunks(self, rows: int, width: int, *, whole: bool) -> tuple[int, ...]:
        """Return the chunks for prompts (B, T); none where they do not fit into graphs."""
        largest = self._sizes[-1]
        bucket = next(one for one in self._rows if one >= rows)
        fitting = tuple(size for size in self._sizes if size * bucket <= largest)
        if not fitting or rows * width > largest:
            return ()
        return plan_chunks(fitting, bucket, largest, whole=whole)[width]

    def run(self, start: int, input_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Put prompts into cleared slots from ``start`` on.

        Args:
            start: The first slot.
            input_ids: Prompts (B, T), padded on the left, for which there are chunks.
            lengths: Tokens of each.

        Returns:
            Logits of the next token (B, V), float32.
        """
        rows = len(lengths)
        slots = torch.arange(start, start + rows, device=input_ids.device)
        chunks = self._chunks(rows, max(lengths), whole=self._whole)
        logits = torch.empty(0)
        for tokens, positions, length in in_chunks(input_ids, lengths, chunks, self._memory.sink):
            logits = self.runner(
                tokens=tokens,
                positions=positions,
                slots=slots,
                chunk=tokens.shape[1],
                length=length,
            )
        return logits

    def capture(self, *, progress: bool = False) -> int:
        """Capture the graphs of every size that prompts may run in; return their number."""
        keys = [
            key
            for key in self.runner.registry
            if key.num_tokens * key.descriptor.axes[0] <= self._sizes[-1]
        ]
        return self.runner.capture(keys, progress=progress).num_graphs


def prompt_runner(
    probe: Probe,
    memory: SlotCache,
    lengths: Sequence[int],
    sizes: tuple[int, ...],
    settings: Mapping[str, Any],
) -> PromptRunner | str:
    """Return what runs prompts through graphs, or the reason why all of them run eager.

    The arguments are those of ``PromptRunner``; without sizes they run eager.
    """
    if not sizes:
        return "no_prompt_sizes"
    if probe.cross:
        # Keys and values of the source are computed with the prompt, and a chunk has no source.
        return "encoder_decoder"
    if _passes_windows(probe, memory.length) and not _masks_windows(probe.model):
        return "windows_not_masked"
    for whole in (False, True):
        if gives_what_prompts_give(probe, memory.length, whole=whole):
            return PromptRunner(probe, memory, lengths, sizes, settings, whole=whole)
    return "chunks_differ"


def _passes_windows(probe: Probe, length: int) -> bool:
    """Return whether sequences may be longer than a window of the model."""
    return any(
        one.sliding_window < length for one in probe.layers if getattr(one, "is_sliding", False)
    )


def _masks_windows(model: Any) -> bool:
    """Return whether the model's own prompts attend only within its windows.

    Moshi's look at all positions, and its single tokens at a window. A trial of a few tokens
    passes no window, so that it is the code that says what masks are made.
    """
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__]
    return any(hasattr(one, name) for one in modules for name in _WINDOW_MASKS)
