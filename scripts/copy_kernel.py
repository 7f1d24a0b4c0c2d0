"""Generate dispatchkit/backends/cuda/copy.ptx from copy.cu.

    python scripts/copy_kernel.py [--check]

Requires nvcc of CUDA 12.4 or newer on PATH. With --check, nothing is written, and the exit code is
1 if the file is out of date.

The PTX declares the minimum versions that the kernel needs, not those of this nvcc, so that older
drivers load it: PTX ISA 7.7 introduced the newest instruction that it uses (cvta.param).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "dispatchkit" / "backends" / "cuda"
SOURCE, TARGET = FOLDER / "copy.cu", FOLDER / "copy.ptx"


def made() -> str:
    """Return the PTX generated from the source."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "copy.ptx"
        run(["nvcc", "-ptx", "-arch=compute_75", "-o", str(output), str(SOURCE)])
        text = re.sub(r"^\s*//.*\n|^\s*\n", "", output.read_text(), flags=re.MULTILINE)
        text = re.sub(r"(?m)^\.version .*", ".version 7.7", text)
        text = re.sub(r"(?m)^\.target .*", ".target sm_70", text)
        # Assemble it as copy.py loads it: more than 4096 bytes of parameters require ISA 8.1.
        for number, loaded in enumerate(
            [text.replace("[29696]", "[2048]"), text.replace("version 7.7", "version 8.1")]
        ):
            path = Path(folder) / f"{number}.ptx"
            path.write_text(loaded)
            run(["ptxas", "-arch=sm_90", "-o", str(output), str(path)])
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    return f"// Made by scripts/copy_kernel.py of copy.cu, sha256 {digest}\n{text}"


def run(command: list[str]) -> None:
    """Run a compiler; exit with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr.strip()}")


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare without writing")
    if not parser.parse_args().check:
        TARGET.write_text(made())
    elif TARGET.read_text() != made():
        sys.exit(f"{TARGET} is out of date for {SOURCE.name} and this nvcc: run {sys.argv[0]}")


if __name__ == "__main__":
    main()
