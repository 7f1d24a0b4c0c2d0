"""Recording of steps: a ring of whole numbers, filled by steps and read as a step trace.

A recorded step writes six numbers, and one for each axis, into memory that is there already;
nothing is made, and the ring never grows. Once it is full the oldest steps are overwritten, and
counted.
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
"""Steps that are kept by default: 3.1 MB."""

# Nanoseconds, tokens, requests, query class, adapters (or variant), ceiling; then the axes.
_FIELDS = 6


class StepRecorder:
    """The last steps of a runner.

    Args:
        config: What the query classes and axes of the steps mean.
        capacity: Steps to keep.

    Attributes:
        num_steps: Steps recorded so far, overwritten ones included.

    Raises:
        ConfigError: ``capacity`` is not a whole number of at least 1.

    Thread safety: one thread adds at a time. Stop recording before reading.
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
        """Record a step by what it was dispatched with.

        The values of axes are those that ``DispatchConfig.variant`` was given for ``loras``;
        of a plain number, the buckets.
        """
        ring, at = self._ring, self._at
        ring[at] = perf_counter_ns()
        ring[at + 1] = num_tokens
        ring[at + 2] = num_reqs
        ring[at + 3] = uniform
        ring[at + 4] = loras
        ring[at + 5] = ceiling
        if self._has_axes:
            # A value above the largest that a trace holds lies outside all the same.
            for index, value in enumerate(self._config.variants.values(loras), at + _FIELDS):
                ring[index] = min(value, MAX_COUNT)
        at += self._width
        self._at = 0 if at == self._end else at
        self.num_steps += 1

    def listening_to(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``dispatch`` that records each step it decides; one that raises is none."""

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
        """Steps that were overwritten by later ones."""
        return max(0, self.num_steps - self.capacity)

    def trace(self) -> StepTrace:
        """Return the steps kept, oldest first; their numbers count from the first ever.

        A fact that was not known of every step is left out: requests where a call did not
        give them, the longest query where a batch was mixed.
        """
        rows = list(self._rows())
        names = [axis.name for axis in self._config.axes]
        first_ns = rows[0][0] if rows else 0
        steps = []
        for number, row in enumerate(rows, start=self.num_lost):
            at_ns, tokens, reqs, uniform, variant, _, *values = row
            # Without axes it is the adapters themselves, of whatever limit there was then.
            loras = self._config.variants.facts(variant)[0] if self._has_axes else variant
            is_uniform, query_len, longest = self._config.query_class(uniform)
            if is_uniform and not reqs:
                reqs = tokens // query_len
            if is_uniform and reqs * query_len != tokens:
                is_uniform, longest = False, None  # not the batch it was said to be
            if not tokens:
                longest = 0
            elif longest is not None:  # what its class allows; no request has more than there are
                longest = min(longest, tokens)
            axes = dict(zip(names, values, strict=True))
            steps.append((number, at_ns, tokens, reqs, longest, is_uniform, loras, axes))
        # Of a step without tokens both are known.
        knows_reqs = all(step[3] or not step[2] for step in steps)
        knows_longest = all(step[4] is not None for step in steps)
        return StepTrace.from_steps(
            (
                TraceStep(
                    step=number,
                    t_s=(at_ns - first_ns) / 1e9,
                    num_tokens=tokens,
                    num_reqs=reqs if knows_reqs else None,
                    max_query_len=longest if knows_longest else None,
                    uniform_decode=is_uniform,
                    num_active_loras=loras,
                    axes=axes,
                )
                for number, at_ns, tokens, reqs, longest, is_uniform, loras, axes in steps
            ),
            source="<recorded>",
        )

    def axes(self) -> list[dict[str, int | None]]:
        """Return the bucket of each axis by name for the steps kept, None for outside.

        The values themselves are in the trace.
        """
        names = [axis.name for axis in self._config.axes]
        facts = self._config.variants.facts
        return [dict(zip(names, facts(row[4])[1], strict=True)) for row in self._rows()]

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the steps kept as a step trace; return how many.

        Raises:
            TraceError: The file cannot be written.
        """
        return write_trace(path, self.trace())

    def _rows(self) -> Iterator[tuple[int, ...]]:
        """Yield the steps kept, oldest first."""
        # Full, the oldest step is the one to be overwritten next.
        start = self._at if self.num_lost else 0
        for index in range(min(self.num_steps, self.capacity)):
            at = (start + index * self._width) % self._end
            yield tuple(self._ring[at : at + self._width])
