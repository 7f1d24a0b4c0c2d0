"""Measure mixed traffic through a decoder: eager, piecewise graphs, and torch.compile.

    python bench/piecewise.py [--rounds N] [--steps N] [--sizes N] [--layers N]
        [--inductor | --no-inductor]

A decoder whose attention is a custom operator runs the same steps in every case. Four of five steps
are uniform decode batches, the others include prefill, and ``--sizes`` distinct numbers of rows
occur. Cases take turns. The time of a step is the time of the trace divided by its number of
steps; as in a server, the device is synchronized only at the end of a trace.

- ``eager``: the model without graphs.
- ``PIECEWISE``, ``FULL_AND_PIECEWISE``: a GraphRunner, with the model split at attention.
- ``compiled``, ``compiled, guards skipped``, ``compiled, inductor pieces``: this package's backend
  for torch.compile, with FULL_AND_PIECEWISE.
- ``torch.compile default``, ``torch.compile reduce-overhead``: torch's own modes.

Each case prints two more lines: ``cold`` is the time of the first run of the trace, including all
compilation and captures, and ``compiles`` is the number of graphs that Dynamo compiled for all
sizes. Without a CUDA device, a small model runs on the tape backend, which tests the script only;
cases with inductor are skipped unless ``--inductor`` is given.
"""

from __future__ import annotations

import argparse
import random
import types
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from _common import emit, emit_all, interleaved
from torch import nn
from torch._dynamo.utils import counters

from dispatchkit import GraphRunner, StaticInput, split_module

from dispatchkit_compile import batch_facts, torch_compile

BENCH = "piecewise"
AT = ["piecewise_bench::attend"]


@torch.library.custom_op(AT[0], mutates_args=("keys", "values", "out"))
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write keys and values to the cache, then let each token attend to its request so far.

    Shapes: query and out (T, H, D), key and value (T, D), keys and values (S, L, D).
    """
    keys[slots, positions] = key
    values[slots, positions] = value
    mask = torch.arange(keys.shape[1], device=query.device) <= positions.unsqueeze(1)
    attended = nn.functional.scaled_dot_product_attention(
        query,
        keys[slots],
        values[slots],
        attn_mask=mask.unsqueeze(1).expand(-1, query.shape[1], -1),
    )
    out.copy_(attended)


@attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    return None


class Block(nn.Module):
    """A transformer block with one key/value head."""

    def __init__(self, heads: int, head_dim: int, slots: int, length: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * head_dim)
        self.out = nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.register_buffer("keys", torch.zeros(slots + 1, length, head_dim))
        self.register_buffer("values", torch.zeros(slots + 1, length, head_dim))

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden state after the block. Shape (T, E)."""
        normed = self.norm(hidden)
        query = self.query(normed).view(-1, self.heads, self.head_dim)
        key, value = self.key_value(normed).chunk(2, dim=-1)
        out = torch.empty_like(query)
        attend(
            query,
            key.contiguous(),
            value.contiguous(),
            positions,
            slots,
            self.keys,
            self.values,
            out,
        )
        hidden = hidden + self.out(out.flatten(1))
        gate, up = self.gate_up(self.norm_mlp(hidden)).chunk(2, dim=-1)
        return hidden + self.down(nn.functional.silu(gate) * up)


class Decoder(nn.Module):
    """A decoder whose cache slot 0 is used for padding."""

    def __init__(self, layers: int, heads: int, head_dim: int, slots: int, length: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.embedding = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(heads, head_dim, slots, length) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 512)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits. Shape (T, V)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, positions, slots)
        return self.head(self.norm(hidden))


Step = tuple[dict[str, torch.Tensor], int, bool]  # inputs, requests, uniform decode


