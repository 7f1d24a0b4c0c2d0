"""Decode with a transformers model, using graphs and one static cache for all batch sizes.

    decoder = GraphDecoder(model, max_batch_size=32, max_length=1024)
    tokens = decoder.generate(**inputs, max_new_tokens=100)

``generate`` takes the arguments of the model's own ``generate`` and returns the same tokens. The
decoder calls the model's ``generate`` and passes itself as ``custom_generate``. The loop of a
server calls ``admit``, ``step`` and ``drop``. To verify drafts, the loop calls ``verify`` instead
of ``step``; see ``speculation.py``.

Requires transformers 4.57.1 to 5.x. Each step of a ``GraphRunner`` computes one token of every
sequence. The runner has a graph for each batch size and cache length. Prompts run eager, or through
graphs if ``prompt_sizes`` is set.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from dispatchkit.dispatch import Policy
from dispatchkit.errors import (
    BackendUnavailableError,
    ConfigError,
    DescriptorError,
    InputError,
    UnknownNameError,
    counted,
)
from dispatchkit.execute import GraphRunner, RunnerStats, StaticInput, StepState
from dispatchkit.keys import Axis, check_count, check_instance, whole_number
from dispatchkit.options import DERIVED, RunnerOptions, refuse_moved, with_settings
from dispatchkit.registry import KeyState

try:
    from dispatchkit_transformers.decode_attention import DECODE_ATTENTION
    from dispatchkit_transformers.decode_step import (
        check_lengths,
        compile_for_any_size,
        decode_step,
        sequence_too_long,
        verify_step,
    )
    from dispatchkit_transformers.generation import (
        call_generate,
        check_tokens,
        generate,
        left_paddings,
    )
    from dispatchkit_transformers.prompts import (
        NO_PROMPT_SIZES,
        EagerPrompts,
        PromptRunner,
        check_prompt_sizes,
        prompt_runner,
    )
    from dispatchkit_transformers.slot_cache import SlotCache
    from dispatchkit_transformers.static_models import (
        Probe,
        Source,
        in_training_mode,
        probe,
        supports_drafts,
    )
except ImportError as _error:
    raise BackendUnavailableError(
        "GraphDecoder requires transformers 4.57.1 to 5.x, which cannot be imported: "
        f"{_error}. Run: pip install 'dispatchkit[transformers]'."
    ) from _error

__all__ = ["DECODE_ATTENTION", "DecoderStats", "GraphDecoder"]

#: Name of the input with drafts, and of the verifying steps in ``stats().graphs``.
DRAFTS = "drafts"


@attrs.frozen
class DecoderStats:
    """Statistics of a decoder.

    Attributes:
        steps: Number of decoding steps.
        admitted: Number of admitted sequences.
        dropped: Number of dropped sequences.
        moved: Number of times that a sequence was moved to another slot, to keep the batch
            contiguous.
        moved_bytes: Bytes copied on the device by these moves.
        graphs: Statistics of each runner in use, by name: ``tokens`` and ``logits`` for steps that
            return these, ``drafts`` for steps that verify drafts, ``prompts`` for prompt chunks.
        prompts: Number of prompts that ran through graphs (``graphs``), and number of eager prompts
            for each reason.
        drafted: Number of verified drafts.
        accepted: Number of accepted drafts.
    """

    steps: int
    admitted: int
    dropped: int
    moved: int
    moved_bytes: int
    graphs: dict[str, RunnerStats]
    prompts: dict[str, int]
    drafted: int
    accepted: int


class GraphDecoder:
    """A decoder that runs many sequences as one batch, one token per step.

    Each batch is padded to a captured size. The live sequences are rows 0 to ``num_rows`` - 1, in
    the first slots of the cache.

    Args:
        model: A transformers model that can generate text, in evaluation mode.
        max_batch_size: Maximum number of live sequences.
        max_length: Maximum length of a sequence in tokens, including the prompt.
        max_source_length: Maximum length of the encoder output. Required for encoder-decoder
            models, not allowed for others.
        sizes: Batch sizes to capture; derived from ``max_batch_size`` by default.
        lengths: Cache lengths to capture graphs for; the largest must be ``max_length``. A step
            reads the smallest length that covers all of its sequences. By default, the lengths are
            the powers of two from 128 up to ``max_length``, and ``max_length`` itself.
        prompt_sizes: Capture sizes of prompt chunks, in tokens. Prompts that are admitted
            together run through graphs only if their total number of tokens, when padded to the
            longest prompt, is at most the largest size. Other prompts run eager, as do all prompts
            by default.
        num_draft_tokens: Maximum number of drafts per row for ``verify``. Layers with a sliding
            window store this number of additional positions.
        compile: True compiles the whole step with ``torch.compile``, including cache writes and
            the choice of tokens, and captures the compiled kernels. A function receives the step of
            each cache length and returns its replacement.
        forward: Function that replaces the model in a step, such as ``torch.compile(model)``.
        policy: The policy of the runners, or its name.
        state: State, besides the cache, that steps change; see ``GraphRunner``.
        options: ``RunnerOptions`` of the runners.
        backend: ``auto``, a backend or its name.
        lazy: Whether to capture each graph when a step first needs it. If False, only
            ``capture()`` captures graphs.
        settings: ``lanes`` and ``mode``, see ``GraphRunner``.

    Attributes:
        model: The transformers model that decodes.
        cache: The memory of all sequences.
        num_rows: Number of live sequences.

    Raises:
        ConfigError: The model cannot use a static cache, or a setting is invalid.
        UnknownNameError: No setting, policy or backend has the given name.

    Thread safety: one thread at a time.
    """

    max_batch_size: int
    max_length: int

    def __init__(
        self,
        model: Any,
        *,
        max_batch_size: int,
        max_length: int,
        max_source_length: int | None = None,
        sizes: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        prompt_sizes: Sequence[int] = (),
        num_draft_tokens: int = 0,
        compile: bool | Callable[[Callable[..., Any]], Callable[..., Any]] = False,  # noqa: A002
        forward: Callable[..., Any] | None = None,
        policy: str | Policy | None = None,
        backend: Any = "auto",
        lazy: bool = True,
        state: StepState | Iterable[torch.Tensor] = (),
        options: RunnerOptions | None = None,
        **settings: Any,
    ) -> None:
        _check_settings(settings)
        max_batch_size = check_count(max_batch_size, "max_batch_size")
        max_length = check_count(max_length, "max_length")
        self.model = model
        self._probe: Probe = probe(model, max_length)
        self._source_length = self._check_source_length(max_source_length)
        self._forward = model if forward is None else forward
        self.max_batch_size, self.max_length = max_batch_size, max_length
        self.lengths: tuple[int, ...] = check_lengths(lengths, max_length)
        self.num_draft_tokens: int = check_count(num_draft_tokens, "num_draft_tokens", minimum=0)
        self.cache: SlotCache = self._probe.cache(
            max_batch_size, max_length, self._source_length, self.num_draft_tokens
        )
        self._check_drafts_fit()
        self.device: torch.device = self._probe.device
        if not isinstance(compile, bool) and not callable(compile):
            raise ConfigError(
                "compile", compile, "True, False or a function that receives the step"
            )
        if compile and self._probe.embeddings:
            raise ConfigError(
                "compile", compile, "False for a model that does not accept position_ids",
                "Its position embeddings need a hook that cannot be compiled.",
            )  # fmt: skip
        self._compile = compile_for_any_size if compile is True else compile or None
        if forward is not None and not callable(forward):
            raise ConfigError(
                "forward", forward, "a function or None", "With None, steps call the model."
            )
        options = RunnerOptions() if options is None else options
        check_instance(options, RunnerOptions, "options")
        if backend == "auto" and options.device is None:
            options = attrs.evolve(options, device=self.device)
        if options.buffers.output_batch_dims == DERIVED:
            options = with_settings(options, {"output_batch_dims": 0})
        # Skip the proof of rows: kernels for few rows round differently than kernels for many rows.
        # Padding rows use only the sink, as tests of the cache verify.
        options = with_settings(options, {"prove_rows": False})
        declared = StepState.of(state)
        self._settings = {
            "sizes": sizes,
            "max_num_tokens": max_batch_size,
            "policy": policy,
            "backend": backend,
            "state": _merge_states(declared, self.cache.slots.step_state),
            "lazy": lazy,
            "mode": "FULL",
            "options": options,
            **settings,
        }
        # One runner per kind of result, so that greedy steps do not write logits.
        self._runners: dict[str, GraphRunner] = {}
        chunk_state = self.cache.chunk_state(runs_twice=bool(options.check))
        self._prompts: PromptRunner | EagerPrompts = prompt_runner(
            self._probe,
            self.cache,
            self.lengths,
            check_prompt_sizes(prompt_sizes, max_length),
            {**self._settings, "state": _merge_states(declared, chunk_state)},
        )
        self._prompt_counts: Counter[str] = Counter()
        self._lengths: list[int] = []
        # For each row, the end of the positions that `verify` wrote or `truncate` discarded. After
        # a prompt, it is the length plus `max_discarded`, so that no position of the prompt can be
        # discarded.
        self._ends: list[int] = []
        # Whether a step was interrupted and left tokens and cache in an unknown state.
        self._is_amid_step = False
        self._tokens = self._no_rows()
        self._positions = self._no_rows()
        self._steps = self._admitted = self._dropped = self._moved = self._moved_bytes = 0
        self._drafted = self._accepted = 0
        self.runner()  # validates the settings

    # -- one call -----------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate like the model's own ``generate``, with the same arguments and result.

        Raises:
            DescriptorError: The batch exceeds ``max_batch_size``, or a sequence exceeds
                ``max_length``.
            ConfigError: An option, such as beam search, is not supported.
        """
        return call_generate(self.model, self, *args, **kwargs)

    def __call__(self, model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Run the decoding loop; transformers calls this object as ``custom_generate``."""
        return generate(self, model, input_ids, **kwargs)

    # -- a server's loop ----------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Number of live sequences."""
        return len(self._lengths)

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self._probe.vocabulary

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Number of used cache positions of each row."""
        return tuple(self._lengths)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of ``tokens`` (rows,), on the device."""
        return self._positions

    @property
    def tokens(self) -> torch.Tensor:
        """Current token of each row (rows,), input of the next step; assignable."""
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: torch.Tensor) -> None:
        shape = getattr(tokens, "shape", None)
        got = type(tokens).__name__ if shape is None else tuple(shape)
        if got != (self.num_rows,):
            raise InputError(
                "tokens", f"tokens must be a tensor of shape ({self.num_rows},), got {got}."
            )
        self._tokens = tokens

    def admit(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        encoder_outputs: Any = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run prompts and append a row for each of them.

        The current token of a new row is the most likely token after its prompt, unless ``tokens``
        is assigned.

        Args:
            input_ids: Prompts (B, T), padded on the left.
            attention_mask: Mask (B, T), 0 at padding.
            encoder_outputs: Output of the model's encoder, for encoder-decoder models.
                ``input_ids`` are then prompts of the decoder.
            encoder_attention_mask: Mask of the encoder output (B, S), 0 at padding.

        Returns:
            Logits of the first new token (B, V), float32.

        Raises:
            DescriptorError: There are too few free slots, or a prompt is too long.
            InputError: Padding is not on the left, a prompt is empty, a token is outside the
                vocabulary, or an earlier step was interrupted. Also raised if the encoder output is
                missing, has the wrong shape, or is given for a model without an encoder.
            ConfigError: The model is in training mode, or was moved or converted after the decoder
                was created.
        """
        self._check_ended()
        source = self._source(input_ids, encoder_outputs, encoder_attention_mask)
        paddings = left_paddings(input_ids, attention_mask)
        check_tokens(input_ids, self._probe.vocabulary)
        rows, width = input_ids.shape
        self.check_fits(rows, max((width - padding for padding in paddings), default=1))
        self._check_model()
        lengths = [width - padding for padding in paddings]
        how, run = self._prompts.choose(rows, max(lengths, default=0))
        with torch.no_grad(), self.cache.joining(rows) as start:
            if run is not None:
                logits = run(start, input_ids, lengths)
            else:
                seen = self._probe.prompt(
                    input_ids, attention_mask if any(paddings) else None, source
                )
                logits = seen.logits
                self.cache.fill(start, seen.layers, paddings, width)
                if source is not None:
                    self.cache.fill_sources(start, seen.cross, source.mask)
            at = torch.tensor(lengths, dtype=torch.int64, device=self.device)
            self._tokens = torch.cat((self._tokens, logits.argmax(-1)))
            self._positions = torch.cat((self._positions, at))
        self._lengths += lengths
        # In layers with windows, no position of a prompt can be discarded: after an eager prompt, a
        # window contains only the positions that the next token attends to.
        back = self.cache.max_discarded or 0
        self._ends += [length + back for length in lengths]
        self._admitted += rows
        self._prompt_counts[how] += rows
        return logits

    def step(self) -> torch.Tensor:
        """Run the current token of each row, and return the most likely next tokens (rows,).

        The result is valid until the next step, which uses it as input.

        Raises:
            DescriptorError: A row is at the end of the cache, or there are no rows.
            InputError: An earlier step was interrupted.
        """
        self._tokens, self._positions = self._run("tokens")
        self._end_step([one + 1 for one in self._lengths])
        return self._tokens

    def logits(self) -> torch.Tensor:
        """Run the current token of each row, and return the next logits (rows, V), float32.

        Assign ``tokens`` before the next step. The result is valid until that step.

        Raises:
            DescriptorError: A row is at the end of the cache, or there are no rows.
            InputError: An earlier step was interrupted.
        """
        logits: torch.Tensor
        logits, self._positions = self._run("logits")
        self._end_step([one + 1 for one in self._lengths])
        return logits

    def verify(self, drafts: torch.Tensor) -> list[list[int]]:
        """Run the current token and the drafts of each row, and return the next tokens.

        Accepts the drafts before the first one that is not the most likely token. The result is
        therefore the same as that of repeated ``step`` calls. Waits for the device.

        Args:
            drafts: Drafts of the tokens after each row's current token (rows, N), N from 1 to
                ``num_draft_tokens``. The drafts of a row end at the first negative value.

        Returns:
            For each row, the accepted drafts and one more token (1 to N + 1 tokens). The last token
            is the row's new current token.

        Raises:
            ConfigError: The decoder was created without ``num_draft_tokens``.
            InputError: The shape or dtype of the drafts is wrong, or an earlier step was
                interrupted.
            DescriptorError: A row is at the end of the cache, or there are no rows.
        """
        self._check_drafts(drafts)
        most = self.num_draft_tokens
        if drafts.shape[1] < most:
            drafts = torch.nn.functional.pad(drafts, (0, most - drafts.shape[1]), value=-1)
        starts = self._lengths
        verified, self._tokens, self._positions = self._run(DRAFTS, most, drafts=drafts)
        self._ends = [max(end, at + 1 + most) for end, at in zip(self._ends, starts, strict=True)]
        rows: list[list[int]] = verified.tolist()
        chosen = [row[: row[-2] + 1] for row in rows]
        self._end_step([at + len(one) for at, one in zip(starts, chosen, strict=True)])
        self._drafted += sum(row[-1] for row in rows)
        self._accepted += sum(row[-2] for row in rows)
        return chosen

    def truncate(self, lengths: Sequence[int]) -> None:
        """Discard the last positions of rows; assign ``tokens`` before the next step.

        After an interrupted step, rows can be truncated to their lengths before that step.

        Args:
            lengths: Number of positions that each row keeps, at least 1. If the model has sliding
                windows, at most ``num_draft_tokens`` + 1 positions can be discarded, and none of
                the prompt. If it has recurrent layers, no position can be discarded.

        Raises:
            DescriptorError: The number of lengths differs from the number of rows, a length exceeds
                the current length of its row, or more positions would be discarded than allowed.
            InputError: An earlier step of a model with recurrent layers was interrupted.
        """
        if len(lengths) != self.num_rows:
            raise DescriptorError(
                "lengths",
                list(lengths),
                f"a list of {counted(self.num_rows, 'length')} (one for each row)",
            )
        back = self.cache.max_discarded
        if back == 0:
            self._check_ended()
        written = 1 + self.num_draft_tokens if self._is_amid_step else 0
        ends = [max(end, now + written) for end, now in zip(self._ends, self._lengths, strict=True)]
        kept: list[int] = []
        for row, (length, now, end) in enumerate(zip(lengths, self._lengths, ends, strict=True)):
            least = 1 if back is None else max(1, end - back)
            number = whole_number(length)
            if number is None or not least <= number <= now:
                allowed = f"from {least} to {now}" if least < now else f"{now}"
                hint = ""
                if number is not None and 1 <= number < least:
                    hint = "The model cannot continue from an earlier position of this row."
                raise DescriptorError(f"length of row {row}", length, allowed, hint)
            kept.append(number)
        self._positions = torch.tensor(kept, dtype=torch.int64, device=self.device)
        self._ends, self._lengths, self._is_amid_step = ends, kept, False

    def drop(self, rows: Iterable[int]) -> list[int]:
        """Drop rows, and move the last rows to the freed slots.

        Returns:
            The previous index of each remaining row, in the new order.

        Raises:
            DescriptorError: ``rows`` is not iterable, or a row does not exist or is given twice.
        """
        if not isinstance(rows, Iterable):
            hint = "" if whole_number(rows) is None else f"For a single row, pass [{rows!r}]."
            raise DescriptorError("rows", rows, "a list of row indices", hint)
        hint = "For a mask, pass mask.nonzero().flatten()."
        gone: set[int] = set()
        for row in rows:
            number = whole_number(row)
            if number is None or not 0 <= number < self.num_rows:
                self.check_has_rows()
                allowed = f"at least 0 and less than {self.num_rows} (the number of live rows)"
                raise DescriptorError("row", row, allowed, hint)
            if number in gone:
                message = f"Row {number} is given more than once."
                raise DescriptorError("row", row, "given only once", hint, message=message)
            gone.add(number)
        order = list(range(self.num_rows - len(gone)))
        with torch.no_grad():
            moves = self.cache.leave(gone, self._lengths)
            for one in moves:
                order[one.target] = one.source
            if moves:
                index = torch.tensor(order, dtype=torch.int64, device=self.device)
                self._tokens = self._tokens.index_select(0, index)
                self._positions = self._positions.index_select(0, index)
            else:
                self._tokens = self._tokens[: len(order)]
                self._positions = self._positions[: len(order)]
        self._lengths = [self._lengths[row] for row in order]
        self._ends = [self._ends[row] for row in order]
        self._moved += len(moves)
        self._moved_bytes += sum(one.num_bytes for one in moves)
        self._dropped += len(gone)
        self._is_amid_step = self._is_amid_step and bool(order)
        return order

    def reset(self) -> None:
        """Drop all rows."""
        self.drop(range(self.num_rows))

    # -- graphs -------------------------------------------------------------------------

    def capture(self, *, logits: bool = False, drafts: bool = False, progress: bool = False) -> int:
        """Capture the graphs of all lengths and sizes, and return their number.

        This includes the graphs of prompts if ``prompt_sizes`` is set.

        Args:
            logits: Whether to capture ``logits()``, which sampling uses, instead of ``step()``.
            drafts: Whether to capture ``verify()`` instead of ``step()``.
            progress: Whether to show a progress bar on stderr.
        """
        runner = self.runner(logits=logits, drafts=drafts)
        num_graphs = runner.capture(progress=progress).num_graphs
        return num_graphs + self._prompts.capture(progress=progress)

    def runner(self, *, logits: bool = False, drafts: bool = False) -> GraphRunner:
        """Return the runner of ``step()``, created on first use.

        Args:
            logits: Whether to return the runner of ``logits()`` instead.
            drafts: Whether to return the runner of ``verify()`` instead.

        Raises:
            ConfigError: ``logits`` and ``drafts`` are both True; or ``drafts`` is True, but the
                decoder was created without ``num_draft_tokens``.
        """
        if logits and drafts:
            raise ConfigError(
                "logits",
                True,
                "False if drafts=True",
                "Pass only one of them; each has its own runner.",
            )
        if drafts:
            self.check_has_drafts()
        return self._runner(DRAFTS if drafts else "logits" if logits else "tokens")

    def prompt_runner(self) -> GraphRunner:
        """Return the runner for prompt chunks.

        Raises:
            ConfigError: All prompts run eager.
        """
        if isinstance(self._prompts, EagerPrompts):
            reason = self._prompts.reason
            hint = "The model does not support chunked prompts."
            if reason == NO_PROMPT_SIZES:
                hint = "Create GraphDecoder(..., prompt_sizes=...)."
            raise ConfigError(
                "prompt_sizes",
                reason,
                "set and supported by the model",
                hint,
                message="There is no runner for prompt chunks, because all prompts run eager "
                f"({reason}).",
            )
        return self._prompts.runner

    def invalidate(self) -> None:
        """Release all graphs. Required after replacing weights, but not after in-place updates."""
        for runner in (*self._runners.values(), *self._prompts.runners):
            runner.invalidate()

    def bucket(self, num_rows: int) -> int:
        """Return the smallest capture size that covers ``num_rows``; if there is none,
        ``num_rows``.
        """
        sizes = self.runner().config.sizes
        return next((size for size in sizes if size >= num_rows), num_rows)

    def stats(self) -> DecoderStats:
        """Return the statistics so far."""
        graphs = {gives: runner.stats() for gives, runner in self._runners.items()}
        for runner in self._prompts.runners:
            graphs["prompts"] = runner.stats()
        return DecoderStats(
            self._steps,
            self._admitted,
            self._dropped,
            self._moved,
            self._moved_bytes,
            graphs,
            dict(self._prompt_counts),
            self._drafted,
            self._accepted,
        )

    def __repr__(self) -> str:
        runners = [*self._runners.values(), *self._prompts.runners]
        states = [entry.state for one in runners for entry in one.registry.entries.values()]
        return (
            f"<GraphDecoder {type(self.model).__name__} on {self.runner().backend.name}, "
            f"{self.num_rows} of {self.max_batch_size} rows, "
            f"{states.count(KeyState.CAPTURED)} of {len(states)} keys captured>"
        )

    # -- internals ----------------------------------------------------------------------

    def _check_source_length(self, given: int | None) -> int:
        if not self._probe.cross:
            if given is not None:
                raise ConfigError(
                    "max_source_length", given, "omitted for a model without an encoder"
                )
            return 0
        if given is None:
            raise ConfigError(
                "max_source_length",
                None,
                "given for an encoder-decoder model, as the maximum length of the encoder output",
                "For Whisper, pass model.config.max_source_positions.",
            )
        return check_count(given, "max_source_length")

    def _source(
        self, input_ids: torch.Tensor, given: Any, mask: torch.Tensor | None
    ) -> Source | None:
        """Return the validated encoder output; None for decoder-only models."""
        if not self._probe.cross:
            if given is not None:
                raise InputError(
                    "encoder_outputs",
                    f"encoder_outputs must be omitted: {type(self.model).__name__} has no encoder.",
                )
            return None
        if given is None:
            raise InputError(
                "encoder_outputs",
                "encoder_outputs is required for an encoder-decoder model. Pass "
                "model.get_encoder()(**inputs).",
            )
        states: torch.Tensor = given[0]
        rows, length = states.shape[:2]
        least = self._source_length if self._probe.has_one_source_length else 1
        if rows != input_ids.shape[0] or not least <= length <= self._source_length:
            positions = counted(self._source_length, "position")
            if least < self._source_length:
                positions = f"{least} to {positions}"
            raise InputError(
                "encoder_outputs",
                f"encoder_outputs must have {counted(input_ids.shape[0], 'row')} and {positions} "
                f"(max_source_length), got shape {tuple(states.shape)}.",
            )
        if mask is None:
            mask = torch.ones(rows, length, dtype=torch.bool, device=states.device)
        if mask.shape != (rows, length):
            raise InputError(
                "encoder_attention_mask",
                f"encoder_attention_mask must have shape {(rows, length)}, the rows and positions "
                f"of encoder_outputs, got {tuple(mask.shape)}.",
            )
        return Source(states, mask.bool())

    def _runner(self, gives: str) -> GraphRunner:
        found = self._runners.get(gives)
        if found is None:
            parts = self._probe, self.cache, self.lengths, self._forward
            inputs = {
                "tokens": StaticInput((None,), "int64"),
                "positions": StaticInput((None,), "int64", fill=self.cache.sink),
            }
            step: Callable[..., Any]
            if gives == DRAFTS:
                number = self.num_draft_tokens
                inputs[DRAFTS] = StaticInput((None, number), "int64", fill=-1)
                step = verify_step(*parts, number, compile=self._compile)
            else:
                wants_logits = gives == "logits"
                step = decode_step(*parts, wants_logits=wants_logits, compile=self._compile)
            found = self._runners[gives] = GraphRunner(
                step, inputs, axes=[Axis("length", self.lengths)], outputs="view", **self._settings
            )
        return found

    def _check_ended(self) -> None:
        if self._is_amid_step:
            instead = ""
            if self.cache.max_discarded != 0:
                instead = (
                    " Alternatively, call truncate(decoder.row_lengths) and assign the tokens from "
                    "before the step to decoder.tokens."
                )
            raise InputError(
                "rows",
                f"A step with {counted(self.num_rows, 'row')} was interrupted or raised an error, "
                f"and may be incomplete. Call reset() and admit the rows again.{instead}",
            )

    def _end_step(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._steps += 1
        self._is_amid_step = False

    def _run(self, gives: str, more: int = 0, **given: Any) -> Any:
        self._check_ended()
        longest = max(self._lengths, default=self.max_length) + 1
        if longest > self.max_length:
            self.check_has_rows()
            raise sequence_too_long(longest, self.max_length)
        runner = self._runners.get(gives) or self._runner(gives)
        length = min(longest + more, self.max_length)
        self._is_amid_step = True
        try:
            return runner(tokens=self._tokens, positions=self._positions, length=length, **given)
        except (DescriptorError, InputError):  # nothing has run
            self._is_amid_step = False
            raise

    def _check_drafts_fit(self) -> None:
        if not self.num_draft_tokens:
            return
        if self.num_draft_tokens >= self.max_length:
            raise ConfigError(
                "num_draft_tokens", self.num_draft_tokens,
                f"less than max_length ({self.max_length})", "Typical values are 2 to 8.",
            )  # fmt: skip
        name = type(self.model).__name__
        if self.cache.states:
            raise ConfigError(
                "num_draft_tokens", self.num_draft_tokens,
                f"0 for {name}",
                "Its recurrent layers cannot undo a rejected draft.",
            )  # fmt: skip
        if not supports_drafts(self._probe, self.max_length):
            raise ConfigError(
                "num_draft_tokens", self.num_draft_tokens,
                f"0 for {name}",
                "Its steps with several tokens per row return different logits than prompts do.",
            )  # fmt: skip

    def check_has_rows(self) -> None:
        """Raise DescriptorError if there are no rows."""
        if not self._lengths:
            raise DescriptorError(
                "rows", 0, "at least 1", "Call admit() first.", message="The decoder has no rows."
            )

    def check_has_drafts(self) -> None:
        """Raise ConfigError if the decoder was created without ``num_draft_tokens``."""
        if not self.num_draft_tokens:
            raise ConfigError(
                "num_draft_tokens", 0, "at least 1 to verify drafts",
                "Create GraphDecoder(..., num_draft_tokens=3).",
            )  # fmt: skip

    def _check_drafts(self, drafts: Any) -> None:
        self.check_has_drafts()
        if not isinstance(drafts, torch.Tensor) or drafts.dtype is not torch.int64:
            got = getattr(drafts, "dtype", type(drafts).__name__)
            raise InputError(
                DRAFTS, f"drafts must be an int64 tensor of tokens (rows, N), got {got}."
            )
        self.check_has_rows()
        rows, most = self.num_rows, self.num_draft_tokens
        if drafts.dim() != 2 or len(drafts) != rows or not 1 <= drafts.shape[1] <= most:
            raise InputError(
                DRAFTS,
                f"drafts must have shape ({rows}, N) with N from 1 to num_draft_tokens ({most}), "
                f"got {tuple(drafts.shape)}. For missing drafts, pass -1.",
            )

    def check_fits(self, rows: int, longest: int) -> None:
        """Raise DescriptorError if ``rows`` more rows of length ``longest`` do not fit."""
        if self.num_rows + rows > self.max_batch_size:
            drop = ", drop finished rows first," if self.num_rows else ""
            raise DescriptorError(
                "batch size",
                self.num_rows + rows,
                f"at most max_batch_size ({self.max_batch_size})",
                f"Pass fewer sequences at a time{drop} or create the GraphDecoder with a larger "
                "max_batch_size. Its cache uses "
                f"{self.cache.num_bytes // self.max_batch_size:,} bytes per sequence.",
            )
        if longest > self.max_length:
            raise sequence_too_long(longest, self.max_length)

    def _check_model(self) -> None:
        if self.model.training:
            raise in_training_mode()
        now = next(self.model.parameters())
        if now.device != self.device or now.dtype != self._probe.dtype:
            raise ConfigError(
                "model",
                f"{now.dtype} on {now.device}",
                f"{self._probe.dtype} on {self.device}",
                "Create a new GraphDecoder after moving or converting the model.",
                message=f"The model is now {now.dtype} on {now.device}, but was "
                f"{self._probe.dtype} on {self.device} when the GraphDecoder was created.",
            )

    def _no_rows(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.int64, device=self.device)


#: Settings of the runners that are not parameters of the decoder.
_RUNNER_SETTINGS = ("lanes", "mode")


def _merge_states(declared: StepState, own: StepState) -> StepState:
    """Return the declared state together with the decoder's own state."""
    return attrs.evolve(
        declared,
        tensors=(*declared.tensors, *own.tensors),
        scratch=(*declared.scratch, *own.scratch),
    )


def _check_settings(settings: Mapping[str, Any]) -> None:
    refuse_moved(settings)
    for name in settings:
        if name not in _RUNNER_SETTINGS:
            own = set(inspect.signature(GraphDecoder).parameters) - {"model", "settings"}
            known = own.union(_RUNNER_SETTINGS)
            raise UnknownNameError("setting", name, known, owner="GraphDecoder")
