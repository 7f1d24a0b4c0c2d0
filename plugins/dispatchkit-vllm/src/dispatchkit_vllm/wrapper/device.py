"""What a wrapper asks of a device, and a device made of any backend."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from dispatchkit.backends import GraphBackend, resolve_backend
from dispatchkit.errors import ReplayError
from dispatchkit.execute import weak_tensor

__all__ = ["BackendDevice", "WrapperDevice"]


class WrapperDevice(Protocol):
    """What a wrapper asks of a device. Everything is called on the calling thread."""

    def global_pool(self) -> Any:
        """Return the pool that all wrappers share, or None for one of its own per graph."""
        ...

    def new_pool(self) -> Any:
        """Return a fresh pool handle."""
        ...

    def new_graph(self) -> Any:
        """Return an empty graph."""
        ...

    def announce_pool(self, pool: Any) -> None:
        """Tell communication libraries which pool the coming capture allocates from."""
        ...

    def current_stream(self) -> Any:
        """Return the stream that work of this thread goes to."""
        ...

    def capture(self, graph: Any, run: Callable[[], Any], *, pool: Any, stream: Any) -> Any:
        """Capture what a callable does into a graph; return what it returned."""
        ...

    def replay(self, graph: Any) -> None:
        """Queue a captured graph."""
        ...

    def release(self, graph: Any) -> None:
        """Let go of a captured graph."""
        ...

    def weak_ref(self, output: Any) -> Any:
        """Return the output, nested or not, without holding its memory where possible."""
        ...

    def address(self, value: Any) -> int | None:
        """Return the address of a tensor's data; None for anything else."""
        ...

    def without_collection(self) -> AbstractContextManager[None]:
        """Make garbage collection and emptying of the device's cache do nothing."""
        ...

    def sync_offload(self) -> None:
        """Wait for weights that are being moved."""
        ...

    def join_offload(self) -> None:
        """Join moves of weights that the captured callable began."""
        ...


class _Slot:
    """A graph of a backend, made empty and filled by the capture.

    It has the methods of ``torch.cuda.CUDAGraph`` that callers of a wrapper use.
    """

    def __init__(self) -> None:
        self.captured: Any = None

    def replay(self) -> None:
        """Queue the graph on the current stream.

        Raises:
            ReplayError: Nothing was captured into it, or it was released.
        """
        if self.captured is None:
            raise ReplayError("This graph holds no capture: it was not made yet, or released.")
        self.captured.replay()

    def reset(self) -> None:
        """Release the graph."""
        captured, self.captured = self.captured, None
        if captured is not None:
            captured.release()


class BackendDevice:
    """Makes any backend a device for wrappers.

    All wrappers of one device share a pool and a capture stream.

    Args:
        backend: A GraphBackend, or the name of one.

    Raises:
        ConfigError: It is neither.
    """

    def __init__(self, backend: str | GraphBackend) -> None:
        self.backend = resolve_backend(backend)
        self._pool = self.backend.new_pool()
        self._stream: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendDevice:
        return self  # one device and one pool serve the copies too

    def __reduce__(self) -> tuple[Any, ...]:
        return BackendDevice, (self.backend.name,)

    def global_pool(self) -> Any:
        """Return the pool that all wrappers of this device share."""
        return self._pool

    def new_pool(self) -> Any:
        """Return a fresh pool handle."""
        return self.backend.new_pool()

    def new_graph(self) -> _Slot:
        """Return an empty graph."""
        return _Slot()

    def announce_pool(self, pool: Any) -> None:
        """Do nothing: no communication library is told."""

    def current_stream(self) -> Any:
        """Return the stream captures are made on.

        The default stream of a device cannot be captured, so it is one of its own.
        """
        if self._stream is None:
            self._stream = self.backend.new_stream()
        return self._stream

    def capture(self, graph: _Slot, run: Callable[[], Any], *, pool: Any, stream: Any) -> Any:
        """Capture what a callable does into a graph; return what it returned."""
        graph.captured = self.backend.capture(
            run,
            stream=stream or self.current_stream(),
            pool=self.new_pool() if pool is None else pool,
        )
        return graph.captured.outputs

    def replay(self, graph: _Slot) -> None:
        """Queue a captured graph on the current stream."""
        graph.replay()

    def release(self, graph: _Slot) -> None:
        """Let go of a captured graph."""
        graph.reset()

    def weak_ref(self, output: Any) -> Any:
        """Return aliases that do not hold memory of a device; on a CPU the output itself."""
        return _map_tensors(weak_tensor, output)

    def address(self, value: Any) -> int | None:
        """Return the address of a tensor's data; None for anything else."""
        return value.data_ptr() if hasattr(value, "data_ptr") else None

    @contextmanager
    def without_collection(self) -> Iterator[None]:
        """Keep the garbage collector from running by itself meanwhile."""
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()

    def sync_offload(self) -> None:
        """Do nothing: nothing is offloaded."""

    def join_offload(self) -> None:
        """Do nothing: nothing is offloaded."""


def _map_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    if hasattr(value, "data_ptr"):
        return change(value)
    if isinstance(value, dict):
        return type(value)((name, _map_tensors(change, each)) for name, each in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(change, each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(change, each) for each in value)
    return value
