"""``config show`` and settings on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TABLE = '[tool.dispatchkit]\npolicy = "vllm@0.11"\nsizes = [1, 2, 4]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with its own settings and a clean environment."""
    (tmp_path / "pyproject.toml").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(done: Any) -> dict[str, dict[str, Any]]:
    assert done.code == 0, done.err
    return {row["setting"]: row for row in json.loads(done.out)["settings"]}


@pytest.mark.usefixtures("folder")
def test_each_setting_says_where_it_came_from(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources are file, environment, command line and default; overrides are listed."""
    monkeypatch.setenv("DISPATCHKIT_LAZY", "yes")
    found = rows(run("--set", "check=5", "config", "show", "--policy", "vllm", "--json"))
    assert found["policy"]["value"] == "vllm"
    assert found["policy"]["source"] == "option --policy"
    assert [each["value"] for each in found["policy"]["overrides"]] == ["vllm@0.11"]
    assert "pyproject.toml" in found["sizes"]["source"]
    assert found["sizes"]["value"] == [1, 2, 4]
    assert found["lazy"]["source"] == "the environment variable DISPATCHKIT_LAZY"
    assert found["check"]["source"] == "option --set check"
    assert found["strict"]["source"] == "default"


@pytest.mark.usefixtures("folder")
def test_text_fits_80_columns(run: Any) -> None:
    """This holds with an override too."""
    done = run("config", "show", "--policy", "vllm")
    assert done.code == 0
    assert max(map(len, done.out.splitlines()[1:])) <= 80  # the first line is a path
    assert 'overrides "vllm@0.11"' in done.out


@pytest.mark.usefixtures("folder")
def test_commands_obey_the_file_and_say_where_it_and_the_environment_differ(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's sizes apply, and only the difference is reported."""
    answer = json.loads(run("explain", "3", "--json").out)
    assert answer["decision"]["padded_num_tokens"] == 4
    assert answer["policy"].startswith("vllm@0.11")
    monkeypatch.setenv("DISPATCHKIT_SIZES", "3,8")
    done = run("explain", "3", "--json")
    assert json.loads(done.out)["decision"]["padded_num_tokens"] == 3
    assert done.err.startswith("Note: sizes: [3, 8] from the environment variable")
    assert len(done.err.splitlines()) == 1


@pytest.mark.usefixtures("folder")
def test_what_is_given_twice_on_the_command_line_is_refused(run: Any) -> None:
    """Neither value can be preferred."""
    done = run("--set", "policy=a", "explain", "3", "--policy", "b")
    assert (done.code, done.out) == (2, "")
    assert "is given twice" in done.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--set", "polcy=x"], "'policy'"),
        (["--set", "policy"], "NAME=VALUE"),
        (["--set", "lazy=maybe"], "true or false"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--set", "max_num_tokens=3"], "pyproject.toml"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_bad_input_is_one_line_and_code_2(run: Any, args: list[str], says: str) -> None:
    """Last case: a limit below the file's sizes names the file."""
    done = run(*args, "config", "show", "--json")
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(done.err.splitlines()) == 1


def test_a_broken_file_leaves_help_and_doctor_alive(
    run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users need both to repair the file."""
    from dispatchkit.cli import doctor

    monkeypatch.setattr(doctor, "examine", lambda plugins, environ: iter(()))
    (folder / "pyproject.toml").write_text("[tool.dispatchkit]\npolcy = 3\n")
    assert "explain" in run("--help").out
    done = run("doctor", "--json")
    assert done.code == 1
    (finding,) = json.loads(done.out)["findings"]
    assert finding["about"] == "settings"
    assert "polcy" in finding["message"]


@pytest.mark.usefixtures("folder")
def test_the_file_says_which_plugins_are_loaded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This works as the environment variable does."""
    monkeypatch.delenv("DISPATCHKIT_PLUGINS")
    Path("pyproject.toml").write_text("[tool.dispatchkit]\nplugins = []\n")
    done = run("policies", "--json")
    assert json.loads(done.out) == []
    assert done.code == 1
