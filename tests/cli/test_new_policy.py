"""``new-policy``: its output can be installed, found by name, and passes the kit."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dispatchkit import DispatchConfig, Dispatcher, load_plugins
from dispatchkit.errors import ConfigError
from dispatchkit.testing import run_policy_conformance

pytest.importorskip("typer")

from dispatchkit.cli.app import run
from dispatchkit.cli.new_policy import write_distribution

PYTHON = sys.executable
PAGE_ON_LEARNING = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "learning.md"
#: A kept copy of the command's output, shown in the documentation.
KEPT = Path(__file__).resolve().parents[2] / "examples" / "dispatchkit-smallest"


def test_it_writes_a_distribution_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new-policy", "my-rule", "--directory", str(tmp_path)]) == 0
    root = tmp_path / "dispatchkit-my-rule"
    written = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert written == {
        "README.md",
        "pyproject.toml",
        "src/dispatchkit_my_rule/__init__.py",
        "src/dispatchkit_my_rule/plugin.py",
        "src/dispatchkit_my_rule/policy.py",
        "src/dispatchkit_my_rule/py.typed",
        "tests/test_policy.py",
    }
    assert "pip install" in capsys.readouterr().out


def test_json_names_what_was_written_and_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts get one document; the folder's name may contain a space."""
    folder = tmp_path / "my work"
    folder.mkdir()
    assert run(["new-policy", "my-rule", "--directory", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["policy"] == "my-rule"
    root = Path(said["folder"])
    assert root == folder / "dispatchkit-my-rule"
    assert set(said["files"]) == {
        path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()
    }
    assert said["next"][0] == f"cd '{root}'"


def test_the_sample_of_the_documentation_is_what_the_command_writes(tmp_path: Path) -> None:
    root = write_distribution("smallest", tmp_path)
    for path in root.rglob("*"):
        if path.is_file():
            assert (KEPT / path.relative_to(root)).read_text() == path.read_text(), path.name


def test_the_page_on_learning_shows_what_the_command_writes(tmp_path: Path) -> None:
    root = write_distribution("quickest", tmp_path, learning=True)
    policy = (root / "src/dispatchkit_quickest/policy.py").read_text()
    first, second = re.findall(r"```python\n(.*?)```", PAGE_ON_LEARNING.read_text(), re.DOTALL)
    assert first == policy
    exec(compile(first + second, str(PAGE_ON_LEARNING), "exec"), {})  # noqa: S102 - it asserts


def test_a_policy_that_learns_keeps_the_contract_and_its_own_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["new-policy", "mine", "--learning", "--directory", str(tmp_path)]) == 0
    root = tmp_path / "dispatchkit-mine"
    monkeypatch.syspath_prepend(root / "src")
    from dispatchkit_mine import MinePolicy

    run_policy_conformance(MinePolicy, max_examples=10).raise_if_failed()
    spec = importlib.util.spec_from_file_location("mine_tests", root / "tests/test_policy.py")
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    for replay_us, eager_us in ((50.0, 70.0), (70.0, 50.0)):
        tests.test_policy_measures_both_and_keeps_the_faster(replay_us, eager_us)


def test_the_policy_is_short_and_nothing_is_left_to_fill_in(tmp_path: Path) -> None:
    root = write_distribution("my-rule", tmp_path)
    policy = (root / "src/dispatchkit_my_rule/policy.py").read_text()
    assert len(policy.splitlines()) < 50
    for path in root.rglob("*.py"):
        ast.parse(path.read_text())
    texts = [path.read_text() for path in root.rglob("*") if path.is_file()]
    assert not any("$name" in text or "$package" in text for text in texts)


def test_the_policy_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_distribution("fresh-rule", tmp_path)
    monkeypatch.syspath_prepend(root / "src")
    from dispatchkit_fresh_rule import FreshRulePolicy

    verdict = run_policy_conformance(FreshRulePolicy, max_examples=10)
    verdict.raise_if_failed()
    with pytest.warns(UserWarning, match="9 to 16"):
        config = DispatchConfig(sizes=(8,), max_num_tokens=16)
    table = Dispatcher(FreshRulePolicy(), config)
    assert table.dispatch(9).reason == "above_largest_size"
    assert verdict.claimed == ("monotone", "order", "smallest_bucket", "stateless")


def test_its_plugin_object_joins_a_composite_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_distribution("joining-rule", tmp_path)
    monkeypatch.syspath_prepend(root / "src")
    from dispatchkit_joining_rule import plugin

    monkeypatch.delenv("DISPATCHKIT_PLUGINS")
    plugins = load_plugins(extra=[("joining-rule", plugin)], strict=True)
    policy = plugins.create_policy("composite", members="joining-rule:9, vllm", plugins=plugins)
    assert [one.name for one in policy.members] == ["joining-rule", "vllm"]


@pytest.mark.parametrize(
    "name", ["", "My", "a_b", "1st", "a--b", "-a", "a-", "../x", "class", "dispatchkit-a"]
)
def test_names_that_cannot_be_used_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="NAME"):
        write_distribution(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_exists_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new-policy", "vllm", "--directory", str(tmp_path)]) == 2
    assert "dispatchkit-vllm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    root = write_distribution("mine", tmp_path)
    (root / "README.md").write_text("kept")
    with pytest.raises(ConfigError, match="already exists"):
        write_distribution("mine", tmp_path)
    assert (root / "README.md").read_text() == "kept"


@pytest.mark.slow
def test_it_builds_installs_passes_its_own_tests_and_joins_a_composite(tmp_path: Path) -> None:
    """Runs as for a user: another process, an installed wheel, names only."""
    pytest.importorskip("hatchling")
    root = tmp_path / KEPT.name
    shutil.copytree(KEPT, root)
    site = tmp_path / "site"
    pip = [PYTHON, "-m", "pip", "--quiet", "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(site), str(root)], check=True)
    path = os.pathsep.join([str(site), sysconfig.get_paths()["purelib"]])
    everything = {key: text for key, text in os.environ.items() if key != "DISPATCHKIT_PLUGINS"}
    environment = {**everything, "PYTHONPATH": path}

    def call(*command: str) -> str:
        done = subprocess.run(
            [PYTHON, *command],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listed = json.loads(call("-m", "dispatchkit", "policies", "--json"))
    rows = listed["policies"] if isinstance(listed, dict) else listed
    assert "dispatchkit-smallest" in {row["distribution"] for row in rows}
    assert " passed" in call("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    code = (
        "from dispatchkit import DispatchConfig, Dispatcher, load_plugins\n"
        "policy = load_plugins().create_policy('composite', members='smallest:1, vllm')\n"
        "table = Dispatcher(policy, DispatchConfig(sizes=(8, 16)), lazy=True)\n"
        "print(table.dispatch(9).policy)"
    )
    assert call("-c", code).strip() == "smallest"
