"""Timeline: save steps in Chrome's trace format, which Perfetto displays.

The timeline shows host time: when each step was launched and how long the launch took. For device
time, use a profiler such as Nsight Systems with ``NvtxRanges``.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from time import perf_counter_ns
from typing import Any

from dispatchkit.dispatch import Decision
from dispatchkit.keys.checks import check_count
from dispatchkit.observe.events import (
    CaptureEvent,
    CaptureFailedEvent,
    EvictEvent,
    PolicyErrorEvent,
    PolicySwappedEvent,
)
from dispatchkit.observe.trace_files import whole_text

__all__ = ["Timeline", "span_name"]

DEFAULT_CAPACITY = 1 << 16
_RARE = "events"  # the row of captures, evictions, policy swaps and errors


def span_name(decision: Decision) -> str:
    """Return the label of a step: its graph, or "eager" with the reason."""
    return decision.graphs or f"eager: {decision.reason}"


class Timeline:
    """A timeline of steps and events, written in Chrome's trace format.

    Example::

        timeline = Timeline()
        runner.taps.watch_steps(timeline)
        ...
        runner.taps.watch_steps(None)
        timeline.save("steps.json")      # open it at ui.perfetto.dev

    To include captures, evictions, policy swaps and policy errors, attach the timeline to the
    runner's plugins: ``plugins.notifier.attach(timeline, "timeline")``.

    Args:
        capacity: Number of spans to keep. Older spans are dropped and counted.

    Attributes:
        num_lost: Number of dropped spans.

    Raises:
        ConfigError: ``capacity`` is not a whole number of at least 1.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        capacity = check_count(capacity, "capacity")
        self._spans: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._start_ns = perf_counter_ns()
        self._open = threading.local()
        self.num_lost: int = 0

    # -- steps ----------------------------------------------------------------------------

    def enter(self, decision: Decision, lane: int) -> None:
        """Begin the span of a step on this thread."""
        steps = self._open.__dict__.setdefault(
            "steps", []
        )  # a stack, because a step may call another runner
        steps.append((perf_counter_ns(), decision, lane))

    def leave(self, *, failed: bool) -> None:
        """End the span of this thread's step after it was launched, or after it raised."""
        begin, decision, lane = self._open.steps.pop()
        facts = {
            "num_tokens": decision.num_tokens,
            "padded_num_tokens": decision.padded_num_tokens,
            "reason": str(decision.reason),
            "mode": decision.mode.name,
            "policy": decision.policy,
            "failed": failed,
        }
        self._add(span_name(decision), "step", f"lane {lane}", begin, perf_counter_ns(), facts)

    # -- rare events ----------------------------------------------------------------------

    def on_capture(self, event: CaptureEvent) -> None:
        """Add a span for a capture that has just ended."""
        self._add_rare(f"capture {event.key}", event.elapsed_us, num_bytes=event.num_bytes)

    def on_capture_failed(self, event: CaptureFailedEvent) -> None:
        """Add a span for a failed capture that has just ended."""
        self._add_rare(f"failed capture {event.key}", event.elapsed_us, reason=event.reason)

    def on_evict(self, event: EvictEvent) -> None:
        """Add an eviction."""
        self._add_rare(f"evict {event.key}", None, reason=event.reason)

    def on_policy_swapped(self, event: PolicySwappedEvent) -> None:
        """Add a policy swap."""
        self._add_rare(f"policy {event.policy}", None, epoch=event.epoch)

    def on_policy_error(self, event: PolicyErrorEvent) -> None:
        """Add a policy error."""
        self._add_rare(f"error of policy {event.policy}", None, reason=event.reason)

    # -- output ---------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the timeline in Chrome's trace format, with times in microseconds."""
        with self._lock:
            spans = sorted(self._spans, key=lambda one: one["ts"])
        names = sorted({one["tid"] for one in spans})
        # Row numbers start at 1: row 0 would have the same number as the process, and viewers treat
        # such a row as the main thread.
        rows = {name: number for number, name in enumerate(names, start=1)}
        about = [_metadata("process_name", 0, "dispatchkit")]
        about += [_metadata("thread_name", number, name) for name, number in rows.items()]
        return {
            "displayTimeUnit": "ns",
            "otherData": {"spans_lost": self.num_lost, "clock": "host"},
            "traceEvents": [*about, *({**one, "tid": rows[one["tid"]]} for one in spans)],
        }

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the timeline to a file, compressed if the name ends in ``.gz``.

        Returns:
            The number of spans written.

        Raises:
            TraceError: The file cannot be written.
        """
        data = self.to_json()
        with whole_text(path) as stream:
            json.dump(data, stream)
        return sum(one["ph"] == "X" for one in data["traceEvents"])

    def _add_rare(self, name: str, elapsed_us: float | None, **facts: Any) -> None:
        end = perf_counter_ns()
        self._add(name, "event", _RARE, end - int((elapsed_us or 0.0) * 1e3), end, facts)

    def _add(
        self, name: str, category: str, row: str, begin: int, end: int, facts: dict[str, Any]
    ) -> None:
        span = {
            "name": name,
            "cat": category,
            "ph": "X",
            # A capture may have begun before the timeline was created; its span begins at 0.
            "ts": max(0, begin - self._start_ns) / 1e3,
            "dur": (end - max(begin, self._start_ns)) / 1e3,
            "pid": 0,
            "tid": row,
            "args": facts,
        }
        with self._lock:
            self.num_lost += len(self._spans) == self._spans.maxlen
            self._spans.append(span)


def _metadata(what: str, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
