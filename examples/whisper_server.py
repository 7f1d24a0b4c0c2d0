"""A Whisper server: clips arrive, are encoded in batches, and are decoded together.

    python examples/whisper_server.py [--steps N] [--slots N] [--check N] [--trace FILE]

This example requires transformers: pip install 'dispatchkit[transformers]'. The model has random
weights and, on a GPU, the size of whisper-base. At each step of the trace in which a request
begins, a clip arrives.

Every clip is padded to the same length, as usual with Whisper, so encoder batches differ only in
their number of clips, and ``graphed`` captures a graph for each size. Clips are admitted to a
``GraphDecoder`` with the forced tokens for the language and the task, and are dropped when their
text ends. At the end, some texts are compared with the results of the model's own ``generate``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import attrs
import torch
from transformers import GenerationMixin, WhisperConfig, WhisperForConditionalGeneration

from dispatchkit import graphed
from dispatchkit.observe.trace import read_trace

from dispatchkit_transformers import GraphDecoder

TRACE = (
    Path(__file__).resolve().parent.parent / "dispatchkit" / "demo" / "data" / "azure_conv_high.csv"
)
IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if IS_GPU else "cpu")
ENCODER_SIZES = (1, 2, 4, 8)
# The forced tokens: start, language, task, no timestamps. END ends a text.
FORCED, END = ([50258, 50259, 50359, 50363], 50257) if IS_GPU else ([1, 5, 6, 7], 2)
SHORTEST, LONGEST = (20, 120) if IS_GPU else (4, 16)  # bounds of ``Clip.limit``


@attrs.define(eq=False)
class Clip:
    """A request: its log-mel features (1, mels, frames), its tokens and its times."""

    features: torch.Tensor
    limit: int
    arrived: float
    tokens: list[int] = attrs.Factory(list)
    first: float = 0.0
    last: float = 0.0

    def take(self, token: int) -> None:
        """Append the next token of the text."""
        self.last = perf_counter()
        self.first = self.first or self.last
        self.tokens.append(token)

    @property
    def is_done(self) -> bool:
        """Whether the text is complete."""
        return self.tokens[-1] == END or len(self.tokens) == self.limit


def make_model() -> Any:
    """Return whisper-base without trained weights, or a tiny model on a CPU."""
    torch.manual_seed(0)
    base = {"vocab_size": 51865, "d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    tiny = {
        "vocab_size": 97, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 30,
        "max_target_positions": 64, "init_std": 0.3,
    }  # fmt: skip
    both = {"pad_token_id": END, "bos_token_id": END, "eos_token_id": END}
    layers = {"encoder_layers": 6, "decoder_layers": 6} if IS_GPU else {}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8} if IS_GPU else {}
    config = WhisperConfig(
        **(base if IS_GPU else tiny), **layers, **heads, **both, decoder_start_token_id=FORCED[0]
    )
    return WhisperForConditionalGeneration(config).to(DEVICE).eval()


def clip_of(model: Any, generator: torch.Generator) -> Clip:
    """Return a clip of noise with a random maximum text length."""
    config = model.config
    shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    features = torch.randn(shape, generator=generator).to(DEVICE)
    limit = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
    return Clip(features, limit, perf_counter())


def drop_finished(decoder: GraphDecoder, live: list[Clip]) -> list[Clip]:
    """Drop the rows of finished clips; return the other clips in their new order."""
    finished = [row for row, clip in enumerate(live) if clip.is_done]
    return [live[row] for row in decoder.drop(finished)]


def plain_tokens(model: Any, clip: Clip) -> list[int]:
    """Return the tokens that transformers' ``generate`` returns for a single clip."""
    ids = GenerationMixin.generate(
        model,
        input_features=clip.features,
        decoder_input_ids=torch.tensor([FORCED], device=DEVICE),
        max_new_tokens=clip.limit,
        do_sample=False,
    )
    tokens: list[int] = ids[0, len(FORCED) :].tolist()
    return tokens


def milliseconds(seconds: list[float]) -> str:
    """Return the median and the 95th percentile as text."""
    p95 = quantiles(seconds, n=20)[-1]
    return f"median {median(seconds) * 1e3:.1f} ms, 95th percentile {p95 * 1e3:.1f} ms"


def main() -> None:
    """Serve the clips of a trace, and print statistics."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=60, help="number of steps to take from the trace"
    )
    parser.add_argument("--slots", type=int, default=8, help="maximum number of concurrent texts")
    parser.add_argument(
        "--check", type=int, default=4, help="number of clips to compare with generate()"
    )
    parser.add_argument("--trace", type=Path, default=TRACE)
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # TF32 results depend on the batch size
    model = make_model()
    encoder = graphed(model.get_encoder(), sizes=ENCODER_SIZES)
    decoder = GraphDecoder(
        model,
        max_batch_size=args.slots,
        max_length=len(FORCED) + LONGEST,
        max_source_length=model.config.max_source_positions,
    )
    forced = torch.tensor([FORCED], device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    begins = [most > 1 for most in read_trace(args.trace)[: args.steps].column("max_query_len")]

    clips: list[Clip] = []
    waiting: list[Clip] = []
    live: list[Clip] = []
    started = perf_counter()
    while begins or waiting or live:
        if begins and begins.pop(0):
            clips.append(clip_of(model, generator))
            waiting.append(clips[-1])
        room = min(args.slots - len(live), ENCODER_SIZES[-1])
        joining, waiting = waiting[:room], waiting[room:]
        if joining:
            with torch.no_grad():
                encoded = encoder(torch.cat([clip.features for clip in joining]))
            decoder.admit(forced.expand(len(joining), -1), encoder_outputs=encoded)
            live += joining
            for clip, token in zip(joining, decoder.tokens[-len(joining) :].tolist(), strict=True):
                clip.take(token)
            live = drop_finished(decoder, live)
        if live:
            for clip, token in zip(live, decoder.step().tolist(), strict=True):
                clip.take(token)
            live = drop_finished(decoder, live)
    elapsed = perf_counter() - started

    num_tokens = sum(len(clip.tokens) for clip in clips)
    print(f"{len(clips)} clips, {num_tokens} tokens, {num_tokens / elapsed:.0f} tokens/s")
    print(f"time to first token: {milliseconds([clip.first - clip.arrived for clip in clips])}")
    print(f"time to last token: {milliseconds([clip.last - clip.arrived for clip in clips])}")
    print(f"encoder: {encoder.graphed.stats()}")
    stats = decoder.stats()
    graphs = stats.graphs["tokens"]
    print(
        f"decoder: {graphs.steps} steps, {graphs.captures} graphs captured, "
        f"{stats.moved} cache rows moved"
    )
    print(f"eager steps by reason: {graphs.eager_by_reason or 'none'}; prompts: {stats.prompts}")
    same = [plain_tokens(model, clip) == clip.tokens for clip in clips[: args.check]]
    print(f"clips with the same tokens as generate(): {sum(same)} of {len(same)}")


if __name__ == "__main__":
    main()
