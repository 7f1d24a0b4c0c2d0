"""Choose the batch sizes that the decoding benchmark runs, plans for and compiles for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from _decoding_cases import OWN_PLANNED

from dispatchkit.observe.trace import StepTrace, read_trace

from dispatchkit_plan import plan_sizes


def trace_sizes(args: argparse.Namespace) -> list[int]:
    """Return the batch sizes of the measured trace steps, with one token per request."""
    return _batches(args, slice(0, args.trace_steps))


def measured_sizes(args: argparse.Namespace) -> list[int]:
    """Return those of the usual capture sizes that measured batches are padded to."""
    usual = [one for one in (1, 2, 4, *range(8, 513, 8)) if one < args.most] + [args.most]
    rows = list(args.batches) if {"fixed", "calls"} & set(args.parts) else []
    if "trace" in args.parts:
        rows += trace_sizes(args)
    return sorted({next(size for size in usual if size >= one) for one in rows})


def planned_sizes(args: argparse.Namespace) -> list[int]:
    """Return the capture sizes that are planned from the trace.

    The plan uses the steps after the measured steps; if there are none, it uses the measured steps.
    """
    later = _batches(args, slice(args.trace_steps, None)) or trace_sizes(args)
    most = min(args.graphs, args.most)
    plan = plan_sizes(StepTrace({"num_tokens": later}), graphs=most, max_size=args.most)
    return list(plan.robust.sizes)


def evenly(sizes: Sequence[int], count: int | None) -> list[int]:
    """Return ``count`` evenly spaced elements; all if there are fewer or ``count`` is None."""
    if count is None or count >= len(sizes):
        return list(sizes)
    return [sizes[(2 * index + 1) * len(sizes) // (2 * count)] for index in range(count)]


def sizes_to_compile(args: argparse.Namespace, case: str) -> list[int]:
    """Return the batch sizes at which a case compiles, in the order in which they occur."""
    in_trace = "trace" in args.parts and case != "default"
    sizes = list(dict.fromkeys(trace_sizes(args))) if in_trace else []
    if "fixed" in args.parts and case != OWN_PLANNED:
        sizes += args.batches[:1] if case == "default" else args.batches
    if args.dynamic in ("auto", "no"):
        return list(dict.fromkeys(sizes))
    first: dict[bool, int] = {}
    for rows in sizes:
        first.setdefault(rows == 1, rows)
    return list(first.values())


def _batches(args: argparse.Namespace, steps: slice) -> list[int]:
    requests: Sequence[int] = read_trace(args.trace)[steps].column("num_reqs")
    return [max(1, min(args.most, one)) for one in requests]
