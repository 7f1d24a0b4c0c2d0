"""Speculative decoding: a step of the model verifies drafts of the next tokens.

    decoder = GraphDecoder(model, max_batch_size=32, max_length=1024, num_draft_tokens=3)
    speculative = SpeculativeDecoder(decoder, PromptLookup(decoder))
    tokens = speculative.generate(**inputs, max_new_tokens=100, do_sample=False)

``SpeculativeDecoder`` has ``generate``, and ``admit``, ``step`` and ``drop`` for the loop of a
server. For each row, a step returns the accepted drafts and one more token. A ``Drafter`` supplies
the drafts: ``PromptLookup``, ``DraftModel`` or your own class.

The tokens equal those of greedy decoding, regardless of the drafts. Sampling is not supported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from dispatchkit.errors import ConfigError, InputError
from dispatchkit.execute import GraphRunner, StaticInput, StepState
from dispatchkit.keys import check_count, check_instance, whole_number
from dispatchkit.options import RunnerOptions

from dispatchkit_transformers.decoder import GraphDecoder
from dispatchkit_transformers.generation import call_generate, generate

# Models pad their vocabulary with fewer than this number of unused tokens.
_MOST_PADDING = 512


class Drafter(Protocol):
    """A source of drafts for the rows of a decoder.

    A wrong draft costs time, but does not change the generated tokens.
    """

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafts per row."""
        ...

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Append rows for prompts (B, T), padded on the left; ``lengths`` exclude padding."""
        ...

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return drafts (rows, ``num_draft_tokens``) on the device; negative for no draft.

        Of the drafts that the previous call returned, those at positions before ``positions`` were
        accepted. The arguments do not contain these drafts.

        Args:
            tokens: The current token of each row (rows,), on the device.
            positions: Positions of the current tokens (rows,), on the device.
            lengths: The same positions, on the host.
        """
        ...

    def drop(self, order: Sequence[int]) -> None:
        """Drop rows; ``order`` contains the previous index of each remaining row."""
        ...


