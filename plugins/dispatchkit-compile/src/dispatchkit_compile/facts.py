"""Properties of a batch that a compiled function cannot derive from its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import attrs

from dispatchkit.keys import RuntimeMode

__all__ = ["BatchFacts", "batch_facts", "current_facts"]


def _ceiling(value: RuntimeMode | str) -> RuntimeMode:
    return RuntimeMode.parse(value, "ceiling")


@attrs.frozen
class BatchFacts:
    """Properties of a batch other than its number of rows, passed to the runner.

    Attributes:
        num_reqs: Number of requests; 0 if unknown.
        uniform: False for a mixed batch. True for a uniform decode batch, in which every request
            is past its prompt and has the same number of tokens. If several query lengths are
            configured, the 1-based index of the batch's query length.
        loras: Number of active adapters.
        ceiling: Highest runtime mode that the batch may run in.

    Raises:
        ModeError: ``ceiling`` is a pair of modes, such as ``FULL_AND_PIECEWISE``.
        UnknownNameError: ``ceiling`` is not a mode.
    """

    num_reqs: int = 0
    uniform: int = 0
    loras: int = 0
    ceiling: RuntimeMode = attrs.field(default=RuntimeMode.FULL, converter=_ceiling)

    def for_graph(self, num_rows: int) -> dict[str, int]:
        """Return the properties as keyword arguments for a call of the runner.

        ``num_reqs`` is limited to ``num_rows``: if Dynamo splits the model into several graphs, a
        later graph may have fewer rows than the batch has requests.
        """
        return {
            "num_reqs": min(self.num_reqs, num_rows),
            "uniform": self.uniform,
            "loras": self.loras,
            "ceiling": self.ceiling,
        }


# A context variable, so that each thread and task has its own ``BatchFacts``.
_current: ContextVar[BatchFacts | None] = ContextVar("dispatchkit_batch_facts", default=None)


def current_facts() -> BatchFacts | None:
    """Return the ``BatchFacts`` set in this thread or task, or None."""
    return _current.get()


@contextmanager
def batch_facts(
    *,
    num_reqs: int = 0,
    uniform: int = 0,
    loras: int = 0,
    ceiling: RuntimeMode | str = RuntimeMode.FULL,
) -> Iterator[BatchFacts]:
    """Set the ``BatchFacts`` for compiled functions called in the ``with`` block.

    The arguments are those of ``BatchFacts``. The previous ``BatchFacts`` are restored on exit.

    Raises:
        ModeError: ``ceiling`` is a pair of modes, such as ``FULL_AND_PIECEWISE``.
        UnknownNameError: ``ceiling`` is not a mode.
    """
    token = _current.set(facts := BatchFacts(num_reqs, uniform, loras, ceiling))
    try:
        yield facts
    finally:
        _current.reset(token)
