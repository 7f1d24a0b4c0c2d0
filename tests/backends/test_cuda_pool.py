"""Memory that torch keeps for ended graph pools, as far as it can be tested without a device."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.cuda import pool as pools  # noqa: E402
from dispatchkit.backends.cuda.destroy import free_idle_memory  # noqa: E402


@pytest.fixture
def freed(monkeypatch):
    """Return the list of torch's caches that were emptied, in order."""
    calls, numbers = [], itertools.count(1)
    monkeypatch.setattr(pools, "idle_memory", pools.IdleMemory())
    monkeypatch.setattr("dispatchkit.backends.cuda.destroy.idle_memory", pools.idle_memory)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("device"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append("host"), raising=False)
    return calls


def use_once(pool):
    pool.give_back(pool.take())


def test_memory_of_an_ended_pool_goes_back_once(freed):
    pool = pools.CudaPool()
    first, second = pool.take(), pool.take()
    pool.give_back(first)
    free_idle_memory()
    assert freed == []
    pool.give_back(second)
    free_idle_memory()
    free_idle_memory()
    assert freed == ["device"]


def test_what_the_host_keeps_for_ended_pools_goes_back_now_and_then(freed):
    """Freeing empties the shared cache of pinned memory, so it does not happen each time."""
    for _ in range(2 * pools.MAX_ENDED):
        use_once(pools.CudaPool())
        free_idle_memory()
    assert freed.count("host") == 2
    assert freed.count("device") == 2 * pools.MAX_ENDED


def test_memory_that_cannot_be_freed_yet_is_freed_later(freed, monkeypatch):
    """Another library captures without this package."""

    def refuse():
        raise RuntimeError("a capture is running")

    use_once(pools.CudaPool())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", refuse)
        free_idle_memory()
    assert freed == []
    free_idle_memory()
    assert freed == ["device"]
