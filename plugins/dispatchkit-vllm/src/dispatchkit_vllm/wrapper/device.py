"""The device interface of wrappers, and an implementation for any backend."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from dispatchkit.backends import GraphBackend, resolve_backend
from dispatchkit.errors import ReplayError
from dispatchkit.execute import weak_tensor
from dispatchkit.keys import check_instance

__all__ = ["BackendDevice", "WrapperDevice", "resolve_device"]


class WrapperDevice(Protocol):
    """The device that a wrapper captures on.

    Its methods are called on the thread that calls the wrapper.
    """

    def global_pool(self) -> Any:
        """Return the pool shared by all wrappers, or None for a separate pool per graph."""
        ...

    def new_pool(self) -> Any:
        """Return a new pool handle."""
        ...

    def new_graph(self) -> Any:
        """Return an empty graph."""
        ...

    def announce_pool(self, pool: Any) -> None:
        """Notify communication libraries of the pool used by the next capture."""
        ...

    def current_stream(self) -> Any:
        """Return the stream to capture on."""
        ...

    def capture(self, graph: Any, run: Callable[[], Any], *, pool: Any, stream: Any) -> Any:
        """Capture the work of a callable into a graph, and return the callable's result."""
        ...

    def replay(self, graph: Any) -> None:
        """Launch a captured graph."""
        ...

    def release(self, graph: Any) -> None:
        """Release a captured graph."""
        ...

    def weak_ref(self, output: Any) -> Any:
        """Return an output, possibly nested, as aliases that do not own their memory.

        On a device that cannot create such aliases, return the output itself.
        """
        ...

    def address(self, value: Any) -> int | None:
        """Return the address of a tensor's data, or None for other values."""
        ...

    def without_collection(self) -> AbstractContextManager[None]:
        """Return a context manager for captures.

        Inside it, garbage collection and emptying of the device cache are disabled.
        """
        ...

    def sync_offload(self) -> None:
        """Wait for running transfers of offloaded weights."""
        ...

    def join_offload(self) -> None:
        """Join transfers of offloaded weights that the captured callable started."""
        ...


class _Slot:
    """A graph that is created empty and filled by a capture.

    It has the methods of ``torch.cuda.CUDAGraph`` that callers of a wrapper use.
    """

    def __init__(self) -> None:
        self.captured: Any = None

    def replay(self) -> None:
        """Launch the graph on the current stream.

        Raises:
            ReplayError: The graph has not been captured yet, or was released.
        """
        if self.captured is None:
            raise ReplayError(
                "This graph has not been captured yet, or was released. Call its wrapper to "
                "capture it."
            )
        self.captured.replay()

    def reset(self) -> None:
        """Release the graph."""
        captured, self.captured = self.captured, None
        if captured is not None:
            captured.release()


class BackendDevice:
    """A device for wrappers, based on a backend.

    All wrappers of a device share its pool and its capture stream.

    Args:
        backend: A GraphBackend or the name of one.

    Raises:
        ConfigError: ``backend`` is neither a GraphBackend nor the name of one.
    """

    def __init__(self, backend: str | GraphBackend) -> None:
        self.backend = resolve_backend(backend)
        self._pool = self.backend.new_pool()
        self._stream: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendDevice:
        return self  # copies share the device and its pool

    def __reduce__(self) -> tuple[Any, ...]:
        return BackendDevice, (self.backend.name,)

    def global_pool(self) -> Any:
        """Return the pool shared by all wrappers of this device."""
        return self._pool

    def new_pool(self) -> Any:
        """Return a new pool handle."""
        return self.backend.new_pool()

    def new_graph(self) -> _Slot:
        """Return an empty graph."""
        return _Slot()

    def announce_pool(self, pool: Any) -> None:
        """Do nothing: there are no communication libraries to notify."""

    def current_stream(self) -> Any:
        """Return the capture stream; the default stream of a device cannot be captured."""
        if self._stream is None:
            self._stream = self.backend.new_stream()
        return self._stream

    def capture(self, graph: _Slot, run: Callable[[], Any], *, pool: Any, stream: Any) -> Any:
        """Capture the work of a callable into a graph, and return the callable's result."""
        graph.captured = self.backend.capture(
            run,
            stream=stream or self.current_stream(),
            pool=self.new_pool() if pool is None else pool,
        )
        return graph.captured.outputs

    def replay(self, graph: _Slot) -> None:
        """Launch a captured graph on the current stream."""
        graph.replay()

    def release(self, graph: _Slot) -> None:
        """Release a captured graph."""
        graph.reset()

    def weak_ref(self, output: Any) -> Any:
        """Return aliases that do not own device memory; on a CPU, the output itself."""
        return _map_tensors(weak_tensor, output)

    def address(self, value: Any) -> int | None:
        """Return the address of a tensor's data, or None for other values."""
        return value.data_ptr() if hasattr(value, "data_ptr") else None

    @contextmanager
    def without_collection(self) -> Iterator[None]:
        """Disable automatic garbage collection."""
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


def resolve_device(device: Any) -> WrapperDevice:
    """Return the device for a backend or its name; a WrapperDevice is returned unchanged.

    Raises:
        ConfigError: ``device`` is none of these.
    """
    if hasattr(device, "weak_ref"):
        wrapper_device: WrapperDevice = device
        return wrapper_device
    if not isinstance(device, str):
        allowed = "a backend, its name ('cuda' or 'tape', for example) or a WrapperDevice"
        check_instance(device, GraphBackend, "device", allowed=allowed)
    return BackendDevice(device)


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
