"""The text of ``str(runner)``, and the progress display of captures."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dispatchkit.dispatch import Reason
from dispatchkit.errors import ConfigError, counted
from dispatchkit.execute.executor import Executor
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.checks import is_flag
from dispatchkit.observe.counters import RunnerStats

_BAR_WIDTH = 30

Show = Callable[[int, int, "GraphKey | None"], None]


def format_runner(executors: Sequence[Executor]) -> str:
    """Return the summary of a runner and the table of its keys."""
    first = executors[0]
    stats = RunnerStats.total(one.counters.read() for one in executors)
    num_bytes = sum(one.lane.num_bytes() for one in executors)
    mode, requested = first.dispatcher.config.mode, first.requested_mode
    resolved = "" if mode is requested else f" (requested: {requested})"
    can_split = first.work.step.can_split
    pieces = (
        "FULL and PIECEWISE"
        if can_split
        else "FULL only, because neither the step nor the mode is piecewise"
    )
    policy = first.dispatcher.policy_name
    modes = ", ".join(f"{count} {mode}" for mode, count in stats.steps_by_mode.items())
    padding = f"padding {stats.padding:.1%} of the real tokens in replays"
    lines = [
        f"GraphRunner: policy {policy}, mode {mode}{resolved}",
        f"backend {first.work.backend.name}; can run {pieces}",
        f"{counted(stats.steps, 'step')}: {modes}; {padding}; graphs use {num_bytes} bytes",
    ]
    if len(executors) > 1:
        lines.append(counted(len(executors), "lane"))
    if first.lane.group.is_asleep:
        lines.append("the runner's GraphMemory is asleep: call memory.wake() before the next step")
    lines += [f"mode {reason}" for reason in first.mode_reasons]
    rows = []
    for key in sorted(first.registry, key=lambda one: (-int(one.mode), one.num_tokens)):
        entry = first.registry.get(key)
        if entry is None:  # removed by a concurrent swap
            continue
        state = _state(executors, key) + ("" if first.registry.is_enabled(key) else " (disabled)")
        misses = _misses(executors, key)
        rows.append(
            (
                str(key),
                state,
                str(sum(member.counters.replays(key) for member in executors)),
                ", ".join(f"{reason} {count}" for reason, count in misses.items()),
                entry.reason or _remark(executors, key),
            )
        )
    other = _misses(executors, None)
    if other:
        text = ", ".join(f"{reason} {count}" for reason, count in other.items())
        rows.append(("(no key)", "", "", text, ""))
    table = [("key", "state", "hits", "eager steps, by reason", "why"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    lines += [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
        ).rstrip()
        for row in table
    ]
    return "\n".join(lines)


def _state(executors: Sequence[Executor], key: GraphKey) -> str:
    """Return the state of a key; if it differs between lanes, name the lanes in each state."""
    lanes: dict[str, list[str]] = {}
    for index, member in enumerate(executors):
        entry = member.registry.get(key)
        # A key declared by controls.register() is only on the first lane.
        state = "not declared" if entry is None else str(entry.state)
        lanes.setdefault(state, []).append(str(index))
    if len(lanes) == 1:
        return next(iter(lanes))
    return "; ".join(
        f"{state} on lane{'s' * (len(where) > 1)} {', '.join(where)}"
        for state, where in lanes.items()
    )


def _remark(executors: Sequence[Executor], key: GraphKey) -> str:
    """Return a remark on a captured key: the limits on its batches, or else its segments."""
    for member in executors:
        step = member.lifecycle.live().get(key)
        if step is not None and step.rows.reason:
            rows = counted(key.num_tokens, "row")
            return f"replays only batches of {rows} ({step.rows.reason}: {step.rows.finding})"
        if step is not None and step.rows.min_rows > 1:
            return (
                f"replays only batches of at least {step.rows.min_rows} rows "
                f"({Reason.ROWS_NOT_THE_BUCKET}: with fewer rows, an output does not have one row "
                "for each row of the batch)"
            )
        if step is not None and step.rows.coupling:
            return f"cannot serve part of a split batch: {step.rows.coupling}"
        if step is not None and step.pieces is not None and step.pieces.segments:
            return str(step.pieces)
    return ""


def _misses(executors: Sequence[Executor], key: GraphKey | None) -> Counter[str]:
    return sum((Counter(member.counters.misses(key)) for member in executors), Counter())


@contextmanager
def progress_display(progress: bool | Show) -> Iterator[Show | None]:
    """Provide the progress display of a capture: the given function, a bar, lines or None.

    Raises:
        ConfigError: ``progress`` is neither a flag nor a function.
    """
    if callable(progress):
        yield progress
    elif not is_flag(progress):
        raise ConfigError("progress", progress, "True, False or a function of (done, total, key)")
    elif not progress:
        yield None
    elif sys.stderr.isatty():
        yield _draw_bar
    else:
        yield _write_line


def _describe(key: GraphKey | None) -> str:
    return "done" if key is None else f"{key.mode} {counted(key.num_tokens, 'token')}"


def _draw_bar(done: int, total: int, key: GraphKey | None) -> None:
    filled = _BAR_WIDTH * done // total if total else _BAR_WIDTH
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    end = "\n" if key is None else ""
    # Each text overwrites the previous text; trailing spaces erase the end of a longer one.
    sys.stderr.write(f"\rcapture [{bar}] {done}/{total} {_describe(key):<24}{end}")
    sys.stderr.flush()


def _write_line(done: int, total: int, key: GraphKey | None) -> None:
    sys.stderr.write(f"capture {done}/{total}: {_describe(key)}\n")
