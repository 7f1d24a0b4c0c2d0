"""Prompts through graphs: cut in chunks, each of which is one replay for some rows.

A chunk is a step of T tokens for each of B prompts. It writes their keys and values into the slots
of these prompts and attends to what the slots hold by then. Prompts are padded on the left, and so
is their first chunk: the last token of the last chunk is the last of each prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from dispatchkit.errors import ConfigError
from dispatchkit.execute import GraphRunner, StaticInput
from dispatchkit.keys import Axis, check_count

from dispatchkit_transformers.layers import AttentionLayer, Place
from dispatchkit_transformers.slot_cache import SlotCache
from dispatchkit_transformers.static_models import Probe

# Up to about so many tokens a chunk takes as long as one of a few, which reads all weights.
# Measured: docs/measurements.md, "Prompts through graphs".
_SAME_TIME = 512


def check_prompt_sizes(sizes: Sequence[int], max_length: int) -> tuple[int, ...]:
    """Return the sizes of chunks, ascending.

    Raises:
        ConfigError: They are no sizes, or above the longest prompt.
    """
    if not isinstance(sizes, Iterable):
        raise ConfigError("prompt_sizes", sizes, "sizes of chunks in tokens, such as (16, 64, 256)")
    made = tuple(sorted({check_count(size, "prompt_sizes") for size in sizes}))
    if made and made[-1] > max_length:
        raise ConfigError("prompt_sizes", made, f"at most max_length ({max_length})")
    return made


@functools.lru_cache(maxsize=64)
def plan_chunks(sizes: tuple[int, ...], rows: int, most: int) -> list[tuple[int, ...]]:
    """Return the chunks to run prompts in, by the tokens of each prompt.

    They take the least time, as far as sizes say that, and are the fewest that do. The first one is
    padded to its size.

    Args:
        sizes: Sizes that chunks may have.
        rows: Prompts that run together.
        most: Most tokens of a prompt.
    """
    times = {size: max(size * rows, _SAME_TIME) for size in sizes}
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for tokens in range(1, most + 1):
        found = []
        for size in sizes:
            time, number, rest = best[max(tokens - size, 0)]
            # What is behind the padded one is full.
            chunks = (*rest, size) if tokens > size else (size,)
            found.append((time + times[size], number + 1, chunks))
        best.append(min(found))
    return [chunks for _, _, chunks in best]


class PromptLayer(AttentionLayer):
    """One layer of the cache as a chunk of prompts sees it."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a chunk into the slots of its prompts; return what these may read.

        Shapes: states (B, heads, T, head size), results (B, heads, length, head size).
        """
        slots, written = self.place.slots, self.place.written(self.capacity)
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            memory[slots.unsqueeze(1), :, written] = states.transpose(1, 2)
        keys, values = (
            memory[:, :, : self.length].index_select(0, slots)
            for memory in (self.keys, self.values)
        )
        return keys, values


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
    place = Place(ahead, memory.sink, [memory.length])
    views = {
        length: Cache(layers=[PromptLayer(*pair, place, length) for pair in memory.pairs])
        for length in lengths
    }

    def step(
        tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, length: int
    ) -> torch.Tensor:
        # Without a graph it is the length itself that is given.
        length = next((one for one in lengths if one >= length), lengths[-1])
        place.enter(positions, slots)
        looks = ahead[:length] <= positions.unsqueeze(-1)  # (B, T, length)
        output = probe.model(
            input_ids=tokens,
            position_ids=positions.clamp(max=last),
            attention_mask=probe.mask_of(looks.unsqueeze(1)),
            **probe.step_arguments(views[length]),
        )
        # State that a step leaves behind would keep it from being captured.
        place.leave()
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    return step


class PromptRunner:
    """Run prompts through graphs.

    Args:
        probe: What was found out about the model.
        memory: The cache that prompts are put into.
        lengths: Lengths of the cache that graphs read, ascending.
        sizes: Tokens of a chunk, ascending; the largest is also how many tokens all prompts of
            one chunk have together.
        settings: Settings of the ``GraphRunner``.

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
    ) -> None:
        self._memory, self._sizes = memory, sizes
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

    def chunks(self, rows: int, width: int) -> tuple[int, ...]:
        """Return the chunks for prompts (B, T); none where they do not fit into graphs."""
        largest = self._sizes[-1]
        bucket = next(one for one in self._rows if one >= rows)
        fitting = tuple(size for size in self._sizes if size * bucket <= largest)
        if not fitting or rows * width > largest:
            return ()
        return plan_chunks(fitting, bucket, largest)[width]

    def run(self, start: int, input_ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Put prompts into the slots from ``start`` on.

        Args:
            start: The first slot.
            input_ids: Prompts (B, T), padded on the left, for which there are chunks.
            lengths: Tokens of each.

        Returns:
            Logits of the next token (B, V), float32.
        """
        rows, width = len(lengths), max(lengths)
        chunks, device = self.chunks(rows, width), input_ids.device
        self._memory.clear(start, rows)
        in_front = sum(chunks) - width
        tokens = pad(input_ids[:, -width:], (in_front, 0))
        ends = torch.tensor(lengths, dtype=torch.int64, device=device)
        # The last token of each prompt is in the last column.
        positions = ends.unsqueeze(1) + torch.arange(-sum(chunks), 0, device=device)
        positions.masked_fill_(positions < 0, self._memory.sink)
        slots = torch.arange(start, start + rows, device=device)
        begin, logits = 0, torch.empty(0)
        for size in chunks:
            end = begin + size
            logits = self.runner(
                tokens=tokens[:, begin:end],
                positions=positions[:, begin:end],
                slots=slots,
                chunk=size,
                length=end - in_front,
            )
            begin = end
        return logits

    def capture(self, *, progress: bool = False) -> int:
        """Capture the graphs of every size that prompts may run in; return their number."""
        keys = [
            key
            for key in self.runner.registry
            if key.num_tokens * key.descriptor.axes[0] <= self._sizes[-1]
        ]
        return self.runner.capture(keys, progress=progress).num_graphs
