"""Read counts of steps: vLLM's CUDA graph statistics, and histograms.

Both contain the frequency of each batch size, but not the order of steps. Plans can be made from
these counts, but validating a plan requires the order of steps, which a step trace records.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import attrs

from dispatchkit.errors import TraceError, counted, nearest_names
from dispatchkit.observe import (
    DEFAULT_MAX_BYTES,
    MAX_COUNT,
    MAX_STEPS,
    Blocks,
    StepTrace,
    iter_line_blocks,
    trace_name,
)

__all__ = [
    "CudagraphStatRow",
    "CudagraphStats",
    "SizeHistogram",
    "StepKind",
    "parse_cudagraph_stats",
    "parse_histogram",
    "read_cudagraph_stats",
    "read_histogram",
]


@attrs.frozen(order=True)
class StepKind:
    """Features by which planning distinguishes steps.

    Attributes:
        num_tokens: Number of real tokens.
        uniform: Whether the step is uniform decode; None if unknown.
        num_active_loras: Number of active adapters.
    """

    num_tokens: int
    uniform: bool | None = None
    num_active_loras: int = 0


@attrs.frozen
class SizeHistogram:
    """Number of steps of each kind.

    Attributes:
        counts: Number of steps by kind.
        source: Name of the source in messages.
    """

    counts: Mapping[StepKind, int]
    source: str = "<memory>"

    @classmethod
    def from_trace(cls, trace: StepTrace) -> SizeHistogram:
        """Return the number of steps of each kind in a trace.

        Without a column for uniform decode, ``uniform`` is None. Without a column for adapters,
        ``num_active_loras`` is 0.
        """
        size = len(trace)
        tokens = trace.column("num_tokens")
        columns = trace.columns
        uniform: Iterable[int | None] = (
            trace.column("uniform_decode") if "uniform_decode" in columns else [None] * size
        )
        loras: Iterable[int] = (
            trace.column("num_active_loras") if "num_active_loras" in columns else [0] * size
        )
        rows = Counter(zip(tokens, uniform, loras, strict=True))
        return cls(
            {
                StepKind(n, None if u is None else bool(u), lora): count
                for (n, u, lora), count in rows.items()
            },
            trace.source,
        )

    @property
    def num_steps(self) -> int:
        """Total number of steps."""
        return sum(self.counts.values())

    @property
    def has_uniform(self) -> bool:
        """Whether ``uniform`` is known for every kind."""
        return all(kind.uniform is not None for kind in self.counts)

    def steps(self) -> StepTrace:
        """Return the counted steps as a trace in which each kind is spread evenly.

        The actual order is unknown, so ``has_order`` of the trace is False. Steps for which
        ``uniform`` is unknown are treated as mixed, which is also the default of a runner.

        Raises:
            TraceError: There are no steps, or more than 5 million.
        """
        if self.num_steps > MAX_STEPS:
            raise TraceError(
                self.source,
                None,
                f"the file counts {self.num_steps:,} steps; at most {MAX_STEPS:,} can be processed "
                f"individually. Divide all counts by at least {-(-self.num_steps // MAX_STEPS)}.",
            )
        kinds = [kind for kind, count in self.counts.items() if count]
        places = (
            ((2 * nth + 1) / self.counts[kind], number)
            for number, kind in enumerate(kinds)
            for nth in range(self.counts[kind])
        )
        order = [number for _, number in sorted(places)]
        if not order:
            raise TraceError(
                self.source, None, "the file counts no steps. Use a file with positive counts."
            )
        columns: dict[str, list[int]] = {"num_tokens": [kind.num_tokens for kind in kinds]}
        if any(kind.uniform is not None for kind in kinds):
            columns["uniform_decode"] = [int(bool(kind.uniform)) for kind in kinds]
        columns["num_active_loras"] = [kind.num_active_loras for kind in kinds]
        return StepTrace(
            {name: [values[number] for number in order] for name, values in columns.items()},
            source=self.source,
            has_order=False,
        )


@attrs.frozen
class CudagraphStatRow:
    """One line of vLLM's table: steps with the same number of tokens, padded size and mode.

    Attributes:
        unpadded: Number of tokens before padding.
        padded: Number of tokens after padding.
        mode: ``FULL``, ``PIECEWISE`` or ``NONE``.
        count: Number of these steps.
    """

    unpadded: int
    padded: int
    mode: str
    count: int


@attrs.frozen
class CudagraphStats:
    """CUDA graph statistics printed by vLLM, from all tables of a log.

    Attributes:
        rows: Lines of the tables, in order; equal lines in different tables are not merged.
        config_mode: Configured mode (``FULL_AND_PIECEWISE``, ...); empty if not printed.
        sizes: Configured capture sizes; empty if not printed.
        source: Name of the source in messages.
    """

    rows: tuple[CudagraphStatRow, ...]
    config_mode: str = ""
    sizes: tuple[int, ...] = ()
    source: str = "<memory>"

    def histogram(self) -> SizeHistogram:
        """Return the number of steps of each size.

        The table has no column for uniform decode. With ``FULL_AND_PIECEWISE`` and
        ``FULL_DECODE_ONLY``, FULL graphs serve only uniform decode. PIECEWISE steps are assumed to
        be mixed, because a uniform batch has this mode only above the largest decode graph. For
        steps without a graph, and for all steps if another mode is configured, ``uniform`` is None.
        """
        counts: Counter[StepKind] = Counter()
        apart = self.config_mode in {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"}
        meaning = {"FULL": True, "PIECEWISE": False} if apart else {}
        for row in self.rows:
            counts[StepKind(row.unpadded, meaning.get(row.mode))] += row.count
        return SizeHistogram(dict(counts), self.source)

    @property
    def waste_pct(self) -> float:
        """Padding as a percentage of the real tokens of replayed steps."""
        graphed = [row for row in self.rows if row.mode != "NONE"]
        real = sum(row.unpadded * row.count for row in graphed)
        padding = sum((row.padded - row.unpadded) * row.count for row in graphed)
        return 100.0 * padding / real if real else 0.0


_STAT_HEADER = ("unpadded tokens", "padded tokens", "num paddings", "runtime mode", "count")
_MODES = ("FULL", "NONE", "PIECEWISE")


def read_cudagraph_stats(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> CudagraphStats:
    """Read the statistics that vLLM prints with ``--cudagraph-metrics``.

    The file may be a whole server log: lines outside tables are skipped, and lines of a table may
    have a logger's prefix. vLLM resets its counts after each table, so the counts of all tables in
    a log are added.

    Args:
        path: Path of the log or table, plain or gzip.
        max_bytes: Maximum number of bytes of text to read.

    Raises:
        TraceError: The file has no table with rows, or a line of a table is damaged.

    Source: vLLM 0.14 to 0.33, ``vllm/compilation/cuda_graph.py`` (a list of settings, then a table
        with the columns Unpadded Tokens, Padded Tokens, Num Paddings, Runtime Mode and Count).
    """
    name = trace_name(path)
    found = parse_cudagraph_stats(name, iter_line_blocks(path, max_bytes=max_bytes))
    if found is None:
        raise TraceError(
            name,
            None,
            "the file has no table of CUDA graph statistics. vLLM prints these tables with "
            f"--cudagraph-metrics; their columns are {', '.join(_STAT_HEADER)}.",
        )
    return found


def parse_cudagraph_stats(name: str, blocks: Blocks) -> CudagraphStats | None:
    """Parse CUDA graph statistics; return None if there is no table.

    Raises:
        TraceError: A table is damaged, or all tables are empty.
    """
    rows: list[CudagraphStatRow] = []
    config_mode, in_table, seen_header = "", False, False
    sizes: tuple[int, ...] = ()
    for first, lines in blocks:
        for line, text in enumerate(lines, start=first):
            if match := re.search(r"- Mode: (?:\w+\.)?(\w+)\s*$", text):
                config_mode = match[1]
            elif match := re.search(r"- Capture sizes: \[([\d, ]*)\]", text):
                # Ignore digit strings that are too long for a size.
                sizes = tuple(map(int, re.findall(r"\b[0-9]{1,10}\b", match[1])))
            cells = _table_cells(text)
            if cells is None:
                in_table = False
            elif tuple(cell.lower() for cell in cells) == _STAT_HEADER:
                in_table = seen_header = True
            elif in_table and not all(set(cell) <= set("-:") for cell in cells):
                rows.append(_stat_row(name, line, cells))
            elif not in_table and _near_header(cells):
                raise TraceError(
                    name,
                    line,
                    f"the table has the columns {', '.join(cells)}, but vLLM's table has the "
                    f"columns {', '.join(_STAT_HEADER)}. Correct the header of the table.",
                )
    if not seen_header:
        return None
    if not rows:
        raise TraceError(
            name, None, "no table of CUDA graph statistics has rows. Run the server longer."
        )
    return CudagraphStats(tuple(rows), config_mode, sizes, name)


def _table_cells(text: str) -> list[str] | None:
    start, end = text.find("|"), text.rfind("|")
    if start < 0 or end <= start:
        return None
    return [cell.strip() for cell in text[start + 1 : end].split("|")]


def _near_header(cells: list[str]) -> bool:
    return sum(bool(nearest_names(c.lower(), _STAT_HEADER, limit=1)) for c in cells) >= 3


def _stat_row(name: str, line: int, cells: list[str]) -> CudagraphStatRow:
    if len(cells) != len(_STAT_HEADER):
        raise TraceError(
            name,
            line,
            f"the line has {counted(len(cells), 'cell')}, but the table has {len(_STAT_HEADER)} "
            "columns. Correct or remove the line.",
        )
    numbers = {
        column: _whole(name, line, column, cell)
        for column, cell in zip(_STAT_HEADER, cells, strict=True)
        if column != "runtime mode"
    }
    unpadded, padded = numbers["unpadded tokens"], numbers["padded tokens"]
    if padded < unpadded:
        raise TraceError(
            name,
            line,
            f"padded tokens must be at least {unpadded}, the number of unpadded tokens, got "
            f"{padded}.",
        )
    if padded - unpadded != numbers["num paddings"]:
        raise TraceError(
            name,
            line,
            f"num paddings must be {padded - unpadded} ({padded} padded tokens - {unpadded} "
            f"unpadded tokens), got {numbers['num paddings']}.",
        )
    mode = cells[3].rpartition(".")[2].upper()
    if mode not in _MODES:
        raise TraceError(
            name, line, f"runtime mode must be one of {', '.join(_MODES)}, got {cells[3]!r}."
        )
    return CudagraphStatRow(unpadded, padded, mode, numbers["count"])


def _whole(name: str, line: int, column: str, text: str) -> int:
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        value = int(text)
    except ValueError:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise TraceError(name, line, f"{column} must be an integer, got {shown!r}.") from None
    if not 0 <= value <= MAX_COUNT:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise TraceError(name, line, f"{column} must be from 0 to {MAX_COUNT}, got {shown}.")
    return value


# -- histograms ---------------------------------------------------------------------------

_SIZE_NAMES = ("num_tokens", "size")
_HISTOGRAM_COLUMNS = (*_SIZE_NAMES, "count", "uniform_decode", "num_active_loras")


def read_histogram(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> SizeHistogram:
    """Read a histogram, a CSV file of sizes and their counts.

    The columns ``count`` and either ``size`` or ``num_tokens`` are required; ``uniform_decode`` (0
    or 1) and ``num_active_loras`` are optional. The counts of equal rows are added.

    Args:
        path: Path of the file, plain or gzip.
        max_bytes: Maximum number of bytes of text to read.

    Raises:
        TraceError: A column is missing or unknown, a value is invalid, or there are no sizes.
    """
    return parse_histogram(trace_name(path), iter_line_blocks(path, max_bytes=max_bytes))


def parse_histogram(name: str, blocks: Blocks) -> SizeHistogram:
    """Parse a histogram, in the format that ``read_histogram`` describes."""
    counts: Counter[StepKind] = Counter()
    header: tuple[str, ...] | None = None
    for line, text in _numbered(blocks):
        cells = [cell.strip() for cell in text.split(",")]
        if header is None:
            header = _histogram_header(name, line, cells)
            continue
        if len(cells) != len(header):
            cut = " The file may be truncated here." if len(cells) < len(header) else ""
            raise TraceError(
                name,
                line,
                f"the line has {counted(len(cells), 'column')}, but the header has "
                f"{len(header)}.{cut} Correct or remove the line.",
            )
        row = {
            column: _whole(name, line, column, cell)
            for column, cell in zip(header, cells, strict=True)
        }
        uniform = row.get("uniform_decode")
        if uniform not in (None, 0, 1):
            raise TraceError(name, line, f"uniform_decode must be 0 or 1, got {uniform}.")
        size = row[next(column for column in _SIZE_NAMES if column in row)]
        kind = StepKind(
            size, None if uniform is None else bool(uniform), row.get("num_active_loras", 0)
        )
        counts[kind] += row["count"]
    if header is None:
        raise TraceError(
            name,
            None,
            "the file is empty. The first line of a histogram is a header such as `size,count`.",
        )
    if not counts:
        raise TraceError(
            name, None, "the file has a header but no sizes. Add a line for each size."
        )
    return SizeHistogram(dict(counts), name)


def _numbered(blocks: Blocks) -> Iterator[tuple[int, str]]:
    for first, lines in blocks:
        for line, text in enumerate(lines, start=first):
            if text.strip():
                yield line, text


def _histogram_header(name: str, line: int, cells: list[str]) -> tuple[str, ...]:
    for column in cells:
        if column not in _HISTOGRAM_COLUMNS:
            near = nearest_names(column, _HISTOGRAM_COLUMNS, limit=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise TraceError(
                name,
                line,
                f"unknown column {column!r}.{guess} Columns of a histogram are "
                f"{', '.join(_HISTOGRAM_COLUMNS)}.",
            )
        if cells.count(column) > 1:
            raise TraceError(name, line, f"column {column!r} is repeated. Keep only one.")
    if "count" not in cells or sum(column in cells for column in _SIZE_NAMES) != 1:
        raise TraceError(
            name,
            line,
            f"the header has the columns {', '.join(cells)}, but a histogram needs `count` and "
            f"exactly one of {' and '.join(_SIZE_NAMES)}.",
        )
    return tuple(cells)
