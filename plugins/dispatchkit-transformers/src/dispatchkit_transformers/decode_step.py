"""Decoding steps as functions of static inputs, and the cache lengths that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dispatchkit.errors import ConfigError, DescriptorError
from dispatchkit.keys import check_counts

from dispatchkit_transformers.slot_cache import SlotCache
from dispatchkit_transformers.static_models import Probe

#: Shortest cache length to capture graphs for by default.
SHORTEST_LENGTH = 128


def decode_step(
    probe: Probe,
    memory: SlotCache,
    lengths: Sequence[int],
    forward: Callable[..., Any],
    *,
    wants_logits: bool,
    compile: Callable[..., Any] | None = None,  # noqa: A002 - as in torch
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that runs one decoding step.

    The function takes tokens and positions (B,), and the cache length to read. It returns two
    tensors: the most likely next tokens (B,) or the logits (B, V) in float32, and the next
    positions (B,).

    Args:
        probe: Description of how the model must be called.
        memory: Cache that the step reads and writes.
        lengths: Cache lengths that the step may read, ascending.
        forward: The model, or a compiled version of it.
        wants_logits: Whether to return logits instead of tokens.
        compile: Function that receives the step of each length and returns its replacement.
    """

    def step_of(length: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        logits_of = probe.step(memory, length, forward)

        def run(tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = logits_of(tokens.unsqueeze(1), positions.unsqueeze(1))[:, 0]
            # Padding rows stay at the sink, a position that is never read.
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
    compile: Callable[..., Any] | None = None,  # noqa: A002 - as in torch
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return a function that runs one step and verifies drafts.

    The function takes tokens and positions (B,), drafts (B, ``num_draft_tokens``) and the cache
    length to read. It runs tokens and drafts together, and accepts the drafts before the first one
    that is not the most likely token. It returns

    - one tensor (B, ``num_draft_tokens`` + 3) with the most likely token after each token and
      draft, the number of accepted drafts, and the number of drafts;
    - the token after the last accepted draft (B,), and its position (B,).

    The drafts of a row end at the first negative one, or at the end of the cache. The keys and
    values of rejected drafts stay in the cache, beyond the end of the row, and are overwritten
    before a token attends to them.

    Args:
        probe: Description of how the model must be called.
        memory: Cache that the step reads and writes, with at least ``num_draft_tokens`` spare
            positions.
        lengths: Cache lengths that the step may read, ascending.
        forward: The model, or a compiled version of it.
        num_draft_tokens: Number of drafts per row.
        compile: Function that receives the step of each length and returns its replacement.
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
    """Return the smallest cache length that covers ``length``.

    If ``length`` exceeds all ``lengths``, return the largest of them. This happens if a runner
    measures how outputs depend on the length. Eager steps pass the exact length that they need.

    Args:
        lengths: Cache lengths that steps may read, ascending.
        length: The length that a step needs.
    """
    return next((one for one in lengths if one >= length), lengths[-1])


def compile_for_any_size(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a step with ``torch.compile``: once for a single row, once for all other sizes.

    By default, ``torch.compile`` specializes on the first size. ``dynamic=True`` would make the
    dimensions of the cache dynamic as well.

    Args:
        step: A function of tensors whose dimension 0 is the batch.
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
    """Return the cache lengths to capture graphs for, ascending.

    Raises:
        ConfigError: A length is invalid, or the largest is not ``max_length``.
    """
    if lengths is None:
        found = {max_length}
        length = SHORTEST_LENGTH
        while length < max_length:
            found.add(length)
            length *= 2
        return tuple(sorted(found))
    if isinstance(lengths, str) or not isinstance(lengths, Iterable):
        raise ConfigError(
            "lengths",
            lengths,
            f"a list of cache lengths up to max_length, such as [{max_length}]",
        )
    lengths = list(lengths)  # may be an iterator, which can be read only once
    made = tuple(sorted(set(check_counts(lengths, "lengths"))))
    if not made or made[-1] != max_length:
        raise ConfigError(
            "lengths",
            lengths,
            f"a list of cache lengths whose largest is max_length ({max_length})",
        )
    return made


def sequence_too_long(needed: int, have: int) -> DescriptorError:
    """Return the error for a sequence that does not fit in the cache."""
    return DescriptorError(
        "sequence length",
        needed,
        f"at most max_length ({have})",
        "Create the GraphDecoder with a larger max_length, or shorten the prompt or the output.",
    )
