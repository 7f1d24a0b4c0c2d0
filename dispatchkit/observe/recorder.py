"""StepRecorder: record steps in a ring buffer, and return them as a step trace.

Recording a step writes six integers, plus one per axis, into preallocated memory. When the ring is
full, new steps overwrite the oldest steps. Overwritten steps are counted.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

from dispatchkit.keys.checks import check_count
from dispatchkit.keys.config import DispatchConfig
from dispatchkit.observe.trace import MAX_COUNT, StepTrace, TraceStep
from dispatchkit.observe.trace_writer import write_trace

__all__ = ["DEFAULT_CAPACITY", "StepRecorder"]

DEFAULT_CAPACITY = 1 << 16
"""Default number of steps to keep (3.1 MB without axes)."""

# Fields of a step before the axes: time in nanoseconds, tokens, requests, query class, adapters (or
# variant) and ceiling.
_FIELDS = 6


class StepRecorder:
    """A recorder of the most recent steps of a runner.

    Args:
        config: The configuration of the runner.
        capacity: Number of steps to keep.

    Attributes:
        num_steps: Number of recorded steps, including overwritten steps.

    Raises:
        ConfigError: ``capacity`` is not a whole number of at least 1.

    Thread safety: only one thread at a time may record. Stop recording before reading.
    """

    def __init__(self, config: DispatchConfig, capacity: int = DEFAULT_CAPACITY) -> None:
        capacity = check_count(capacity, "capacity")
        self._config = config
        self._has_axes = bool(config.axes)
        self._width = _FIELDS + len(config.axes)
        self._ring = array("q", bytes(8 * self._width * capacity))
        self._end = self._width * capacity
        self._at = 0
        self.capacity = capacity
        self.num_steps: int = 0

    def add(
        self, num_tokens: int, num_reqs: int, uniform: int, loras: int, ceiling: int = 2
    ) -> None:
        """Record a step, described by the arguments of ``dispatch``.

        Axis values are recorded as passed to ``DispatchConfig.variant``. If ``loras`` was not
        returned by ``variant``, only the buckets are known. Each bucket is then recorded in place
        of the value. If the value was outside all buckets, the largest bucket plus 1 is recorded.
        """
        ring, at = self._ring, self._at
        ring[at] = perf_counter_ns()
        ring[at + 1] = num_tokens
        ring[at + 2] = num_reqs
        ring[at + 3] = uniform
        ring[at + 4] = loras
        ring[at + 5] = ceiling
        if self._has_axes:
            # A trace cannot contain a value above MAX_COUNT.
            for index, value in enumerate(self._config.variants.values(loras), at + _FIELDS):
                ring[index] = min(value, MAX_COUNT)
        at += self._width
        self._at = 0 if at == self._end else at
        self.num_steps += 1

    def recording(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``dispatch`` to record each successful call."""

        def dispatch_and_record(
            num_tokens: int,
            num_reqs: int = 0,
            uniform: int = 0,
            loras: int = 0,
            ceiling: int = 2,
        ) -> Any:
            decision = dispatch(num_tokens, num_reqs, uniform, loras, ceiling)
            self.add(num_tokens, num_reqs, uniform, loras, ceiling)
            return decision

        return dispatch_and_record

    @property
    def num_lost(self) -> int:
        """Number of overwritten steps."""
        return max(0, self.num_steps - self.capacity)

    def trace(self) -> StepTrace:
        """Return the kept steps as a trace, oldest first.

        Steps are numbered from the first recorded step. A column is omitted if its value is unknown
        for any step: ``num_reqs`` if a batch that is not uniform was recorded without it,
        ``max_query_len`` if a batch was mixed or its counts contradict its query class.
        """
        rows = list(self._rows())
        names = [axis.name for axis in self._config.axes]
        first_ns = rows[0][0] if rows else 0
        steps = []
        for number, row in enumerate(rows, start=self.num_lost):
            at_ns, tokens, reqs, uniform, variant, _, *values = row
            # Without axes, the variant is the number of adapters, regardless of ``max_loras``.
            loras = self._config.variants.facts(variant)[0] if self._has_axes else variant
            is_uniform, query_len, longest = self._config.query_class(uniform)
            if is_uniform and not reqs:
                reqs = tokens // query_len
            if is_uniform and reqs * query_len != tokens:
                is_uniform, longest = False, None  # the counts contradict the query class
            if not tokens:
                longest = 0
            elif longest is not None:  # the class's max_query_len may exceed the batch's tokens
                longest = min(longest, tokens)
            axes = dict(zip(names, values, strict=True))
            steps.append((number, at_ns, tokens, reqs, longest, is_uniform, loras, axes))
        # 0 requests means unknown, except in a step without tokens.
        has_reqs = all(step[3] or not step[2] for step in steps)
        has_longest = all(step[4] is not None for step in steps)
        return StepTrace.from_steps(
            (
                TraceStep(
                    step=number,
                    t_s=(at_ns - first_ns) / 1e9,
                    num_tokens=tokens,
                    num_reqs=reqs if has_reqs else None,
                    max_query_len=longest if has_longest else None,
                    uniform_decode=is_uniform,
                    num_active_loras=loras,
                    axes=axes,
                )
                for number, at_ns, tokens, reqs, longest, is_uniform, loras, axes in steps
            ),
            source="<recorded>",
        )

    def axes(self) -> list[dict[str, int | None]]:
        """Return the axis buckets of each kept step by name; None for a value outside all buckets.

        ``trace`` returns the values themselves.
        """
        names = [axis.name for axis in self._config.axes]
        facts = self._config.variants.facts
        return [dict(zip(names, facts(row[4])[1], strict=True)) for row in self._rows()]

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the kept steps as a step trace, and return their number.

        Raises:
            TraceError: The file cannot be written.
        """
        return write_trace(path, self.trace())

    def _rows(self) -> Iterator[tuple[int, ...]]:
        """Yield the kept steps, oldest first."""
        # In a full ring, the oldest step is at the position to overwrite next.
        start = self._at if self.num_lost else 0
        for index in range(min(self.num_steps, self.capacity)):
            at = (start + index * self._width) % self._end
            yield tuple(self._ring[at : at + self._width])
