"""Decoding with transformers models: graphs here beside the ways a user has without them.

    python bench/decoding.py [--models NAME ...] [--batches N ...] [--steps N] [--rounds N]
        [--trace FILE] [--trace-steps N] [--graphs N] [--length N] [--skip CASE ...]
        [--dynamic auto|yes|no] [--parts fixed trace calls] [--compile] [--fill-cache]

Random weights; every case decodes on one cache of the same size and gives the same tokens. A
step takes a token for each row and returns the next, on the device. Cases take turns; the device
is waited for at the end of a round alone.

- ``eager``: the step, called plainly.
- ``raw graphs``: torch.cuda.graph by hand, one for each size, on the same cache.
- ``graphs``: GraphDecoder. ``graphs, compiled``: with ``compile=True``.
- ``graphs, compiled, planned``: with the ``--graphs`` capture sizes that ``plan_sizes``
  recommends from the steps of the trace behind those that are measured (traces only).
- ``graphs, decode attention``, ``graphs, compiled, decode attention``: of the model with
  ``DECODE_ATTENTION``; all other cases have the library's ``sdpa``.
- ``reduce-overhead``, ``default``: torch.compile of the step with its own graphs, and as it is (for
  the smallest of the fixed batches alone).
- ``library static``, ``library dynamic``, ``generate``: whole calls of ``generate`` (fixed batches
  only, the first with the smallest alone): with its compiled static cache, without, and through
  GraphDecoder.

Fixed batches: milliseconds for a step, and tokens a second, once everything is captured. Trace:
the batch sizes of the first steps of real traffic, from the first step on; captures and
re-recordings are in the time, compilation and tuning of its kernels are not, and are printed beside
it (``compile_s``, ``autotune_s``). Lines of "the trace again", at the end, are of the same steps
with everything there, the cases in turns. A case that fails has a line with ``error``, the others
go on, and the exit status is 1.

torch.compile takes up to half a minute for a step, twice for each case: once for the size it sees
first, once for any size. ``--fill-cache`` does only that, the models at the same time if asked for
so, and what is measured afterwards finds it on the disk:

    export TORCHINDUCTOR_CACHE_DIR=/tmp/kernels
    for one in gpt2 llama-small llama-1b; do
        python bench/decoding.py --fill-cache --models $one &
    done; wait
    python bench/decoding.py

Without a CUDA device tiny models run on the tape, which shows that it works and no speed;
torch.compile is left out there unless ``--compile`` asks for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from _common import emit

try:
    import transformers
except ImportError:
    raise SystemExit("Needs transformers: pip install 'dispatchkit[transformers]'") from None

from _compile_time import CompileTime, compile_time, load_compiler
from _decoding_cases import (
    CASES,
    COMPILED,
    DEVICE,
    IS_GPU,
    MODELS,
    PLANNED,
    Case,
    make_model,
    planned_sizes,
    start_afresh,
    synchronize,
    trace_sizes,
)

from dispatchkit.integrations.transformers import GraphDecoder

BENCH = "decoding"
TRACE = Path(__file__).resolve().parent.parent / "tests/data/traces/step_azure_conv_low.csv.gz"

_failed: list[str] = []


@contextmanager
def contained(model: str, traffic: str, case: str) -> Iterator[None]:
    """Print what goes wrong as the line of a case, and let the others go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a case raises is its result
        _failed.append(case)
        traceback.print_exc(limit=-8)
        row = {"bench": BENCH, "case": case, "model": model, "traffic": traffic}
        print(json.dumps({**row, "error": f"{type(error).__name__}: {error}"[:500]}), flush=True)


def wanted(args: argparse.Namespace, *, of_trace: bool = False) -> list[str]:
    """Return the cases that can run here."""
    left_out = set(args.skip)
    left_out.add("default" if of_trace else PLANNED)  # the one captures nothing
    if not IS_GPU:
        left_out.add("raw graphs")
    if args.fill_cache:
        left_out |= set(CASES) - set(COMPILED)
    elif not compiles(args):
        left_out |= set(COMPILED)
    return [name for name in CASES if name not in left_out]


def compiles(args: argparse.Namespace) -> bool:
    """Return whether torch.compile is asked for."""
    return IS_GPU or args.compile or args.fill_cache


