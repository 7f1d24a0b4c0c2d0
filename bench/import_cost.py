"""Measure `import dispatchkit` and `import attrs, pluggy`, its run-time dependencies.

Each sample is a new interpreter that measures only the import. The two imports alternate, so that a
busy machine slows both equally. The script prints one JSON line with the median of the first
import in microseconds, and the ratio of this median to that of the second import.

    python bench/import_cost.py [SAMPLES]
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys

CASE = "import dispatchkit"
RATIO_TO = "import attrs, pluggy"


def sample(statement: str) -> float:
    """Return the microseconds that a statement takes in a new interpreter."""
    code = (
        "from time import perf_counter_ns as now\n"
        f"start = now()\n{statement}\nprint((now() - start) / 1000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    return float(done.stdout)


def main(samples: int = 41) -> None:
    """Measure both imports and print the result."""
    for statement in (CASE, RATIO_TO):  # the first run writes bytecode
        sample(statement)
    times: dict[str, list[float]] = {CASE: [], RATIO_TO: []}
    for _ in range(samples):
        for statement, taken in times.items():
            taken.append(sample(statement))
    median, base = (statistics.median(times[name]) for name in (CASE, RATIO_TO))
    has_torch = importlib.util.find_spec("torch") is not None
    row = {
        "bench": "import_cost",
        "case": CASE,
        "median": round(median, 1),
        "unit": "us",
        "n": samples,
        "ratio_to": RATIO_TO,
        "ratio": round(median / base, 3),
        "device": "cpu",
        "torch": importlib.metadata.version("torch") if has_torch else None,
        "driver": None,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
