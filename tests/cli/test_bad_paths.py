"""Every command with every kind of bad path, stream and ending: a message, a code, no data loss."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

TRACE = b"num_tokens\n5\n6\n"
LOG = b"""\
INFO 10:00 [engine] starting
INFO 10:01 **CUDAGraph Config Settings:**
INFO 10:01 - Mode: FULL_AND_PIECEWISE
INFO 10:01 - Capture sizes: [1, 2, 4, 8]
| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
|-----------------|---------------|--------------|--------------|-------|
| 6               | 8             | 2            | PIECEWISE    | 40    |
| 1               | 1             | 0            | FULL         | 7     |
"""
READERS = {
    "plan": ["plan", "IN", "--graphs", "2", "--max-size", "8"],
    "simulate": ["simulate", "IN", "--sizes", "8"],
    "explain": ["explain", "--trace", "IN", "--sizes", "8"],
    "report": ["report", "IN", "-o", "page.html", "--sizes", "8", "--force"],
}
MANY = json.dumps([1] * 10_000)


def a_file(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def unreadable(path: Path) -> None:
    path.write_bytes(TRACE)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may read anything")


BAD_INPUTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "absent": (lambda path: None, "does not exist"),
    "folder": (Path.mkdir, "is a folder"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels"),
    "unreadable": (unreadable, "Permission denied"),
    "first byte": (lambda path: path.symlink_to("/proc/self/mem"), "Input/output error"),
    "empty": (a_file(b""), "empty"),
    "blank": (a_file(b"\n \n"), "empty"),
    "zeros": (a_file(bytes(5000)), "byte 0x00"),
    "many zeros": (a_file(bytes(200_000)), "byte 0x00"),
    "not UTF-8": (a_file(TRACE + b"\xff\n"), "byte 0xff"),
    "UTF-16": (a_file("num_tokens\n5\n".encode("utf-16")), "UTF-16"),
    "torn gzip": (a_file(gzip.compress(TRACE * 99)[:-12]), "truncated"),
    "long line": (a_file(b"x" * 200_000), "no line break"),
    "long header": (a_file(b"a" * 60_000 + b",b\n1\n"), "num_tokens"),
    "huge number": (a_file(b"num_tokens\n" + b"9" * 5000 + b"\n"), "num_tokens must be"),
    "number beyond": (a_file(b"num_tokens\n9999999999\n"), "num_tokens must be"),
    "NaN": (a_file(b"num_tokens\nnan\n"), "num_tokens must be"),
    "JSON NaN": (a_file(b'{"num_tokens": NaN}\n'), "num_tokens must be"),
    "deep JSON": (a_file(b"[" * 60_000), "num_tokens"),
    "many counts": (a_file(b"size,count\n5,2000000000\n"), "steps"),
}


# Plan and report have their own readers; the other commands read as plan does.
@pytest.mark.parametrize(
    ("command", "kind"),
    [(command, kind) for command in ("plan", "report") for kind in BAD_INPUTS]
    + [(command, kind) for command in ("simulate", "explain") for kind in ("zeros", "many counts")],
)
def test_an_input_that_cannot_be_used_is_one_message(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    """The message names the file and stays short; nothing is written."""
    monkeypatch.chdir(tmp_path)
    make, says = BAD_INPUTS[kind]
    make(tmp_path / "in.csv")
    if (command, kind) == ("plan", "many counts"):
        pytest.skip("a plan needs no single steps")
    done = run(*[word.replace("IN", "in.csv") for word in READERS[command]])
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert "in.csv" in done.err
    assert len(done.err) < 1300
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("data", "as_pipe"),
    [
        (TRACE, True),
        (b"num_tokens\r5\r6\r", False),
        (gzip.compress(TRACE), True),
        (b'{"num_tokens": 5}\n{"num_tokens": 6}\n', True),
        (b'{"num_tokens": 5}', False),
        (b"size,count\n5,2\n6,1\n", False),
        (LOG, False),
        (gzip.compress(LOG), True),
    ],
    ids=["csv", "CR", "gzip", "json", "one", "histogram", "log", "packed log"],
)
def test_every_command_takes_every_file_of_traffic(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    data: bytes,
    as_pipe: bool,
) -> None:
    """A pipe, which can be read only once, works too."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in"
    if as_pipe:
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=(data,))
        writer.start()
    else:
        path.write_bytes(data)
    done = run(*[word.replace("IN", str(path)) for word in READERS[command]], "--json")
    if as_pipe:
        writer.join()
    assert done.code == 0, done.err
    assert json.loads(done.out)


