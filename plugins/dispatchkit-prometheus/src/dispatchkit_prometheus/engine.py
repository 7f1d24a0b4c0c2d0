"""Export an engine's counters from a worker process, on a port or to a text file.

vLLM's workers do not serve ``/metrics``, and its front end cannot access a worker's steps, so each
worker exports its own counters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from dispatchkit.errors import ConfigError

__all__ = ["EngineCollector", "EngineExport", "export_engine"]

_PERIOD_S = 5.0


class EngineCounts(Protocol):
    """Counters of an engine, such as ``dispatchkit_vllm.engine.counts.StepCounts``."""

    policy: str
    runner: str

    def read(self) -> Iterable[Any]:
        """Return one record for each pair of a mode and a reason.

        Its fields are ``mode``, ``reason``, ``steps``, ``real_tokens`` and ``padded_tokens``, which
        includes the real tokens.
        """
        ...


class EngineCollector(Collector):
    """Collector that reads the counters of engines at each scrape.

    Args:
        rank: Value of the label ``rank`` of all metrics.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = str(rank)
        self._engines: list[EngineCounts] = []

    def add(self, counts: EngineCounts) -> None:
        """Add the counters of an engine."""
        self._engines.append(counts)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that the registry reserves their names."""
        return self._metrics(())

    def collect(self) -> Iterable[Metric]:
        """Return the counters as metrics."""
        return self._metrics(tuple(self._engines))

    def _metrics(self, engines: tuple[EngineCounts, ...]) -> Iterator[Metric]:
        labels = ["rank", "runner", "mode", "reason"]
        steps = CounterMetricFamily(
            "dispatchkit_engine_steps",
            "Number of steps, by runtime mode and reason.",
            labels=labels,
        )
        tokens = CounterMetricFamily(
            "dispatchkit_engine_tokens",
            "Number of tokens, by kind: real or padding.",
            labels=[*labels, "kind"],
        )
        info = GaugeMetricFamily(
            "dispatchkit_engine_info",
            "Always 1; the labels name the rank, the runner and the policy.",
            labels=["rank", "runner", "policy"],
        )
        totals: dict[tuple[str, ...], list[int]] = {}
        for engine in engines:
            for one in engine.read():
                cell = totals.setdefault((self._rank, engine.runner, one.mode, one.reason), [0] * 3)
                cell[0] += one.steps
                cell[1] += one.real_tokens
                cell[2] += one.padded_tokens - one.real_tokens
        for names, (count, real, padding) in sorted(totals.items()):
            steps.add_metric(list(names), count)
            tokens.add_metric([*names, "real"], real)
            tokens.add_metric([*names, "padding"], padding)
        for runner, policy in sorted({(one.runner, one.policy or "none") for one in engines}):
            info.add_metric([self._rank, runner, policy], 1)
        yield from (steps, tokens, info)


class EngineExport:
    """Export of an engine's metrics on an HTTP port or to a text file.

    Args:
        where: Port (0 for any free port), or path of a text file (``.prom``) for the node
            exporter's textfile collector.
        rank: Rank of the process, and value of the label ``rank``. The rank is added to the port,
            unless the port is 0.
        world_size: Number of ranks; if there are several, the file's name contains the rank.
        period_s: Seconds between two writes of the file.

    Raises:
        ConfigError: ``where`` is not a string, the port cannot be opened, or the file cannot be
            written.
    """

    def __init__(
        self, where: str, *, rank: int = 0, world_size: int = 1, period_s: float = _PERIOD_S
    ) -> None:
        if not isinstance(where, str):
            raise ConfigError(
                "metrics",
                where,
                "a string with a port or the path of a text file",
                "Pass a string with a port or the path of a text file.",
                message=f"Cannot export metrics to {where!r}, which is not a string.",
            )
        target = repr(where)
        self.registry = CollectorRegistry()
        self.collector = EngineCollector(rank)
        self.registry.register(self.collector)
        self._ended = threading.Event()
        self.port: int | None = None
        self.path: Path | None = None
        try:
            if where.isascii() and where.isdigit():
                self.port = int(where) + rank if int(where) else 0
                target = f"port {self.port}" + f" ({where} plus the rank)" * bool(rank)
                server, _ = start_http_server(self.port, registry=self.registry)
                self.port = int(server.server_port)
                self._server = server
            else:
                path = Path(where)
                stem = path.stem if world_size == 1 else f"{path.stem}-rank{rank}"
                self.path = path.with_name(stem + path.suffix)
                target = repr(str(self.path))
                self._write()
                threading.Thread(
                    target=self._run, args=(period_s,), name="dispatchkit-metrics", daemon=True
                ).start()
        except (OSError, OverflowError, ValueError) as error:
            # ValueError means, for example, that ``where`` is empty or has too many digits.
            raise ConfigError(
                "metrics",
                where,
                "a free port or the path of a writable file",
                "Pass a free port or the path of a writable file.",
                message=f"Cannot export metrics to {target}: {str(error).rstrip('.')}.",
            ) from error

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._ended.is_set()

    def close(self) -> None:
        """Write the file one last time, or close the port."""
        self._ended.set()
        if self.path is not None:
            self._write()
        else:
            self._server.shutdown()
            self._server.server_close()

    def _run(self, period_s: float) -> None:
        while not self._ended.wait(period_s):
            try:
                self._write()
            except OSError:
                continue  # such as a full disk; the next write tries again

    def _write(self) -> None:
        write_to_textfile(str(self.path), self.registry)


_exports: dict[tuple[str, int], EngineExport] = {}
_lock = threading.Lock()


def export_engine(
    counts: EngineCounts, where: str, *, rank: int = 0, world_size: int = 1
) -> EngineExport:
    """Export an engine's counters.

    Engines of one process with the same ``where`` share the port or file until it is closed.

    Args:
        counts: Counters to export, read whenever metrics are requested or written.
        where: Port, or path of a text file, as for ``EngineExport``.
        rank: Rank of the process, as for ``EngineExport``.
        world_size: Number of ranks, as for ``EngineExport``.

    Raises:
        ConfigError: As for ``EngineExport``.
    """
    with _lock:
        export = _exports.get((where, rank))
        if export is None or export.is_closed:
            export = _exports[where, rank] = EngineExport(where, rank=rank, world_size=world_size)
    export.collector.add(counts)
    return export