class SpeculativeDecoder:
    """A decoder whose steps verify drafts.

    Args:
        decoder: The decoder that verifies drafts, created with ``num_draft_tokens``.
        drafter: The source of drafts, which gets the same rows as ``decoder``.

    Raises:
        ConfigError: The drafter proposes no drafts or more than the decoder verifies, the decoder
            was created without ``num_draft_tokens`` or already has rows, or an argument has the
            wrong type.

    Thread safety: one thread at a time. While there are rows, do not call ``decoder.admit``,
    ``decoder.step`` or ``decoder.drop``.
    """

    def __init__(self, decoder: GraphDecoder, drafter: Drafter) -> None:
        check_instance(decoder, GraphDecoder, "decoder")
        if whole_number(getattr(drafter, "num_draft_tokens", None)) is None:
            hint = "Pass PromptLookup(decoder), for example."
            allowed = "a Drafter with an integer num_draft_tokens"
            raise ConfigError("drafter", drafter, allowed, hint)
        decoder.check_has_drafts()
        number = drafter.num_draft_tokens
        if not 1 <= number <= decoder.num_draft_tokens:
            hint = "Create the drafter with a different num_draft_tokens"
            if number > 0:
                hint += f", or the GraphDecoder with num_draft_tokens={number}"
            raise ConfigError(
                "drafter.num_draft_tokens",
                number,
                f"from 1 to the decoder's num_draft_tokens ({decoder.num_draft_tokens})",
                f"{hint}.",
            )
        if decoder.num_rows:
            hint = "Call decoder.reset() first."
            raise ConfigError("decoder.num_rows", decoder.num_rows, "0", hint)
        self.decoder, self.drafter = decoder, drafter
        self._lengths: tuple[int, ...] = ()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate like the model's own ``generate``, with the same arguments and result.

        Raises:
            ConfigError: The call samples, needs scores, logits or logits processors, or has another
                unsupported option.
            DescriptorError: The batch exceeds ``max_batch_size``, or a sequence exceeds
                ``max_length``.
        """
        return call_generate(self.decoder.model, self, *args, **kwargs)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        **prepared: Any,
    ) -> Any:
        """Run the decoding loop; transformers calls this object as ``custom_generate``."""
        return generate(VerifiedRows(self), model, input_ids, **prepared)

    @property
    def num_rows(self) -> int:
        """Number of live sequences."""
        return self.decoder.num_rows

    def admit(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **source: Any
    ) -> torch.Tensor:
        """Run prompts and append a row for each; see ``GraphDecoder.admit``."""
        before = self.decoder.num_rows
        logits = self.decoder.admit(input_ids, attention_mask, **source)
        try:
            self.drafter.admit(input_ids, self.decoder.row_lengths[before:])
        except BaseException:
            self.decoder.drop(range(before, self.decoder.num_rows))
            raise
        self._lengths = (*self._lengths, *self.decoder.row_lengths[before:])
        return logits

    def step(self) -> list[list[int]]:
        """Run a step, and return each row's accepted drafts and one more token.

        Raises:
            DescriptorError: A row is at the end of the cache, or there are no rows.
            InputError: Direct calls to the decoder changed its rows, or an earlier step was
                interrupted.
        """
        decoder = self.decoder
        if decoder.row_lengths != self._lengths:
            raise InputError(
                "rows",
                "The rows of the decoder were changed by calls outside the SpeculativeDecoder: "
                f"their lengths are {decoder.row_lengths} instead of {self._lengths}. Call reset() "
                "of the SpeculativeDecoder, admit the rows again, and call only its own admit(), "
                "step() and drop().",
            )
        decoder.check_has_rows()
        drafts = self.drafter.propose(decoder.tokens, decoder.positions, self._lengths)
        tokens = decoder.verify(drafts)
        self._lengths = decoder.row_lengths
        return tokens

    def drop(self, rows: Iterable[int]) -> list[int]:
        """Drop rows, and return the previous index of each remaining row, in the new order."""
        order = self.decoder.drop(rows)
        self.drafter.drop(order)
        self._lengths = self.decoder.row_lengths
        return order

    def reset(self) -> None:
        """Drop all rows."""
        self.drop(range(self.num_rows))


class PromptLookup:
    """A drafter that proposes the tokens after an earlier occurrence of a row's last tokens.

    The lookup runs on the device in a small graph for all rows, because the tokens of a step are on
    the device. A lookup on the host would have to wait for each step, would leave the device idle
    meanwhile, and would take longer for more rows.

    Args:
        decoder: The decoder whose rows get drafts.
        num_draft_tokens: Number of drafts per row; by default, ``decoder.num_draft_tokens``.
        max_ngram: Maximum number of last tokens to compare with earlier tokens. The longest match
            is used, and the latest of equally long matches. If fewer than ``num_draft_tokens``
            tokens follow the match, they are repeated.

    Attributes:
        runner: The runner of the lookup.
    """

    def __init__(
        self, decoder: GraphDecoder, num_draft_tokens: int | None = None, *, max_ngram: int = 3
    ) -> None:
        check_instance(decoder, GraphDecoder, "decoder")
        if num_draft_tokens is None:
            decoder.check_has_drafts()
            num_draft_tokens = decoder.num_draft_tokens
        self.num_draft_tokens = check_count(num_draft_tokens, "num_draft_tokens")
        self._max_ngram = check_count(max_ngram, "max_ngram")
        rows, length, device = decoder.max_batch_size, decoder.max_length, decoder.device
        with torch.inference_mode(False):
            # Padding rows write to the last position, which is never compared.
            self._tokens = torch.full((rows, length + 1), -1, dtype=torch.int64, device=device)
            self._ahead = torch.arange(length + 1, device=device)
        self._num_rows = 0
        self.runner: GraphRunner = GraphRunner(
            self._step,
            {
                "tokens": StaticInput((None,), "int64"),
                "positions": StaticInput((None,), "int64", fill=length),
            },
            sizes=decoder.runner(drafts=True).config.sizes,
            mode="FULL",
            lazy=True,
            outputs="view",
            options=RunnerOptions(device=device),
            state=StepState(scratch=(self._tokens,)),
        )

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Store the tokens of prompts."""
        width = input_ids.shape[1]
        for row, length in enumerate(lengths, self._num_rows):
            self._tokens[row, :length] = input_ids[row - self._num_rows, width - length :]
        self._num_rows += len(lengths)

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return the drafts of each row; -1 if the row's last tokens do not occur earlier."""
        drafts: torch.Tensor = self.runner(tokens=tokens, positions=positions)
        return drafts

    def drop(self, order: Sequence[int]) -> None:
        """Keep the stored tokens of the remaining rows, in their new order."""
        if list(order) != list(range(len(order))):
            index = torch.tensor(order, dtype=torch.int64, device=self._tokens.device)
            self._tokens[: len(order)] = self._tokens.index_select(0, index)
        self._num_rows = len(order)

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        known, last = self._tokens[: tokens.shape[0]], positions.unsqueeze(1)
        most = known.shape[1] - 1
        known.scatter_(1, last, tokens.unsqueeze(1))
        # For each earlier position, the length of the match between the tokens that end there and
        # the row's last tokens.
        is_equal = self._ahead < last
        number = torch.zeros_like(known)
        for back in range(self._max_ngram):
            before = torch.nn.functional.pad(known, (back, 0), value=-1)[:, : most + 1]
            is_equal = is_equal & (before == known.gather(1, (last - back).clamp(min=0)))
            number = number + is_equal
        best, place = (number * (most + 1) + self._ahead).max(1, keepdim=True)
        ahead = self._ahead[: self.num_draft_tokens]
        following = place + 1 + ahead % (last - place).clamp(min=1)
        drafts = known.gather(1, following.clamp(max=most))
        drafts = drafts.masked_fill(best <= most, -1)
        # Store the drafts as if accepted: later tokens overwrite rejected drafts.
        known.scatter_(1, (last + 1 + ahead).clamp(max=most), drafts)
        return drafts


