"""Decoding steps as functions of static inputs, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dispatchkit.errors import ConfigError, DescriptorError
from dispatchkit.keys import check_count

from dispatchkit_transformers.slot_cache import SlotCache
from dispatchkit_transformers.static_models import Probe

#: Shortest length of the cache that has separate graphs.
SHORTEST = 128


def decode_step(
    probe: Probe,
    memory: SlotCache,
    lengths: Sequence[int],
    forward: Callable[..., Any],
    *,
    wants_logits: bool,
    compile: Callable[..., Any] | None = None,  # noqa: A002 - torch's own word
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that runs one decoding step.

    It takes tokens and positions (B,) and how much of the cache it must read. It returns the
    most likely next tokens (B,), or their logits (B, V) in float32, and the positions of the next
    tokens (B,).

    Args:
        probe: The probe of the model.
        memory: The cache.
        lengths: Lengths of the cache that the step may read, ascending.
        forward: The model, or its compiled form.
        wants_logits: Return logits.
        compile: Takes the function of one length, and returns the function to run instead.
    """

    def step_of(length: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        logits_of = probe.step(memory, length, forward)

        def run(tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = logits_of(tokens.unsqueeze(1), positions.unsqueeze(1))[:, 0]
            # A row that waits to be dropped stays at the position that is never read.
            following = (positions + 1).clamp(max=memory.sink)
            return (logits if wants_logits else logits.argmax(-1)), following

        return run if compile is None else compile(run)

    steps = {length: step_of(length) for length in lengths}

    def step(
        tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return steps[length_to_read(lengths, length)](tokens, positions)

    return step


def verify_step(
    probe: Probe,
    memory: SlotCache,
    lengths: Sequence[int],
    forward: Callable[..., Any],
    num_draft_tokens: int,
    *,
    compile: Callable[..., Any] | None = None,  # noqa: A002 - torch's own word
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return a function that runs one step and verifies drafts.

    It takes tokens and positions (B,), the drafts that may follow each token
    (B, ``num_draft_tokens``) and how much of the cache it must read. It runs all of them, accepts
    drafts up to the first one that is not the most likely token, and returns

    - the most likely token after each of them, the number of drafts accepted and the number given
      (B, ``num_draft_tokens`` + 3);
    - the token after the last accepted one (B,), and its position (B,).

    A value below 0 or beyond the end of the cache is not a draft. Rejected drafts leave keys and
    values beyond the row's end: no token attends to them before they are overwritten.

    Args:
        probe: The probe of the model.
        memory: The cache, with at least ``num_draft_tokens`` spare positions.
        lengths: Lengths of the cache that the step may read, ascending.
        forward: The model, or its compiled form.
        num_draft_tokens: Number of drafts for each row.
        compile: Takes the function of one length, and returns the function to run instead.
    """
    offsets = torch.arange(1 + num_draft_tokens, device=probe.device)
    last_token = probe.vocabulary - 1

    def step_of(length: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        logits_of = probe.step(memory, length, forward, 1 + num_draft_tokens)

        def run(
            tokens: torch.Tensor, positions: torch.Tensor, drafts: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            given = torch.cat((tokens.unsqueeze(1), drafts.clamp(0, last_token)), 1)
            at = (positions.unsqueeze(1) + offsets).clamp(max=memory.sink)
            likeliest = logits_of(given, at).argmax(-1)
            is_given = (drafts >= 0) & (at[:, 1:] < memory.sink)
            is_right = is_given & (drafts == likeliest[:, :-1])
            num_given, num_right = (
                one.long().cumprod(1).sum(1, keepdim=True) for one in (is_given, is_right)
            )
            following = (positions + num_right.squeeze(1) + 1).clamp(max=memory.sink)
            verified = torch.cat((likeliest, num_right, num_given), 1)
            return verified, likeliest.gather(1, num_right).squeeze(1), following

        return run if compile is None else compile(run)

    steps = {length: step_of(length) for length in lengths}

    def step(
        tokens: torch.Tensor, positions: torch.Tensor, drafts: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return steps[length_to_read(lengths, length)](tokens, positions, drafts)

    return step


def length_to_read(lengths: Sequence[int], length: int) -> int:
    """Return how much of the cache a step reads: the smallest of the lengths that covers one.

    Without a graph the exact length is passed; while measuring which outputs follow the length, it
    may exceed all of ``lengths`` by one, and the largest is read.

    Args:
        lengths: Lengths of the cache that steps may read, ascending.
        length: The length that a step must read.
    """
    return next((one for one in lengths if one >= length), lengths[-1])


def compile_for_any_size(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a step with ``torch.compile`` once for all sizes, and once for a single row.

    By default ``torch.compile`` would specialize on the first size it sees. ``dynamic=True`` would
    make the sizes of the cache dynamic as well.

    Args:
        step: Takes tensors of the batch.
        options: Options of ``torch.compile``.
    """
    compiled = torch.compile(step, **options)

    def run(*given: torch.Tensor) -> Any:
        if given[0].shape[0] > 1:
            for one in given:
                torch._dynamo.maybe_mark_dynamic(one, 0)
        return compiled(*given)

    return run


def check_lengths(lengths: Sequence[int] | str | None, max_length: int) -> tuple[int, ...]:
    """Return the lengths of the cache to capture for, ascending.

    Raises:
        ConfigError: They do not end with the longest, or are not lengths.
    """
    if lengths is None:
        found = {max_length}
        length = SHORTEST
        while length < max_length:
            found.add(length)
            length *= 2
        return tuple(sorted(found))
    if isinstance(lengths, str) or not isinstance(lengths, Iterable):
        raise ConfigError(
            "lengths",
            lengths,
            f"lengths of which the largest is max_length, such as ({max_length},)",
        )
    made = tuple(sorted({check_count(length, "lengths") for length in lengths}))
    if not made or made[-1] != max_length:
        raise ConfigError(
            "lengths", list(lengths), f"lengths of which the largest is max_length ({max_length})"
        )
    return made


def too_short(needed: int, have: int) -> DescriptorError:
    """Return the error for a sequence that does not fit into the cache."""
    return DescriptorError(
        "sequence length",
        needed,
        f"at most max_length ({have}), the positions of the cache",
        "Create the GraphDecoder with a larger max_length, or ask for fewer new tokens.",
    )
