"""``record``: run a script, and write down every batch that it dispatches."""

from __future__ import annotations

import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from dispatchkit.cli.output import JsonOption, complain, console, print_json
from dispatchkit.dispatch import Decision, Dispatcher
from dispatchkit.errors import ConfigError
from dispatchkit.observe.trace import MAX_COUNT, TraceStep, TraceWriter
from dispatchkit.report.files import check_writable


def record(
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT", help="The trace to write; .jsonl and .gz as the name has."
        ),
    ],
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or -m MODULE.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="What the script is given.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a Python script and record every batch it dispatches as a step trace.

    Batches of every GraphRunner and Dispatcher of this process count; processes that it starts
    are not seen. What the script prints goes to standard error.

    Example: dispatchkit record trace.csv.gz serve.py --port 8000

    Example: dispatchkit record trace.csv.gz -m my_package.serve
    """
    check_writable(output)
    words = [script, *(arguments or [])]
    if words[0] == "--" and len(words) > 1:
        words = words[1:]
    as_module = words[0] == "-m"
    if as_module and len(words) < 2:
        raise ConfigError("script", script, "followed by a module's name")
    target, rest = (words[1], words[2:]) if as_module else (words[0], words[1:])
    if not as_module and not Path(target).is_file():
        raise ConfigError("script", target, "a Python file that exists, or -m MODULE")
    code, stopped = 0, False
    with TraceWriter(output) as writer:
        with recording(writer) as left_out, _arguments(target, rest), _stdout_is_stderr():
            try:
                if as_module:
                    runpy.run_module(target, run_name="__main__", alter_sys=True)
                else:
                    sys.path.insert(0, str(Path(target).resolve().parent))
                    runpy.run_path(target, run_name="__main__")
            except SystemExit as done:
                code = done.code if isinstance(done.code, int) else int(done.code is not None)
            except KeyboardInterrupt:
                # Servers are stopped that way: what was recorded until then is a whole trace.
                stopped = True
        steps = writer.num_steps
        if not steps:
            raise ConfigError(
                "script", target, "one that dispatches batches in this process", "It did not."
            )
    if as_json:
        print_json({"output": str(output), "steps": steps, "exit_code": code, "stopped": stopped})
    else:
        console().print(Text(f"{steps:,} steps written to {output}."))
    if left_out:
        complain(
            f"Note: {sum(left_out.values()):,} steps of runners with other axes than the first "
            f"({', '.join(left_out)}) are left out: a trace has one set of columns."
        )
    if stopped:
        complain("Stopped.")
        raise typer.Exit(130)
    if code:
        complain(f"{target} ended with exit code {code}.")
        raise typer.Exit(1)


@contextmanager
def recording(writer: TraceWriter) -> Iterator[Counter[str]]:
    """Write down every batch that any dispatcher of this process is asked about.

    Args:
        writer: Open; it gets the steps in the order they are decided.

    Yields:
        How many steps were left out because their axes are not those of the first step.
    """
    decide = Dispatcher.dispatch
    lock = threading.Lock()
    left_out: Counter[str] = Counter()
    first: list[tuple[str, ...]] = []
    start = time.monotonic()

    def dispatch(
        self: Dispatcher,
        num_tokens: int,
        num_reqs: int = 0,
        uniform: int = 0,
        loras: int = 0,
        ceiling: int = 2,
    ) -> Decision:
        decision = decide(self, num_tokens, num_reqs, uniform, loras, ceiling)
        is_uniform, query_len, most = self.config.query_class(int(uniform))
        variants = self.config.variants
        names = tuple(axis.name for axis in self.config.axes)
        # What was dispatched must never fail here: the program that is recorded would.
        tokens = int(num_tokens)
        reqs = int(num_reqs) or _fewest(tokens, query_len)
        if is_uniform and reqs * query_len != tokens:
            is_uniform, most = False, 0  # not the batch it was said to be
        step = TraceStep(
            num_tokens=tokens,
            num_reqs=reqs,
            max_query_len=min(most or tokens, tokens),
            uniform_decode=is_uniform,
            num_active_loras=variants.facts(int(loras))[0],
            t_s=time.monotonic() - start,
            # A value above the largest that a trace holds lies outside all the same.
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
    """Return how many requests there are at least, where the caller did not say."""
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
    """Keep standard output for our own words, and JSON for JSON."""
    before = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = before