def make_steps(
    count: int, num_sizes: int, most: int, slots: int, length: int, device: str
) -> list[Step]:
    """Return steps with ``num_sizes`` distinct numbers of rows; four of five are decode steps."""
    chance = random.Random(5)
    decode = chance.sample(range(1, slots + 1), min(slots, max(1, num_sizes // 2)))
    mixed = chance.sample(range(slots + 1, most + 1), max(1, num_sizes - len(decode)))
    steps: list[Step] = []
    for index in range(count):
        is_decode = index % 5 != 4
        sizes = decode if is_decode else mixed
        rows = sizes[(index // 5 * 4 + index % 5 if is_decode else index // 5) % len(sizes)]
        requests = rows if is_decode else min(slots, rows)
        # The rows of a request have consecutive positions, as in a prefill.
        slot = torch.arange(rows) % requests + 1
        place = (torch.arange(rows) // requests + chance.randrange(length // 2)) % length
        inputs = {
            "tokens": torch.randint(512, (rows,)).to(device),
            "positions": place.to(device),
            "slots": slot.to(device),
        }
        steps.append((inputs, requests, is_decode))
    return steps


def with_own_code(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the model, with a separate code object for Dynamo's cache."""

    def call(tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return model(tokens, positions, slots)

    return types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)


def make_cases(
    model: nn.Module, sizes: list[int], most: int, on_device: bool, with_inductor: bool
) -> dict[str, Callable[[Step], Any]]:
    """Return, for each case, a factory of the function that runs one step."""
    inputs = {name: StaticInput((None,), "int64") for name in ("tokens", "positions", "slots")}
    backend = "cuda" if on_device else "tape"
    device = "cuda" if on_device else "cpu"

    def runner_case(mode: str) -> Callable[[Step], Any]:
        pieces = split_module(model, inputs, at=AT, device=device)
        runner = GraphRunner(
            pieces,
            inputs,
            sizes=sizes,
            max_num_tokens=most,
            mode=mode,
            backend=backend,
            state=list(model.buffers()),
            outputs="view",
        )
        runner.capture()

        def run(step: Step) -> Any:
            given, requests, uniform = step
            return runner(**given, num_reqs=requests, uniform=uniform)

        return run

    def compiled_case(skip_guards: bool, compiler: str | None = None) -> Callable[[Step], Any]:
        compiled = torch_compile.compile(
            with_own_code(model),
            at=AT,
            fill={"slots": 0},
            sizes=sizes,
            max_num_tokens=most,
            device_backend=backend,
            piece_compiler=compiler,
            skip_guards=skip_guards,
            outputs="view",
            lazy=False,
        )

        def run(step: Step) -> Any:
            given, requests, uniform = step
            if not uniform:
                return compiled(**given)
            with batch_facts(num_reqs=requests, uniform=True):
                return compiled(**given)

        return run

    def torch_case(mode: str) -> Callable[[Step], Any]:
        compiled = torch.compile(with_own_code(model), mode=mode)

        def run(step: Step) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(**step[0])

        return run

    makers: dict[str, Callable[[], Callable[[Step], Any]]] = {
        "eager": lambda: lambda step: model(**step[0]),
        "PIECEWISE": lambda: runner_case("PIECEWISE"),
        "FULL_AND_PIECEWISE": lambda: runner_case("FULL_AND_PIECEWISE"),
        "compiled": lambda: compiled_case(False),
        "compiled, guards skipped": lambda: compiled_case(True),
    }
    if with_inductor:
        if on_device:
            makers["compiled, inductor pieces"] = lambda: compiled_case(True, "inductor")
        makers["torch.compile default"] = lambda: torch_case("default")
        makers["torch.compile reduce-overhead"] = lambda: torch_case("reduce-overhead")
    return makers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    on_device = torch.cuda.is_available()
    parser.add_argument("--rounds", type=int, default=7 if on_device else 3)
    parser.add_argument("--steps", type=int, default=500 if on_device else 20)
    parser.add_argument("--sizes", type=int, default=100 if on_device else 8)
    parser.add_argument("--layers", type=int, default=16 if on_device else 2)
    parser.add_argument("--inductor", action=argparse.BooleanOptionalAction, default=on_device)
    options = parser.parse_args()

    device = "cuda" if on_device else "cpu"
    heads, head_dim, slots, length = (16, 64, 128, 512) if on_device else (2, 16, 16, 32)
    most = 512 if on_device else 64
    torch.manual_seed(0)
    model = Decoder(options.layers, heads, head_dim, slots, length).requires_grad_(False)
    model = model.to(device, torch.bfloat16 if on_device else torch.float32)
    steps = make_steps(options.steps, options.sizes, most, slots, length, device)
    num_sizes = len({len(step[0]["tokens"]) for step in steps})
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, most + 1, 16)]
    sizes = [size for size in sizes if size < most] + [most]

    def wait() -> None:
        if on_device:
            torch.cuda.synchronize()

    def run_all(run: Callable[[Step], Any]) -> Callable[[], None]:
        def trace() -> None:
            for step in steps:
                run(step)
            wait()

        return trace

    makers = make_cases(model, sizes, most, on_device, options.inductor)
    stats = counters["stats"]
    cases: dict[str, Callable[[], None]] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in makers.items():
            before, start = stats["unique_graphs"], perf_counter()
            run = make()
            cases[name] = run_all(run)
            cases[name]()
            cold = perf_counter() - start
            emit(BENCH, f"{name}: cold", cold * 1e3, "ms", 1, steps=len(steps), sizes=num_sizes)
            made = stats["unique_graphs"] - before
            emit(BENCH, f"{name}: compiles", made, "graphs", 1, sizes=num_sizes)
            check(model, run, steps)
        times = interleaved(cases, rounds=options.rounds, warmup=1)
    emit_all(BENCH, times, per=len(steps), ratio_to="eager", sizes=num_sizes, layers=options.layers)


def check(model: nn.Module, run: Callable[[Step], Any], steps: list[Step]) -> None:
    """Compare a case with the model on some steps; exit if it differs."""
    for step in steps[:10]:
        want = model(**step[0])
        got = run(step).clone()
        error = (got - want).abs().max() / want.abs().max()
        if not error < (3e-2 if want.dtype is torch.bfloat16 else 1e-4):
            raise SystemExit(
                f"a case differs from eager by {float(error):.2g} of the largest absolute value"
            )


if __name__ == "__main__":
    main()