def inputs(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions for the largest batch: the middle of the cache."""
    maker = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, 90, (args.most,), generator=maker).to(DEVICE)
    positions = torch.full((args.most,), args.length // 2, dtype=torch.int64, device=DEVICE)
    return tokens, positions


def fixed(name: str, model: Any, args: argparse.Namespace) -> None:
    """Steps of one batch size, everything captured and compiled before."""
    tokens, positions = inputs(args)
    cases: list[Case] = []
    for one in wanted(args):
        with contained(name, "fixed", one):
            cases.append(CASES[one](model, args))
    for rows in args.batches:
        if rows != args.batches[0]:
            cases = [case for case in cases if case.name != "default"]
        given, traffic = (tokens[:rows], positions[:rows]), f"batch {rows}"
        ready = []
        for case in cases:
            with contained(name, traffic, case.name):
                for _ in range(3):
                    case.run(*given)
                synchronize()
                ready.append(case)
        seconds = in_turns(ready, [given] * args.steps, args.rounds)
        report(name, traffic, ready, seconds, [rows] * args.steps)


def in_turns(
    cases: Sequence[Case], steps: Sequence[tuple[torch.Tensor, torch.Tensor]], rounds: int
) -> dict[str, list[float]]:
    """Return seconds for a step by case, a sample for each round."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            start = perf_counter()
            for given in steps:
                case.run(*given)
            synchronize()
            seconds[case.name].append((perf_counter() - start) / len(steps))
    return seconds


def trace(name: str, model: Any, args: argparse.Namespace) -> None:
    """Steps of a trace, from cold: what is captured on the way counts, compilation does not."""
    sizes = trace_sizes(args)
    tokens, positions = inputs(args)
    views = {rows: (tokens[:rows], positions[:rows]) for rows in set(sizes)}
    steps = [views[rows] for rows in sizes]
    traffic = f"trace of {len(sizes)}"
    cases: list[Case] = []
    seconds: dict[str, list[float]] = {}
    for one in wanted(args, of_trace=True):
        with contained(name, traffic, one):
            start_afresh()
            before, start = compile_time(), perf_counter()
            case = CASES[one](model, args)  # raw graphs are captured here
            for given in steps:
                case.run(*given)
            synchronize()
            elapsed, spent = perf_counter() - start, compile_time().since(before)
            cases.append(case)
            seconds[one] = [(elapsed - spent.total) / len(sizes)]
            more = {"distinct_sizes": len(views), "rows": round(sum(sizes) / len(sizes), 2)}
            report(name, traffic, [case], seconds, sizes, {**more, **fields(spent)})
    # Eager steps have nothing to capture: they go on as they began, and take the longest.
    later = [case for case in cases if case.name != "eager"]
    again = in_turns(later, steps, min(args.rounds, 2))
    if "eager" in seconds:
        again["eager"] = seconds["eager"]
    report(name, f"{traffic}, again", later, again, sizes)


def fields(spent: CompileTime) -> dict[str, float]:
    """Return compilation as fields of a line."""
    return {"compile_s": round(spent.compiling, 2), "autotune_s": round(spent.tuning, 2)}


def whole_calls(name: str, model: Any, args: argparse.Namespace) -> None:
    """``generate`` itself, of the library and through graphs: prompts, choices and all."""
    count = tokens_of_call(args)
    decoder = GraphDecoder(
        model, max_batch_size=args.most, max_length=args.length, lengths=[args.length],
        sizes=args.sizes,
    )  # fmt: skip
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "library dynamic": lambda ids: model.generate(ids, **asked(args)),
        "generate": lambda ids: decoder.generate(ids, **asked(args)),
    }
    if compiles(args) and "library static" not in args.skip:
        calls["library static"] = static_call(model, args)
    for rows in args.batches:
        if rows != min(args.batches):
            calls.pop("library static", None)  # compiled anew for each batch
        ids, traffic = prompts(rows), f"generate, batch {rows}"
        cases = []
        for one, call in calls.items():
            with contained(name, traffic, one):
                call(ids)
                call(ids)
                cases.append(Case(one, lambda tokens, _, call=call: call(tokens)))
        seconds = in_turns(cases, [(ids, ids)], min(args.rounds, 3))
        seconds = {one: [sample / count for sample in known] for one, known in seconds.items()}
        report(name, traffic, cases, seconds, [rows] * count)


