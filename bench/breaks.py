"""Measure a step with breaks, compared with traced pieces, eager and torch.compile.

    python bench/breaks.py [--rounds N] [--steps N] [--layers N]

- Mixed traffic: the demo's decoder runs the mixed steps of the demo's trace ``eager``, split into
  pieces by tracing (``traced``), and in segments without tracing (``segments``). A sample is the
  duration of the trace divided by its number of steps.
- Prefill: a model of ``--layers`` layers whose attention reads sequence lengths on the host runs
  ``eager``, in ``segments``, and with ``torch.compile default``, in which attention is a graph
  break. The sequences have different lengths. A sample is one step.

Lines that begin with ``#`` contain the number of segments of the largest graph, their operations
and times, the duration of all captures, and the bytes of all graphs. Without a CUDA device, small
models run on the tape backend, which tests the script only; torch.compile is skipped.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable
from importlib.resources import as_file, files
from time import perf_counter
from typing import Any

import torch
from _common import at_least_one, emit_all, interleaved
from torch import nn

from dispatchkit import GraphRunner, StaticInput, eager_region, split_module
from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache
from dispatchkit.demo.traffic import plan_traffic
from dispatchkit.observe import read_trace

BENCH = "breaks"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BACKEND = "cuda" if HAS_GPU else "tape"


def wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def captured(step: Any, inputs: dict[str, StaticInput], sizes: list[int], state: Any) -> Any:
    """Return a runner with all graphs captured, and the time and memory of the captures."""
    start = perf_counter()
    runner = GraphRunner(
        step,
        inputs,
        sizes=sizes,
        mode="PIECEWISE",
        backend=BACKEND,
        outputs="view",
        state=state,
    )
    report = runner.capture()
    if report.failed:
        raise SystemExit(str(report))
    wait()
    took = {"capture_s": round(perf_counter() - start, 2), "num_bytes": runner.num_bytes}
    largest = runner.stats().segments.get(f"PIECEWISE tokens={max(sizes)}", ())
    if largest:
        took["segments"] = len(largest)
        took["operations"] = sum(one.operations for one in largest)
        took["segment_us"] = [round(one.elapsed_us, 1) for one in largest]
    return runner, took


def mixed_traffic(rounds: int, num_steps: int) -> None:
    shape = DecoderShape(num_layers=8, num_heads=8, head_dim=32) if HAS_GPU else DecoderShape()
    with as_file(files("dispatchkit.demo") / "data" / "azure_conv_high.csv") as excerpt:
        rows = read_trace(excerpt)[: 20 * num_steps]
    traffic = plan_traffic(
        rows, num_slots=shape.num_slots, cache_len=shape.cache_len, vocab=shape.vocab
    )
    mixed = [step for step in traffic.steps if not step.uniform]
    steps = [
        {
            name: torch.tensor(getattr(step, name), dtype=torch.int64, device=DEVICE)
            for name in ("tokens", "positions", "slots")
        }
        for step in (mixed or list(traffic.steps))[:num_steps]
    ]
    largest = max(len(one["tokens"]) for one in steps)
    sizes = sorted({max(1, largest * part // 16) for part in range(1, 17)})
    decoder = Decoder(shape, device=DEVICE)
    caches = [KVCache(shape, DEVICE) for _ in range(3)]
    inputs = {
        "tokens": StaticInput((None,), "int64", fill=0),
        "positions": StaticInput((None,), "int64", fill=0),
        "slots": StaticInput((None,), "int64", fill=shape.sink_slot),
    }
    cases: dict[str, Callable[..., Any]] = {"eager": decoder.step(caches[0])}
    more: dict[str, Any] = {}
    forms = {
        "traced": (split_module(decoder.step(caches[1]), inputs, device=DEVICE), caches[1]),
        "segments": (decoder.step(caches[2]), caches[2]),
    }
    for name, (step, cache) in forms.items():
        cases[name], more[name] = captured(step, inputs, sizes, cache.tensors)
    check(cases, steps[-1])

    def trace(run: Callable[..., Any]) -> Callable[[], None]:
        def play() -> None:
            for step in steps:
                run(**step)
            wait()

        return play

    times = interleaved({name: trace(run) for name, run in cases.items()}, rounds=rounds, warmup=1)
    show(times, "mixed", len(steps), "traced", more)


class Layer(nn.Module):
    """A layer whose attention runs eager, because it reads sequence lengths on the host."""

    def __init__(self, width: int, num_heads: int, lengths: dict[str, list[int]]) -> None:
        super().__init__()
        self.num_heads, self.lengths = num_heads, lengths
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @eager_region
    def attend(self, out: torch.Tensor, qkv: torch.Tensor) -> None:
        """Write each sequence's attention to ``out``. Shapes: out (T, E), qkv (T, 3E)."""
        start = 0
        for length in self.lengths["now"]:
            length = min(length, len(qkv) - start)  # captures run at other sizes
            if not length:
                break
            one = qkv[start : start + length].view(length, 3, self.num_heads, -1)
            query, key, value = one.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
            done = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            out[start : start + length] = done[0].transpose(0, 1).reshape(length, -1)
            start += length

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows after attention and the MLP. Shape (T, E)."""
        qkv = self.qkv(self.norms[0](hidden))
        out = torch.empty_like(hidden)
        self.attend(out, qkv)
        hidden = hidden + self.out(out)
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


def prefill(rounds: int, num_layers: int) -> None:
    width, heads, size = (1024, 16, 512) if HAS_GPU else (32, 2, 32)
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    lengths: dict[str, list[int]] = {"now": [size]}
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer(width, heads, lengths) for _ in range(num_layers)))
    layers = layers.to(DEVICE, dtype).eval().requires_grad_(requires_grad=False)

    def model(hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layers(hidden)
        return result

    sizes = [size // 4, size // 2, size]
    inputs = {"hidden": StaticInput((None, width), str(dtype).removeprefix("torch."))}
    runner, more = captured(model, inputs, sizes, ())
    cases: dict[str, Callable[..., Any]] = {"eager": model, "segments": runner}
    if HAS_GPU:
        cases["torch.compile default"] = torch.compile(model)
    draw = random.Random(0)
    for number in (size, size * 7 // 16):
        first = draw.randrange(number // 4, number // 2)
        lengths["now"] = [first, number - first]
        hidden = torch.randn(number, width, device=DEVICE, dtype=dtype)
        check(cases, {"hidden": hidden})

        def one(run: Callable[..., Any], hidden: torch.Tensor = hidden) -> Callable[[], None]:
            def step() -> None:
                run(hidden=hidden)
                wait()

            return step

        times = interleaved({name: one(run) for name, run in cases.items()}, rounds=rounds)
        show(times, f"prefill of {number} tokens", 1, "eager", {"segments": more})


def check(cases: dict[str, Callable[..., Any]], inputs: dict[str, torch.Tensor]) -> None:
    """Exit if a case differs from eager, or did not replay."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = cases["eager"](**inputs)
        for name, run in cases.items():
            got = run(**inputs)
            error = float((got - want).float().norm() / want.float().norm())
            if not error < 2e-2:
                raise SystemExit(f"{name} differs from eager by a relative error of {error}")
            if isinstance(run, GraphRunner) and run.stats().steps_by_mode["NONE"]:
                raise SystemExit(
                    f"{name} ran steps eager, by reason: {run.stats().eager_by_reason}"
                )


def show(
    times: dict[str, list[int]], what: str, per: int, ratio_to: str, more: dict[str, Any]
) -> None:
    named = {f"{what}: {name}": found for name, found in times.items()}
    emit_all(BENCH, named, per=per, ratio_to=f"{what}: {ratio_to}")
    for name, took in more.items():
        print(f"# {what}: {name}: {took}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=10)
    parser.add_argument("--steps", type=at_least_one, default=60 if HAS_GPU else 4)
    parser.add_argument("--layers", type=at_least_one, default=16 if HAS_GPU else 2)
    options = parser.parse_args()
    with torch.no_grad():
        mixed_traffic(options.rounds, options.steps)
        prefill(options.rounds, options.layers)


if __name__ == "__main__":
    main()
