"""Speculative decoding: one step of the model verifies drafts of the next tokens.

    decoder = GraphDecoder(model, max_batch_size=32, max_length=1024, num_draft_tokens=3)
    speculative = SpeculativeDecoder(decoder, PromptLookup(decoder))
    tokens = speculative.generate(**inputs, max_new_tokens=100, do_sample=False)

``SpeculativeDecoder`` has ``generate``, and for a server's loop ``admit``, ``step`` and ``drop`` as
the decoder, but a step returns one token per row plus one for each accepted draft. A ``Drafter``
supplies the drafts: ``PromptLookup``, ``DraftModel`` or a user-defined one.

Tokens are those of greedy decoding, whatever the drafts are. Sampling is not supported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from dispatchkit.errors import ConfigError, InputError
from dispatchkit.execute import GraphRunner, StaticInput, StepState
from dispatchkit.keys import check_count
from dispatchkit.options import RunnerOptions

from dispatchkit_transformers.decoder import GraphDecoder
from dispatchkit_transformers.generation import call_generate, generate

# Models round the size of their vocabulary up, by less than this many tokens that no tokenizer has.
_MOST_PADDING = 512


class Drafter(Protocol):
    """Propose tokens that may follow, for rows that are admitted and dropped with a decoder's.

    A draft is a guess: a wrong one costs its part of a step, and changes no token.
    """

    @property
    def num_tokens(self) -> int:
        """Number of drafts for each row."""
        ...

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Append rows for prompts (B, T), padded on the left; ``lengths`` are without padding."""
        ...

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return drafts (rows, ``num_tokens``), on the device; below 0 for no draft.

        Earlier proposals were accepted as far as the positions have advanced, except for the last
        token, which is passed.

        Args:
            tokens: The current token of each row (rows,), on the device.
            positions: Its position (rows,), on the device: the tokens before it are known.
            lengths: The same positions, on the host.
        """
        ...

    def drop(self, order: Sequence[int]) -> None:
        """Drop rows; ``order`` has the previous index of each remaining row."""
        ...


class SpeculativeDecoder:
    """Decode rows with steps that verify drafts.

    Args:
        decoder: Verifies drafts; created with ``num_draft_tokens``.
        drafter: Proposes drafts.

    Raises:
        ConfigError: The drafter proposes more than the decoder verifies.

    Thread safety: one thread at a time. While there are rows, do not admit, step or drop rows
    of the decoder directly.
    """

    def __init__(self, decoder: GraphDecoder, drafter: Drafter) -> None:
        if not 1 <= drafter.num_tokens <= decoder.num_draft_tokens:
            raise ConfigError(
                "drafter.num_tokens",
                drafter.num_tokens,
                f"from 1 to the decoder's num_draft_tokens ({decoder.num_draft_tokens})",
                f"GraphDecoder(..., num_draft_tokens={drafter.num_tokens}).",
            )
        if decoder.num_rows:
            hint = "Call decoder.reset() first."
            raise ConfigError("decoder", f"{decoder.num_rows} rows", "without rows", hint)
        self.decoder, self.drafter = decoder, drafter
        self._lengths: tuple[int, ...] = ()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model's own ``generate`` does, with the same arguments and result.

        Raises:
            ConfigError: Tokens are sampled, or otherwise not always the most likely ones.
            DescriptorError: The batch is above the limit, or the cache is too short.
        """
        return call_generate(self.decoder.model, self, *args, **kwargs)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        **prepared: Any,
    ) -> Any:
        """Decode what ``generate`` has prepared, as the library's ``custom_generate``."""
        return generate(VerifiedRows(self), model, input_ids, **prepared)

    @property
    def num_rows(self) -> int:
        """Number of live sequences."""
        return self.decoder.num_rows

    def admit(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **source: Any
    ) -> torch.Tensor:
        """Run prompts and give each a row, as the decoder's ``admit``."""
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
        """Return the next tokens of each row: one, plus one for each accepted draft.

        Raises:
            DescriptorError: A row is at the end of the cache, or there are no rows.
            InputError: The rows differ from those that the last call here left.
        """
        decoder = self.decoder
        if decoder.row_lengths != self._lengths:
            raise InputError(
                "rows",
                f"rows must have the lengths that the last step left, {self._lengths}, got "
                f"{decoder.row_lengths}. Call admit, step and drop of the SpeculativeDecoder, "
                "not those of its decoder.",
            )
        decoder.check_has_rows()
        drafts = self.drafter.propose(decoder.tokens, decoder.positions, self._lengths)
        said = decoder.verify(drafts)
        self._lengths = decoder.row_lengths
        return said

    def drop(self, rows: Iterable[int]) -> list[int]:
        """Drop rows; return the previous index of each remaining row, as the decoder's ``drop``."""
        order = self.decoder.drop(rows)
        self.drafter.drop(order)
        self._lengths = self.decoder.row_lengths
        return order

    def reset(self) -> None:
        """Drop all rows."""
        self.drop(range(self.num_rows))


