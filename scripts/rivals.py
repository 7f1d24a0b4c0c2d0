"""Fetch the dispatchers of published vLLM releases, for comparison.

Downloads the wheels of some releases without their dependencies and keeps the files that define the
dispatcher, its descriptor, its modes and its caller. The files are stored in ``.rivals/``, which
git ignores, and are not part of this project.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = ("0.33.0", "0.13.0", "0.11.0")
FILES = (
    "vllm/v1/cudagraph_dispatcher.py",
    "vllm/forward_context.py",
    "vllm/config/compilation.py",
    "vllm/lora/utils.py",
    "vllm/v1/worker/gpu_model_runner.py",
)
FOLDER = Path(__file__).resolve().parent.parent / ".rivals"


def log(text: str) -> None:
    """Print a line without buffering."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def unpack(wheel: Path, target: Path) -> None:
    """Write the compared files and their license."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        missing = sorted(set(FILES) - names)
        if missing:
            sys.exit(
                f"{wheel.name} does not contain {', '.join(missing)}; "
                f"update FILES in {Path(__file__).name}."
            )
        licences = [name for name in names if ".dist-info/" in name and "LICENSE" in name]
        for name in (*FILES, *licences):
            path = target / (name if name in FILES else "LICENSE")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))


def main() -> None:
    """Fetch the missing releases."""
    for release in RELEASES:
        target = FOLDER / f"vllm-{release}"
        if all((target / name).is_file() for name in FILES):
            log(f"{target}: already fetched")
            continue
        log(f"vllm {release}: downloading the wheel (several hundred MB)")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", folder]
            fetched = subprocess.run([*command, f"vllm=={release}"], check=False)
            wheels = list(Path(folder).glob("*.whl"))
            if fetched.returncode or len(wheels) != 1:
                sys.exit(
                    f"vllm {release} could not be downloaded. It requires a package index and "
                    "Linux on x86-64; try again there."
                )
            unpack(wheels[0], target)
        log(f"{target}: {len(FILES)} files")


if __name__ == "__main__":
    main()
