"""Classes that follow the documentation of a third-party dispatcher.

The dispatcher's documentation is published, but its implementation is not. These classes have the
documented names and behavior, and use dispatchkit's registry. ``AdaptiveDispatchPolicy`` requires
dispatchkit-adaptive, and ``StreamDispatcher`` requires dispatchkit-multistream.
"""

from __future__ import annotations

import abc
import enum
import importlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs

from dispatchkit import BatchDescriptor, GraphKey, GraphRegistry, RuntimeMode, load_plugins
from dispatchkit.backends import resolve_backend
from dispatchkit.dispatch import PendingStep
from dispatchkit.errors import ConfigError, DispatchkitError, RegistrationError
from dispatchkit.keys import check_count

__all__ = [
    "AdaptiveDispatchPolicy",
    "CompositeDispatcher",
    "CudagraphDispatcher",
    "DefaultDispatchPolicy",
    "DispatchKey",
    "DispatchMode",
    "DispatchPolicy",
    "DispatchStats",
    "GraphEntry",
    "NotBuiltError",
    "StreamDispatcher",
    "create_dispatch_key",
    "get_padded_key",
]

_log = logging.getLogger(__name__)
_LANE_POLICY = "by-key"


class NotBuiltError(DispatchkitError, NotImplementedError):
    """Raised if a class of this module requires a distribution that is not installed."""

    def __init__(self, name: str, policy: str) -> None:
        self.name, self.policy = name, policy
        super().__init__(
            f"{name} needs dispatchkit-{policy}, which is not installed. "
            f"Run: pip install dispatchkit-{policy}."
        )


class DispatchMode(enum.Enum):
    """How a batch runs."""

    EAGER = "eager"
    PIECEWISE = "piecewise"
    FULL = "full"

    @property
    def runtime_mode(self) -> RuntimeMode:
        """The corresponding runtime mode in dispatchkit."""
        return RuntimeMode.NONE if self is DispatchMode.EAGER else RuntimeMode[self.name]


@attrs.frozen
class DispatchKey:
    """The key of a graph.

    Attributes:
        num_tokens: Number of tokens in the batch.
        num_reqs: Number of requests in the batch.
        max_seq_len: Length of the longest sequence in tokens.
        is_prefill: Whether the batch contains prompts.
    """

    num_tokens: int
    num_reqs: int = 1
    max_seq_len: int = 0
    is_prefill: bool = False

    def graph_key(self, mode: RuntimeMode) -> GraphKey:
        """Return the corresponding key in dispatchkit's registry.

        Raises:
            DescriptorError: The numbers do not describe a possible batch.
        """
        facts: Any = (self.max_seq_len, int(self.is_prefill))
        return GraphKey(mode, BatchDescriptor(self.num_tokens, num_reqs=self.num_reqs, axes=facts))


def create_dispatch_key(
    num_tokens: int, num_reqs: int = 1, max_seq_len: int = 0, is_prefill: bool = False
) -> DispatchKey:
    """Return a validated key.

    Raises:
        ConfigError: A number is invalid, or there are more requests than tokens.
    """
    num_tokens = check_count(num_tokens, "num_tokens")
    num_reqs = check_count(num_reqs, "num_reqs")
    max_seq_len = check_count(max_seq_len, "max_seq_len", minimum=0)
    if num_reqs > num_tokens:
        raise ConfigError("num_reqs", num_reqs, f"at most num_tokens ({num_tokens})")
    return DispatchKey(num_tokens, num_reqs, max_seq_len, is_prefill)


