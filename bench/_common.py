"""Functions that the benchmark scripts share. The scripts print one JSON line per result.

All lines have the fields ``bench`` (script), ``case``, ``median``, ``unit``, ``n`` (number of
samples), ``ratio_to`` (case for comparison), ``ratio``, ``device``, ``torch`` (version) and
``driver`` (CUDA version that torch was built for). Scripts that do not need torch do not import it:
the version is read from torch's package metadata.
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
    """Convert a command-line argument to a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: The text is not an integer of at least 1.
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
        case: Name of the measured case.
        median: Median of the samples.
        unit: Unit of the median (``ns``, ``us``, ``ms``, ``bytes``).
        n: Number of samples.
        ratio_to: Name of the case for comparison.
        ratio: Ratio to that case.
        more: Further fields.
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
    """Return the fields about the machine; the device is ``cpu`` unless torch is imported."""
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
    """Measure cases in turns, and return the nanoseconds of each sample by case.

    Because the cases take turns, a busy machine slows all of them equally. Garbage collection is
    disabled while they run.

    Args:
        cases: Functions to run, by name.
        rounds: Number of samples of each case.
        warmup: Number of runs of each case before the samples.
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
    """Print each case with its median nanoseconds per call and its ratio to one case.

    Args:
        bench: Name of the script.
        times: Nanoseconds of each sample, by case.
        per: Number of calls per sample.
        ratio_to: Case that all others are compared with. The ratio is computed for each round, and
            the median of these ratios is printed.
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
