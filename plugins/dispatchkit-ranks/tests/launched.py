"""Run a program of the checkout under torchrun on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def torchrun(*arguments, size=2, on_gpus=False, limit=300):
    """Return the output of the ranks; fail the test if the program fails or times out."""
    # Without an address, torchrun asks a name server for that of this host.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(size)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not on_gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*command, *arguments],
        check=False,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