def test_counts_are_as_many_steps_of_no_known_order(run: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(LOG)
    log = str(tmp_path / "log")
    simulated = json.loads(run("simulate", log, "--sizes", "8", "--max-graphs", "1", "--json").out)
    assert simulated["num_steps"] == 47
    assert any("depend on the order" in note for note in simulated["notes"])
    account = json.loads(run("explain", "--trace", log, "--sizes", "8", "--json").out)
    assert account["steps"] == 47
    page = tmp_path / "page.html"
    assert run("report", log, "-o", str(page), "--sizes", "8").code == 0
    assert "does not record the order of steps" in page.read_text()
    refused = run("plan", log, "--graphs", "2", "--max-size", "8", "--fit-on", "first-half")
    assert "which does not record the order" in refused.err


# -- outputs ------------------------------------------------------------------------------

WRITERS = {
    "report": ["report", "in.csv", "-o", "OUT", "--sizes", "8"],
    "figure": ["report", "in.csv", "--figure", "waste", "-o", "OUT", "--sizes", "8"],
    "record": ["record", "OUT", "script.py"],
    "calibrate": ["calibrate", "-o", "OUT", "--sizes", "x"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.csv").write_bytes(TRACE)
    (tmp_path / "script.py").write_text("raise SystemError('it must not run')\n")
    return tmp_path


@pytest.mark.parametrize("command", ["report", "figure", "record"])
@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("there", "--force"),
        ("folder", "not a folder"),
        ("no/folder/out", "an existing folder"),
        ("there/out", "cannot be written"),
        ("n" * 300, "cannot be written"),
        ("loop", "cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    run: Any, folder: Path, command: str, output: str, says: str
) -> None:
    (folder / "there").write_text("mine")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    before = sorted(folder.rglob("*"))
    done = run(*[output if word == "OUT" else word for word in WRITERS[command]])
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert "it must not run" not in done.err
    assert sorted(folder.rglob("*")) == before
    assert (folder / "there").read_text() == "mine"


def test_calibrate_replaces_nothing_either(run: Any, folder: Path) -> None:
    (folder / "costs.json").write_text("mine")
    done = run("calibrate")
    assert done.code == 2
    assert "--force" in done.err
    assert (folder / "costs.json").read_text() == "mine"


@pytest.mark.parametrize("name", ["in.csv", "./in.csv", "hard.csv", "soft.csv"])
def test_an_input_is_never_written_over(run: Any, folder: Path, name: str) -> None:
    """This holds for the input under another name and with --force."""
    (folder / "hard.csv").hardlink_to(folder / "in.csv")
    (folder / "soft.csv").symlink_to("in.csv")
    (folder / "pyproject.toml").write_text("[tool.dispatchkit]\nsizes = [8]\n")
    done = run("report", "in.csv", "-o", name, "--force")
    assert done.code == 2
    assert "a file other than the input" in done.err
    done = run("record", "--force", name.replace("in.csv", "script.py"), "script.py")
    assert done.code in (1, 2)  # the script raises if its name differs
    done = run("report", "in.csv", "-o", "pyproject.toml", "--force")
    assert "a file other than the input" in done.err
    assert (folder / "script.py").read_text().startswith("raise")
    assert (folder / "in.csv").read_bytes() == TRACE


def test_force_replaces_the_output(run: Any, folder: Path) -> None:
    """With ``--force``, an existing file that is not an input is overwritten."""
    (folder / "page.html").write_text("old")
    assert run("report", "in.csv", "-o", "page.html", "--sizes", "8", "--force").code == 0
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


# -- streams, signals and environments ------------------------------------------------------

ENVIRON = {**os.environ, "DISPATCHKIT_PLUGINS": "vllm,plan", "COLUMNS": "80"}


def shell(line: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which ``dk`` is the command line."""
    call = f'dk() {{ "{sys.executable}" -m dispatchkit "$@"; }}; {line}'
    return subprocess.run(
        ["/bin/bash", "-c", call],
        cwd=cwd,
        env={**ENVIRON, **environ},
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
    )


MORE_LINES = [
    ("dk report in.csv -o page.html --sizes 8 <&- >&- && test -s page.html", 0),
    ("dk explain 13 --json > /dev/full", 2),
    ("dk policies >&-", 0),
    ("dk policies 2>&-", 0),
    ("dk policies <&- >&- 2>&-", 0),
    ("dk policies > /dev/full", 2),
    ("mkdir gone; cd gone; rmdir ../gone; dk report ../in.csv", 2),
    ("PYTHONIOENCODING=ascii dk explain 13 --num-reqs 13", 0),
    ("cp in.csv $'\\xff.csv'; dk simulate $'\\xff.csv' --sizes 8", 0),
    ("cp in.csv $'\\xff.csv'; dk report $'\\xff.csv' -o page.html --sizes 8 --json", 0),
    ("dk explain 13 | true; test ${PIPESTATUS[0]} = 0 -o ${PIPESTATUS[0]} = 141", 0),
    ("TERM=dumb dk plan in.csv --graphs 2 --max-size 8 < /dev/null", 0),
]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("mkdir gone; cd gone; rmdir ../gone; PYTHONIOENCODING=ascii dk explain 13 --json <&-", 0),
        *(pytest.param(line, code, marks=pytest.mark.slow) for line, code in MORE_LINES),
    ],
)
def test_no_surrounding_ends_in_a_traceback(tmp_path: Path, line: str, code: int) -> None:
    """Streams, folders and encodings may be unusual."""
    (tmp_path / "in.csv").write_bytes(TRACE)
    done = shell(line, tmp_path)
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr
    if "--json" in line and code == 0:
        json.loads(done.stdout)


def test_numbers_beyond_every_size_have_an_answer(run: Any) -> None:
    assert run("explain", "5", "--sizes", "1000000000").code == 2
    assert run("explain", "5", "--max-loras", "1000000000").code == 2
    assert json.loads(run("explain", "99999999999999999999", "--json").out)


def test_explain_of_a_batch_above_every_size_says_that_it_runs_eager(run: Any) -> None:
    """Only an explicit limit refuses it."""
    answer = json.loads(run("explain", "600", "--json").out)
    assert answer["decision"]["reason"] == "above_largest_size"
    assert run("explain", "600", "--num-reqs", "600", "--uniform").code == 0
    refused = run("explain", "600", "--max-num-tokens", "512", "--json")
    assert json.loads(refused.out)["error"].startswith("DescriptorError: num_tokens")


SERVER = """
import sys, time
from dispatchkit import Dispatcher, DispatchConfig, load_plugins
dispatcher = Dispatcher(load_plugins().create_policy("vllm"), DispatchConfig(max_num_tokens=8))
for step in range(3):
    dispatcher.dispatch(5)
print("ready", flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_a_recorded_server_that_is_stopped_leaves_its_trace(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The trace is complete, or partial if it could not be finished."""
    from dispatchkit.observe import read_trace

    (tmp_path / "serve.py").write_text(SERVER.format(end="time.sleep(60)"))
    words = [sys.executable, "-m", "dispatchkit", "record", "o.csv.gz", "serve.py"]
    restore = "import signal, os, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    server = subprocess.Popen(
        [sys.executable, "-c", f"{restore}os.execv(sys.argv[1], sys.argv[1:])", *words],
        cwd=tmp_path,
        env=ENVIRON,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        encoding="utf-8",
    )
    assert server.stderr is not None
    assert server.stderr.readline() == "ready\n"
    server.send_signal(number)
    said = server.stderr.read()
    assert server.wait() == code
    server.stderr.close()
    assert "Traceback" not in said
    (left,) = [path for path in tmp_path.iterdir() if path.name != "serve.py"]
    assert left.name == ("o.csv.gz.part" if number == signal.SIGKILL else "o.csv.gz")
    assert len(read_trace(left)) == 3


MORE_ENDS = [
    "import os\nif not os.fork(): dispatcher.dispatch(7); sys.exit()\nos.wait()",
    "import os; os.chdir('/')",
    "raise ValueError('mine')",
    "sys.exit('words')",
    "import os\nif not os.fork(): dispatcher.dispatch(7); os._exit(0)\nos.wait()",
    "sys.stdout.close()",
]


@pytest.mark.parametrize(
    "end",
    [
        "import os; os.chdir('/'); raise ValueError('mine')",
        *(pytest.param(end, marks=pytest.mark.slow) for end in MORE_ENDS),
    ],
)
def test_however_a_recorded_script_ends_its_steps_are_there(tmp_path: Path, end: str) -> None:
    """All steps are in the requested file; only the script's own traceback is shown."""
    from dispatchkit.observe import read_trace

    (tmp_path / "s.py").write_text(SERVER.format(end=end))
    done = shell("dk record o.csv s.py", tmp_path)
    assert "dispatchkit/cli" not in done.stderr
    assert len(read_trace(tmp_path / "o.csv")) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.csv", "s.py"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (["-m", "no_such_module"], "cannot be imported"),
        (["-m", "os.path.nothing"], "cannot be imported"),
        (["-m", "xml"], "__main__"),
        (["-m", ".odd"], "cannot be imported"),
        (["-m", ""], "cannot be imported"),
        (["bad.py"], "line 1"),
        (["zeros.py"], "null bytes"),
        (["latin.py"], "utf-8"),
        (["."], "is not an existing file"),
        (["n" * 300], "cannot be read"),
    ],
)
def test_a_script_that_cannot_be_run_is_bad_input(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("x=(\n")
    (tmp_path / "zeros.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xff'\n")
    done = run("record", "o.csv", *target)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"capture_time_s": 10**400},
        {"memory_bytes": 1e300},
        {"time_s": float("nan")},
        {"num_steps": float("inf")},
        {"memory_bytes": "many"},
        {"capture_time_s": -1},
    ],
)
def test_impossible_numbers_in_simulations_are_named(
    run: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    """They are named before anything is simulated."""
    (tmp_path / "in.csv").write_bytes(TRACE)
    found = json.loads(run("simulate", str(tmp_path / "in.csv"), "--sizes", "8", "--json").out)
    source = tmp_path / "s.json"
    source.write_text(json.dumps({**found, **change}))
    done = run("report", str(source), "-o", str(tmp_path / "page.html"))
    assert (done.code, done.out) == (2, "")
    assert next(iter(change)) in done.err
    assert len(done.err) < 600


def test_a_new_policy_is_whole_or_not_there(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("new-policy", "a" * 300, "--directory", str(tmp_path)).code == 2
    (tmp_path / "file").write_text("mine")
    assert run("new-policy", "small", "--directory", str(tmp_path / "file")).code == 2
    (tmp_path / "dispatchkit-small").symlink_to(tmp_path / "nowhere")
    assert run("new-policy", "small", "--directory", str(tmp_path)).code == 2

    def full(self: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    done = run("new-policy", "other", "--directory", str(tmp_path))
    assert "No space left" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dispatchkit-small", "file"]
