"""Hypothesis strategies for configurations, batches, keys, registries and changes of graphs.

Sizes are small on purpose. Policies often fail at edge cases: batches one token smaller or larger
than a bucket, a query length that does not divide a size, or a limit between two sizes. With small
sizes, these cases are frequent.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Sequence

import attrs
from hypothesis import strategies as st

from dispatchkit.keys import (
    ALLOWED_MODES,
    Batch,
    BatchDescriptor,
    CaptureSizeWarning,
    CUDAGraphMode,
    DispatchConfig,
    GraphKey,
    RuntimeMode,
)
from dispatchkit.registry import GraphRegistry, KeyState
from dispatchkit.testing.samples import make_batch

__all__ = [
    "CHANGE_KINDS",
    "Change",
    "apply_change",
    "batches",
    "changes",
    "configs",
    "graph_keys",
    "registries",
    "sample_batch",
]


@st.composite
def configs(
    draw: st.DrawFn,
    *,
    modes: Sequence[CUDAGraphMode] = tuple(CUDAGraphMode),
    max_tokens: int = 40,
    query_lens: Sequence[tuple[int, ...]] = ((1,), (1,), (2,), (3,), (4,), (1, 3), (4, 2)),
    max_loras: int = 3,
) -> DispatchConfig:
    """Return a strategy for common and unusual configurations.

    Args:
        draw: Passed by hypothesis.
        modes: Values of ``mode`` to draw from.
        max_tokens: Largest ``max_num_tokens``.
        query_lens: Values of ``query_lens`` to draw from.
        max_loras: Largest ``max_loras``.
    """
    # Tiny limits and an empty ``sizes`` are valid, but reveal few faults, so they are rare.
    odd = draw(st.integers(0, 3)) == 0
    limit = draw(st.integers(1 if odd else max_tokens // 2, max_tokens))
    lens = draw(st.sampled_from(query_lens))
    one_size = st.integers(1, limit)
    sizes = draw(st.lists(one_size, min_size=0 if odd else 3, max_size=7))
    if draw(st.booleans()):  # round sizes up to multiples of the first query length
        sizes = [min(limit, -(-size // lens[0]) * lens[0]) for size in sizes]
    if draw(st.booleans()) and sizes:
        sizes.append(limit)
    uniform_sizes: list[int] | None = None
    if draw(st.integers(0, 4)) == 0:
        most = limit // lens[0]
        counts = st.lists(st.integers(1, max(1, most)), max_size=4 if most else 0)
        uniform_sizes = [count * lens[0] for count in draw(counts)]
    loras = draw(st.integers(0, max_loras))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureSizeWarning)
        return DispatchConfig(
            mode=draw(st.sampled_from(modes)),
            sizes=tuple(sizes),
            max_num_tokens=limit,
            max_num_seqs=draw(st.integers(1, limit) | st.just(limit)),
            query_lens=lens,
            varlen_decode=draw(st.integers(0, 3)) == 0,
            uniform_sizes=None if uniform_sizes is None else tuple(uniform_sizes),
            max_loras=loras,
            specialize_lora=draw(st.booleans()),
            specialize_active_loras=loras > 0 and draw(st.booleans()),
        )


@st.composite
def batches(draw: st.DrawFn, config: DispatchConfig, *, known_reqs: bool = True) -> Batch:
    """Return a strategy for batches that a configuration allows, often near a capture size.

    Args:
        draw: Passed by hypothesis.
        config: Configuration that limits the batches.
        known_reqs: Whether some batches include the number of requests. A dispatcher first calls
            ``decide`` without this number.
    """
    limit = config.max_num_tokens
    return _batch(
        config,
        num_tokens=draw(st.sampled_from(_edges(config)) | st.integers(1, limit)),
        uniform=draw(st.integers(0, config.num_query_classes - 1)),
        reqs=draw(st.integers(1, limit)) if known_reqs and draw(st.booleans()) else None,
        loras=draw(st.integers(0, config.max_loras)),
        allowed=draw(st.sampled_from(_ALLOWED)),
    )


def sample_batch(config: DispatchConfig, rng: random.Random, *, known_reqs: bool = True) -> Batch:
    """Draw a batch as ``batches`` does, but faster, because hypothesis is not used."""
    limit = config.max_num_tokens
    edge = rng.random() < 0.7
    return _batch(
        config,
        num_tokens=rng.choice(_edges(config)) if edge else rng.randint(1, limit),
        uniform=rng.randrange(config.num_query_classes),
        reqs=rng.randint(1, limit) if known_reqs and rng.random() < 0.5 else None,
        loras=rng.randint(0, config.max_loras),
        allowed=rng.choice(_ALLOWED),
    )


_ALLOWED = (2, 2, 2, *range(len(ALLOWED_MODES)))


def _edges(config: DispatchConfig) -> list[int]:
    limit = config.max_num_tokens
    sizes = (*config.sizes, *(config.uniform_sizes or ()), 1, limit)
    return sorted({n + d for n in sizes for d in (-1, 0, 1) if 1 <= n + d <= limit})


def _batch(
    config: DispatchConfig,
    *,
    num_tokens: int,
    uniform: int,
    reqs: int | None,
    loras: int,
    allowed: int,
) -> Batch:
    """Return a batch with consistent numbers of tokens and requests."""
    is_uniform, query_len, _ = config.query_class(uniform)
    num_reqs = None
    if reqs is not None:
        num_reqs = min(reqs, num_tokens, config.max_num_seqs)
        if is_uniform and query_len <= num_tokens:
            num_reqs = min(num_tokens // query_len, config.max_num_seqs)
            num_tokens = num_reqs * query_len
    return make_batch(
        config, num_tokens, num_reqs=num_reqs, uniform=uniform, loras=loras, allowed=allowed
    )


@st.composite
def graph_keys(draw: st.DrawFn, config: DispatchConfig) -> GraphKey:
    """Return a strategy for all keys within a configuration's limits, declared or not."""
    num_tokens = draw(st.integers(1, config.max_num_tokens))
    uniform, query_len, max_query_len = config.query_class(
        draw(st.integers(0, config.num_query_classes - 1))
    )
    most = min(num_tokens, config.max_num_seqs)
    return GraphKey(
        draw(st.sampled_from((RuntimeMode.PIECEWISE, RuntimeMode.FULL))),
        BatchDescriptor(
            num_tokens=num_tokens,
            num_reqs=draw(st.none() | st.integers(1, most)),
            uniform=uniform,
            num_active_loras=draw(st.integers(0, config.max_loras)),
            query_len=query_len,
            max_query_len=None if uniform else max_query_len,
        ),
    )