class PromptLookup:
    """Drafts from the row's own tokens: what followed an earlier occurrence of its last tokens.

    It compares on the device, for all rows at once, in a small separate graph: the tokens are there
    when a step ends. The host would have to wait for them before every step, and its time would
    grow with the number of rows while the device is idle.

    Args:
        decoder: The decoder whose rows get drafts.
        num_tokens: Number of drafts for each row; the decoder's ``num_draft_tokens`` by default.
        max_ngram: The most tokens to compare. The occurrence with the most equal tokens is used,
            among several the latest; if the row ends before there are enough drafts, what follows
            the occurrence is repeated.

    Attributes:
        runner: The runner of the graphs.
    """

    def __init__(
        self, decoder: GraphDecoder, num_tokens: int | None = None, *, max_ngram: int = 3
    ) -> None:
        if num_tokens is None:
            decoder.check_has_drafts()
            num_tokens = decoder.num_draft_tokens
        self.num_tokens = check_count(num_tokens, "num_tokens")
        self._max_ngram = check_count(max_ngram, "max_ngram")
        rows, length, device = decoder.max_batch_size, decoder.max_length, decoder.device
        with torch.inference_mode(False):
            # Rows of padding write to the last place, which is never compared.
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
        """Return what followed the last tokens of each row; none if they did not occur before."""
        drafts: torch.Tensor = self.runner(tokens=tokens, positions=positions)
        return drafts

    def drop(self, order: Sequence[int]) -> None:
        """Keep the tokens of the rows that remain."""
        if list(order) != list(range(len(order))):
            index = torch.tensor(order, dtype=torch.int64, device=self._tokens.device)
            self._tokens[: len(order)] = self._tokens.index_select(0, index)
        self._num_rows = len(order)

    def _step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        known, last = self._tokens[: tokens.shape[0]], positions.unsqueeze(1)
        most = known.shape[1] - 1
        known.scatter_(1, last, tokens.unsqueeze(1))
        # The number of tokens equal to the row's last ones, up to each place before its own.
        is_equal = self._ahead < last
        number = torch.zeros_like(known)
        for back in range(self._max_ngram):
            before = torch.nn.functional.pad(known, (back, 0), value=-1)[:, : most + 1]
            is_equal = is_equal & (before == known.gather(1, (last - back).clamp(min=0)))
            number = number + is_equal
        best, place = (number * (most + 1) + self._ahead).max(1, keepdim=True)
        ahead = self._ahead[: self.num_tokens]
        following = place + 1 + ahead % (last - place).clamp(min=1)
        drafts = known.gather(1, following.clamp(max=most))
        drafts = drafts.masked_fill(best <= most, -1)
        # Written as if they were accepted: the next tokens overwrite those that are not.
        known.scatter_(1, (last + 1 + ahead).clamp(max=most), drafts)
        return drafts


