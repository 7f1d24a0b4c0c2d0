"""Writing a trace while a program runs: any end of the program keeps the steps."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dispatchkit.errors import ConfigError, TraceError, counted
from dispatchkit.observe import TraceStep, TraceWarning, TraceWriter, read_trace, write_trace

PROGRAM = """
import os, signal, sys
from dispatchkit.observe import TraceWriter
writer = TraceWriter(sys.argv[1])
"""
FORKS = "with writer:\n    writer.write(3)\n    if not os.fork():\n        "
NAMES = ["t.csv", "t.csv.gz", "t.jsonl"]


def tokens(path: Path) -> list[int]:
    return list(read_trace(path).column("num_tokens"))


def run_program(path: Path, body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + body, path.name],
        cwd=path.parent,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_keeps_the_steps_before_it(
    tmp_path: Path, name: str, error: type[BaseException]
) -> None:
    with pytest.raises(error), TraceWriter(tmp_path / name) as writer:  # noqa: PT012
        writer.write(3)
        writer.write(5)
        raise error
    assert tokens(tmp_path / name) == [3, 5]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_exception_before_the_first_step_leaves_an_older_file(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.csv", [7])
    with pytest.raises(ValueError, match="mine"), TraceWriter(tmp_path / "t.csv"):
        raise ValueError("mine")
    assert tokens(tmp_path / "t.csv") == [7]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow_except("exit", "fork", "folder gone")
@pytest.mark.parametrize(
    "body",
    [
        "with writer:\n    writer.write(3); sys.exit(4)",
        "writer.__enter__(); writer.write(3)",
        "with writer:\n    os.chdir('/'); writer.write(3)",
        "with writer:\n    os.mkdir('d'); os.chdir('d'); os.rmdir('../d'); writer.write(3)",
        "def steps():\n    with writer:\n        writer.write(3); yield\nit = steps(); next(it)",
        f"{FORKS}sys.exit()\n    os.wait()",
        f"{FORKS}os._exit(0)\n    os.wait()",
    ],
    ids=["exit", "no with", "chdir", "folder gone", "generator", "fork", "fork _exit"],
)
def test_a_program_that_ends_leaves_its_trace(tmp_path: Path, body: str) -> None:
    """The trace is complete, in the requested file, and nothing is printed."""
    done = run_program(tmp_path / "t.csv.gz", body)
    assert done.stderr == ""
    assert tokens(tmp_path / "t.csv.gz") == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv.gz"]


@pytest.mark.parametrize(
    ("how", "name"), [("SIGTERM", "t.csv.gz"), ("SIGKILL", "t.jsonl"), ("_exit", "t.csv")]
)
def test_a_program_that_is_killed_leaves_the_part(tmp_path: Path, how: str, name: str) -> None:
    """It can be read, and a later program does not overwrite it."""
    end = "os._exit(1)" if how == "_exit" else f"os.kill(os.getpid(), signal.{how})"
    done = run_program(tmp_path / name, f"with writer:\n    writer.write(3); {end}")
    assert done.returncode in (1, -signal.SIGTERM, -signal.SIGKILL)
    part = tmp_path / f"{name}.part"
    assert tokens(part) == [3]
    with TraceWriter(tmp_path / name) as writer:
        writer.write(4)
    assert tokens(tmp_path / name) == [4]
    assert tokens(part) == [3]


def test_a_writer_that_is_collected_has_written_its_file(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.csv")
    writer.__enter__()
    writer.write(3)
    del writer
    gc.collect()
    assert tokens(tmp_path / "t.csv") == [3]


def test_a_forked_process_has_no_part_in_it(tmp_path: Path) -> None:
    """A step written by the child is an error, not a line among the parent's."""
    body = """
with writer:
    writer.write(3)
    if not os.fork():
        try:
            writer.write(4)
        except ValueError as error:
            print(error)
        sys.exit()
    os.wait()
    writer.write(5)
"""
    done = run_program(tmp_path / "t.csv", body)
    assert "was opened by process" in done.stdout
    assert done.stderr == ""
    assert tokens(tmp_path / "t.csv") == [3, 5]


# -- full disk ------------------------------------------------------------------------------


class FullDisk:
    """Has room for some bytes and truncates the rest, as a real disk does."""

    def __init__(self, room: int) -> None:
        self.room, self._write = room, os.write

    def write(self, number: int, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fitting = bytes(data)[: self.room]
        self.room -= len(fitting)
        return self._write(number, fitting)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("room", [40, 41, 45, 60])
def test_a_full_disk_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, room: int
) -> None:
    """One warning and a final error; the steps that fit are a complete trace."""
    path = tmp_path / name
    with pytest.raises(TraceError, match="No space left") as caught:  # noqa: PT012, SIM117
        with TraceWriter(path) as writer:
            writer.write(3)
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", FullDisk(room).write)
                with pytest.warns(TraceWarning, match="No space") as warned:  # noqa: PT031
                    for _ in range(20):
                        writer.write(5)
            writer.write(6)  # there may be room again, but a trace has no gaps
    assert len(warned) == 1
    assert tokens(path) == [3] + [5] * (writer.num_steps - 1)
    assert writer.num_steps + writer.num_lost == 22
    assert f"{counted(writer.num_lost, 'later step')} could not be written" in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_cannot_get_its_name_is_told_with_its_steps(tmp_path: Path, name: str) -> None:
    """A folder of that name was created meanwhile."""
    path = tmp_path / name
    with pytest.raises(TraceError, match=r"\. The file .*\.part contains 2 steps") as caught:  # noqa: PT012, SIM117
        with TraceWriter(path) as writer:
            writer.write(3)
            writer.write(4)
            path.mkdir()
    assert str(caught.value).count("cannot be written") == 1
    assert tokens(tmp_path / f"{name}.part") == [3, 4]


def test_a_trace_that_is_written_at_once_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(tmp_path / "t.csv", [7])

    def steps() -> Any:
        yield 3
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        write_trace(tmp_path / "t.csv", steps())
    assert tokens(tmp_path / "t.csv") == [7]
    assert len(list(tmp_path.iterdir())) == 1


# -- written traces -------------------------------------------------------------------------


def test_a_bare_count_is_a_step(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.csv") as writer:
        writer.write(3)
        writer.write(TraceStep(5, num_reqs=2))
    assert (tmp_path / "t.csv").read_text() == "step,num_tokens,num_active_loras\n0,3,0\n1,5,0\n"
    assert write_trace(tmp_path / "u.jsonl", [3, 0]) == 2
    assert tokens(tmp_path / "u.jsonl") == [3, 0]


@pytest.mark.parametrize("step", [-1, 2**31, 1.5, True, "3", None])
def test_what_is_no_count_is_refused(tmp_path: Path, step: Any) -> None:
    with TraceWriter(tmp_path / "t.csv") as writer:
        writer.write(3)
        with pytest.raises(TraceError, match="num_tokens must be"):
            writer.write(step)
    assert tokens(tmp_path / "t.csv") == [3]


def test_what_is_thrown_away_leaves_the_older_file(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.csv", [7])
    with TraceWriter(tmp_path / "t.csv") as writer:
        writer.write(3)
        writer.discard()
        with pytest.raises(ConfigError, match="open"):
            writer.write(4)
    assert tokens(tmp_path / "t.csv") == [7]
    assert len(list(tmp_path.iterdir())) == 1
