"""The installed vLLM's own rule, as a policy that other policies can refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dispatchkit import Batch, Decision, DispatchConfig, GraphKey, GraphView, Policy, Reason
from dispatchkit.keys import CUDAGraphMode

__all__ = ["RunnerRule", "current_rule", "use_rule"]

_rule: ContextVar[Policy | None] = ContextVar("dispatchkit_vllm_rule", default=None)


class RunnerRule:
    """A policy that returns the decisions of the runner's own dispatcher.

    Args:
        keys: Keys of the graphs that the runner captures.
        ask: Function that returns the key that the runner's own code chooses for a batch; None for
            eager.
    """

    name = "vllm"
    traits: frozenset[str] = frozenset()

    def __init__(self, keys: Iterable[GraphKey], ask: Callable[[Batch], GraphKey | None]) -> None:
        self._keys = tuple(keys)
        self._ask = ask

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of the runner's graphs."""
        return self._keys

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return the decision of the runner's own code."""
        key = self._ask(batch)
        if key is None:
            return Decision.eager(self._why_eager(batch, graphs))
        why = graphs.why_not(key)
        return Decision.replay(key) if why is None else Decision.eager(why)

    def _why_eager(self, batch: Batch, graphs: GraphView) -> str:
        mode = graphs.config.mode
        part = mode.decode_mode() if batch.uniform else mode.mixed_mode()
        if part is CUDAGraphMode.NONE:
            return Reason.MODE_NONE
        if batch.num_tokens > max((key.num_tokens for key in self._keys), default=0):
            return Reason.ABOVE_LARGEST
        if any(key.covers(batch) and not batch.allows(key.mode) for key in self._keys):
            return Reason.CEILING
        return Reason.NO_KEY


def current_rule() -> Policy | None:
    """Return the rule set by ``use_rule``; None outside its context."""
    return _rule.get()


@contextmanager
def use_rule(rule: Policy) -> Iterator[None]:
    """Make the policy name ``vllm`` select a runner's own rule inside the context."""
    token = _rule.set(rule)
    try:
        yield
    finally:
        _rule.reset(token)
