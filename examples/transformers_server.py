"""A transformers model in a server's loop, with the batch sizes of real traffic.

    python examples/transformers_server.py [--steps N] [--trace FILE]

This example requires transformers: pip install 'dispatchkit[transformers]'. The model is small and
has random weights. Each row of the trace is one step with a number of requests. If fewer requests
are live, prompts are admitted; if more are live, the oldest leave. A request also leaves when it
has filled its row of the static cache. When a request leaves, the last row in use moves to the gap.
Every step replays a graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dispatchkit.observe.trace import read_trace

from dispatchkit_transformers import GraphDecoder

TRACE = (
    Path(__file__).resolve().parent.parent / "dispatchkit" / "demo" / "data" / "azure_conv_high.csv"
)
MOST, LENGTHS = 32, (24, 40)  # maximum number of requests; cache lengths with graphs
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tiny_model() -> Any:
    """Return a small Llama-like model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).to(DEVICE).eval()


def main() -> None:
    """Serve the first steps of a trace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", type=Path, default=TRACE)
    args = parser.parse_args()
    counts = read_trace(args.trace)[: args.steps].column("num_reqs")
    num_requests = [max(1, count * MOST // max(counts)) for count in counts]

    decoder = GraphDecoder(
        tiny_model(), max_batch_size=MOST, max_length=LENGTHS[-1], lengths=LENGTHS
    )
    random = torch.Generator().manual_seed(0)
    texts: list[list[int]] = []  # tokens of each live row, in the decoder's order
    finished = 0
    for count in num_requests:
        full = [row for row, length in enumerate(decoder.row_lengths) if length >= LENGTHS[-1]]
        oldest = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        leaving = {*full, *oldest[: max(0, len(texts) - count)]}
        texts = [texts[row] for row in decoder.drop(leaving)]
        finished += len(leaving)
        if missing := count - decoder.num_rows:
            prompts = torch.randint(3, 97, (missing, 12), generator=random).to(DEVICE)
            decoder.admit(prompts)
            texts += [[token] for token in decoder.tokens[-missing:].tolist()]
        for text, token in zip(texts, decoder.step().tolist(), strict=True):
            text.append(token)

    stats = decoder.stats()
    print(f"{stats.steps} steps, {sum(num_requests)} tokens, {finished} requests finished")
    print(f"{stats.moved} cache rows moved ({stats.moved_bytes} bytes copied)")
    graphs = stats.graphs["tokens"]
    print(f"{graphs.captures} graphs captured, {graphs.steps_by_mode['NONE']} eager steps")
    for key, hits in graphs.hits.items():
        print(f"{hits:5} replays of {key}")


if __name__ == "__main__":
    main()
