"""Configure pytest for all tests, of the core and of the plugins.

Needs only pytest and hypothesis. Tests import other packages (torch, numpy, rich, ...) with
``pytest.importorskip``.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# One torch thread, so that results and times do not depend on the number of cores. Torch reads
# these variables on import. Importing torch here instead would slow down tests that do not need it.
# Processes that tests start inherit the variables.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)
# Inductor compiles in this process instead of starting a pool of processes that each import torch.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# Importing and collecting tests creates little garbage, and garbage collections would take a fifth
# of the time.
gc.disable()

# No deadlines: a busy machine must not fail a test.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=20, **_common)
settings.register_profile("ci", max_examples=10, derandomize=True, **_common)
settings.register_profile("nightly", max_examples=10_000, print_blob=True, **_common)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)
if PROFILE == "ci" and hasattr(providers, "_get_local_constants"):
    # By default, Hypothesis also draws constants from imported files. Parsing the files takes
    # seconds, and the examples of a test would depend on the imports of other tests.
    providers._get_local_constants = lambda: providers._local_constants  # noqa: SLF001 - no option


@pytest.fixture(scope="session")
def is_nightly() -> bool:
    """Return whether tests run all their repetitions."""
    return PROFILE == "nightly"


def pytest_report_header() -> str:
    """Report which dispatchkit is tested: the checkout or an installed package."""
    spec = importlib.util.find_spec("dispatchkit")
    where = spec.origin if spec is not None else "not importable"
    return f"dispatchkit: {where}; hypothesis profile: {PROFILE}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--share``, with which each of several processes runs some of the files."""
    parser.addoption(
        "--share",
        default="1/1",
        metavar="K/N",
        help="collect the K-th of N shares of the test files, as scripts/shares.py does",
    )


_OF_OTHER_SHARES = pytest.StashKey[set[Path]]()


def pytest_configure(config: pytest.Config) -> None:
    """Find the files of the other shares."""
    given = config.getoption("--share")
    numbers = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", given)
    if numbers is None or int(numbers[1]) > int(numbers[2]):
        raise pytest.UsageError(f"--share is {given!r}; give K/N with 1 <= K <= N, such as 1/2")
    own, count = int(numbers[1]) - 1, int(numbers[2])
    shares = deal_files(config, count) if count > 1 else []
    config.stash[_OF_OTHER_SHARES] = set().union(*shares[:own], *shares[own + 1 :])


def deal_files(config: pytest.Config, count: int) -> list[set[Path]]:
    """Divide the test files and the tested pages into shares.

    The size of a file estimates its duration; pages count as empty. Starting with the largest file,
    each file is added to the smallest share. Files in which ``-m`` deselects all tests are in no
    share.

    Args:
        config: The configuration of pytest, with the folders to search.
        count: Number of shares.
    """
    folders = [
        folder for pattern in config.getini("testpaths") for folder in config.rootpath.glob(pattern)
    ]
    sizes = {
        path: path.stat().st_size if path.suffix == ".py" else 0
        for folder in folders
        for pattern in ("test_*.py", "*.md")
        for path in folder.rglob(pattern)
        if not _is_deselected(path, config)
    }
    shares: list[set[Path]] = [set() for _ in range(count)]
    totals = [0] * count
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        taker = totals.index(min(totals))
        shares[taker].add(path)
        totals[taker] += sizes[path]
    return shares


_WHOLE_FILE = re.compile(r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.(slow|gpu)\b", re.MULTILINE)


def _is_deselected(path: Path, config: pytest.Config) -> bool:
    """Return whether ``-m`` deselects all tests of a file, as far as its text shows."""
    asked = set(config.option.markexpr.split(" and "))
    if not (asked <= {"slow", "gpu", "not slow", "not gpu"} and path.match("test_*.py")):
        return False
    text = path.read_text(encoding="utf-8")
    whole = _WHOLE_FILE.search(text)
    if whole and f"not {whole[1]}" in asked:
        return True
    return any(f"mark.{mark}" not in text for mark in asked & {"slow", "gpu"})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files of other shares, and files in which ``-m`` deselects all tests.

    Skipped files are not imported. Importing slow tests or GPU tests takes seconds, because they
    import torch's compiler or transformers.
    """
    is_left_out = collection_path in config.stash[_OF_OTHER_SHARES]
    return True if is_left_out or _is_deselected(collection_path, config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a test except those that its ``slow_except`` mark names."""
    named, found = set(), set()
    for item in items:
        mark = item.get_closest_marker("slow_except")
        if mark is not None:
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            named |= {(test, each) for each in mark.args}
            found.add((test, case))
            if case not in mark.args:
                item.add_marker("slow")
    if named - found and not any("::" in path for path in config.args):
        raise pytest.UsageError(f"slow_except names unknown cases: {sorted(named - found)}")


def pytest_collection_finish() -> None:
    """Reduce the work that pytest and the garbage collector do for each test.

    Imported objects are excluded from garbage collections until the last collection, because tests
    cause hundreds of collections. All loggers propagate: pytest adds its handlers to the root
    logger and to each logger that does not propagate, six times per test, and torch has fifty of
    these loggers.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # fewer automatic collections
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _keep_what_earlier_files_imported_out_of_garbage_collections() -> None:
    """Freeze imported objects, because collecting torch's compiler takes half a second."""
    gc.collect(1)
    gc.freeze()


_LOGGING = "logging-plugin"  # of pytest itself
_RECORDER = pytest.StashKey[object]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """With ``--share``, record log messages only for tests that request ``caplog``.

    To record messages, pytest visits every logger six times per test, and torch has hundreds of
    loggers. Without ``--share``, failure reports of all tests contain log messages.
    """
    if item.config.getoption("--share") != "1/1":
        _record_logs(item.config, "caplog" in getattr(item, "fixturenames", ()))


def _record_logs(config: pytest.Config, is_wanted: bool) -> None:
    plugins = config.pluginmanager
    if is_wanted and _RECORDER in config.stash:
        plugins.register(config.stash[_RECORDER], _LOGGING)
        del config.stash[_RECORDER]
    elif not is_wanted and plugins.has_plugin(_LOGGING):
        config.stash[_RECORDER] = plugins.unregister(name=_LOGGING)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Unfreeze all objects, so that pytest's last collection finds files that were never closed."""
    _record_logs(session.config, is_wanted=True)  # pytest closes its handlers
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Freeze the remaining objects, because pytest starts another collection."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests if there is no GPU, unless DISPATCHKIT_REQUIRE_GPU is set."""
    if item.get_closest_marker("gpu") is None or os.environ.get("DISPATCHKIT_REQUIRE_GPU"):
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
