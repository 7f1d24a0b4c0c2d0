"""Commands shown in README and docs run as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dispatchkit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(dispatchkit.__file__).resolve().parent
RUN_HERE = re.compile(r"^([A-Z_]+=\S+ )*(dispatchkit |python -m dispatchkit)")
# Set-up and test commands run this test itself; tests/packaging checks their targets and
# requirements. Servers are started by hand.
ELSEWHERE = set(
    "make python3 python pip git export cd pytest torchrun apt-get printf vllm curl".split()
)
# Files that a reader has: traces of a service, two of them with an axis, and a module with a model.
LENGTHS = """
step,t_s,num_tokens,num_reqs,max_query_len,uniform_decode,num_active_loras,axis.length
0,0.0000,3,3,1,1,0,40
1,0.0083,12,2,8,0,0,9
"""
MODULE = """
import torch
from dispatchkit import GraphRunner, StaticInput

def make_runner():
    weight = torch.ones(4, 4)
    inputs = {"x": StaticInput((None, 4), "float32")}
    return GraphRunner(lambda x: x @ weight, inputs, sizes=[1, 8], backend="tape")
"""
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md")
    for path in ROOT.glob(pattern)
)


def typed(page: str) -> list[str]:
    """Return the commands of a page's console blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```console\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def install_policy_of_page(folder: Path) -> None:
    """Lay out the distribution of the page on writing a policy as if it were installed."""
    page = (ROOT / "docs" / "how-to" / "policy.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    package, facts = (
        folder / "dispatchkit_half_full",
        folder / "dispatchkit_half_full-0.1.dist-info",
    )
    package.mkdir(parents=True)
    facts.mkdir()
    for name, mark in (("policy", "class HalfFull:"), ("plugin", "@hookimpl")):
        (package / f"{name}.py").write_text(next(block for block in blocks if mark in block))
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dispatchkit-half-full\nVersion: 0.1\n"
    )
    (facts / "entry_points.txt").write_text(
        "[dispatchkit]\nhalf-full = dispatchkit_half_full.plugin\n"
    )


EVERY = [(page, line) for page in PAGES for line in typed(page)]
COMMANDS = [(page, line) for page, line in EVERY if RUN_HERE.match(line)]


def test_there_are_commands_and_each_is_run_here_or_elsewhere() -> None:
    """Every other command is of a known kind."""
    assert len(COMMANDS) > 10
    others = {line for page, line in EVERY if (page, line) not in COMMANDS}
    programs = {re.sub(r"^([A-Z_]+=\S+ )*", "", line).split()[0] for line in others}
    assert {Path(program).name for program in programs} <= ELSEWHERE


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as in a shell
@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_every_command_of_a_page_runs_as_printed(
    page: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands run in order in a folder that looks like a checkout."""
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    from dispatchkit.cli import options

    for name in ("tests", "bench", "plugins", "dispatchkit", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    sample = ROOT / "tests" / "data" / "traces" / "step_azure_conv_low.csv.gz"
    (tmp_path / "trace.csv.gz").symlink_to(sample)
    (tmp_path / "lengths.csv").write_text(LENGTHS.lstrip())
    calls = [f"{1 + step % 7},{8 * (1 + step % 5)}" for step in range(60)]
    (tmp_path / "calls.csv").write_text("\n".join(["num_tokens,axis.length", *calls]) + "\n")
    (tmp_path / "my_module.py").write_text(MODULE)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, words in (("dispatchkit", "-m dispatchkit"), ("python", "")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    if page == "docs/how-to/policy.md":
        install_policy_of_page(tmp_path / "site-packages")
        monkeypatch.syspath_prepend(tmp_path / "site-packages")
    for name in [name for name in os.environ if "DISPATCHKIT" in name]:
        monkeypatch.delenv(name)
    for line in [line for where, line in COMMANDS if where == page]:
        if line.startswith("dispatchkit bench") and PACKAGE.parent != ROOT:
            line += f" --checkout {ROOT}"  # an installed package has no benchmarks
        program, *words = shlex.split(line)
        if program == "dispatchkit" and not set(line) & set("*>|"):
            # In this process, because starting one takes longer than most commands.
            options.forget_plugins()
            done = run(*words)
            code, said = done.code, (done.out, done.err)
        else:
            shell = subprocess.run(
                ["bash", "-c", line], capture_output=True, encoding="utf-8", check=False
            )
            code, said = shell.returncode, (shell.stdout, shell.stderr)
        assert code == 0, f"{line}\n{said[0][-800:]}\n{said[1][-2000:]}"
    parts = [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")]
    assert parts == []


def test_the_reference_names_every_command_and_only_options_there_are(run: Any) -> None:
    """Users do not find a command missing from the reference; removed options mislead."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^│ ([a-z][a-z-]+) +[A-Z]", run("--help").out, flags=re.MULTILINE))
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    documented = {word.split()[0] for word in re.findall(r"`([a-z -]+)`", table)}
    assert listed
    assert listed == documented
    known = set(re.findall(r"--[a-z-]+", run("--help").out))
    for command in sorted(listed):
        words = ["config", "show"] if command == "config" else [command]
        known |= set(re.findall(r"--[a-z-]+", run(*words, "--help").out))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) <= known


def test_examples_in_help_are_of_their_command(run: Any) -> None:
    """Each command's help has an example, which must parse."""
    import shlex

    from dispatchkit.cli import app as module

    group: Any = module.typer.main.get_command(module.app)
    found = 0
    with group.make_context("dispatchkit", [], resilient_parsing=True) as ctx:
        commands = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    for name, command in commands.items():
        for one in getattr(command, "commands", {"": command}).values():
            for example in re.findall(r"Example: (dispatchkit .+)", one.help or ""):
                words = shlex.split(example)[1:]
                at = words.index(name)
                rest = words[at + 1 + (one is not command) :]
                with one.make_context(name, list(rest)) as ctx:
                    assert ctx.params
                found += 1
    assert found >= 10
