r"""Decoding with transformers models: graphs here beside the ways a user has without them.

    python bench/decoding.py [--models NAME ...] [--batches N ...] [--steps N] [--rounds N]
        [--trace FILE] [--trace-steps N] [--eager-steps N] [--graphs N] [--length N] [--most N]
        [--cases CASE ...] [--skip CASE ...] [--dynamic batch|auto|yes|no]
        [--parts trace fixed calls] [--compile] [--fill-cache]

Random weights; every case decodes on one cache of the same size and gives the same tokens. A
step takes a token for each row and returns the next, on the device. Cases take turns, those that
compile after the others; the device is waited for at the end of a round alone.

- ``eager``: the step, called plainly.
- ``raw graphs``: torch.cuda.graph by hand, one for each size that is measured, on the same cache.
- ``graphs``: GraphDecoder. ``graphs, compiled``: over kernels of torch.compile.
- ``graphs, decode attention``, ``graphs, compiled, decode attention``: of the model with
  ``DECODE_ATTENTION``; all other cases but the next have the library's ``sdpa``.
- ``graphs, compiled, decode attention, planned``: with the ``--graphs`` capture sizes that
  ``plan_sizes`` recommends from the steps of the trace behind those that are measured (traces
  only).
- ``reduce-overhead``, ``default``: torch.compile of the step with its own graphs, and as it is (for
  the smallest of the fixed batches alone).
- ``library static``, ``library dynamic``, ``generate``: whole calls of ``generate`` (fixed batches
  only, the first with the smallest alone): with its compiled static cache, without, and through
  GraphDecoder.

Parts, in this order, on the same cases:

- ``trace``: the batch sizes of the first steps of real traffic, from the first step on; captures
  and re-recordings are in the time, compilation and the tuning of its kernels are not, and are
  printed beside it (``compile_s``, ``autotune_s``; ``compiled`` graphs, of which the kernels of
  ``found`` were on the disk). ``--eager-steps`` has eager, which has nothing
  to warm up, run so many of the steps, evenly chosen. "The trace again" are the same steps with
  everything there, the cases in turns, half as many rounds.
- ``fixed``: milliseconds for a step of one batch size, and tokens a second, with everything there.
- ``calls``: milliseconds for a new token of whole calls.

Each line is printed as soon as it is known. A case that fails has a line with ``error``, the others
go on, and the exit status is 1. The last line of a model, ``summary``, has for each traffic the
best case here and how many times as fast as each rival it is; and the same of plain graphs against
graphs by hand, and of compiled ones against the best compiled rival, with the same attention.

torch.compile takes up to a quarter of a minute for a graph, and makes two for a case: for a single
row, and for any other batch. With ``--dynamic batch`` it is told beforehand that the batch changes
and nothing else does, as GraphDecoder's ``compile=True`` tells it. Left to itself, ``auto``, it
compiles for the first size it sees, and for any at the second; ``yes`` and ``no`` are its settings
of that name.

``--fill-cache`` does only that, and what is measured afterwards finds it on the disk. Models and
cases can have processes of their own:

    export TORCHINDUCTOR_CACHE_DIR=/tmp/kernels
    for one in gpt2 llama-small llama-1b; do
        python bench/decoding.py --fill-cache --models $one &
    done; wait
    python bench/decoding.py

Models of the other kinds of layers (windows, linear attention, state space, encoder-decoder), each
within a minute:

    four="gemma3 qwen3.5 mamba whisper"
    python bench/decoding.py --models $four --parts fixed --steps 30 --most 64 \
        --cases eager "raw graphs" graphs reduce-overhead
    python bench/decoding.py --models $four --parts trace --eager-steps 100 --rounds 2 --most 32 \
        --cases eager "raw graphs" graphs "graphs, compiled" reduce-overhead

Without a CUDA device tiny models run on the tape, which shows that it works and no speed;
torch.compile is left out there unless ``--compile`` asks for it.
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
    import transformers  # noqa: F401 - the modules below would name it less plainly
except ImportError:
    raise SystemExit("Needs transformers: pip install 'dispatchkit[transformers]'") from None

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
    make_model,
    start_afresh,
    synchronize,
    tidy,
)
from _decoding_lines import Lines, spent_since
from _decoding_sizes import evenly, measured_sizes, planned_sizes, sizes_to_compile, trace_sizes

TRACE = Path(__file__).resolve().parent.parent / "tests/data/traces/step_azure_conv_low.csv.gz"

Given = tuple[torch.Tensor, torch.Tensor]


class Session:
    """The measurement of one model: cases are made once, for all parts.

    Args:
        lines: Where what is measured goes.
        model: The model.
        args: What was asked for.
    """

    def __init__(self, lines: Lines, model: Any, args: argparse.Namespace) -> None:
        self.lines, self.model, self.args = lines, model, args
        self._made: dict[str, Case] = {}
        maker = torch.Generator().manual_seed(7)
        self._tokens = torch.randint(3, 90, (args.most,), generator=maker).to(DEVICE)
        # The middle of the cache.
        self._positions = torch.full(
            (args.most,), args.length // 2, dtype=torch.int64, device=DEVICE
        )
        self._views: dict[int, Given] = {}

    def inputs(self, rows: int) -> Given:
        """Return tokens and positions of a batch, the same ones each time."""
        if rows not in self._views:
            self._views[rows] = self._tokens[:rows], self._positions[:rows]
        return self._views[rows]

    def case(self, name: str) -> Case:
        """Return a case, made at its first use."""
        if name not in self._made:
            self._made[name] = CASES[name](self.model, self.args)
        return self._made[name]

    def trace(self) -> None:
        """Steps of a trace, from cold: what is captured on the way counts, compilation does not."""
        sizes = trace_sizes(self.args)
        traffic = f"trace of {len(sizes)}"
        ready: list[Case] = []
        seconds: dict[str, list[float]] = {}
        for one in wanted(self.args, "trace"):
            ran = evenly(sizes, self.args.eager_steps) if one == "eager" else sizes
            steps = [self.inputs(rows) for rows in ran]
            tidy()
            with self.lines.contained(traffic, one):
                try:
                    before, start = compile_time(), perf_counter()
                    case = self.case(one)  # raw graphs are captured here
                    for given in steps:
                        case.run(*given)
                    synchronize()
                    elapsed, spent = perf_counter() - start, compile_time().since(before)
                except BaseException:
                    self._made.pop(one, None)  # the next part begins anew
                    raise
                ready.append(case)
                seconds[one] = [(elapsed - spent.total) / len(ran)]
                more = {"distinct_sizes": len(set(ran)), "rows": round(sum(ran) / len(ran), 2)}
                fields = {**more, **spent_since(before)}
                self.lines.report(traffic, [case], {one: seconds[one]}, ran, {one: fields})
        # Eager steps have nothing to capture: they go on as they began, and take the longest.
        ready = [case for case in ready if case.name != "eager"]
        steps = [self.inputs(rows) for rows in sizes]
        again = in_turns(ready, steps, max(1, self.args.rounds // 2))
        if "eager" in seconds:
            again["eager"] = seconds["eager"]
        self.lines.report(f"{traffic}, again", ready, again, sizes)

    def fixed(self) -> None:
        """Steps of one batch size, everything captured and compiled before."""
        names = wanted(self.args, "fixed")
        # What compiles comes last: a limit of time loses nothing else.
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
            with self.lines.contained(traffic, one):
                before, case = compile_time(), self.case(one)
                for _ in range(3):
                    case.run(*given)
                synchronize()
                case.stats()  # what follows is counted from here on
                ready.append(case)
                fields[one] = spent_since(before)
        seconds = in_turns(ready, [given] * self.args.steps, self.args.rounds)
        self.lines.report(traffic, ready, seconds, [rows] * self.args.steps, fields)

    def calls(self) -> None:
        """``generate`` itself, of the library and through graphs: prompts, choices and all."""
        self._made.clear()
        start_afresh()
        count = num_tokens(self.args)
        calls = calls_of(self.model, self.args, wanted(self.args, "calls"))
        for rows in self.args.batches:
            if rows != self.args.batches[0]:
                calls.pop(LIBRARY_STATIC, None)  # compiled anew for each batch
            ids, traffic = prompts(rows), f"generate, batch {rows}"
            ready = []
            for one, call in calls.items():
                with self.lines.contained(traffic, one):
                    call(ids)
                    call(ids)
                    ready.append(Case(one, lambda tokens, _, call=call: call(tokens)))
            seconds = in_turns(ready, [(ids, ids)], min(self.args.rounds, 3))
            each = {one: [sample / count for sample in known] for one, known in seconds.items()}
            self.lines.report(traffic, ready, each, [rows] * count)

    def fill(self) -> None:
        """Run what is compiled once, as it is compiled in the measurement."""
        steps = [part for part in self.args.parts if part != "calls"]
        for one in wanted(self.args, *steps) if steps else ():
            sizes = sizes_to_compile(self.args, one)
            self._fill(one, lambda one=one, sizes=sizes: self._run_once(one, sizes))
        if "calls" in self.args.parts:
            self._made.clear()
            start_afresh()
            ids = prompts(self.args.batches[0])
            for one, call in calls_of(self.model, self.args, wanted(self.args, "calls")).items():
                self._fill(one, lambda call=call: (call(ids), call(ids)))

    def _fill(self, one: str, run: Callable[[], Any]) -> None:
        tidy()
        with self.lines.contained("cache filled", one):
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


def wanted(args: argparse.Namespace, *parts: str) -> list[str]:
    """Return the cases of parts that can run here, in the order that they are made in."""
    names = list(CALLS) if parts == ("calls",) else list(CASES)
    left_out = set(args.skip)
    if "fixed" not in parts:
        left_out.add("default")  # captures nothing
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
    """Return whether torch.compile is asked for."""
    return IS_GPU or args.compile or args.fill_cache


def in_turns(cases: Sequence[Case], steps: Sequence[Given], rounds: int) -> dict[str, list[float]]:
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


def measure(name: str, args: argparse.Namespace) -> list[str]:
    """Measure one model, or compile for it; return the cases that failed."""
    lines = Lines(name)
    with lines.contained("all", "model"):
        session = Session(lines, make_model(name), args)
        if args.fill_cache:
            session.fill()
            return lines.failed
        for part, run in PARTS.items():
            if part in args.parts:
                with lines.timed(part), lines.contained(part, "all"):
                    run(session)
        lines.summary()
    return lines.failed


def arguments() -> argparse.Namespace:
    """Return what is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["gpt2", "llama-small", "llama-1b"] if IS_GPU else ["gpt2-tiny", "llama-tiny"]
    cases = [*CASES, *CALLS]
    parser.add_argument("--models", nargs="+", default=names, choices=sorted(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64] if IS_GPU else [1, 5])
    parser.add_argument("--steps", type=int, default=50 if IS_GPU else 5)
    parser.add_argument("--rounds", type=at_least_one, default=3 if IS_GPU else 2)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--trace-steps", type=int, default=1000 if IS_GPU else 30)
    parser.add_argument("--eager-steps", type=at_least_one, help="of the trace (default: all)")
    parser.add_argument("--graphs", type=int, default=3, help="planned capture sizes")
    parser.add_argument("--length", type=int, default=512 if IS_GPU else 64)
    parser.add_argument("--most", type=int, default=128 if IS_GPU else 16, help="largest batch")
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases, help="the only ones")
    parser.add_argument("--skip", nargs="+", default=[], choices=cases, help="cases to leave out")
    parser.add_argument(
        "--dynamic",
        default="batch",
        choices=("batch", "auto", "yes", "no"),
        help="which sizes torch.compile takes for such as change",
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU too")
    parser.add_argument("--fill-cache", action="store_true", help="compile, and measure nothing")
    args = parser.parse_args()
    args.batches = sorted(rows for rows in args.batches if rows <= args.most)
    args.sizes = measured_sizes(args)
    args.planned = planned_sizes(args)
    return args


def main() -> None:
    """Measure every model that is asked for."""
    args = arguments()
    if compiles(args):
        load_compiler(DEVICE)
    failed: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what compilers and the library advise
        for name in args.models:
            failed += measure(name, args)
            start_afresh()
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
