"""Decoding of a transformers model through graphs, on one static cache for every batch size.

    decoder = GraphDecoder(model, max_batch_size=32, max_length=1024)
    tokens = decoder.generate(**inputs, max_new_tokens=100)

``generate`` takes what the library's own takes and gives the same tokens; it is that method,
with the decoder as its ``custom_generate``. A server's loop uses ``admit``, ``step`` and ``drop``.

Needs transformers 4.57.1 or newer, up to 5.x. Each token of a batch is one step of a
``GraphRunner``, whose graphs differ in the batch and in how much of the cache they read. Prompts
run eager, or with ``prompt_sizes`` through graphs, too.
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
)
from dispatchkit.execute import GraphRunner, RunnerStats, StaticInput, StepState
from dispatchkit.keys import Axis, check_count
from dispatchkit.options import DERIVED, RunnerOptions, refuse_moved, with_settings
from dispatchkit.registry import KeyState

try:
    from dispatchkit_transformers.decode_attention import DECODE_ATTENTION
    from dispatchkit_transformers.decode_step import (
        check_lengths,
        compile_for_any_size,
        decode_step,
        too_short,
    )
    from dispatchkit_transformers.generation import (
        check_options,
        check_tokens,
        generate,
        left_paddings,
    )
    from dispatchkit_transformers.prompts import (
        GRAPHS,
        PromptRunner,
        check_prompt_sizes,
        prompt_runner,
    )
    from dispatchkit_transformers.slot_cache import SlotCache
    from dispatchkit_transformers.static_models import Probe, Source, probe
except ImportError as _error:
    raise BackendUnavailableError(
        "GraphDecoder needs transformers from 4.57.1 on, below 6, and what is installed here "
        f"does not do: {_error}. Run: pip install 'dispatchkit[transformers]'."
    ) from _error

__all__ = ["DECODE_ATTENTION", "DecoderStats", "GraphDecoder"]


@attrs.frozen
class DecoderStats:
    """What a decoder has done so far.

    Attributes:
        steps: Decoding steps.
        admitted: Sequences that were given a slot.
        dropped: Sequences that gave theirs up.
        moved: Sequences that were moved to another slot, to keep the batch in one piece.
        moved_bytes: Bytes copied for that, on the device.
        graphs: The runner's counts, by what its graphs give: ``tokens`` or ``logits``; those of
            chunks of prompts are ``prompts``.
        prompts: Prompts by how they ran: through ``graphs``, or the reason why eager.
    """

    steps: int
    admitted: int
    dropped: int
    moved: int
    moved_bytes: int
    graphs: dict[str, RunnerStats]
    prompts: dict[str, int]


class GraphDecoder:
    """Decode one token for each of many sequences, padded to a captured batch size.

    The live sequences are rows 0 to ``num_rows`` - 1, in the first slots of the cache.

    Args:
        model: A model of transformers that generates text, in evaluation mode.
        max_batch_size: Most sequences at a time.
        max_length: Most tokens of one sequence, prompt included.
        max_source_length: Most positions of what an encoder gives, for encoder-decoder models.
        sizes: Batch sizes to capture; derived from ``max_batch_size`` by default.
        lengths: Lengths of the cache to capture for: a step reads the smallest that covers all
            of its sequences. By default powers of two from 128 on, and ``max_length``.
        prompt_sizes: Tokens of a chunk of prompts to capture for. Prompts run through graphs where
            all that are admitted together have no more tokens than the largest; others, and all by
            default, run eager.
        compile: Capture compiled kernels: True compiles the whole step, the model with the
            writing of the cache and the choice of tokens, by ``torch.compile``; a function is
            given the step and returns what runs in its place.
        forward: What computes the model's part of a step in its place, such as
            ``torch.compile(model)``.
        policy: Name of the policy, or an object.
        state: Further state of the step, as for ``GraphRunner``.
        options: Options of the runners.
        backend: ``auto``, a backend's name, or an object.
        lazy: Capture a graph when a step asks for it; False: only ``capture()`` does.
        settings: ``lanes`` and ``mode``, as for ``GraphRunner``.

    Attributes:
        model: The model.
        cache: The memory of all sequences.
        num_rows: Live sequences.

    Raises:
        ConfigError: The model cannot be cached statically, or a setting cannot be used.
        UnknownNameError: No setting, policy or backend goes by a given name.

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
        self.cache: SlotCache = self._probe.cache(max_batch_size, max_length, self._source_length)
        self.device: torch.device = self._probe.device
        if not isinstance(compile, bool) and not callable(compile):
            raise ConfigError(
                "compile", compile, "True, False, or a function that is given the step"
            )
        if compile and self._probe.embeddings:
            raise ConfigError(
                "compile", compile, "False for a model that takes no positions",
                "What it embeds for each row is put right by a hook, which is not compiled.",
            )  # fmt: skip
        self._compile = compile_for_any_size if compile is True else compile or None
        options = RunnerOptions() if options is None else options
        if backend == "auto" and options.device is None:
            options = attrs.evolve(options, device=self.device)
        if options.buffers.output_batch_dims == DERIVED:
            options = with_settings(options, {"output_batch_dims": 0})
        # Rows of padding read and write the sink alone, which tests of the cache hold. Logits of
        # few rows come from other kernels than those of many, which round otherwise.
        options = with_settings(options, {"prove_rows": False})
        declared, own = StepState.of(state), self.cache.slots.step_state
        self._settings = {
            "sizes": sizes,
            "max_num_tokens": max_batch_size,
            "policy": policy,
            "backend": backend,
            "state": attrs.evolve(
                declared,
                tensors=(*declared.tensors, *own.tensors),
                scratch=(*declared.scratch, *own.scratch),
            ),
            "lazy": lazy,
            "mode": "FULL",
            "options": options,
            **settings,
        }
        # Tokens and logits are other graphs: whoever chooses tokens does not pay for logits.
        self._runners: dict[bool, GraphRunner] = {}
        self._prompts: PromptRunner | str = prompt_runner(
            self._probe,
            self.cache,
            self.lengths,
            check_prompt_sizes(prompt_sizes, max_length),
            self._settings,
        )
        self._prompt_counts: Counter[str] = Counter()
        self._lengths: list[int] = []
        self._tokens = self._no_rows()
        self._positions = self._no_rows()
        self._steps = self._admitted = self._dropped = self._moved = self._moved_bytes = 0
        self.runner()  # which refuses settings that it cannot use

    # -- one call -----------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model's own ``generate`` does, with the same arguments and result.

        Raises:
            DescriptorError: The batch is above the limit, or the cache is too short.
            ConfigError: Something is asked for that a step here does not give, such as beams.
        """
        # Of some options the library hears alone, and decodes without its custom_generate.
        config = kwargs.get("generation_config") or self.model.generation_config
        check_options({**vars(config), **kwargs})
        return self.model.generate(*args, custom_generate=self, **kwargs)

    def __call__(self, model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Be the library's ``custom_generate``: decode what ``generate`` has prepared."""
        return generate(self, model, input_ids, **kwargs)

    # -- a server's loop ----------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Live sequences."""
        return len(self._lengths)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Positions of the cache that each row uses."""
        return tuple(self._lengths)

    @property
    def tokens(self) -> torch.Tensor:
        """The token that each row is at (rows,), which the next step takes; set it to choose."""
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: torch.Tensor) -> None:
        if tokens.shape != (self.num_rows,):
            raise InputError(
                "tokens", f"tokens must be of shape ({self.num_rows},), got {tuple(tokens.shape)}."
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
        """Run prompts, and give each a row behind those there are.

        Their first new tokens are the likeliest ones, until ``tokens`` is set.

        Args:
            input_ids: Prompts (B, T), padded on the left.
            attention_mask: 0 where padding is (B, T).
            encoder_outputs: What the model's encoder gave, for encoder-decoder models, of which
                the prompts are the decoder's.
            encoder_attention_mask: 0 where that is padding (B, S).

        Returns:
            Logits of the first new token (B, V), float32.

        Raises:
            DescriptorError: There are not so many free slots, or a prompt is too long.
            InputError: Padding is not on the left, a prompt is empty, a token is outside the
                vocabulary, or what the encoder gave is missing, or longer than
                ``max_source_length``.
        """
        source = self._source(input_ids, encoder_outputs, encoder_attention_mask)
        paddings = left_paddings(input_ids, attention_mask)
        check_tokens(input_ids, self._probe.vocabulary)
        rows, width = input_ids.shape
        self.check_fits(rows, max((width - padding for padding in paddings), default=1))
        self._check_model()
        lengths = [width - padding for padding in paddings]
        prompts = self._prompts
        longest = max(lengths, default=0)
        how = prompts if isinstance(prompts, str) else prompts.how(rows, longest)
        with torch.no_grad(), self.cache.joining(rows) as start:
            if how == GRAPHS and not isinstance(prompts, str):
                logits = prompts.run(start, input_ids, lengths)
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
        self._admitted += rows
        self._prompt_counts[how] += rows
        return logits

    def step(self) -> torch.Tensor:
        """Take each row's token in and return the likeliest next ones (rows,).

        What it returns is valid until the next step, which takes it.

        Raises:
            DescriptorError: A row is at the end of the cache, or there is none.
        """
        tokens, self._positions = self._run(wants_logits=False)
        self._tokens = tokens
        return self._tokens

    def logits(self) -> torch.Tensor:
        """Take each row's token in and return the logits of the next (rows, V), float32.

        Set ``tokens`` before the next step. What it returns is valid until then.

        Raises:
            DescriptorError: A row is at the end of the cache, or there is none.
        """
        logits: torch.Tensor
        logits, self._positions = self._run(wants_logits=True)
        return logits

    def drop(self, rows: Iterable[int]) -> list[int]:
        """Give rows up; the last ones move into their places, on the device.

        Returns:
            For each remaining row, in its new order, where it was.

        Raises:
            DescriptorError: There is no such row.
        """
        if not isinstance(rows, Iterable):
            raise DescriptorError("rows", rows, "a list of rows", f"One row: [{rows!r}].")
        gone = set(rows)
        for row in gone:
            if not 0 <= row < self.num_rows:
                raise DescriptorError("row", row, f"one of the {self.num_rows} live rows")
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
        self._moved += len(moves)
        self._moved_bytes += sum(one.num_bytes for one in moves)
        self._dropped += len(gone)
        return order

    def reset(self) -> None:
        """Give all rows up."""
        self.drop(range(self.num_rows))

    # -- graphs -------------------------------------------------------------------------

    def capture(self, *, logits: bool = False, progress: bool = False) -> int:
        """Capture the graphs of every length and size; returns how many there are.

        Those of prompts too, where ``prompt_sizes`` were given.

        Args:
            logits: Those of ``logits()``, which sampling uses, rather than of ``step()``.
            progress: Show a progress bar on stderr.
        """
        num_graphs = self.runner(logits=logits).capture(progress=progress).num_graphs
        if not isinstance(self._prompts, str):
            num_graphs += self._prompts.capture(progress=progress)
        return num_graphs

    def runner(self, *, logits: bool = False) -> GraphRunner:
        """Return the runner of the steps that give tokens, or logits; made at its first use."""
        found = self._runners.get(logits)
        if found is None:
            step = decode_step(
                self._probe,
                self.cache,
                self.lengths,
                self._forward,
                wants_logits=logits,
                compile=self._compile,
            )
            found = self._runners[logits] = GraphRunner(
                step,
                {
                    "tokens": StaticInput((None,), "int64"),
                    "positions": StaticInput((None,), "int64", fill=self.cache.sink),
                },
                axes=[Axis("length", self.lengths)],
                outputs="view",
                **self._settings,
            )
        return found

    def prompt_runner(self) -> GraphRunner:
        """Return the runner of chunks of prompts.

        Raises:
            ConfigError: All prompts run eager.
        """
        if isinstance(self._prompts, str):
            raise ConfigError(
                "prompt_sizes",
                self._prompts,
                "given, for a model whose prompts can run through graphs",
            )
        return self._prompts.runner

    def invalidate(self) -> None:
        """Give up all graphs, after weights were replaced; copied in place, they need not go."""
        for runner in self._runners.values():
            runner.invalidate()
        if not isinstance(self._prompts, str):
            self._prompts.runner.invalidate()

    def bucket(self, num_rows: int) -> int:
        """Return the smallest captured batch size for so many rows, or that number itself."""
        sizes = self.runner().config.sizes
        return next((size for size in sizes if size >= num_rows), num_rows)

    def stats(self) -> DecoderStats:
        """Return what has been done so far."""
        graphs = {
            "logits" if logits else "tokens": runner.stats()
            for logits, runner in self._runners.items()
        }
        if not isinstance(self._prompts, str):
            graphs["prompts"] = self._prompts.runner.stats()
        return DecoderStats(
            self._steps,
            self._admitted,
            self._dropped,
            self._moved,
            self._moved_bytes,
            graphs,
            dict(self._prompt_counts),
        )

    def __repr__(self) -> str:
        runners = [*self._runners.values()]
        if not isinstance(self._prompts, str):
            runners.append(self._prompts.runner)
        states = [entry.state for one in runners for entry in one.registry.entries.values()]
        return (
            f"<GraphDecoder {type(self.model).__name__} on {self.runner().backend.name}, "
            f"{self.num_rows} of {self.max_batch_size} rows, "
            f"{states.count(KeyState.CAPTURED)} of {len(states)} keys captured>"
        )

    # -- inside -------------------------------------------------------------------------

    def _check_source_length(self, given: int | None) -> int:
        if not self._probe.cross:
            if given is not None:
                raise ConfigError(
                    "max_source_length", given, "left out for a model without an encoder"
                )
            return 0
        if given is None:
            raise ConfigError(
                "max_source_length",
                None,
                "the most positions that the encoder gives",
                "For Whisper that is model.config.max_source_positions.",
            )
        return check_count(given, "max_source_length")

    def _source(
        self, input_ids: torch.Tensor, given: Any, mask: torch.Tensor | None
    ) -> Source | None:
        """Return what an encoder gave, in the form that prompts take it."""
        if not self._probe.cross:
            if given is not None:
                raise InputError("encoder_outputs", "encoder_outputs are for encoder-decoders.")
            return None
        if given is None:
            raise InputError(
                "encoder_outputs",
                "encoder_outputs must be what the encoder gave: model.get_encoder()(**inputs).",
            )
        states: torch.Tensor = given[0]
        rows, length = states.shape[:2]
        least = self._source_length if self._probe.has_one_source_length else 1
        if rows != input_ids.shape[0] or not least <= length <= self._source_length:
            raise InputError(
                "encoder_outputs",
                f"encoder_outputs must be of {input_ids.shape[0]} rows of {least} to "
                f"{self._source_length} positions (max_source_length), got {tuple(states.shape)}.",
            )
        if mask is None:
            mask = torch.ones(rows, length, dtype=torch.bool, device=states.device)
        if mask.shape != (rows, length):
            raise InputError(
                "encoder_attention_mask",
                f"encoder_attention_mask must be of shape {(rows, length)}, as encoder_outputs, "
                f"got {tuple(mask.shape)}.",
            )
        return Source(states, mask.bool())

    def _run(self, *, wants_logits: bool) -> Any:
        longest = max(self._lengths, default=self.max_length) + 1
        if longest > self.max_length:
            if not self._lengths:
                raise DescriptorError("rows", 0, "at least 1", "admit() prompts first.")
            raise too_short(longest, self.max_length)
        runner = self._runners.get(wants_logits) or self.runner(logits=wants_logits)
        results = runner(tokens=self._tokens, positions=self._positions, length=longest)
        self._lengths = [one + 1 for one in self._lengths]
        self._steps += 1
        return results

    def check_fits(self, rows: int, longest: int) -> None:
        """Raise DescriptorError unless so many more rows of such a length have room."""
        if self.num_rows + rows > self.max_batch_size:
            raise DescriptorError(
                "batch size",
                self.num_rows + rows,
                f"at most max_batch_size ({self.max_batch_size})",
                "Give fewer sequences at a time, or make the GraphDecoder with more: its cache "
                f"takes {self.cache.num_bytes // self.max_batch_size} bytes for each.",
            )
        if longest > self.max_length:
            raise too_short(longest, self.max_length)

    def _check_model(self) -> None:
        if self.model.training:
            raise ConfigError("model", "in training mode", "in evaluation mode", "model.eval().")
        now = next(self.model.parameters())
        if now.device != self.device or now.dtype != self._probe.dtype:
            raise ConfigError(
                "model",
                f"{now.dtype} on {now.device}",
                f"as when the GraphDecoder was made, {self._probe.dtype} on {self.device}",
                "Make a new GraphDecoder for it: cache and graphs are where the model was.",
            )

    def _no_rows(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.int64, device=self.device)


#: Settings of its runners that it has no parameters of its own for.
_OF_RUNNERS = ("lanes", "mode")


def _check_settings(settings: Mapping[str, Any]) -> None:
    refuse_moved(settings)
    for name in settings:
        if name not in _OF_RUNNERS:
            own = set(inspect.signature(GraphDecoder).parameters) - {"model", "settings"}
            raise UnknownNameError("setting of GraphDecoder", name, own.union(_OF_RUNNERS))
