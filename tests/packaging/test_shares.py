"""The processes of ``make test`` divide the files among them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_file_is_in_one_share_and_shares_are_equally_long(
    count: int, request: pytest.FixtureRequest
) -> None:
    """A file in no share would not be tested."""
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    shares = conftest.deal_files(request.config, count)
    (everything,) = conftest.deal_files(request.config, 1)
    assert {Path(__file__), ROOT / "docs" / "tutorial.md"} <= everything
    assert set().union(*shares) == everything
    assert sum(map(len, shares)) == len(everything)
    lengths = [
        sum(path.stat().st_size for path in share if path.suffix == ".py") for share in shares
    ]
    assert max(lengths) < 1.01 * min(lengths)


def run_shares(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script on files of a folder, with a conftest.py that deals them by name."""
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--share')\n"
        "def pytest_ignore_collect(collection_path, config):\n"
        "    if collection_path.name.startswith('test_'):\n"
        "        return collection_path.stem[-1] != config.getoption('--share')[0]\n"
    )
    command = [sys.executable, ROOT / "scripts" / "shares.py", "2", "-q", *arguments]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # half of their time
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("failing", [None, 1, 2])
def test_the_output_of_all_shares_is_shown_and_a_failure_of_any_fails(
    failing: int | None, tmp_path: Path
) -> None:
    """Otherwise a broken change would pass."""
    for share in (1, 2):
        test = f"def test_of_{share}():\n    assert {share != failing}\n"
        (tmp_path / f"test_{share}.py").write_text(test)
    found = run_shares(tmp_path)
    assert found.returncode == (failing is not None)
    assert found.stdout.count("1 passed") == (2 if failing is None else 1)
    assert ("FAILED" in found.stdout) == (failing is not None)


@pytest.mark.slow
def test_a_share_without_tests_fails_only_if_all_are(tmp_path: Path) -> None:
    """`make test ARGS=FILE` gives one share nothing to do."""
    (tmp_path / "test_2.py").write_text("def test_of_2():\n    pass\n")
    assert run_shares(tmp_path).returncode == 0
    assert run_shares(tmp_path, "-k", "no_such_test").returncode == 5
