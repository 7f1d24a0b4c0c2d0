"""What the benchmark scripts share: one JSON line per result, always with the same fields.

Fields: ``bench`` (the script), ``case``, ``median``, ``unit``, ``n`` (samples), ``ratio_to`` (the
case it is compared with) and ``ratio``, ``device``, ``torch`` and ``driver``. Torch is asked for
its version without being imported, unless a script has imported it already.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any


def at_least_one(text: str) -> int:
    """Return a number of rounds that was given on the command line.

    Raises:
        argparse.ArgumentTypeError: It is not a whole number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def emit(
    bench: str,
    case: str,
    median: float,
    unit: str,
    n: int,
    *,
    ratio_to: str | None = None,
    ratio: float | None = None,
    **more: Any,
) -> None:
    """Print one result as a JSON line.

    Args:
        bench: Name of the script.
        case: What was measured.
        median: The median of the samples.
        unit: Its unit (``ns``, ``us``, ``ms``, ``bytes``).
        n: Number of samples.
        ratio_to: The case it is compared with.
        ratio: How many times that one.
        more: Further fields of one script.
    """
    row = {
        "bench": bench,
        "case": case,
        "median": round(median, 2),
        "unit": unit,
        "n": n,
        "ratio_to": ratio_to,
        "ratio": None if ratio is None else round(ratio, 3),
        **machine(),
        **more,
    }
    print(json.dumps(row), flush=True)


def machine() -> dict[str, str | None]:
    """Return device, torch version and driver; CPU where torch was not imported."""
    try:
        version: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = None
    device, driver = "cpu", None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        driver = torch.version.cuda and f"CUDA {torch.version.cuda}"
    return {"device": device, "torch": version, "driver": driver}


def interleaved(
    cases: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int = 3
) -> dict[str, list[int]]:
    """Return nanoseconds of each case, measured in turns.

    Cases take turns, so that a busy machine slows all alike; the collector is held off.

    Args:
        cases: What to run, by name.
        rounds: Samples of each.
        warmup: Runs of each that are not counted.
    """
    times: dict[str, list[int]] = {name: [] for name in cases}
    for _ in range(warmup):
        for run in cases.values():
            run()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in cases.items():
                start = perf_counter_ns()
                run()
                times[name].append(perf_counter_ns() - start)
    finally:
        if was_enabled:
            gc.enable()
    return times


def emit_all(
    bench: str,
    times: Mapping[str, list[int]],
    *,
    per: int,
    ratio_to: str | None = None,
    **more: Any,
) -> dict[str, float]:
    """Print the median nanoseconds per call of each case, and how it compares.

    Args:
        bench: Name of the script.
        times: Nanoseconds of each sample, by case.
        per: Calls in one sample.
        ratio_to: The case all others are compared with; the ratio is the median of the ratios
            of samples taken one after the other.
        more: Further fields.

    Returns:
        The medians by case.
    """
    medians = {}
    for name, samples in times.items():
        ratio = None
        if ratio_to is not None and name != ratio_to:
            pairs = zip(samples, times[ratio_to], strict=True)
            ratio = statistics.median(mine / base for mine, base in pairs)
        medians[name] = statistics.median(samples) / per
        emit(
            bench,
            name,
            medians[name],
            "ns",
            len(samples),
            ratio_to=ratio_to if ratio is not None else None,
            ratio=ratio,
            best=round(min(samples) / per, 2),
            **more,
        )
    return medians