def tokens_of_call(args: argparse.Namespace) -> int:
    """Return how many new tokens a call asks for."""
    return min(args.steps, args.length // 2, 50) + 1


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a call of ``generate`` is asked with."""
    return {
        "max_new_tokens": tokens_of_call(args),
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }


def prompts(rows: int) -> torch.Tensor:
    """Return short prompts (rows, 8)."""
    maker = torch.Generator().manual_seed(3)
    return torch.randint(3, 90, (rows, 8), generator=maker).to(DEVICE)


def static_call(model: Any, args: argparse.Namespace) -> Callable[[torch.Tensor], Any]:
    """Return a call of ``generate`` with the library's own compiled static cache."""
    return lambda ids: model.generate(ids, cache_implementation="static", **asked(args))


PARTS: dict[str, Callable[[str, Any, argparse.Namespace], None]] = {
    "fixed": fixed,
    "trace": trace,
    "calls": whole_calls,
}


def fill_cache(name: str, model: Any, args: argparse.Namespace) -> None:
    """Run what is compiled once for each size, in the order of the measurements."""
    tokens, positions = inputs(args)

    def filled(case: str, part: str, run: Callable[[], Any]) -> None:
        with contained(name, part, case):
            before, start = compile_time(), perf_counter()
            run()
            synchronize()
            spent, elapsed = compile_time().since(before), perf_counter() - start
            more = {"model": name, "traffic": f"{part}, cache filled", **fields(spent)}
            emit(BENCH, case, elapsed, "s", 1, **more)

    def sizes_of(case: str, sizes: Sequence[int]) -> None:
        made = CASES[case](model, args)
        for rows in sizes:
            made.run(tokens[:rows], positions[:rows])

    if "fixed" in args.parts:
        start_afresh()
        for case in wanted(args):
            sizes = args.batches[:1] if case == "default" else args.batches
            filled(case, "fixed", lambda case=case, sizes=sizes: sizes_of(case, sizes))
    if "trace" in args.parts:
        sizes = tuple(dict.fromkeys(trace_sizes(args)))
        for case in wanted(args, of_trace=True):
            start_afresh()
            filled(case, "trace", lambda case=case: sizes_of(case, sizes))
    if "calls" in args.parts and "library static" not in args.skip:
        start_afresh()
        ids = prompts(min(args.batches))
        filled("library static", "calls", lambda: static_call(model, args)(ids))


def report(
    model: str,
    traffic: str,
    cases: Sequence[Case],
    seconds: dict[str, list[float]],
    sizes: Sequence[int],
    more: dict[str, Any] | None = None,
) -> None:
    """Print one line for each case."""
    base = "raw graphs" if "raw graphs" in seconds else next(iter(seconds), "")
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
            **(more or {}),
        )


def main() -> None:
    """Measure every model that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["gpt2", "llama-small", "llama-1b"] if IS_GPU else ["gpt2-tiny", "llama-tiny"]
    parser.add_argument("--models", nargs="+", default=names, choices=sorted(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64] if IS_GPU else [1, 5])
    parser.add_argument("--steps", type=int, default=50 if IS_GPU else 5)
    parser.add_argument("--rounds", type=int, default=3 if IS_GPU else 2)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--trace-steps", type=int, default=1000 if IS_GPU else 30)
    parser.add_argument("--graphs", type=int, default=12, help="planned capture sizes")
    parser.add_argument("--length", type=int, default=512 if IS_GPU else 64)
    parser.add_argument("--most", type=int, default=128 if IS_GPU else 16, help="largest batch")
    parser.add_argument("--skip", nargs="+", default=[], help="cases to leave out")
    parser.add_argument(
        "--dynamic",
        default="auto",
        choices=("auto", "yes", "no"),
        help="torch.compile's setting of that name for 'graphs, compiled'",
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU too")
    parser.add_argument("--fill-cache", action="store_true", help="compile, and measure nothing")
    args = parser.parse_args()
    args.batches = sorted(rows for rows in args.batches if rows <= args.most)
    args.sizes = [one for one in (1, 2, 4, *range(8, 513, 8)) if one < args.most] + [args.most]
    args.planned = planned_sizes(args)
    if compiles(args):
        load_compiler(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what compilers and the library advise
        for name in args.models:
            model = make_model(name)
            if args.fill_cache:
                fill_cache(name, model, args)
            else:
                for part in args.parts:
                    start_afresh()
                    with contained(name, part, "all"):
                        PARTS[part](name, model, args)
            del model
            start_afresh()
    if _failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
