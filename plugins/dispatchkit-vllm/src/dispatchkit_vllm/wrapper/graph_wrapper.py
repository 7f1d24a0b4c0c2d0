"""A wrapper that captures and replays a callable inside a model.

It captures a graph for each new key, and replays the graph of a known key. The mode and the key
come from the forward context and are not checked; inputs are neither padded nor copied. A FULL
wrapper around a model and PIECEWISE wrappers around its pieces can be nested, because each acts
only in its own mode.

``WrapperRules`` describes the differences between the vLLM releases whose wrapper ``GraphWrapper``
can replace. ``device.WrapperDevice`` is the interface of devices.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from dispatchkit.errors import CaptureError, ReplayError
from dispatchkit.execute import ChurnWarning, Guard, Watched
from dispatchkit.keys import CUDAGraphMode, ModeError, RuntimeMode
from dispatchkit.once import Once

from dispatchkit_vllm.wrapper.context import forward_context_is_available, get_forward_context
from dispatchkit_vllm.wrapper.device import WrapperDevice, resolve_device

__all__ = [
    "GraphWrapper",
    "WrappedEntry",
    "WrapperError",
    "WrapperOptions",
    "WrapperRules",
    "capture_counter",
    "capturing_is_enabled",
    "set_capturing_enabled",
]

_log = logging.getLogger(__name__)


class WrapperError(ReplayError, AssertionError):
    """Raised if a step has no descriptor, or if input addresses have changed since the capture.

    It is also an AssertionError, which vLLM's wrapper raises in these cases.
    """


@attrs.define
class WrapperOptions:
    """Options of a wrapper's captures.

    Attributes:
        debug_log_enable: Whether to log a debug message before each capture.
        gc_disable: Whether to capture inside the device's ``without_collection()``, which disables
            garbage collection and emptying of the device cache. For a model of many pieces, set
            this for every piece except the first.
        weak_ref_output: Whether to release the output inside the capture, so that later graphs can
            reuse its memory. If True, callers must not use the output after the next replay of any
            graph in the pool.
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True


@attrs.frozen
class WrapperRules:
    """The behavior of a vLLM release whose wrapper ``GraphWrapper`` can replace.

    Attributes:
        passes_without_context: Whether the callable runs directly if there is no forward context;
            otherwise, a missing context is an error.
        needs_descriptor: Whether a step in the wrapper's mode must have a descriptor.
        offloads: Whether to wait for transfers of offloaded weights before captures and replays,
            and to join these transfers at the end of a capture.
        names_stream: Whether to pass the device's current stream to a capture; otherwise, the
            device chooses the stream.
        replays_after_capture: Whether the call that captures also replays. A capture computes
            nothing, so without a replay, the result of the call has undefined values.
        unwraps_nested: Whether unwrapping nested wrappers returns the innermost callable.
        guards_module: Whether to capture again if the module was moved, or switched between
            training and evaluation, after the capture. vLLM does not check this.
    """

    passes_without_context: bool = True
    needs_descriptor: bool = True
    offloads: bool = True
    names_stream: bool = True
    replays_after_capture: bool = True
    unwraps_nested: bool = True
    guards_module: bool = True


@attrs.define
class WrappedEntry:
    """The entry of one key in a wrapper.

    Attributes:
        batch_descriptor: Descriptor of the step, which is the key.
        cudagraph: The captured graph; None before the capture.
        output: Output of the captured call, which each replay overwrites.
        input_addresses: Addresses of positional tensor arguments during the capture.
        captured_under: If modules are guarded: the module, and its training flag and weight address
            during the capture.
    """

    batch_descriptor: Any
    cudagraph: Any = None
    output: Any = None
    input_addresses: list[int] | None = None
    captured_under: tuple[Watched, ...] = ()


# -- permission and counting ---------------------------------------------------------------

_capturing_enabled = True


def set_capturing_enabled(enabled: bool) -> None:
    """Allow or forbid captures by all wrappers of this process.

    An engine forbids captures while it serves, so that an unexpected key raises an error instead of
    stalling the engine for seconds.
    """
    global _capturing_enabled  # noqa: PLW0603 - the switch is per process, as in vLLM
    _capturing_enabled = enabled


def capturing_is_enabled() -> bool:
    """Return whether wrappers may capture."""
    return _capturing_enabled


def _validate_capturing(descriptor: Any, *, module_changed: bool = False) -> None:
    if _capturing_enabled:
        return
    problem = f"Descriptor {descriptor} has no graph"
    step = "Capture its graph before you disable captures"
    if module_changed:
        problem = "The module was moved, or switched between training and evaluation, after the "
        problem += f"capture of {descriptor}"
        step = "Undo this change"
    raise CaptureError(
        f"{problem}, and captures are disabled. {step}, or call set_capturing_enabled(True).",
        key=str(descriptor),
        reason="not_permitted",
    )


