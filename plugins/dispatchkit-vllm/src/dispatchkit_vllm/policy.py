"""The policy class, parameterized by a dialect."""

from __future__ import annotations

from collections.abc import Container, Iterable

from dispatchkit import Batch, Decision, DispatchConfig, GraphKey, GraphView, Reason
from dispatchkit.errors import UnknownNameError
from dispatchkit.keys import CUDAGraphMode, check_instance

from dispatchkit_vllm.dialects import DIALECTS, Dialect
from dispatchkit_vllm.ladder import Ladder

__all__ = ["VllmPolicy"]


class VllmPolicy:
    """vLLM's rule: pad to the smallest size that fits, then try FULL, PIECEWISE and eager.

    If a graph cannot run (not captured, failed, evicted, disabled or not allowed for the batch),
    the batch uses the next mode, never a larger graph of the same mode.

    Args:
        dialect: A ``Dialect`` or its name.
        ladder: Ladder that yields the keys to try. By default, the dialect is applied to the
            dispatcher's configuration.

    Raises:
        UnknownNameError: No dialect has the given name.
        ConfigError: ``dialect`` is neither a name nor a ``Dialect``.
    """

    def __init__(self, dialect: Dialect | str = "vllm", *, ladder: Ladder | None = None) -> None:
        if isinstance(dialect, str):
            if dialect not in DIALECTS:
                raise UnknownNameError("dialect", dialect, DIALECTS)
            dialect = DIALECTS[dialect]
        self.dialect = check_instance(
            dialect, Dialect, "dialect", allowed="a Dialect or the name of one, such as 'vllm'"
        )
        self.name = dialect.name
        self.traits = dialect.traits
        self._fixed = ladder
        self._last: tuple[DispatchConfig, Ladder, dict[GraphKey, None]] | None = None

    def ladder(self, config: DispatchConfig) -> Ladder:
        """Return the dialect applied to a configuration."""
        return self._applied(config)[0]

    def _applied(self, config: DispatchConfig) -> tuple[Ladder, Container[GraphKey] | None]:
        """Return the ladder and its keys; the keys are None for a ladder passed by the caller."""
        if self._fixed is not None:
            return self._fixed, None
        last = self._last
        if last is None or last[0] is not config:
            ladder = Ladder.of(self.dialect, config)
            last = self._last = (config, ladder, dict.fromkeys(ladder.keys()))
        return last[1], last[2]

    def declare(self, config: DispatchConfig) -> Iterable[GraphKey]:
        """Return the keys of the configuration; empty for a ladder passed by the caller."""
        return () if self._fixed is not None else tuple(self.ladder(config).keys())

    def decide(self, batch: Batch, graphs: GraphView) -> Decision | None:
        """Return a decision to replay the first key that can run, or to run eager with a reason."""
        ladder, own = self._applied(graphs.config)
        if ladder.mode is CUDAGraphMode.NONE:
            return Decision.eager(Reason.MODE_NONE)
        query_len = batch.query_len if batch.uniform else 0
        if query_len not in ladder.query_lens:
            query_len = 0
        # If only decode batches have graphs, mixed batches run eager by configuration.
        mixed = not query_len and batch.max_query_len is None
        is_eager = mixed and ladder.mode.mixed_mode() is CUDAGraphMode.NONE
        obstacle: str = Reason.MODE_NONE if is_eager else Reason.NO_KEY
        chain = tuple(
            ladder.chain(batch.num_tokens, query_len, ladder.lora_case(batch.num_active_loras))
        )
        if not chain and batch.num_tokens > ladder.max_size:
            return Decision.eager(obstacle if is_eager else Reason.ABOVE_LARGEST)
        for key in chain:
            # Skip graphs of an earlier configuration, which may still exist.
            if key not in graphs or (own is not None and key not in own):
                continue
            if not key.covers(batch):
                if _too_many_reqs(key, batch):
                    obstacle = Reason.TOO_MANY_REQS
                continue
            if not batch.allows(key.mode):
                obstacle = Reason.CEILING
                continue
            why = graphs.why_not(key)
            if why is None:
                return Decision.replay(key)
            obstacle = why
        return Decision.eager(obstacle)

    def __repr__(self) -> str:
        return f"VllmPolicy({self.name!r})"


def _too_many_reqs(key: GraphKey, batch: Batch) -> bool:
    limit = key.descriptor.num_reqs
    return limit is not None and batch.num_reqs is not None and batch.num_reqs > limit
