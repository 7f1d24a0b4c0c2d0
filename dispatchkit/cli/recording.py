"""``record``: run a script and record every batch that it dispatches."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import threading
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.text import Text

from dispatchkit.cli.endings import STOPPED, TERMINATED, Terminated
from dispatchkit.cli.output import (
    FORCE_HINT,
    ForceOption,
    JsonOption,
    console,
    print_json,
    print_stderr,
)
from dispatchkit.dispatch import Decision, Dispatcher
from dispatchkit.errors import ConfigError, counted, format_value
from dispatchkit.files import check_output
from dispatchkit.observe import TraceStep, TraceWriter
from dispatchkit.observe.trace import MAX_COUNT


def record(
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="Trace to write: JSON lines if the name ends in .jsonl, otherwise CSV; an "
            "additional .gz compresses it.",
        ),
    ],
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or -m MODULE.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Arguments of the script.", show_default=False),
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a Python script, and record its dispatched batches in a step trace.

    The trace contains the batches of all runners and dispatchers in the process, but not the
    batches of child processes. The script's standard output is redirected to standard error. The
    recorded steps are written to OUTPUT even if the script fails or is stopped. If the process is
    killed, the steps remain in OUTPUT.part.

    Example: dispatchkit record trace.csv.gz serve.py --port 8000

    Example: dispatchkit record trace.csv.gz -m my_package.serve
    """
    words = [script, *(arguments or [])]
    if words[0] == "--" and len(words) > 1:
        words = words[1:]
    as_module = words[0] == "-m"
    if as_module and len(words) < 2:
        message = "-m must be followed by the name of a module."
        raise ConfigError("script", script, "followed by the name of a module", message=message)
    target, rest = (words[1], words[2:]) if as_module else (words[0], words[1:])
    inputs = [] if as_module else [target]
    check_output(output, inputs=inputs, overwrite=force, hint=FORCE_HINT)
    if not as_module:
        _check_script(target)
    writer = TraceWriter(output)
    end = _ScriptResult()
    with writer, recording(writer) as left_out, _arguments(target, rest), _stdout_is_stderr():
        folder = str(Path.cwd()) if as_module else str(Path(target).resolve().parent)
        sys.path.insert(0, folder)
        try:
            if not as_module:
                runpy.run_path(target, run_name="__main__")
            elif problem := _module_problem(target):
                refused = ConfigError("module", target, "a module that can run", message=problem)
                end = _ScriptResult(refused=refused)
            else:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
        except Terminated:
            end = _ScriptResult(TERMINATED)
        except SystemExit as done:
            end = _ScriptResult(
                done.code if isinstance(done.code, int) else int(done.code is not None)
            )
            if isinstance(done.code, str):
                print_stderr(done.code)
        except KeyboardInterrupt:
            # Ctrl-C is the normal way to stop a server, not a failure of the script.
            end = _ScriptResult(STOPPED)
        except Exception as error:  # noqa: BLE001 - an exception of the script; the recorded steps are kept
            end = _ScriptResult(1, error)
        if not writer.num_steps and not writer.num_lost:
            writer.discard()
    steps = writer.num_steps
    if end.refused is not None:
        raise end.refused
    if end.error is not None:
        _print_traceback(end.error)
    elif not steps and not end.code:
        raise ConfigError(
            "script",
            target,
            "a script that dispatches batches in this process",
            message=f"{target} dispatched no batch in this process, so no trace was written. "
            "Batches of child processes are not recorded; dispatch them in this process.",
        )
    _report(output, steps, end, left_out, as_json=as_json)
    if end.code in (STOPPED, TERMINATED):
        print_stderr("Stopped.")
        raise typer.Exit(end.code)
    if end.code:
        if end.error is None:
            print_stderr(f"{target} ended with exit code {end.code}.")
        raise typer.Exit(1)


@attrs.frozen
class _ScriptResult:
    """The result of a script: its exit code and exception, or why it could not run."""

    code: int = 0
    error: Exception | None = None
    refused: ConfigError | None = None


def _report(
    output: Path, steps: int, end: _ScriptResult, left_out: Counter[str], *, as_json: bool
) -> None:
    if as_json:
        stopped = end.code in (STOPPED, TERMINATED)
        print_json(
            {
                "output": str(output) if steps else None,
                "steps": steps,
                "exit_code": 0 if stopped else end.code,
                "stopped": stopped,
            }
        )
    elif steps:
        console().print(Text(f"{counted(steps, 'step')} written to {output}."))
    if left_out:
        print_stderr(
            f"Note: omitted {counted(sum(left_out.values()), 'step')} whose axes "
            f"({', '.join(left_out)}) differ from those of the first step, because a trace has one "
            "set of columns. Record runners with different axes in separate runs."
        )


