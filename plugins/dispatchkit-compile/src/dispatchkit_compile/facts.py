"""Facts of a batch that a compiled function cannot see in its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import attrs

from dispatchkit.keys import RuntimeMode

__all__ = ["BatchFacts", "batch_facts", "current_facts"]


def _ceiling(value: RuntimeMode | str) -> RuntimeMode:
    return RuntimeMode.parse(value)


@attrs.frozen
class BatchFacts:
    """Facts of a batch besides its rows: the arguments of a runner's call.

    Attributes:
        num_reqs: Requests in the batch; 0 if not known.
        uniform: False for a mixed batch; True for a uniform decode batch, in which every request
            is past its prompt and has the same number of tokens; or the position of that query
            length among those configured, counted from 1.
        loras: Active adapters.
        ceiling: Highest runtime mode that the batch may run in.

    Raises:
        ModeError: The ceiling is a mode for configurations, made of two.
        UnknownNameError: It is not a mode.
    """

    num_reqs: int = 0
    uniform: int = 0
    loras: int = 0
    ceiling: RuntimeMode = attrs.field(default=RuntimeMode.FULL, converter=_ceiling)

    def for_graph(self, num_rows: int) -> dict[str, int]:
        """Return a runner's arguments; a later graph may have fewer rows than requests."""
        return {
            "num_reqs": min(self.num_reqs, num_rows),
            "uniform": self.uniform,
            "loras": self.loras,
            "ceiling": self.ceiling,
        }


# A context variable, so that each thread and task has its own facts.
_current: ContextVar[BatchFacts | None] = ContextVar("dispatchkit_batch_facts", default=None)


def current_facts() -> BatchFacts | None:
    """Return the facts set in this thread or task; None if none are set."""
    return _current.get()


@contextmanager
def batch_facts(
    *,
    num_reqs: int = 0,
    uniform: int = 0,
    loras: int = 0,
    ceiling: RuntimeMode | str = RuntimeMode.FULL,
) -> Iterator[BatchFacts]:
    """Set the facts of the batch for compiled functions called inside the block.

    The previous facts are restored on exit. The arguments are those of ``BatchFacts``.

    Raises:
        ModeError: The ceiling is a mode for configurations, made of two.
        UnknownNameError: It is not a mode.
    """
    token = _current.set(facts := BatchFacts(num_reqs, uniform, loras, ceiling))
    try:
        yield facts
    finally:
        _current.reset(token)