class DraftModel:
    """Drafts from a smaller model with the same tokenizer as the model that verifies them.

    It runs one step per draft, and one more so that its cache has every token that may be accepted.

    Args:
        decoder: Verifies the drafts.
        small: The decoder of the smaller model, with at least as many rows and positions, created
            with ``num_draft_tokens``: the number of drafts for each row. The sizes of the
            vocabularies may differ by their padding.

    Raises:
        ConfigError: The smaller one has fewer rows, positions or (by more than padding) tokens, no
            ``num_draft_tokens``, an encoder, or rows already.
    """

    def __init__(self, decoder: GraphDecoder, small: GraphDecoder) -> None:
        for name in ("max_batch_size", "max_length"):
            given, least = getattr(small, name), getattr(decoder, name)
            if given < least:
                raise ConfigError(f"small.{name}", given, f"at least the decoder's, {least}")
        if small.vocabulary <= decoder.vocabulary - _MOST_PADDING:
            raise ConfigError(
                "vocabulary of small", small.vocabulary,
                f"at least about that of the decoder, {decoder.vocabulary}",
                "Choose a model with the same tokenizer.",
            )  # fmt: skip
        if not small.num_draft_tokens:
            raise ConfigError(
                "small.num_draft_tokens", 0, "at least 1: the number of drafts per row",
                "GraphDecoder(small_model, ..., num_draft_tokens=3).",
            )  # fmt: skip
        if small.cache.has_sources:
            raise ConfigError("small", type(small.model).__name__, "a model without an encoder")
        if small is decoder or small.num_rows:
            given = "decoder itself" if small is decoder else f"{small.num_rows} rows"
            raise ConfigError("small", given, "a decoder of its own, without rows")
        self._decoder = small
        # Tokens that only the larger model has are not of the tokenizer; a draft after one is a
        # guess like any other.
        self._last = small.vocabulary - 1 if small.vocabulary < decoder.vocabulary else None

    @property
    def num_tokens(self) -> int:
        """Number of drafts for each row."""
        return self._decoder.num_draft_tokens

    def admit(self, input_ids: torch.Tensor, lengths: Sequence[int]) -> None:
        """Run prompts."""
        width = input_ids.shape[1]
        at = torch.arange(width, device=input_ids.device)
        begins = width - torch.tensor(lengths, device=input_ids.device)
        self._decoder.admit(self._known(input_ids), (at >= begins.unsqueeze(1)).long())

    def propose(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return the smaller model's most likely tokens, fewer at the end of its cache."""
        decoder, most = self._decoder, self.num_tokens
        decoder.truncate(lengths)
        decoder.tokens = self._known(tokens)
        drafts = tokens.new_full((len(lengths), most), -1)
        steps = min(most + 1, decoder.max_length - max(lengths))
        for number in range(steps):
            found = decoder.step()
            if number < steps - 1:  # the last step only fills the cache
                drafts[:, number] = found
        return drafts

    def drop(self, order: Sequence[int]) -> None:
        """Drop the rows that do not remain."""
        remaining = set(order)
        gone = [row for row in range(self._decoder.num_rows) if row not in remaining]
        if self._decoder.drop(gone) != list(order):
            raise InputError("order", f"order must be that of the decoder's drop, got {order}.")

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens with those that the smaller model lacks replaced by its last one."""
        return tokens if self._last is None else tokens.clamp(max=self._last)


class VerifiedRows:
    """Return verified tokens to ``generate`` one at a time for each row.

    Rows advance at their own pace. A row whose drafts are correct more often has tokens in store
    when another needs a step, and leaves the decoder once its cache is full.

    Args:
        loop: Steps that return several tokens.
    """

    def __init__(self, loop: SpeculativeDecoder) -> None:
        self._loop, self._decoder = loop, loop.decoder
        self.model = self._decoder.model
        self.tokens: torch.Tensor = self._decoder.tokens
        self._stores: list[deque[int]] = []
        # The row of each sequence that is still in the decoder.
        self._rows: list[int] = []

    @property
    def num_rows(self) -> int:
        """Number of live sequences."""
        return len(self._stores) or self._loop.num_rows

    def check_fits(self, rows: int, longest: int) -> None:
        """Check as the decoder does."""
        self._decoder.check_fits(rows, longest)

    def bucket(self, num_rows: int) -> int:
        """Return the decoder's bucket."""
        return self._decoder.bucket(num_rows)

    def admit(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, **source: Any
    ) -> torch.Tensor:
        """Admit rows as the decoder does."""
        logits = self._loop.admit(input_ids, attention_mask, **source)
        self._rows += range(len(self._stores), len(self._stores) + len(input_ids))
        self._stores += [deque() for _ in input_ids]
        self.tokens = self._decoder.tokens
        return logits

    def step(self) -> torch.Tensor:
        """Return each row's most likely next token (rows,)."""
        decoder = self._decoder
        while not all(self._stores):
            full = [row for row, one in enumerate(decoder.row_lengths) if one >= decoder.max_length]
            if full:
                self._leave(full)
            for row, said in zip(self._rows, self._loop.step(), strict=True):
                self._stores[row].extend(said)
        return torch.tensor([one.popleft() for one in self._stores], device=decoder.device)

    def drop(self, rows: Iterable[int]) -> list[int]:
        """Drop rows; return the previous index of each remaining row."""
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
