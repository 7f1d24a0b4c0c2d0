"""Decoding with transformers models: graphs here beside the ways a user has without them.

    python bench/decoding.py [--models NAME ...] [--batches N ...] [--steps N] [--rounds N]
        [--trace FILE] [--trace-steps N] [--length N] [--skip CASE ...] [--compile]
        [--parts fixed trace calls]

Random weights; every case decodes on one cache of the same size and gives the same tokens. A
step takes a token for each row and returns the next, on the device. Cases take turns; the device
is waited for at the end of a round alone.

- ``eager``: the step, called plainly.
- ``raw graphs``: torch.cuda.graph by hand, one for each size, on the same cache.
- ``reduce-overhead``, ``default``: torch.compile of the step with its own graphs, and as it is (for
  the smallest of the fixed batches alone: each size compiles for up to half a minute).
- ``graphs``: GraphDecoder. ``graphs, compiled``: with ``compile=True``.
- ``library static``, ``library dynamic``, ``generate``: whole calls of ``generate`` (fixed batches
  only, the first with the smallest alone): with its compiled static cache, without, and through
  GraphDecoder.

Fixed batches: milliseconds for a step, and tokens a second, once everything is captured. Trace:
the batch sizes of the first steps of real traffic, from the first step on; captures and
re-recordings are in the time, compilation is not, and is printed beside it. Each case has a cache
and memory of its own and is let go of before the next model. Without a CUDA device tiny models run
on the tape, which shows that it works and no speed; torch.compile is left out there unless
``--compile`` asks for it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from _common import emit
from torch import _dynamo

from dispatchkit.observe.trace import read_trace

try:
    import transformers
except ImportError:
    raise SystemExit("Needs transformers: pip install 'dispatchkit[transformers]'") from None

from dispatchkit.backends.cuda_workspace import hold_workspace
from dispatchkit.integrations.decode_step import decode_step
from dispatchkit.integrations.slot_cache import SlotCache
from dispatchkit.integrations.static_models import probe
from dispatchkit.integrations.transformers import GraphDecoder

BENCH = "decoding"
IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if IS_GPU else "cpu")
TRACE = Path(__file__).resolve().parent.parent / "tests/data/traces/step_azure_conv_low.csv.gz"
COMPILED = ("default", "reduce-overhead", "graphs, compiled", "library static")

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


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2-tiny": lambda: gpt2(32, 2, 4, 256, 97),
    "llama-tiny": lambda: llama(32, 64, 2, 4, 2, 97),
    "gpt2": lambda: gpt2(768, 12, 12, 1024, 50257),
    "llama-small": lambda: llama(1024, 2816, 12, 16, 8, 32000),
    "llama-1b": lambda: llama(2048, 5632, 16, 32, 8, 32000),
}


def make_model(name: str) -> Any:
    """Return a model by name with random weights, always the same."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    with torch.device(DEVICE):
        return MODELS[name]().to(dtype).eval()


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def compile_seconds() -> float:
    """Return what Dynamo has spent on compiling in this process."""
    from torch._dynamo.utils import cumulative_time_spent_ns

    return cumulative_time_spent_ns["entire_frame_compile"] / 1e9


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what compilers and the library advise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Case:
    """One way to run a step of any batch size.

    Args:
        name: What it is called.
        run: Takes tokens and positions (B,), returns the next tokens (B,).
        held: What it needs to live.
        stats: Further fields of its lines.
    """

    def __init__(
        self, name: str, run: Run, held: Any = (), stats: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self.name, self.run, self.held = name, run, held
        self.stats = stats or dict


def plain_step(model: Any, args: argparse.Namespace, *, forward: Any = None) -> tuple[Any, Any]:
    """Return the step on a cache of its own, and that cache."""
    found = probe(model, args.length)
    memory = SlotCache(found.states, args.most, args.length)
    step = decode_step(found, memory, [args.length], forward or model, wants_logits=False)

    def run(tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        with torch.no_grad():
            return step(tokens, positions, args.length)

    return run, memory


def eager(model: Any, args: argparse.Namespace) -> Case:
    step, memory = plain_step(model, args)
    return Case("eager", lambda tokens, positions: step(tokens, positions)[0], memory)


def raw_graphs(model: Any, args: argparse.Namespace) -> Case:
    """By hand, as one would write it: static inputs, one graph for each size, one pool."""
    step, memory = plain_step(model, args)
    tokens = torch.zeros(args.most, dtype=torch.int64, device=DEVICE)
    positions = torch.full((args.most,), memory.sink, dtype=torch.int64, device=DEVICE)
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    pool = None
    # As many as here, the largest first.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # `reduce-overhead` in this process would have them write into the memory of others.
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


def compiled(model: Any, args: argparse.Namespace, mode: str) -> Case:
    """torch.compile of the same step, on a cache whose addresses it is told are fixed."""
    step, memory = plain_step(model, args)
    for pair in memory.layers:
        for one in pair:
            _dynamo.mark_static_address(one)
    fast = torch.compile(step, mode=None if mode == "default" else mode)

    def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        # The next step's graph writes over this one's result, which is its input.
        result: torch.Tensor = fast(tokens, positions)[0].clone()
        return result

    return Case(mode, run, memory)


def graphs(name: str, model: Any, args: argparse.Namespace, **options: Any) -> Case:
    """GraphDecoder's own runner of this length."""
    decoder = GraphDecoder(
        model,
        max_batch_size=args.most,
        max_length=args.length,
        lengths=[args.length],
        sizes=args.sizes,
        **options,
    )
    runner = decoder.runner()

    def run(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = runner(tokens=tokens, positions=positions, length=args.length)[0]
        return result

    def stats() -> dict[str, Any]:
        done = runner.stats()
        return {
            "captures": done.captures,
            "eager_steps": done.steps_by_mode["NONE"],
            "graph_bytes": runner.num_bytes,
        }

    return Case(name, run, decoder, stats)


CASES: dict[str, Callable[[Any, argparse.Namespace], Case]] = {
    "eager": eager,
    "raw graphs": raw_graphs,
    "graphs": lambda model, args: graphs("graphs", model, args),
    "reduce-overhead": lambda model, args: compiled(model, args, "reduce-overhead"),
    "graphs, compiled": lambda model, args: graphs("graphs, compiled", model, args, compile=True),
    "default": lambda model, args: compiled(model, args, "default"),
}


def wanted(args: argparse.Namespace, *, of_trace: bool = False) -> list[str]:
    """Return the cases that can run here."""
    left_out = set(args.skip)
    if of_trace:
        left_out.add("default")  # it compiles for long, and captures nothing
    if not IS_GPU:
        left_out.add("raw graphs")
        if not args.compile:
            left_out |= set(COMPILED)
    return [name for name in CASES if name not in left_out]


def inputs(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions for the largest batch: the middle of the cache."""
    maker = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 90, (args.most,), generator=maker).to(DEVICE)
    positions = torch.full((args.most,), args.length // 2, dtype=torch.int64, device=DEVICE)
    return tokens, positions


def fixed(name: str, model: Any, args: argparse.Namespace) -> None:
    """Steps of one batch size, everything captured and compiled before."""
    tokens, positions = inputs(args)
    cases = [CASES[one](model, args) for one in wanted(args)]
    for rows in args.batches:
        if rows != args.batches[0]:
            cases = [case for case in cases if case.name != "default"]
        given = (tokens[:rows], positions[:rows])
        for case in cases:
            for _ in range(3):
                case.run(*given)
        synchronize()
        seconds: dict[str, list[float]] = {case.name: [] for case in cases}
        for _ in range(args.rounds):
            for case in cases:
                start = perf_counter()
                for _ in range(args.steps):
                    case.run(*given)
                synchronize()
                seconds[case.name].append((perf_counter() - start) / args.steps)
        report(name, f"batch {rows}", cases, seconds, [rows] * args.steps)


def trace_sizes(args: argparse.Namespace) -> list[int]:
    """Return the batch sizes of real traffic: one token for each request in a step."""
    trace = read_trace(args.trace)[: args.trace_steps]
    return [max(1, min(args.most, one)) for one in trace.column("num_reqs")]


def trace(name: str, model: Any, args: argparse.Namespace) -> None:
    """Steps of a trace, from cold: what is captured on the way counts, compilation does not."""
    sizes = trace_sizes(args)
    tokens, positions = inputs(args)
    views = {rows: (tokens[:rows], positions[:rows]) for rows in set(sizes)}
    cases: list[Case] = []
    seconds: dict[str, list[float]] = {}
    names = wanted(args, of_trace=True)
    base = "raw graphs" if "raw graphs" in names else names[0]
    waiting: list[tuple[Case, dict[str, Any]]] = []
    for one in names:
        _dynamo.reset()
        before = compile_seconds()
        synchronize()
        start = perf_counter()
        case = CASES[one](model, args)  # raw graphs are captured here
        for rows in sizes:
            case.run(*views[rows])
        synchronize()
        spent = compile_seconds() - before
        elapsed = perf_counter() - start - spent
        cases.append(case)
        seconds[case.name] = [elapsed / len(sizes)]
        more: dict[str, Any] = {
            "compile_s": round(spent, 2),
            "distinct_sizes": len(set(sizes)),
        }
        if case.name != "eager":
            # Once more, with everything there: how it goes on.
            start = perf_counter()
            for rows in sizes:
                case.run(*views[rows])
            synchronize()
            more["second_pass_ms"] = round((perf_counter() - start) / len(sizes) * 1e3, 4)
        waiting.append((case, more))
        if base in seconds:  # each as soon as it can be compared
            for known, fields in waiting:
                traffic = f"trace of {len(sizes)}"
                report(name, traffic, [known], seconds, sizes, {known.name: fields})
            waiting.clear()


def whole_calls(name: str, model: Any, args: argparse.Namespace) -> None:
    """``generate`` itself, of the library and through graphs: prompts, choices and all."""
    count = min(args.steps, args.length // 2, 50) + 1
    decoder = GraphDecoder(
        model, max_batch_size=args.most, max_length=args.length, lengths=[args.length],
        sizes=args.sizes,
    )  # fmt: skip
    asked = {
        "max_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "library dynamic": lambda ids: model.generate(ids, **asked),
        "generate": lambda ids: decoder.generate(ids, **asked),
    }
    if (IS_GPU or args.compile) and "library static" not in args.skip:
        calls["library static"] = lambda ids: model.generate(
            ids, cache_implementation="static", **asked
        )
    for rows in args.batches:
        if rows != min(args.batches):
            calls.pop("library static", None)  # compiled anew for each batch
        ids = torch.randint(3, 90, (rows, 8), generator=torch.Generator().manual_seed(3)).to(DEVICE)
        cases = [Case(one, lambda tokens, _: tokens) for one in calls]
        seconds: dict[str, list[float]] = {one: [] for one in calls}
        for call in calls.values():
            call(ids)
            call(ids)
        for _ in range(min(args.rounds, 3)):
            for one, call in calls.items():
                synchronize()
                start = perf_counter()
                call(ids)
                synchronize()
                seconds[one].append((perf_counter() - start) / count)
        report(name, f"generate, batch {rows}", cases, seconds, [rows] * count)


PARTS: dict[str, Callable[[str, Any, argparse.Namespace], None]] = {
    "fixed": fixed,
    "trace": trace,
    "calls": whole_calls,
}


def report(
    model: str,
    traffic: str,
    cases: Sequence[Case],
    seconds: dict[str, list[float]],
    sizes: Sequence[int],
    more: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Print one line for each case."""
    base = "raw graphs" if "raw graphs" in seconds else next(iter(seconds))
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    for case in cases:
        median = medians[case.name]
        emit(
            BENCH,
            case.name,
            median * 1e3,
            "ms",
            len(seconds[case.name]),
            ratio_to=base if case.name != base else None,
            ratio=median / medians[base] if case.name != base else None,
            model=model,
            traffic=traffic,
            tokens_per_s=round(sum(sizes) / len(sizes) / median, 1),
            times_eager=round(medians["eager"] / median, 2) if "eager" in medians else None,
            transformers=transformers.__version__,
            **case.stats(),
            **(more or {}).get(case.name, {}),
        )


def main() -> None:
    """Measure every model that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["gpt2", "llama-small", "llama-1b"] if IS_GPU else ["gpt2-tiny", "llama-tiny"]
    parser.add_argument("--models", nargs="+", default=names, choices=sorted(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64] if IS_GPU else [1, 5])
    parser.add_argument("--steps", type=int, default=100 if IS_GPU else 5)
    parser.add_argument("--rounds", type=int, default=3 if IS_GPU else 2)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--trace-steps", type=int, default=1000 if IS_GPU else 30)
    parser.add_argument("--length", type=int, default=512 if IS_GPU else 64)
    parser.add_argument("--most", type=int, default=128 if IS_GPU else 16, help="largest batch")
    parser.add_argument("--skip", nargs="+", default=[], help="cases to leave out")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU too")
    args = parser.parse_args()
    args.batches = sorted(rows for rows in args.batches if rows <= args.most)
    args.sizes = [one for one in (1, 2, 4, *range(8, 513, 8)) if one < args.most] + [args.most]
    with quiet():
        for name in args.models:
            model = make_model(name)
            for part in args.parts:
                PARTS[part](name, model, args)
                _dynamo.reset()
                gc.collect()
                if IS_GPU:
                    torch.cuda.empty_cache()
            del model


if __name__ == "__main__":
    main()
