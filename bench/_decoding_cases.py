"""Models with random weights, and ways to run their decoding steps.

A case is called with tokens and positions of any batch size and returns the next tokens. Each case
has its own cache and memory.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import _dynamo

from dispatchkit.backends.cuda.workspace import hold_workspace

from dispatchkit_transformers import DECODE_ATTENTION, GraphDecoder
from dispatchkit_transformers.decode_step import decode_step
from dispatchkit_transformers.static_models import probe

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if IS_GPU else "cpu")

OWN, OWN_COMPILED = "graphs, decode attention", "graphs, compiled, decode attention"
OWN_PLANNED = f"{OWN_COMPILED}, planned"
COMPILED = (
    "graphs, compiled", OWN_COMPILED, OWN_PLANNED, "default", "reduce-overhead", "library static",
)  # fmt: skip

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gpt2(hidden: int, layers: int, heads: int, positions: int, vocabulary: int) -> Any:
    """Return a GPT-2-like model."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def llama(hidden: int, middle: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Any:
    """Return a Llama-like model."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=middle,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=4096,
        )
    )


def gemma3(hidden: int, middle: int, layers: int, heads: int, window: int, vocabulary: int) -> Any:
    """Return a Gemma-like model in which only every sixth layer attends to all positions."""
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=middle,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=hidden // heads,
            sliding_window=window,
            max_position_embeddings=4096,
        )
    )


def qwen35(hidden: int, middle: int, layers: int, heads: int, vocabulary: int) -> Any:
    """Return a Qwen3.5-like model in which three of four layers have linear attention."""
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=middle,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=hidden // heads,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=hidden // heads,
            linear_value_head_dim=hidden // heads,
            max_position_embeddings=4096,
        )
    )


def mamba(hidden: int, layers: int, vocabulary: int) -> Any:
    """Return a Mamba-like model."""
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers
        )
    )


def whisper(
    hidden: int, middle: int, layers: int, heads: int, sources: int, vocabulary: int
) -> Any:
    """Return a Whisper-like encoder-decoder model whose sources all have the same length."""
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=vocabulary,
            d_model=hidden,
            encoder_layers=1,  # steps run only the decoder
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=middle,
            decoder_ffn_dim=middle,
            max_source_positions=sources,
            max_target_positions=4096,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2-tiny": lambda: gpt2(32, 2, 4, 256, 97),
    "llama-tiny": lambda: llama(32, 64, 2, 4, 2, 97),
    "gpt2": lambda: gpt2(768, 12, 12, 1024, 50257),
    "llama-small": lambda: llama(1024, 2816, 12, 16, 8, 32000),
    "llama-1b": lambda: llama(2048, 5632, 16, 32, 8, 32000),
    "gemma3-tiny": lambda: gemma3(32, 64, 6, 4, 16, 97),
    "qwen3.5-tiny": lambda: qwen35(32, 64, 4, 4, 97),
    "mamba-tiny": lambda: mamba(32, 2, 97),
    "whisper-tiny": lambda: whisper(32, 64, 2, 4, 30, 97),
    "gemma3": lambda: gemma3(1152, 4608, 6, 8, 256, 32000),
    "qwen3.5": lambda: qwen35(1024, 2816, 4, 8, 32000),
    "mamba": lambda: mamba(1024, 8, 32000),
    "whisper": lambda: whisper(512, 2048, 6, 8, 1500, 51865),
}


def make_model(name: str) -> Any:
    """Return a model by name, always with the same random weights."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    with torch.device(DEVICE):
        return MODELS[name]().to(dtype).eval()


def synchronize() -> None:
    """Synchronize the device."""
    if IS_GPU:
        torch.cuda.synchronize()


def reset_compiler() -> None:
    """Reset torch.compile and free unused memory before the next model."""
    _dynamo.reset()
    free_memory()


