"""Run pytest in several processes, each on its share of the test files.

    python scripts/shares.py 2 -q tests/keys

``conftest.py`` divides the files into shares. The output of the first share is printed while it
runs, and the output of the other shares after all shares have finished. Each share has its own
cache, so that ``--lf`` repeats the failed tests of all shares.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

_NO_TESTS = 5  # pytest's exit status if it collects nothing


def run(count: int, arguments: Sequence[str]) -> int:
    """Run ``count`` shares at the same time; return the exit status of the first that failed."""
    command = [sys.executable, "-m", "pytest"]
    if count <= 1:
        return subprocess.call([*command, *arguments])
    if sys.stdout.isatty():
        command.append("--color=yes")
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        processes = []
        for number, output in enumerate([None, *outputs], 1):
            own = ["--share", f"{number}/{count}", "-o", f"cache_dir=.pytest_cache/{number}"]
            process = subprocess.Popen([*command, *own, *arguments], stdout=output, stderr=output)
            processes.append(process)
        codes = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout.buffer)
            sys.stdout.flush()
    failed = [code for code in codes if code not in {0, _NO_TESTS}]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
