"""Configure pytest for all tests, of the core and of the plugins.

Needs only pytest and hypothesis. Tests request other packages (torch, numpy, rich, ...) by
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

# One torch thread, so that results and times do not depend on the number of cores. Torch reads
# these variables on import. Importing torch here instead would slow down tests that do not need it.
# Processes that tests start inherit the variables.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)
# Inductor compiles in this process instead of starting a pool of processes that each import torch.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# Imports and collection make little garbage, and looking for it would take a fifth of their time.
gc.disable()

# No deadlines: a busy machine must not fail a test.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=20, **_common)
settings.register_profile("ci", max_examples=10, derandomize=True, **_common)
settings.register_profile("nightly", max_examples=10_000, print_blob=True, **_common)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


@pytest.fixture(scope="session")
def is_nightly() -> bool:
    """Return whether tests run all their repetitions."""
    return PROFILE == "nightly"


def pytest_report_header() -> str:
    """Report which dispatchkit is tested: the checkout or an installed package."""
    spec = importlib.util.find_spec("dispatchkit")
    where = spec.origin if spec is not None else "not importable"
    return f"dispatchkit: {where}; hypothesis profile: {PROFILE}"


_WHOLE_FILE = re.compile(r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.(slow|gpu)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip a file without importing it if ``-m`` would deselect all its tests.

    Importing GPU tests or slow tests takes seconds because they import torch's compiler or
    transformers.
    """
    asked = set(config.option.markexpr.split(" and "))
    if not (asked <= {"slow", "gpu", "not slow", "not gpu"} and collection_path.match("test_*.py")):
        return None
    text = collection_path.read_text(encoding="utf-8")
    whole = _WHOLE_FILE.search(text)
    if whole and f"not {whole[1]}" in asked:
        return True
    return True if any(f"mark.{mark}" not in text for mark in asked & {"slow", "gpu"}) else None


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
        raise pytest.UsageError(f"slow_except names cases that are not: {sorted(named - found)}")


def pytest_collection_finish() -> None:
    """Reduce the work that pytest and the garbage collector do for each test.

    Imported objects are excluded from later garbage collections because tests run hundreds of
    these. pytest adds its handlers to the root logger and to each logger that does not propagate,
    six times per test; torch has fifty such loggers.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # Python's automatic collections, of which there are thousands
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _keep_what_earlier_files_imported_out_of_garbage_collections() -> None:
    """Freeze imported objects, because collecting torch's compiler takes half a second."""
    gc.collect(1)
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Unfreeze all objects, so that pytest's last collection finds files that were never closed."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU, unless DISPATCHKIT_REQUIRE_GPU is set."""
    if item.get_closest_marker("gpu") is None or os.environ.get("DISPATCHKIT_REQUIRE_GPU"):
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