class _Counter:
    """A counter of the graphs captured by wrappers in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_captured: int = 0

    def add(self) -> None:
        with self._lock:
            self.num_captured += 1


capture_counter: _Counter = _Counter()


# -- the wrapper ---------------------------------------------------------------------------


class GraphWrapper:
    """A wrapper that captures and replays a callable, controlled by the forward context.

    Args:
        runnable: Callable to capture. Attributes that the wrapper lacks are read from and set on
            the callable.
        mode: The runtime mode in which the wrapper acts: PIECEWISE or FULL.
        device: The device of the graphs: a ``WrapperDevice``, a backend or the name of a backend.
        options: Options of captures.
        rules: The behavior of the vLLM release to reproduce.

    Raises:
        ModeError: The mode is NONE.
        ConfigError: Another argument is invalid.
    """

    _all: ClassVar[weakref.WeakSet[GraphWrapper]] = weakref.WeakSet()
    _own: ClassVar[frozenset[str]] = frozenset(
        {"runnable", "runtime_mode", "device", "options", "rules", "entries"}
        | {"_pool", "_debugging", "_guard", "_once"}
    )

    def __init__(
        self,
        runnable: Callable[..., Any],
        mode: Any,
        device: Any,
        *,
        options: WrapperOptions | None = None,
        rules: WrapperRules | None = None,
    ) -> None:
        configured = mode if isinstance(mode, RuntimeMode) else CUDAGraphMode.parse(mode)
        if configured.name == "NONE":
            raise ModeError("runtime mode of a wrapper", "NONE", "PIECEWISE or FULL")
        self.runnable = runnable
        # A combined mode is accepted, but matches no step.
        self.runtime_mode = configured
        self.device: WrapperDevice = resolve_device(device)
        self.options: WrapperOptions = WrapperOptions() if options is None else options
        self.rules: WrapperRules = WrapperRules() if rules is None else rules
        self.entries: dict[Any, WrappedEntry] = {}
        self._pool = self.device.global_pool()
        self._guard = self._make_guard()
        self._once = Once()
        self._debugging = os.environ.get("VLLM_LOGGING_LEVEL", "").upper() == "DEBUG"
        GraphWrapper._all.add(self)

    # -- the call -----------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the callable, capture it, or replay its graph.

        Returns:
            The result of the callable. If it comes from a capture or a replay, a later replay of
            any graph in the pool may overwrite it.

        Raises:
            CaptureError: Captures are disabled, but this call needs a capture: the key has no
                graph, or the module has changed since its graph was captured.
            WrapperError: The step has no descriptor, or (with VLLM_LOGGING_LEVEL=DEBUG) the address
                of a tensor has changed since the capture.
            NoForwardContextError: There is no forward context, and the rules require a context.
        """
        if self.rules.passes_without_context and not self._context_is_available():
            return self.runnable(*args, **kwargs)
        context = self._get_context()
        if context.runtime_mode.name != self.runtime_mode.name:
            return self.runnable(*args, **kwargs)
        descriptor = context.descriptor
        if descriptor is None and self.rules.needs_descriptor:
            raise WrapperError(
                f"A step in mode {self.runtime_mode.name} needs a descriptor to look up its graph. "
                "Pass a descriptor to set_forward_context."
            )
        entry = self.entries.get(descriptor)
        if entry is None:
            entry = self.entries[descriptor] = WrappedEntry(descriptor)
        for module, training, place_now, place in entry.captured_under:
            if module.training is not training or place_now() != place:
                entry = self._renew(entry)
                break
        if entry.cudagraph is None:
            return self._capture(entry, args, kwargs)
        if self._debugging:
            self._check_addresses(entry, args)
        if self.rules.offloads:
            self.device.sync_offload()
        self.device.replay(entry.cudagraph)
        return entry.output

    def _renew(self, entry: WrappedEntry) -> WrappedEntry:
        """Release a graph whose module changed after the capture, and return a new entry."""
        descriptor = entry.batch_descriptor
        # Raise before the release if captures are disabled: the module may change back.
        _validate_capturing(descriptor, module_changed=True)
        if self._once.first():
            warnings.warn(
                f"The module in {self!r} was moved, or switched between training and evaluation, "
                f"after the capture of {descriptor}. After each such change, every key is "
                "captured again. Move or switch the module before the first capture. This warning "
                "is issued once per wrapper.",
                ChurnWarning,
                stacklevel=3,
            )
        self.device.release(entry.cudagraph)
        entry = self.entries[descriptor] = WrappedEntry(descriptor)
        return entry

    def _make_guard(self) -> Guard | None:
        inner = self.unwrap()
        if not self.rules.guards_module or not isinstance(inner, torch.nn.Module):
            return None
        return Guard("cpu", [inner])  # any device type: autocast is not compared

    def _context_is_available(self) -> bool:
        return forward_context_is_available()

    def _get_context(self) -> Any:
        return get_forward_context()

    def _capture(self, entry: WrappedEntry, args: Any, kwargs: Any) -> Any:
        device, rules, options = self.device, self.rules, self.options
        if options.debug_log_enable:
            _log.debug("Capturing %s for %s", self.runtime_mode.name, entry.batch_descriptor)
        self._validate(entry.batch_descriptor)
        entry.input_addresses = self._addresses(args)
        graph = device.new_graph()
        device.announce_pool(device.new_pool() if self._pool is None else self._pool)
        if rules.offloads:
            device.sync_offload()

        def run() -> Any:
            output = self.runnable(*args, **kwargs)
            if rules.offloads:
                device.join_offload()
            # Releasing the output inside the capture frees its memory for later graphs.
            return device.weak_ref(output) if options.weak_ref_output else output

        stream = device.current_stream() if rules.names_stream else None
        if options.gc_disable:
            with device.without_collection():
                output = device.capture(graph, run, pool=self._pool, stream=stream)
        else:
            output = device.capture(graph, run, pool=self._pool, stream=stream)
        entry.output = device.weak_ref(output)
        entry.cudagraph = graph
        if self._guard is not None:
            entry.captured_under = self._guard.watched(self._guard.now())
        capture_counter.add()
        if rules.replays_after_capture:
            device.replay(graph)
        return output

    def _validate(self, descriptor: Any) -> None:
        _validate_capturing(descriptor)

    def _addresses(self, args: Any) -> list[int]:
        found = (self.device.address(value) for value in args)
        return [address for address in found if address is not None]

    def _check_addresses(self, entry: WrappedEntry, args: Any) -> None:
        now = self._addresses(args)
        if now != entry.input_addresses:
            raise WrapperError(
                f"The graph {self.runtime_mode.name} {entry.batch_descriptor} was captured with "
                f"inputs at the addresses {entry.input_addresses}, but this call has inputs at "
                f"{now}. Copy the values into the captured inputs."
            )

    # -- graphs -------------------------------------------------------------------------

    def unwrap(self) -> Any:
        """Return the wrapped callable."""
        inner = self.runnable
        while self.rules.unwraps_nested and isinstance(inner, GraphWrapper):
            inner = inner.runnable
        return inner

    def clear_graphs(self) -> None:
        """Release all graphs; the next call with each key captures again."""
        entries = list(self.entries.values())
        self.entries.clear()  # in place, because callers may have a reference to the dict
        for entry in entries:
            if entry.cudagraph is not None:
                self.device.release(entry.cudagraph)

    @classmethod
    def clear_all_graphs(cls) -> None:
        """Release the graphs of every wrapper of this class in the process."""
        for wrapper in tuple(GraphWrapper._all):
            if isinstance(wrapper, cls):
                GraphWrapper.clear_graphs(wrapper)

    # -- attributes of the callable -----------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for missing attributes. Objects that are being copied or unpickled
        # also lack their callable, and must not look it up recursively.
        runnable = self.__dict__.get("runnable")
        if runnable is None or name in self._own or (name[:2] == "__" and name[-2:] == "__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(runnable, name)
        except AttributeError:
            if _has_static(runnable, name):
                raise  # the attribute exists, and its code raised the error
            inner = type(runnable).__name__
            raise AttributeError(
                f"neither {type(self).__name__} nor the wrapped {inner} has an attribute {name!r}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        # Set attributes on the object that they are read from.
        runnable = self.__dict__.get("runnable")
        if name in self._own or runnable is None or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(runnable, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # Graphs are bound to this process and its buffers, so a copy starts without graphs.
        return {**self.__dict__, "entries": {}, "_pool": None, "_guard": None, "_once": Once()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__["_pool"] = self.device.global_pool()
        self.__dict__["_guard"] = self._make_guard()
        GraphWrapper._all.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.runtime_mode.name}, {self.unwrap()!r})"


def _has_static(value: Any, name: str) -> bool:
    try:
        inspect.getattr_static(value, name)
    except AttributeError:
        return False
    return True