def free_memory() -> None:
    """Free unused memory before the next case, but keep compiled code."""
    gc.collect()
    if IS_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Case:
    """A way to run a step of any batch size.

    Args:
        name: Name of the case.
        run: Function of tokens and positions (B,) that returns the next tokens (B,).
        held: Objects that must stay alive.
        stats: Function that returns further fields of the case's lines. Counts start anew with each
            call of this function.
    """

    def __init__(
        self, name: str, run: Run, held: Any = (), stats: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self.name, self.run, self.held = name, run, held
        self.stats = stats or dict


def source_length(model: Any, args: argparse.Namespace) -> int:
    """Return the number of positions of an encoder source; 0 for decoder-only models."""
    length: int = getattr(model.config, "max_source_positions", args.length)
    return length if model.config.is_encoder_decoder else 0


def plain_step(model: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """Return a decoding step without graphs, and its new cache."""
    found = probe(model, args.length)
    memory = found.cache(args.most, args.length, source_length(model, args))
    memory.source_mask.fill_(True)
    step = decode_step(found, memory, [args.length], model, wants_logits=False)

    def run(tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        with torch.no_grad():
            return step(tokens, positions, args.length)

    return run, memory


def eager(model: Any, args: argparse.Namespace) -> Case:
    """Return the case without graphs."""
    step, memory = plain_step(model, args)
    return Case("eager", lambda tokens, positions: step(tokens, positions)[0], memory)


def raw_graphs(model: Any, args: argparse.Namespace) -> Case:
    """Return the case with handwritten graphs: static inputs, one graph per size, one pool."""
    step, memory = plain_step(model, args)
    tokens = torch.zeros(args.most, dtype=torch.int64, device=DEVICE)
    positions = torch.full((args.most,), memory.sink, dtype=torch.int64, device=DEVICE)
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    pool = None
    # Capture as many graphs as GraphDecoder, the largest first.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # Keep the cuBLAS workspace of this stream. Otherwise, `reduce-overhead` in the same process
        # would free it, and the graphs would write to memory that is in use elsewhere.
        hold_workspace(side)
    for size in sorted(args.sizes, reverse=True):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(tokens[:size], positions[:size])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            result = step(tokens[:size], positions[:size])[0]
        pool = graph.pool()
        graphs[size] = (graph, result)
    padded = [min(size for size in args.sizes if size >= rows) for rows in range(1, args.most + 1)]

    def run(given: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        rows = given.shape[0]
        graph, result = graphs[padded[rows - 1]]
        tokens[:rows].copy_(given)
        positions[:rows].copy_(at)
        # Rows of an earlier, larger batch must not write to slots that are in use.
        positions[rows:].fill_(memory.sink)
        graph.replay()
        return result[:rows]

    return Case("raw graphs", run, (memory, graphs))


# Argument `dynamic` of torch.compile for each value of `--dynamic`. For "batch", dimension 0 is
# marked as dynamic instead.
DYNAMIC = {"batch": None, "auto": None, "yes": True, "no": False}


def compiled(model: Any, args: argparse.Namespace, mode: str) -> Case:
    """Return the case with torch.compile and a cache at static addresses."""
    step, memory = plain_step(model, args)
    for one in memory.tensors:
        _dynamo.mark_static_address(one)
    fast = torch.compile(
        step, mode=None if mode == "default" else mode, dynamic=DYNAMIC[args.dynamic]
    )
    unmarked = args.dynamic == "batch"

    def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        nonlocal unmarked
        if unmarked and tokens.shape[0] > 1:
            # GraphDecoder does the same with compile=True. torch compiles a batch of one row
            # separately in any case.
            for one in (tokens, positions):
                _dynamo.maybe_mark_dynamic(one, 0)
            unmarked = False
        torch.compiler.cudagraph_mark_step_begin()
        # The next step overwrites this result, which is also its input.
        result: torch.Tensor = fast(tokens, positions)[0].clone()
        return result

    return Case(mode, run, memory)


def decoder_of(model: Any, args: argparse.Namespace, **options: Any) -> GraphDecoder:
    """Return a GraphDecoder for the largest batch, with a cache of the requested length."""
    if model.config.is_encoder_decoder:
        options["max_source_length"] = source_length(model, args)
    decoder = GraphDecoder(
        model,
        max_batch_size=args.most,
        max_length=args.length,
        lengths=[args.length],
        **{"sizes": args.sizes, **options},
    )
    decoder.cache.source_mask.fill_(True)
    return decoder


def graphs(name: str, model: Any, args: argparse.Namespace, **options: Any) -> Case:
    """Return a case that calls the runner of a GraphDecoder."""
    decoder = decoder_of(model, args, **options)
    runner = decoder.runner()

    def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = runner(tokens=tokens, positions=positions, length=args.length)[0]
        return result

    before = runner.stats()

    def stats() -> dict[str, Any]:
        nonlocal before
        last, before = before, runner.stats()
        rows, steps = before.padded_tokens - last.padded_tokens, before.steps - last.steps
        return {
            "captures": before.captures - last.captures,
            "eager_steps": before.steps_by_mode["NONE"] - last.steps_by_mode["NONE"],
            "eager_by_reason": before.eager_by_reason,
            "graph_bytes": runner.num_bytes,
            "padded_rows": round(rows / steps, 2) if steps else None,
            "sizes": len(runner.config.sizes),
        }

    return Case(name, run, decoder, stats)


def graphs_compiled(name: str, model: Any, args: argparse.Namespace, **options: Any) -> Case:
    """Return a case that calls the runner of a GraphDecoder with compiled kernels."""
    chosen = functools.partial(torch.compile, dynamic=DYNAMIC[args.dynamic])
    return graphs(name, model, args, compile=args.dynamic == "batch" or chosen, **options)


# One copy of each model, so that all cases share the copy's compiled code.
_OTHERS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def with_decode_attention(model: Any) -> Any:
    """Return a model with the same weights and the attention of GraphDecoder."""
    if model not in _OTHERS:
        shared = {id(one): one for one in (*model.parameters(), *model.buffers())}
        _OTHERS[model] = copy.deepcopy(model, shared)
        _OTHERS[model].set_attn_implementation(DECODE_ATTENTION)
    return _OTHERS[model]


# `reduce-overhead` is last, because it takes control of the allocator. `OWN_PLANNED` uses the code
# compiled for `OWN_COMPILED`.
CASES: dict[str, Callable[[Any, argparse.Namespace], Case]] = {
    "eager": eager,
    "raw graphs": raw_graphs,
    "graphs": lambda model, args: graphs("graphs", model, args),
    "graphs, compiled": lambda model, args: graphs_compiled("graphs, compiled", model, args),
    OWN: lambda model, args: graphs(OWN, with_decode_attention(model), args),
    OWN_COMPILED: lambda model, args: graphs_compiled(
        OWN_COMPILED, with_decode_attention(model), args
    ),
    OWN_PLANNED: lambda model, args: graphs_compiled(
        OWN_PLANNED, with_decode_attention(model), args, sizes=args.planned
    ),
    "default": lambda model, args: compiled(model, args, "default"),
    "reduce-overhead": lambda model, args: compiled(model, args, "reduce-overhead"),
}