def get_padded_key(key: DispatchKey, pad_to: int) -> DispatchKey:
    """Return the key with ``num_tokens`` rounded up to a multiple of ``pad_to``.

    Raises:
        ConfigError: ``pad_to`` is not a positive whole number.
    """
    pad_to = check_count(pad_to, "pad_to")
    return attrs.evolve(key, num_tokens=-(-key.num_tokens // pad_to) * pad_to)


@attrs.define
class DispatchStats:
    """The number of batches that ran in each mode."""

    num_full: int = 0
    num_piecewise: int = 0
    num_eager: int = 0

    @property
    def total(self) -> int:
        """Total number of batches."""
        return self.num_full + self.num_piecewise + self.num_eager

    @property
    def graph_ratio(self) -> float:
        """Fraction of batches that replayed a graph; 0 before the first batch."""
        return (self.num_full + self.num_piecewise) / self.total if self.total else 0.0


class DispatchPolicy(abc.ABC):
    """A policy that decides whether and how a batch replays a graph."""

    @abc.abstractmethod
    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Return whether a batch should replay a graph."""

    @abc.abstractmethod
    def select_mode(
        self, key: DispatchKey, available_modes: Collection[DispatchMode]
    ) -> DispatchMode:
        """Return the mode for a batch; ``available_modes`` are the modes with a graph."""


class DefaultDispatchPolicy(DispatchPolicy):
    """A policy that replays graphs for batches whose number of tokens is within a range.

    Args:
        min_tokens_for_graph: Smallest number of tokens of a batch that replays a graph.
        max_tokens_for_graph: Largest number of tokens of a batch that replays a graph.
        prefer_piecewise: Whether to prefer PIECEWISE over FULL if both have a graph.

    Raises:
        ConfigError: The range is empty, or a limit is invalid.
    """

    def __init__(
        self,
        min_tokens_for_graph: int = 1,
        max_tokens_for_graph: int = 8192,
        prefer_piecewise: bool = False,
    ) -> None:
        least = check_count(min_tokens_for_graph, "min_tokens_for_graph", minimum=0)
        most = check_count(max_tokens_for_graph, "max_tokens_for_graph")
        if least > most:
            raise ConfigError(
                "min_tokens_for_graph", least, f"at most max_tokens_for_graph ({most})"
            )
        self.min_tokens_for_graph = least
        self.max_tokens_for_graph = most
        self.prefer_piecewise = prefer_piecewise

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Return whether a graph exists and the batch is within the range."""
        inside = self.min_tokens_for_graph <= key.num_tokens <= self.max_tokens_for_graph
        return graph_available and inside

    def select_mode(
        self, key: DispatchKey, available_modes: Collection[DispatchMode]
    ) -> DispatchMode:
        """Return the preferred available mode, or EAGER."""
        order = [DispatchMode.FULL, DispatchMode.PIECEWISE]
        if self.prefer_piecewise:
            order.reverse()
        return next((mode for mode in order if mode in available_modes), DispatchMode.EAGER)


@attrs.frozen
class GraphEntry:
    """A registered graph.

    Attributes:
        key: Key that the graph serves.
        mode: FULL or PIECEWISE.
        graph: An object with ``replay()``, or a callable without arguments.
        input_ptrs: Addresses of the graph's inputs.
    """

    key: DispatchKey
    mode: DispatchMode
    graph: Any
    input_ptrs: tuple[int, ...] = ()

    def replay(self) -> Any:
        """Run the graph."""
        replay = getattr(self.graph, "replay", self.graph)
        return replay()


class CudagraphDispatcher:
    """Dispatcher that replays the cached graph of a key, or runs the batch eager.

    Args:
        eager_runner: Function that runs a batch without a graph, given its key.
        policy: Policy that decides whether and how a batch replays a graph.
        max_cached_graphs: Maximum number of graphs; the least recently used graph is evicted first.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(
        self,
        eager_runner: Callable[[DispatchKey], Any],
        policy: DispatchPolicy | None = None,
        max_cached_graphs: int = 64,
    ) -> None:
        self._eager_runner = eager_runner
        self._policy = DefaultDispatchPolicy() if policy is None else policy
        self._max_graphs = check_count(max_cached_graphs, "max_cached_graphs")
        self._lock = threading.RLock()
        self._used: OrderedDict[GraphKey, None] = OrderedDict()
        self._stats = DispatchStats()
        self.registry = GraphRegistry()

    @property
    def stats(self) -> DispatchStats:
        """The number of batches that ran in each mode."""
        return self._stats

    def register_graph(
        self,
        key: DispatchKey,
        graph: Any,
        input_ptrs: Sequence[int] = (),
        mode: DispatchMode = DispatchMode.FULL,
    ) -> None:
        """Add a graph; evict the least recently used graph if the cache is full.

        Raises:
            DescriptorError: The mode is EAGER, or the key does not describe a possible batch.
        """
        name = key.graph_key(mode.runtime_mode)
        with self._lock:
            if name not in self.registry:
                while len(self._used) >= self._max_graphs:
                    oldest, _ = self._used.popitem(last=False)
                    self.registry.forget(oldest)
            self.registry.declare([name])
            self.registry.captured(name, GraphEntry(key, mode, graph, tuple(input_ptrs)))
            self._used[name] = None
            self._used.move_to_end(name)

    def _available(self, key: DispatchKey) -> dict[DispatchMode, GraphEntry]:
        found = {}
        for mode in (DispatchMode.FULL, DispatchMode.PIECEWISE):
            name = key.graph_key(mode.runtime_mode)
            entry = self.registry.get(name)
            if entry is not None and self.registry.is_enabled(name):
                found[mode] = entry.graph
        return found

    def has_graph(self, key: DispatchKey) -> bool:
        """Return whether the key has a graph in an enabled mode."""
        return bool(self._available(key))

    def get_graph(self, key: DispatchKey) -> GraphEntry | None:
        """Return the graph of a key, preferring FULL over PIECEWISE, or None."""
        return next(iter(self._available(key).values()), None)

    def dispatch(self, key: DispatchKey) -> Any:
        """Replay the graph of a key, or run the batch eager, and return the result."""
        with self._lock:
            available = self._available(key)
            mode = DispatchMode.EAGER
            if self._policy.should_use_graph(key, bool(available)):
                mode = self._policy.select_mode(key, tuple(available))
            entry = available.get(mode)
            if entry is None:
                self._stats.num_eager += 1
            else:
                self._used.move_to_end(key.graph_key(mode.runtime_mode))
                if mode is DispatchMode.FULL:
                    self._stats.num_full += 1
                else:
                    self._stats.num_piecewise += 1
        return self._eager_runner(key) if entry is None else entry.replay()

    def clear_cache(self) -> None:
        """Release all graphs."""
        with self._lock:
            self._used.clear()
            self.registry.clear()

    def enable_mode(self, mode: DispatchMode) -> None:
        """Allow replays of a mode's graphs again, after ``disable_mode``."""
        self.registry.set_enabled(True, mode=mode.runtime_mode)

    def disable_mode(self, mode: DispatchMode) -> None:
        """Stop replays of a mode's graphs until ``enable_mode`` is called."""
        self.registry.set_enabled(False, mode=mode.runtime_mode)


class AdaptiveDispatchPolicy(DispatchPolicy):
    """A policy that learns from latencies, implemented by dispatchkit-adaptive.

    Args:
        history_size: Approximate number of recent latencies that determine the estimate for a key
            and mode; at least 8.

    Raises:
        ConfigError: ``history_size`` is invalid.
        NotBuiltError: dispatchkit-adaptive is not installed.
    """

    def __init__(self, history_size: int = 100) -> None:
        # Import by name, because distributions of policies must not depend on each other.
        try:
            adaptive = importlib.import_module("dispatchkit_adaptive")
        except ModuleNotFoundError as error:
            if error.name != "dispatchkit_adaptive":
                raise
            raise NotBuiltError("AdaptiveDispatchPolicy", "adaptive") from error
        self._learner: Any = adaptive.LatencyPolicy(history_size)

    def record(self, key: DispatchKey, mode: DispatchMode, latency: float) -> None:
        """Record the latency of a batch in a mode; use the same unit in all calls.

        Raises:
            ConfigError: The latency is not a finite number above 0.
        """
        self._learner.record(key, mode, latency)

    def should_use_graph(self, key: DispatchKey, graph_available: bool) -> bool:
        """Return whether a graph exists and eager is not known to be faster.

        Once enough latencies of eager and of a graph are known, one in 64 calls for a key returns
        the slower choice, so that its latency is measured again.
        """
        return bool(self._learner.should_use_graph(key, graph_available))

    def select_mode(
        self, key: DispatchKey, available_modes: Collection[DispatchMode]
    ) -> DispatchMode:
        """Return a mode with too few latencies if there is one, otherwise the fastest mode.

        Raises:
            ConfigError: ``available_modes`` is empty.
        """
        mode: DispatchMode = self._learner.select_mode(key, available_modes)
        return mode


class CompositeDispatcher:
    """A group of dispatchers that are tried in order of priority, highest first.

    The first dispatcher with a graph for the key runs the batch. If no dispatcher has a graph, the
    dispatcher with the highest priority runs the batch. Dispatchers with equal priority are tried
    in the order in which they were added.

    Attributes:
        faults: Number of errors in ``has_graph`` of each dispatcher, by name. A dispatcher whose
            ``has_graph`` raises an error counts as having no graph for the batch.
    """

    def __init__(self) -> None:
        self._members: list[tuple[int, int, str, Any]] = []
        self.faults: dict[str, int] = {}

    def add_dispatcher(self, name: str, dispatcher: Any, priority: int = 0) -> None:
        """Add a dispatcher, an object with ``has_graph`` and ``dispatch``.

        Raises:
            RegistrationError: The name is already used.
        """
        if name in self.faults:
            taken = ", ".join(map(repr, sorted(self.faults)))
            raise RegistrationError(
                f"The name {name!r} is already used. Choose a name other than {taken}."
            )
        self.faults[name] = 0
        self._members.append((-priority, len(self._members), name, dispatcher))
        self._members.sort(key=lambda member: member[:2])

    def dispatch(self, key: DispatchKey) -> Any:
        """Run a batch in the first dispatcher that has a graph for its key; return the result.

        If no dispatcher has a graph, the dispatcher with the highest priority runs the batch. If
        the chosen dispatcher raises an exception, no other dispatcher is tried, so that no batch
        runs twice.

        Raises:
            ConfigError: There are no dispatchers.
        """
        if not self._members:
            raise ConfigError(
                "number of dispatchers", 0, "at least 1", "Call add_dispatcher() first."
            )
        for _, _, name, dispatcher in self._members:
            if self._has_graph(name, dispatcher, key):
                return dispatcher.dispatch(key)
        return self._members[0][3].dispatch(key)

    def _has_graph(self, name: str, dispatcher: Any, key: DispatchKey) -> bool:
        try:
            return bool(dispatcher.has_graph(key))
        except Exception:  # noqa: BLE001 - a failing member must not stop the others
            self.faults[name] += 1
            _log.exception(
                "Dispatcher %r counts as having no graph for %s: has_graph() raised an error",
                name,
                key,
            )
            return False


@attrs.frozen
class _Cache:
    """A stream and the keys of its batches, in the form that a lane policy reads."""

    index: int
    keys: set[GraphKey] = attrs.field(factory=set)
    num_unfinished: int = 0
    unfinished_tokens: int = 0

    def holds(self, key: GraphKey) -> bool:
        """Return whether a batch with this key has run on the stream."""
        return key in self.keys


class StreamDispatcher(CudagraphDispatcher):
    """A dispatcher with several streams, which runs all batches of a key on the same stream.

    The lane policy ``by-key`` of dispatchkit-multistream chooses the stream. A batch waits for
    earlier work on the caller's stream. To wait for batches, call ``wait`` or ``synchronize``.

    Args:
        eager_runner: Function that runs a batch without a graph, given its key.
        num_streams: Number of independent streams.
        policy: See ``CudagraphDispatcher``.
        max_cached_graphs: See ``CudagraphDispatcher``.
        backend: A backend or its name.

    Raises:
        ConfigError: The device has fewer than ``num_streams`` unused streams, or another argument
            is invalid.
        NotBuiltError: dispatchkit-multistream is not installed.
    """

    def __init__(
        self,
        eager_runner: Callable[[DispatchKey], Any],
        num_streams: int = 2,
        policy: DispatchPolicy | None = None,
        max_cached_graphs: int = 64,
        backend: Any = "auto",
    ) -> None:
        super().__init__(eager_runner, policy, max_cached_graphs)
        num_streams = check_count(num_streams, "num_streams")
        plugins = load_plugins()
        if _LANE_POLICY not in plugins.lane_policies:
            raise NotBuiltError("StreamDispatcher", "multistream")
        self._lane_policy = plugins.create_lane_policy(_LANE_POLICY)
        self._backend = resolve_backend(backend)
        self.streams = [self._backend.new_stream() for _ in range(num_streams)]
        self._arrived = self._backend.new_event()
        self._caches = tuple(_Cache(index) for index in range(num_streams))

    def _select_stream(self, key: DispatchKey) -> int:
        """Return the index of the stream for batches of a key."""
        name = key.graph_key(RuntimeMode.FULL)
        with self._lock:
            return self._lane_policy.choose(PendingStep(key.num_tokens, name), self._caches)

    def dispatch(self, key: DispatchKey) -> Any:
        """Run a batch on the stream of its key, after earlier work on the caller's stream."""
        with self._lock:
            index = self._select_stream(key)
            self._caches[index].keys.add(key.graph_key(RuntimeMode.FULL))
            stream = self.streams[index]
            self._arrived.record(self._backend.current_stream())
            stream.wait_event(self._arrived)
            with self._backend.use_stream(stream):
                return super().dispatch(key)

    def clear_cache(self) -> None:
        """Release all graphs; keys may move to other streams afterwards."""
        with self._lock:
            self.synchronize()
            super().clear_cache()
            for cache in self._caches:
                cache.keys.clear()

    def wait(self) -> None:
        """Make the current stream wait for all batches dispatched so far."""
        current = self._backend.current_stream()
        for stream in self.streams:
            current.wait_stream(stream)

    def synchronize(self) -> None:
        """Block the host until all batches dispatched so far have run."""
        for stream in self.streams:
            stream.synchronize()
