"""Build all distributions, install them without the checkout, and run their tests there.

Usage: scripts/release.py [NAME ...]; by default, all distributions are tested. The built files stay
    in ``dist/``. Needs no network: dependencies come from the environment that runs this script.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SOURCES = {
    path.parent.name if path.parent != ROOT else "dispatchkit": path.parent
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
}
NO_TESTS = 5  # exit code of pytest if no tests were selected
# These tests check the checkout itself: its setup, sources and pages.
OF_THE_CHECKOUT = (
    "--ignore=tests/packaging",
    "--ignore=tests/cli/test_docs.py",
    "--deselect=tests/cli/test_benching.py::test_those_of_this_checkout_are_found",
    "--deselect=tests/settings/test_settings.py::test_every_variable_that_the_code_reads_is_known",
)


def main(names: list[str]) -> int:
    """Return 0 if every distribution was built and installed and passes its tests."""
    unknown = sorted(set(names) - set(SOURCES))
    if unknown:
        log(f"Unknown distribution {unknown[0]!r}; choose from {', '.join(SOURCES)}.")
        return 2
    problem = versions_disagree()
    if problem:
        log(problem)
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    for name, folder in SOURCES.items():
        log(f"== build {name}")
        build = [sys.executable, "-m", "hatchling", "build", "-d", str(DIST)]
        if subprocess.run(build, cwd=folder, check=False).returncode:
            return 1
    with tempfile.TemporaryDirectory(prefix="release ") as place:
        # Copy the tests right after the build, so that both come from the same sources.
        tests = {name: copy_tests(name, Path(place)) for name in names or SOURCES}
        python = install(Path(place))
        failed = [name for name, folder in tests.items() if not passes(name, python, folder)]
    log(f"FAILED: {', '.join(failed)}" if failed else "All built, installed and passed.")
    return int(bool(failed))


def versions_disagree() -> str:
    """Return a description of inconsistent versions; empty if all are consistent."""
    found = {
        name: tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
        for name, folder in SOURCES.items()
    }
    wrong = [
        f"{name} {version}" for name, version in found.items() if version != found["dispatchkit"]
    ]
    if wrong:
        return f"Versions differ from dispatchkit {found['dispatchkit']}: {', '.join(wrong)}."
    for name, folder in SOURCES.items():
        source = folder if name == "dispatchkit" else folder / "src"
        package = source / name.replace("-", "_")
        file = package / "_version.py" if name == "dispatchkit" else package / "__init__.py"
        text = file.read_text()
        match = re.search(r'__version__\s*(?::\s*\w+)?\s*=\s*"([^"]+)"', text)
        if match and match[1] != found[name]:
            return f"{name} has version {found[name]} in pyproject.toml, {match[1]} in {file.name}."
    if f"## {found['dispatchkit']}" not in (ROOT / "CHANGELOG.md").read_text():
        return f"CHANGELOG.md has no section {found['dispatchkit']}."
    return ""


def install(place: Path) -> Path:
    """Create an environment with the wheels and their dependencies; return its Python."""
    environment = place / "env"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    wheels = sorted(map(str, DIST.glob("*.whl")))
    subprocess.run([*pip, "--no-index", "--no-deps", *wheels], check=True)
    # Add dependencies by path: the .pth files of editable installs in that folder are not read.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = subprocess.run(
        [str(python), "-P", "-c", "import dispatchkit; print(dispatchkit.__file__)"],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    ).stdout.strip()
    if not Path(where).is_relative_to(site):
        raise SystemExit(f"The imported package is not the wheel: {where}")
    return python


def copy_tests(name: str, place: Path) -> Path:
    """Copy the tests of a distribution to a folder without its sources; return the folder."""
    folder = place / name
    folder.mkdir()
    # Tests also read traces, pages and examples; only sources must be missing.
    left_out = shutil.ignore_patterns("__pycache__", ".*", "dist", "_build")
    for part in ("conftest.py", "pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / part, folder)
    for part in ("tests", "docs", "bench", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=left_out)
    if name != "dispatchkit":
        target = folder / "plugins" / name
        shutil.copytree(SOURCES[name], target, ignore=left_out)
        shutil.rmtree(target / "src")
    return folder


def passes(name: str, python: Path, folder: Path) -> bool:
    """Return whether the copied tests pass; slow tests run only if there are no other tests."""
    log(f"== test {name}")
    code = run_tests(name, python, folder, "not slow and not gpu")
    if code == NO_TESTS:
        code = run_tests(name, python, folder, "not gpu")
    return code == 0


def run_tests(name: str, python: Path, folder: Path, marks: str) -> int:
    """Run copied tests with the given marks; return pytest's exit code."""
    tests = "tests" if name == "dispatchkit" else f"plugins/{name}"
    how = ["-q", "-m", marks, "-n", "2", "--dist", "loadfile"]
    done = subprocess.run(
        [str(python), "-m", "pytest", *how, *OF_THE_CHECKOUT, tests],
        cwd=folder,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        check=False,
    )
    return done.returncode


def log(text: str) -> None:
    """Print a line without buffering, because subprocesses also print."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
