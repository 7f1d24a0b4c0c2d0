"""Print the result lines of the decoding benchmark, and a summary for each model."""

from __future__ import annotations

import json
import statistics
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import transformers
from _common import emit
from _compile_time import CompileTime, compile_time
from _decoding_cases import Case, synchronize

BENCH = "decoding"
# All other cases belong to this package.
RIVALS = ("eager", "raw graphs", "default", "reduce-overhead", "library static", "library dynamic")
COMPILED_RIVALS = ("default", "reduce-overhead")
# These cases use the same attention as the rivals.
PLAIN, SAME_KERNELS = "graphs", "graphs, compiled"


class Lines:
    """Printer of one model's results. It also collects them for the summary.

    Args:
        model: Name of the model.

    Attributes:
        failed: Names of the cases that failed, in order.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.failed: list[str] = []
        self._medians: dict[str, dict[str, float]] = {}
        self._seconds: dict[str, float] = {}

    @contextmanager
    def catch_errors(self, traffic: str, case: str) -> Iterator[None]:
        """Print an exception as the line of a case, and continue."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a case may raise anything
            self.failed.append(case)
            traceback.print_exc(limit=-8)
            row = {"bench": BENCH, "case": case, "model": self.model, "traffic": traffic}
            text = f"{type(error).__name__}: {error}"[:500]
            print(json.dumps({**row, "error": text}), flush=True)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Record the duration of a part for the summary."""
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = round(perf_counter() - start, 1)

    def report(
        self,
        traffic: str,
        cases: Sequence[Case],
        seconds: Mapping[str, Sequence[float]],
        sizes: Sequence[int],
        more: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Print one line for each case.

        Args:
            traffic: Name of the traffic.
            cases: Cases to print.
            seconds: Seconds per step by case, one sample per round.
            sizes: Batch sizes of the steps.
            more: Further fields by case.
        """
        medians = {name: statistics.median(samples) for name, samples in seconds.items()}
        known = self._medians.setdefault(traffic, {})
        known.update({name: median * 1e3 for name, median in medians.items()})
        by_hand, eager = known.get("raw graphs"), known.get("eager")
        for case in cases:
            median = medians[case.name]
            compares = by_hand is not None and case.name != "raw graphs"
            emit(
                BENCH,
                case.name,
                median * 1e3,
                "ms",
                len(seconds[case.name]),
                ratio_to="raw graphs" if compares else None,
                ratio=median * 1e3 / by_hand if compares else None,
                model=self.model,
                traffic=traffic,
                tokens_per_s=round(sum(sizes) / len(sizes) / median, 1),
                times_eager=None if eager is None else round(eager / median / 1e3, 2),
                n_steps=len(sizes),
                transformers=transformers.__version__,
                **case.stats(),
                **((more or {}).get(case.name, {})),
            )

    def filled(self, case: str, start: float, before: CompileTime) -> None:
        """Print the time that a case has spent on compilation since ``before``."""
        synchronize()
        fields, elapsed = spent_since(before), perf_counter() - start
        emit(BENCH, case, elapsed, "s", 1, model=self.model, traffic="cache filled", **fields)

    def summary(self) -> None:
        """Print all comparisons in one line."""
        read = {traffic: compared(known) for traffic, known in self._medians.items()}
        row = {"bench": BENCH, "case": "summary", "model": self.model, "traffic": "all"}
        row = {**row, **read, "failed": self.failed, "seconds": self._seconds}
        print(json.dumps(row), flush=True)


def compared(milliseconds: Mapping[str, float]) -> dict[str, Any]:
    """Compare the cases of one kind of traffic.

    Args:
        milliseconds: Milliseconds per step, by case.

    Returns:
        ``best``: the fastest case of this package; ``ms``: its time; ``times ...``: its speed
            relative to each rival. ``plain to raw``: the speed of plain graphs relative to
            handwritten graphs. ``compiled to rival``: the speed of compiled graphs relative to the
            best compiled rival, both with the same attention. Comparisons with cases that were not
            measured are omitted.
    """
    ours = {case: ms for case, ms in milliseconds.items() if case not in RIVALS}
    found: dict[str, Any] = {}
    if ours:
        best = min(ours, key=ours.__getitem__)
        found = {"best": best, "ms": round(ours[best], 3)}
        for rival in RIVALS:
            if rival in milliseconds:
                found[f"times {rival}"] = round(milliseconds[rival] / ours[best], 3)
    if PLAIN in ours and "raw graphs" in milliseconds:
        found["plain to raw"] = round(milliseconds["raw graphs"] / ours[PLAIN], 3)
    compiled = [milliseconds[rival] for rival in COMPILED_RIVALS if rival in milliseconds]
    if SAME_KERNELS in ours and compiled:
        found["compiled to rival"] = round(min(compiled) / ours[SAME_KERNELS], 3)
    return found


def spent_since(before: CompileTime) -> dict[str, float]:
    """Return the time spent on compilation since ``before``, as fields of a line."""
    spent = compile_time().since(before)
    return {
        "compile_s": round(spent.compiling, 2),
        "autotune_s": round(spent.tuning, 2),
        "compiled": spent.graphs,
        "found": spent.found,
    }
