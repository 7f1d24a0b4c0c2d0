"""Write the steps of a rank to a file, from a background thread.

Once a second, the thread appends the new rows; in a compressed file, as one gzip member. If the
process is killed between these writes, the file ends with a complete row.
"""

from __future__ import annotations

import atexit
import gzip
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns

from dispatchkit.errors import TraceError, counted

from dispatchkit_vllm.engine.log import log

__all__ = ["StepLog", "path_of_rank"]

COLUMNS = ("step", "t_s", "num_tokens", "num_reqs", "uniform_decode", "num_active_loras")
_PERIOD_S = 1.0

Row = tuple[int, int, int, bool, int]


def path_of_rank(path: str, rank: int, world_size: int) -> Path:
    """Return the path of a rank's file; with several ranks, the file name contains the rank."""
    whole = Path(path)
    if world_size == 1:
        return whole
    stem, dot, suffixes = whole.name.partition(".")
    return whole.with_name(f"{stem}-rank{rank}{dot}{suffixes}")


class StepLog:
    """Recorder that writes steps to a trace file.

    Args:
        path: Path of the file, which is compressed if the name ends in ``.gz``. An existing file
            is renamed, with ``~`` appended to its name.
        period_s: Seconds between writes.

    Raises:
        TraceError: The file cannot be written.

    Thread safety: only one thread may add steps; any thread may flush or close.
    """

    def __init__(self, path: str | os.PathLike[str], *, period_s: float = _PERIOD_S) -> None:
        self.path = Path(path)
        self._packs = self.path.suffix == ".gz"
        self._rows: list[Row] = []
        self._num_steps = 0
        self._start_ns = 0
        self._period_s = period_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._fault = ""
        try:
            if self.path.exists():
                self.path.replace(self.path.with_name(self.path.name + "~"))
            self._file = self.path.open("xb", buffering=0)
            self._write(",".join(COLUMNS) + "\n")
        except OSError as error:
            raise TraceError(
                str(self.path),
                None,
                f"the file cannot be written: {error.strerror or error}. Change or remove "
                "the setting trace (DISPATCHKIT_TRACE).",
            ) from error
        self._thread = threading.Thread(target=self._run, name="dispatchkit-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, num_tokens: int, num_reqs: int, uniform: bool, loras: int) -> None:
        """Record a step.

        Args:
            num_tokens: Number of tokens before padding.
            num_reqs: Number of requests in the batch.
            uniform: Whether the batch is a uniform decode batch.
            loras: Number of active adapters.
        """
        self._rows.append((perf_counter_ns(), num_tokens, num_reqs, uniform, loras))

    @property
    def is_open(self) -> bool:
        """Whether the file is open: true until ``close`` is called."""
        return not self._ended.is_set()

    def flush(self) -> None:
        """Write the pending rows."""
        with self._lock:
            count = len(self._rows)
            rows = self._rows[:count]
            del self._rows[:count]
            if not rows or self._fault:
                return
            written = self._num_steps
            try:
                self._write("".join(self._lines(rows)))
            except (OSError, ValueError) as error:
                self._fault = str(error)
                log.warning(
                    "Recording to %s stopped after %s: %s. Serving continues. To record again, "
                    "fix the cause or change the setting trace (DISPATCHKIT_TRACE), then "
                    "restart vLLM.",
                    self.path,
                    counted(written, "step"),
                    error,
                )

    def close(self) -> None:
        """Write the pending rows and close the file."""
        self._ended.set()
        self.flush()
        with self._lock:
            self._file.close()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self.flush()

    def _lines(self, rows: Sequence[Row]) -> Iterator[str]:
        for at_ns, num_tokens, num_reqs, uniform, loras in rows:
            self._start_ns = self._start_ns or at_ns
            seconds = (at_ns - self._start_ns) / 1e9
            yield f"{self._num_steps},{seconds:.6f},{num_tokens},{num_reqs},{uniform:d},{loras}\n"
            self._num_steps += 1

    def _write(self, text: str) -> None:
        data = text.encode()
        if self._packs:
            data = gzip.compress(data, compresslevel=6, mtime=0)
        while data:
            data = data[self._file.write(data) :]