class DraftModel:
    """A drafter that runs a smaller model with the same tokenizer.

    It runs one step per draft, and another step to store the last draft in the cache.

    Args:
        decoder: The decoder that verifies the drafts.
        small: The decoder of the smaller model. Its ``num_draft_tokens`` is the number of drafts
            per row. Its ``max_batch_size`` and ``max_length`` must be at least those of
            ``decoder``. Its vocabulary may have up to 511 tokens fewer than that of ``decoder``:
            models pad their vocabularies with unused tokens.

    Raises:
        ConfigError: ``small`` has too small a ``max_batch_size``, ``max_length`` or vocabulary, no
            ``num_draft_tokens``, an encoder, or rows already; or ``small`` is ``decoder`` itself;
            or an argument has the wrong type.
    """

    def __init__(self, decoder: GraphDecoder, small: GraphDecoder) -> None:
        check_instance(decoder, GraphDecoder, "decoder")
        hint = "Create GraphDecoder(small_model, ..., num_draft_tokens=3)."
        check_instance(small, GraphDecoder, "small", hint)
        for name in ("max_batch_size", "max_length"):
            given, least = getattr(small, name), getattr(decoder, name)
            if given < least:
                raise ConfigError(
                    f"small.{name}",
                    given,
                    f"at least {least} (the decoder's {name})",
                    f"Create GraphDecoder(small_model, {name}={least}, ...).",
                )
        if small.vocabulary <= decoder.vocabulary - _MOST_PADDING:
            raise ConfigError(
                "small.vocabulary", small.vocabulary,
                f"at least {decoder.vocabulary - _MOST_PADDING + 1}",
                f"The decoder's vocabulary has {decoder.vocabulary} tokens. Use a model with the "
                "same tokenizer.",
            )  # fmt: skip
        if not small.num_draft_tokens:
            raise ConfigError("small.num_draft_tokens", 0, "at least 1", hint)
        if small.cache.has_sources:
            raise ConfigError(
                "small", type(small.model).__name__, "a decoder of a model without an encoder",
                "Use a decoder-only model, or PromptLookup(decoder) instead of DraftModel.",
            )  # fmt: skip
        if small is decoder:
            allowed = "a GraphDecoder other than the decoder that verifies drafts"
            raise ConfigError("small", small, allowed, hint)
        if small.num_rows:
            raise ConfigError("small.num_rows", small.num_rows, "0", "Call small.reset() first.")
        self._decoder = small
        # Tokens that the smaller model lacks are assumed to be unused. At worst, replacing them
        # makes drafts wrong.
        self._last = small.vocabulary - 1 if small.vocabulary < decoder.vocabulary else None

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafts per row."""
        return self._decoder.num_draft_tokens

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Run prompts through the smaller model."""
        width = input_ids.shape[1]
        at = torch.arange(width, device=input_ids.device)
        begins = width - torch.tensor(lengths, device=input_ids.device)
        self._decoder.admit(self._known(input_ids), (at >= begins.unsqueeze(1)).long())

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return the smaller model's most likely tokens; fewer drafts at the end of its cache."""
        decoder, most = self._decoder, self.num_draft_tokens
        decoder.truncate(lengths)
        decoder.tokens = self._known(tokens)
        drafts = tokens.new_full((len(lengths), most), -1)
        steps = min(most + 1, decoder.max_length - max(lengths))
        for number in range(steps):
            found = decoder.step()
            if number < steps - 1:  # the last step only writes to the cache
                drafts[:, number] = found
        return drafts

    def drop(self, order: Sequence[int]) -> None:
        """Drop the rows that are not in ``order``."""
        remaining = set(order)
        gone = [row for row in range(self._decoder.num_rows) if row not in remaining]
        if self._decoder.drop(gone) != list(order):
            raise InputError(
                "order",
                "order must be the return value of drop() of the decoder that verifies drafts, got "
                f"{order}.",
            )

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens that the smaller model lacks to its last token."""
        return tokens if self._last is None else tokens.clamp(max=self._last)


class VerifiedRows:
    """A store that passes verified tokens to ``generate``, one per row and step.

    Rows advance at different rates. Tokens of faster rows are stored until slower rows also have a
    token. When the slot of a row is full, the row leaves the decoder.

    Args:
        loop: The decoder, whose steps return one or more tokens per row.
    """

    def __init__(self, loop: SpeculativeDecoder) -> None:
        self._loop, self._decoder = loop, loop.decoder
        self.model = self._decoder.model
        self.tokens: torch.Tensor = self._decoder.tokens
        self._stores: list[deque[int]] = []
        # For each row of the decoder, the row in the output.
        self._rows: list[int] = []

    @property
    def num_rows(self) -> int:
        """Number of live sequences."""
        return len(self._stores) or self._loop.num_rows

    def check_fits(self, rows: int, longest: int) -> None:
        """Raise DescriptorError if the rows do not fit into the decoder."""
        self._decoder.check_fits(rows, longest)

    def bucket(self, num_rows: int) -> int:
        """Return the decoder's bucket for ``num_rows``."""
        return self._decoder.bucket(num_rows)

    def admit(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, **source: Any
    ) -> torch.Tensor:
        """Run prompts and append a row for each; see ``GraphDecoder.admit``."""
        logits = self._loop.admit(input_ids, attention_mask, **source)
        self._rows += range(len(self._stores), len(self._stores) + len(input_ids))
        self._stores += [deque() for _ in input_ids]
        self.tokens = self._decoder.tokens
        return logits

    def step(self) -> torch.Tensor:
        """Return the next token of each row (rows,), from the store or a step."""
        decoder = self._decoder
        while not all(self._stores):
            full = [row for row, one in enumerate(decoder.row_lengths) if one >= decoder.max_length]
            if full:
                self._leave(full)
            for row, tokens in zip(self._rows, self._loop.step(), strict=True):
                self._stores[row].extend(tokens)
        return torch.tensor([one.popleft() for one in self._stores], device=decoder.device)

    def drop(self, rows: Iterable[int]) -> list[int]:
        """Drop rows, and return the previous index of each remaining row."""
        gone = set(rows)
        order = [row for row in range(len(self._stores)) if row not in gone]
        self._leave(at for at, row in enumerate(self._rows) if row in gone)
        places = {row: place for place, row in enumerate(order)}
        self._rows = [places[row] for row in self._rows]
        self._stores = [self._stores[row] for row in order]
        return order

    def reset(self) -> None:
        """Drop all rows."""
        self._loop.reset()
        self._rows, self._stores = [], []

    def _leave(self, rows: Iterable[int]) -> None:
        self._rows = [self._rows[row] for row in self._loop.drop(rows)]
