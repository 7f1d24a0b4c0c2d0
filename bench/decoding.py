r"""Measure decoding with transformers models: GraphDecoder and its alternatives.

    python bench/decoding.py [--models NAME ...] [--batches N ...] [--steps N] [--rounds N]
        [--trace FILE] [--trace-steps N] [--eager-steps N] [--graphs N] [--length N] [--most N]
        [--cases CASE ...] [--skip CASE ...] [--dynamic batch|auto|yes|no]
        [--parts trace fixed calls] [--compile] [--fill-cache]

Weights are random. All cases decode with a cache of the same size and return the same tokens. A
step takes one token per row and returns the next tokens on the device. Cases take turns; cases that
compile run after the others. The device is synchronized only at the end of a round.

- ``eager``: the step without graphs.
- ``raw graphs``: one handwritten torch.cuda.graph for each measured size, all with one cache.
- ``graphs``: GraphDecoder. ``graphs, compiled``: GraphDecoder with kernels from torch.compile.
- ``graphs, decode attention``, ``graphs, compiled, decode attention``: the same with
  ``DECODE_ATTENTION``. All other cases, except the next one, use transformers' ``sdpa``.
- ``graphs, compiled, decode attention, planned``: the same with ``--graphs`` capture sizes, which
  ``plan_sizes`` plans from the trace steps after the measured ones (only in ``trace``).
- ``reduce-overhead``: torch.compile of the step with torch's own graphs. ``default``: torch.compile
  without graphs (only for the smallest fixed batch).
- ``library static``, ``library dynamic``: complete calls of transformers' ``generate`` with its
  compiled static cache (only for the smallest batch), and with its dynamic cache. ``generate``:
  complete calls of GraphDecoder's ``generate``. These three run only in ``calls``.

There are three parts, run in this order:

- ``trace``: the batch sizes of the first steps of real traffic, starting cold. Times include
  captures and re-recordings. Compilation and autotuning are excluded and printed separately
  (``compile_s``, ``autotune_s``). ``compiled`` is the number of graphs that torch.compile compiled,
  ``found`` the number of those whose kernels were on disk. With ``--eager-steps N``, the case
  ``eager`` runs only N evenly spaced steps. After that, lines of "trace of ..., again" repeat the
  steps with everything captured, with cases in turns and half of ``--rounds``.
- ``fixed``: milliseconds per step of one batch size, and tokens per second, with everything
  captured.
- ``calls``: milliseconds per new token of complete calls, for the same batch sizes.

Each line is printed as soon as it is measured. A case that fails prints a line with ``error``; the
others continue, and the exit status is 1. The last line of a model, ``summary``, contains three
comparisons for each kind of traffic: the best case of this package with each alternative;
``graphs`` with handwritten graphs; and ``graphs, compiled`` with the best compiled alternative,
which uses the same attention.

torch.compile takes up to 15 seconds per graph and compiles two graphs per case: one for a single
row, one for any other batch. With ``--dynamic batch``, only the batch dimension is marked as
dynamic, as in GraphDecoder with ``compile=True``. With ``auto``, torch.compile specializes on the
first size and generalizes at the second. ``yes`` and ``no`` stand for ``dynamic=True`` and
``dynamic=False``.

``--fill-cache`` only compiles; later measurements then find the kernels on disk. Models and cases
can be compiled in separate processes:

    export TORCHINDUCTOR_CACHE_DIR=/tmp/kernels
    for one in gpt2 llama-small llama-1b; do
        python bench/decoding.py --fill-cache --models $one &
    done; wait
    python bench/decoding.py

These commands measure models with other kinds of layers (sliding windows, linear attention, state
space, encoder-decoder). Each model takes less than a minute:

    four="gemma3 qwen3.5 mamba whisper"
    python bench/decoding.py --models $four --parts fixed --steps 30 --most 64 \
        --cases eager "raw graphs" graphs reduce-overhead
    python bench/decoding.py --models $four --parts trace --eager-steps 100 --rounds 2 --most 32 \
        --cases eager "raw graphs" graphs "graphs, compiled" reduce-overhead

Without a CUDA device, tiny models run on the tape backend. This tests the script only;
torch.compile is skipped unless ``--compile`` is given.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

try:
    import transformers  # noqa: F401 - fails here with a clearer message than in the modules below
except ImportError:
    raise SystemExit(
        "This script requires transformers: pip install 'dispatchkit[transformers]'"
    ) from None

from _common import at_least_one
from _compile_time import compile_time, load_compiler
from _decoding_calls import CALLS, LIBRARY_STATIC, calls_of, num_tokens, prompts
from _decoding_cases import (
    CASES,
    COMPILED,
    DEVICE,
    IS_GPU,
    MODELS,
    OWN_PLANNED,
    Case,
    free_memory,
    make_model,
    reset_compiler,
    synchronize,
)
from _decoding_lines import Lines, spent_since
from _decoding_sizes import evenly, measured_sizes, planned_sizes, sizes_to_compile, trace_sizes

TRACE = Path(__file__).resolve().parent.parent / "tests/data/traces/step_azure_conv_low.csv.gz"

Given = tuple[torch.Tensor, torch.Tensor]


class Session:
    """The measurement of one model.

    The parts ``trace`` and ``fixed`` share the cases, so graphs are captured once.

    Args:
        lines: Printer of the results.
        model: Model to measure.
        args: Command-line arguments.
    """

    def __init__(self, lines: Lines, model: Any, args: argparse.Namespace) -> None:
        self.lines, self.model, self.args = lines, model, args
        self._made: dict[str, Case] = {}
        maker = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(3, 90, (args.most,), generator=maker).to(DEVICE)
        # Use the middle of the cache.
        self._positions = torch.full(
            (args.most,), args.length // 2, dtype=torch.int64, device=DEVICE
        )
        self._views: dict[int, Given] = {}

    def inputs(self, rows: int) -> Given:
        """Return the tokens and positions of a batch, always the same tensors."""
        if rows not in self._views:
            self._views[rows] = self._tokens[:rows], self._positions[:rows]
        return self._views[rows]

    def case(self, name: str) -> Case:
        """Return a case, which is created on first use."""
        if name not in self._made:
            self._made[name] = CASES[name](self.model, self.args)
        return self._made[name]

    def trace(self) -> None:
        """Measure the steps of a trace from a cold start, with captures but without compilation."""
        sizes = trace_sizes(self.args)
        traffic = f"trace of {len(sizes)}"
        ready: list[Case] = []
        seconds: dict[str, list[float]] = {}
        for one in selected_cases(self.args, "trace"):
            ran = evenly(sizes, self.args.eager_steps) if one == "eager" else sizes
            steps = [self.inputs(rows) for rows in ran]
            free_memory()
            with self.lines.catch_errors(traffic, one):
                try:
                    before, start = compile_time(), perf_counter()
                    case = self.case(one)  # the case `raw graphs` captures here
                    for given in steps:
                        case.run(*given)
                    synchronize()
                    elapsed, spent = perf_counter() - start, compile_time().since(before)
                except BaseException:
                    self._made.pop(one, None)  # the next part creates it again
                    raise
                ready.append(case)
                seconds[one] = [(elapsed - spent.total) / len(ran)]
                more = {"distinct_sizes": len(set(ran)), "rows": round(sum(ran) / len(ran), 2)}
                fields = {**more, **spent_since(before)}
                self.lines.report(traffic, [case], {one: seconds[one]}, ran, {one: fields})
        # Eager steps capture nothing, so they need no second pass, and they take longest.
        ready = [case for case in ready if case.name != "eager"]
        steps = [self.inputs(rows) for rows in sizes]
        again = in_turns(ready, steps, max(1, self.args.rounds // 2))
        if "eager" in seconds:
            again["eager"] = seconds["eager"]
        self.lines.report(f"{traffic}, again", ready, again, sizes)

    def fixed(self) -> None:
        """Measure steps of one batch size, with everything captured and compiled."""
        names = selected_cases(self.args, "fixed")
        # Compiled cases come last, so that a time limit cuts off only these.
        for group in (set(names) - set(COMPILED), set(names) & set(COMPILED)):
            for rows in self.args.batches:
                self._fixed(rows, [one for one in names if one in group])

    def _fixed(self, rows: int, names: Sequence[str]) -> None:
        traffic, given = f"batch {rows}", self.inputs(rows)
        ready: list[Case] = []
        fields = {}
        for one in names:
            if one == "default" and rows != self.args.batches[0]:
                continue
            with self.lines.catch_errors(traffic, one):
                before, case = compile_time(), self.case(one)
                for _ in range(3):
                    case.run(*given)
                synchronize()
                case.stats()  # resets the counters
                ready.append(case)
                fields[one] = spent_since(before)
        seconds = in_turns(ready, [given] * self.args.steps, self.args.rounds)
        self.lines.report(traffic, ready, seconds, [rows] * self.args.steps, fields)

    def calls(self) -> None:
        """Measure complete calls of ``generate``, of transformers and of GraphDecoder."""
        self._made.clear()
        reset_compiler()
        count = num_tokens(self.args)
        calls = calls_of(self.model, self.args, selected_cases(self.args, "calls"))
        for rows in self.args.batches:
            if rows != self.args.batches[0]:
                calls.pop(LIBRARY_STATIC, None)  # it would compile again for each batch
            ids, traffic = prompts(rows), f"generate, batch {rows}"
            ready = []
            for one, call in calls.items():
                with self.lines.catch_errors(traffic, one):
                    call(ids)
                    call(ids)
                    ready.append(Case(one, lambda tokens, _, call=call: call(tokens)))
            seconds = in_turns(ready, [(ids, ids)], min(self.args.rounds, 3))
            each = {one: [sample / count for sample in known] for one, known in seconds.items()}
            self.lines.report(traffic, ready, each, [rows] * count)

    def fill(self) -> None:
        """Run each compiled case once, so that its kernels are on disk."""
        steps = [part for part in self.args.parts if part != "calls"]
        for one in selected_cases(self.args, *steps) if steps else ():
            sizes = sizes_to_compile(self.args, one)
            self._fill(one, lambda one=one, sizes=sizes: self._run_once(one, sizes))
        if "calls" in self.args.parts:
            self._made.clear()
            reset_compiler()
            ids = prompts(self.args.batches[0])
            for one, call in calls_of(
                self.model, self.args, selected_cases(self.args, "calls")
            ).items():
                self._fill(one, lambda call=call: (call(ids), call(ids)))

    def _fill(self, one: str, run: Callable[[], Any]) -> None:
        free_memory()
        with self.lines.catch_errors("cache filled", one):
            before, start = compile_time(), perf_counter()
            run()
            self.lines.filled(one, start, before)

    def _run_once(self, one: str, sizes: Sequence[int]) -> None:
        for rows in sizes:
            self.case(one).run(*self.inputs(rows))


PARTS: dict[str, Callable[[Session], None]] = {
    "trace": Session.trace,
    "fixed": Session.fixed,
    "calls": Session.calls,
}


def selected_cases(args: argparse.Namespace, *parts: str) -> list[str]:
    """Return the cases that the parts run on this machine, in order."""
    names = list(CALLS) if parts == ("calls",) else list(CASES)
    left_out = set(args.skip)
    if "fixed" not in parts:
        left_out.add("default")  # does not capture graphs
    if "trace" not in parts:
        left_out.add(OWN_PLANNED)
    if not IS_GPU:
        left_out.add("raw graphs")
    if args.fill_cache:
        left_out |= set(names) - set(COMPILED)
    elif not compiles(args):
        left_out |= set(COMPILED)
    return [one for one in names if one in args.cases and one not in left_out]


def compiles(args: argparse.Namespace) -> bool:
    """Return whether torch.compile is used."""
    return IS_GPU or args.compile or args.fill_cache


def in_turns(cases: Sequence[Case], steps: Sequence[Given], rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of each case, one sample per round."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            start = perf_counter()
            for given in steps:
                case.run(*given)
            synchronize()
            seconds[case.name].append((perf_counter() - start) / len(steps))
    return seconds


def measure(name: str, args: argparse.Namespace) -> list[str]:
    """Measure one model, or only fill the cache for it; return the cases that failed."""
    lines = Lines(name)
    with lines.catch_errors("all", "model"):
        session = Session(lines, make_model(name), args)
        if args.fill_cache:
            session.fill()
            return lines.failed
        for part, run in PARTS.items():
            if part in args.parts:
                with lines.timed(part), lines.catch_errors(part, "all"):
                    run(session)
        lines.summary()
    return lines.failed


def arguments() -> argparse.Namespace:
    """Return the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["gpt2", "llama-small", "llama-1b"] if IS_GPU else ["gpt2-tiny", "llama-tiny"]
    cases = [*CASES, *CALLS]
    parser.add_argument("--models", nargs="+", default=names, choices=sorted(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64] if IS_GPU else [1, 5])
    parser.add_argument("--steps", type=int, default=50 if IS_GPU else 5)
    parser.add_argument("--rounds", type=at_least_one, default=3 if IS_GPU else 2)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--trace-steps", type=int, default=1000 if IS_GPU else 30)
    parser.add_argument(
        "--eager-steps",
        type=at_least_one,
        help="number of trace steps for the case eager (default: all)",
    )
    parser.add_argument("--graphs", type=int, default=3, help="number of planned capture sizes")
    parser.add_argument("--length", type=int, default=512 if IS_GPU else 64)
    parser.add_argument("--most", type=int, default=128 if IS_GPU else 16, help="largest batch")
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases, help="cases to run")
    parser.add_argument("--skip", nargs="+", default=[], choices=cases, help="cases to skip")
    parser.add_argument(
        "--dynamic",
        default="batch",
        choices=("batch", "auto", "yes", "no"),
        help="which dimensions torch.compile treats as dynamic",
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--compile", action="store_true", help="use torch.compile on a CPU too")
    parser.add_argument("--fill-cache", action="store_true", help="compile without measuring")
    args = parser.parse_args()
    args.batches = sorted(rows for rows in args.batches if rows <= args.most)
    args.sizes = measured_sizes(args)
    args.planned = planned_sizes(args)
    return args


def main() -> None:
    """Measure all requested models."""
    args = arguments()
    if compiles(args):
        load_compiler(DEVICE)
    failed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings from torch.compile and transformers
        for name in args.models:
            failed += measure(name, args)
            reset_compiler()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
