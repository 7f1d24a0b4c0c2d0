"""The backend ``launchlog``, which logs and delays the launches of another backend."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dispatchkit.backends import (
    BackendCapabilities,
    CapturedGraph,
    GraphBackend,
    LaunchCall,
    Stream,
    features_of,
    resolve_backend,
)
from dispatchkit.errors import ConfigError
from dispatchkit.keys import check_count


class Launch(NamedTuple):
    """One launch of a graph.

    Attributes:
        stream: Raw handle of the stream.
        is_direct: Whether the graph was launched by a direct call to the device runtime, not by
            ``replay``.
    """

    stream: int
    is_direct: bool


class LaunchLogBackend:
    """A backend that wraps another one, and logs and delays each launch of a graph.

    Args:
        backend: The backend to wrap, or its name.
        device: Device of the wrapped backend, if ``backend`` does not specify it.
        delay_us: Time that the host waits before each launch, in microseconds.
        capacity: Maximum number of launches in the log; the oldest are dropped.

    Raises:
        ConfigError: ``delay_us`` is not a number of at least 0, or ``capacity`` is not a whole
            number of at least 1.

    Attributes:
        launches: The log, oldest launch first.
    """

    def __init__(
        self,
        backend: str | GraphBackend = "auto",
        *,
        device: Any = None,
        delay_us: float = 0.0,
        capacity: int = 10_000,
    ) -> None:
        delay: Any = delay_us
        if not isinstance(delay, int | float) or not delay >= 0:
            raise ConfigError("delay_us", delay, "a number of at least 0")
        check_count(capacity, "capacity")
        inner = resolve_backend(backend, device=device)
        self._inner, self._delay = inner, delay_us / 1e6
        self.launches: deque[Launch] = deque(maxlen=capacity)
        # Streams, events and pools belong to the wrapped backend and are only passed back to it.
        # Its bound methods are assigned as they are, because a wrapper would slow down every step.
        self.current_stream = inner.current_stream
        self.current_stream_handle = inner.current_stream_handle
        self.new_stream = inner.new_stream
        self.use_stream = inner.use_stream
        self.new_event = inner.new_event
        self.synchronize = inner.synchronize
        self.new_pool, self.pool_bytes = inner.new_pool, inner.pool_bytes
        self.warmup, self.is_capturing = inner.warmup, inner.is_capturing
        # Define only the optional methods that the wrapped backend has.
        self._features = features = features_of(inner)
        if features.rehearsals is not None:
            self.rehearse = features.rehearsals.rehearse
        if features.unwatched_captures is not None:
            self.new_notes = features.unwatched_captures.new_notes
        if features.copy_nodes is not None:
            self.copy_node = features.copy_nodes.copy_node

    def log_launch(self, stream: int, *, is_direct: bool) -> None:
        """Wait for ``delay_us``, then log a launch."""
        if self._delay:
            time.sleep(self._delay)
        self.launches.append(Launch(stream, is_direct))

    @property
    def name(self) -> str:
        """Name of the backend in reports."""
        return f"launchlog on {self._inner.name}"

    @property
    def torch_device(self) -> str:
        """Device on which the runner creates tensors."""
        return self._inner.torch_device

    @property
    def capabilities(self) -> BackendCapabilities:
        """Capabilities of the wrapped backend, because ``capture`` forwards all arguments to it."""
        return self._inner.capabilities

    def device_info(self) -> dict[str, str]:
        """Return information about the device for reports."""
        return {**self._inner.device_info(), "launch delay": f"{self._delay * 1e6:g} us"}

    def capture(
        self,
        run: Callable[[], Any],
        *,
        stream: Stream,
        pool: Any,
        generators: Iterable[Any] = (),
        **options: Any,
    ) -> CapturedGraph:
        """Capture a step into a graph whose launches are logged."""
        graph = self._inner.capture(run, stream=stream, pool=pool, generators=generators, **options)
        return LoggedGraph(graph, self)

    def direct_launch(self, graph: CapturedGraph) -> tuple[LaunchCall, Any] | None:
        """Return the wrapped backend's launch call with logging; None without direct launches."""
        launches = self._features.direct_launches
        found = None if launches is None else launches.direct_launch(_inner_graph(graph))
        if found is None:
            return None
        call, handle = found

        def logged_call(graph: Any, stream: Any) -> int | None:
            self.log_launch(stream.value or 0, is_direct=True)
            return call(graph, stream)

        return logged_call, handle

    def upload(self, graph: CapturedGraph, stream: Stream) -> bool:
        """Prepare a graph for its first launch, if the wrapped backend supports uploads."""
        uploads = self._features.uploads
        return uploads is not None and uploads.upload(_inner_graph(graph), stream)


class LoggedGraph:
    """A wrapped graph that logs its replays, and forwards all other attributes."""

    def __init__(self, inner: CapturedGraph, backend: LaunchLogBackend) -> None:
        self.inner, self._backend = inner, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def outputs(self) -> Any:
        """Outputs of the step at capture."""
        return self.inner.outputs

    @property
    def has_random_state(self) -> bool:
        """Whether a replay draws random numbers."""
        return self.inner.has_random_state

    def replay(self) -> None:
        """Log the launch, then replay."""
        self._backend.log_launch(self._backend.current_stream_handle(), is_direct=False)
        self.inner.replay()

    def release(self) -> None:
        """Release the graph."""
        self.inner.release()


def _inner_graph(graph: CapturedGraph) -> CapturedGraph:
    return graph.inner if isinstance(graph, LoggedGraph) else graph