# -- changes of graphs --------------------------------------------------------------------


@attrs.frozen
class Change:
    """A change of the state of a graph or of a runtime mode.

    Attributes:
        kind: ``captured``, ``failed``, ``evicted``, ``stale``, ``disabled``, ``enabled``,
            ``mode_disabled`` or ``mode_enabled``.
        key: The key of the graph. For a runtime mode, any key of the mode.
    """

    kind: str
    key: GraphKey


CHANGE_KINDS = (
    *("captured", "failed", "evicted", "stale", "disabled", "enabled"),
    *("mode_disabled", "mode_enabled"),
)


def changes(
    keys: Sequence[GraphKey], *, kinds: Sequence[str] = CHANGE_KINDS
) -> st.SearchStrategy[Change]:
    """Return a strategy for a ``Change`` of one of the keys; it is empty if there are no keys."""
    if not keys:
        return st.nothing()
    return st.builds(Change, st.sampled_from(kinds), st.sampled_from(keys))


def apply_change(registry: GraphRegistry, change: Change) -> bool:
    """Apply a change if the state of its key allows it; return whether the change was applied."""
    key, kind = change.key, change.kind
    entry = registry.get(key)
    if entry is None:
        return False
    has_graph = entry.state in (KeyState.CAPTURED, KeyState.STALE)
    actions: dict[str, tuple[bool, Callable[[], object]]] = {
        "captured": (True, lambda: registry.captured(key, object())),
        "failed": (True, lambda: registry.failed(key, "error")),
        "evicted": (has_graph, lambda: registry.evicted(key)),
        "stale": (
            entry.state is KeyState.CAPTURED,
            lambda: registry.stale(key, "weights moved"),
        ),
        "disabled": (True, lambda: registry.set_enabled(False, key=key)),
        "enabled": (True, lambda: registry.set_enabled(True, key=key)),
        "mode_disabled": (True, lambda: registry.set_enabled(False, mode=key.mode)),
        "mode_enabled": (True, lambda: registry.set_enabled(True, mode=key.mode)),
    }
    possible, act = actions[kind]
    if possible:
        act()
    return possible


@st.composite
def registries(
    draw: st.DrawFn,
    keys: Iterable[GraphKey],
    *,
    all_captured: bool = False,
    max_changes: int = 6,
) -> GraphRegistry:
    """Return a strategy for registries that declare the given keys, in random states.

    Args:
        draw: Passed by hypothesis.
        keys: Keys to declare, in order.
        all_captured: Whether all graphs are captured and enabled.
        max_changes: Maximum number of random changes of graphs.
    """
    registry = GraphRegistry()
    known = list(dict.fromkeys(keys))
    registry.declare(known)
    if all_captured or draw(st.integers(0, 3)):
        for key in known:
            registry.captured(key, object())
    if known and not all_captured:
        for change in draw(st.lists(changes(known), max_size=max_changes)):
            apply_change(registry, change)
    return registry