def _check_script(target: str) -> None:
    """Validate that a script can be read and compiled, or is a zip file for runpy."""
    path = Path(target)
    try:
        if not path.is_file():
            raise ConfigError(
                "script",
                target,
                "a Python file that exists, or -m MODULE",
                message=f"Script {target!r} is not an existing file. Pass a Python file, or -m "
                "MODULE.",
            )
        source = path.read_bytes()
        if not zipfile.is_zipfile(path):
            compile(source, target, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        message = f"Script {target!r} is not valid Python: {where}{error.msg}."
        raise ConfigError("script", target, "valid Python", message=message) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        message = (
            f"Script {format_value(target)} cannot be read: {why}. Check the path and its "
            "permissions."
        )
        raise ConfigError("script", target, "a file that can be read", message=message) from error


def _module_problem(target: str) -> str:
    """Return why a module cannot run, as a message; empty if it can.

    As a side effect, the parent packages of the module are imported, and the module itself if it
    is a package.
    """
    try:
        # A relative name cannot be resolved without a parent package; an empty name is invalid.
        spec = None if target.startswith(".") or not target else importlib.util.find_spec(target)
        is_package = spec is not None and spec.submodule_search_locations is not None
        if is_package and importlib.util.find_spec(f"{target}.__main__") is None:
            return f"Package {target!r} has no __main__.py. Name a module of the package."
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target}.".startswith(f"{error.name}."):
            raise  # an import inside the target's package failed
        spec = None
    except ValueError:  # the name is invalid, or the module has no spec
        spec = None
    if spec is not None:
        return ""
    return (
        f"Module {target!r} cannot be imported from the current folder. Check the name, or change "
        "to the folder that contains the module."
    )


def _print_traceback(error: Exception) -> None:
    """Print the traceback of a script, without the frames of this file and of runpy."""
    whole = traceback.TracebackException.from_exception(error)
    todo: list[traceback.TracebackException | None] = [whole]
    while todo:
        one = todo.pop()
        if one is not None:
            frames = [frame for frame in one.stack if not _is_internal(frame.filename)]
            one.stack = traceback.StackSummary.from_list(frames)
            todo += [one.__cause__, one.__context__, *(one.exceptions or ())]
    print("".join(whole.format()), end="", file=sys.stderr)


def _is_internal(filename: str) -> bool:
    return filename in (__file__, "<frozen runpy>", runpy.__file__)


@contextmanager
def recording(writer: TraceWriter) -> Iterator[Counter[str]]:
    """Record every batch that is dispatched in this process.

    Args:
        writer: An open writer; it receives the steps in the order of their dispatch.

    Yields:
        A counter of omitted steps. Its keys are axis names as text, such as ``length and width``,
        or ``none``. A step is omitted if its axes differ from those of the first step.
    """
    decide = Dispatcher.dispatch
    lock = threading.Lock()
    left_out: Counter[str] = Counter()
    first: list[tuple[str, ...]] = []
    start, process = time.monotonic(), os.getpid()

    def dispatch(
        self: Dispatcher,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Decision:
        decision = decide(self, num_tokens, num_reqs, uniform, loras, ceiling)
        if os.getpid() != process:
            return decision  # a forked process is not recorded
        is_uniform, query_len, most = self.config.query_class(int(uniform))
        variants = self.config.variants
        names = tuple(axis.name for axis in self.config.axes)
        # The values must be valid in a trace, because an exception would make the recorded
        # program fail.
        tokens = int(num_tokens)
        reqs = int(num_reqs) or _fewest(tokens, query_len)
        if is_uniform and reqs * query_len != tokens:
            is_uniform, most = False, 0  # the counts contradict the query class
        step = TraceStep(
            num_tokens=tokens,
            num_reqs=reqs,
            max_query_len=min(most or tokens, tokens),
            uniform_decode=is_uniform,
            num_active_loras=variants.facts(int(loras))[0],
            t_s=time.monotonic() - start,
            # MAX_COUNT is the largest value that a trace can contain.
            axes={
                name: min(value, MAX_COUNT)
                for name, value in zip(names, variants.values(loras), strict=True)
            },
        )
        with lock:
            if not first:
                first.append(names)
            if names == first[0]:
                writer.write(step)
            else:
                left_out[" and ".join(names) or "none"] += 1
        return decision

    patched: Any = Dispatcher
    patched.dispatch = dispatch
    try:
        yield left_out
    finally:
        patched.dispatch = decide


def _fewest(num_tokens: int, query_len: int) -> int:
    """Return a lower bound for the number of requests of a batch."""
    return min(num_tokens, max(1, num_tokens // query_len if query_len else 1))


@contextmanager
def _arguments(target: str, rest: list[str]) -> Iterator[None]:
    before, path = sys.argv, list(sys.path)
    sys.argv = [target, *rest]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, path


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Redirect stdout to stderr, so that stdout contains only the command's output."""
    before = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = before
