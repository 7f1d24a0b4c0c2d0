"""The installed vLLM's own rule as a policy, so that others can build on it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dispatchkit import Batch, Decision, DispatchConfig, GraphKey, GraphView, Policy, Reason
from dispatchkit.keys import CUDAGraphMode

__all__ = ["RunnerRule", "rule_in_force", "use_rule"]

_rule: ContextVar[Policy | None] = ContextVar("dispatchkit_vllm_rule", default=None)


class RunnerRule:
    """Answer as the runner's own dispatcher does, whatever its release.

    Args:
        keys: The graphs that the runner captures.
        ask: Returns the key that the runner's own code chooses for a batch; None for eager.
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
        """Return the answer of the runner's own code."""
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


def rule_in_force() -> Policy | None:
    """Return the rule of the runner whose policy is being created; None elsewhere."""
    return _rule.get()


@contextmanager
def use_rule(rule: Policy) -> Iterator[None]:
    """Let the name ``vllm`` mean a runner's own rule while a policy is created."""
    token = _rule.set(rule)
    try:
        yield
    finally:
        _rule.reset(token)
