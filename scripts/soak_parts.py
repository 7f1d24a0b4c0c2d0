"""Parts of the soak: planned faults, faulty devices, a model and a comparison."""

from __future__ import annotations

import collections
import threading
import types
import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dispatchkit.backends.tape import TapeBackend
from dispatchkit.backends.tape.streams import TapeEvent
from dispatchkit.dispatch import Decision
from dispatchkit.hookspecs import ObserverSpec, PolicySpec, hookimpl
from dispatchkit.observe.events import EVENTS
from dispatchkit.plugins import PluginSet, load_plugins

#: Number of cache rows that steps use; one more row is for rows without a token.
SINK = 64
# Error code of the driver for unknown errors.
_UNKNOWN_ERROR = 999
# Simulated times of steps on the tape: like those of a device, and the same in every run.
_GRAPH_US, _EAGER_US = 30.0, 150.0


class SoakError(AssertionError):
    """A check of the soak failed."""


class PlannedError(RuntimeError):
    """A planned fault."""


class Faults:
    """Planned faults; each is armed for one use, and counted when used.

    Attributes:
        at_operation: Number of operations of a capture before one fails; -1 for none.
        with_error: Exception raised by the failing operation.
        done: Number of times that each fault was used.
    """

    def __init__(self) -> None:
        self.at_operation = -1
        self.with_error: Exception = PlannedError()
        self.done: collections.Counter[str] = collections.Counter()
        self._armed: set[str] = set()
        self._lock = threading.Lock()

    def arm(self, what: str) -> None:
        """Make the next launch, policy or observer fail."""
        with self._lock:
            self._armed.add(what)

    def arm_capture(self, at_operation: int, *, out_of_memory: bool) -> None:
        """Make the next capture fail after ``at_operation`` operations."""
        error = torch.OutOfMemoryError if out_of_memory else PlannedError
        self.at_operation, self.with_error = at_operation, error("injected in a capture")

    def disarm(self) -> None:
        """Disarm all faults."""
        with self._lock:
            self._armed.clear()
        self.at_operation = -1

    def use(self, what: str) -> bool:
        """Disarm and count a fault; return whether it was armed."""
        if what not in self._armed:
            return False
        with self._lock:
            is_due = what in self._armed
            self._armed.discard(what)
            self.done[what] += is_due
        return is_due

    def operation(self, backend: Any) -> None:
        """Raise the planned error of a capture if it is due; steps call this between operations."""
        if self.at_operation < 0 or not backend.is_capturing():
            return
        self.at_operation -= 1
        if self.at_operation < 0:
            memory = isinstance(self.with_error, torch.OutOfMemoryError)
            self.done["capture out of memory" if memory else "capture failed"] += 1
            raise self.with_error


class FaultyGraph:
    """A graph whose launch may fail."""

    def __init__(self, graph: Any, backend: Any) -> None:
        self.graph, self.backend, self.is_released = graph, backend, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)

    def replay(self) -> None:
        """Launch the graph, unless the launch fails."""
        if self.backend.faults.use("launch refused"):
            raise PlannedError("injected at a launch")
        self.backend.launches += 1
        self.graph.replay()

    def release(self) -> None:
        """Release the graph and stop counting it."""
        self.backend.num_live -= not self.is_released
        self.is_released = True
        self.graph.release()


class PacedEvent(TapeEvent):
    """Event with simulated device times; the tape's measured times vary and favor eager."""

    def __init__(self, backend: FaultyTape, *, timing: bool) -> None:
        super().__init__(backend.current_stream, timing=timing)
        self.backend, self.launches = backend, 0

    def record(self, stream: Any = None) -> None:
        """Mark the end of the work queued so far."""
        super().record(stream)
        self.launches = self.backend.launches

    def elapsed_us(self, end: Any) -> float:
        """Return the simulated time of the graphs launched between events, or of an eager step."""
        super().elapsed_us(end)  # validates the events
        return (end.launches - self.launches) * _GRAPH_US or _EAGER_US


class FaultyTape(TapeBackend):
    """Tape whose launches may fail, and which counts live graphs."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults, self.num_live, self.launches = faults, 0, 0

    def new_event(self, *, timing: bool = False) -> TapeEvent:
        """Return an event with simulated times."""
        return PacedEvent(self, timing=timing)

    def capture(self, run: Any, **options: Any) -> Any:
        """Capture a counted graph."""
        graph = super().capture(run, **options)
        self.num_live += 1
        return FaultyGraph(graph, self)


def faulty_device(device: str, faults: Faults) -> Any:
    """Return the backend of a device (``cpu`` or CUDA) whose launches may fail."""
    if device == "cpu":
        return FaultyTape(faults)
    from dispatchkit.backends.cuda import CudaBackend

    class FaultyCuda(CudaBackend):
        """CUDA backend whose launches may fail, including direct launches."""

        def __init__(self) -> None:
            super().__init__(device)
            self.faults, self.num_live, self.launches = faults, 0, 0

        def capture(self, run: Any, **options: Any) -> Any:
            """Capture a counted graph."""
            graph = super().capture(run, **options)
            self.num_live += 1
            return FaultyGraph(graph, self)

        def direct_launch(self, graph: Any) -> Any:
            """Return a call that launches, or returns an error code."""
            found = super().direct_launch(graph)
            if found is None:
                return None
            launch, handle = found

            def launch_unless_refused(graph: Any, stream: Any) -> int:
                if faults.use("launch refused"):
                    faults.done["direct launch refused"] += 1
                    return _UNKNOWN_ERROR
                return launch(graph, stream)

            return launch_unless_refused, handle

    return FaultyCuda()


class Model:
    """A step with a cache, a counter, a weight, a sum across rows and several outputs."""

    def __init__(self, device: str, faults: Faults | None = None, backend: Any = None) -> None:
        # Weak references: objects reachable from a step are restored after a capture, but used
        # faults must stay used.
        self.faults = None if faults is None else weakref.ref(faults)
        self.backend = None if backend is None else weakref.ref(backend)
        self.cache = torch.zeros(SINK + 1, 2, device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.weight = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], device=device)

    def fault_point(self) -> None:
        """Let a planned fault occur between two operations."""
        if self.faults is not None and self.backend is not None:
            faults, backend = self.faults(), self.backend()
            if faults is not None:
                faults.operation(backend)

    def project(self, slots: torch.Tensor, values: torch.Tensor) -> Any:
        """Write the cache."""
        self.fault_point()
        self.counter.add_(1)
        self.fault_point()
        hidden = values @ self.weight
        self.fault_point()
        self.cache.index_copy_(0, slots, hidden)
        self.fault_point()
        return hidden, values.abs()

    def attend(self, pair: Any) -> Any:
        """Return cumulative sums over rows."""
        return pair[0].cumsum(0), pair[1]

    def finish(self, pair: Any, slots: torch.Tensor) -> Any:
        """Read the cache."""
        self.fault_point()
        mixed = pair[0] + self.cache[slots]
        self.fault_point()
        return {"mixed": mixed, "more": [pair[1] * 2, self.counter + 0]}

    def __call__(self, slots: torch.Tensor, values: torch.Tensor) -> Any:
        """Run the step without graphs."""
        return self.finish(self.attend(self.project(slots, values)), slots)

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state that users can observe."""
        return self.cache[:SINK], self.counter


class Comparison:
    """Comparison on the device, which is synchronized only by ``raise_if_wrong``.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: str) -> None:
        self._first = torch.full((), -1, dtype=torch.int64, device=device)

    def compare(self, got: Any, want: Any, number: int) -> None:
        """Compare two results, and record the smallest number of a step that differs.

        Raises:
            SoakError: The results differ in shape or type.
        """
        ours, theirs = tree_leaves(got), tree_leaves(want)
        forms = [[(one.shape, one.dtype) for one in leaves] for leaves in (ours, theirs)]
        if forms[0] != forms[1]:
            raise SoakError(f"step {number} returned {forms[0]}, eager {forms[1]}")
        first, second = (
            torch.cat([leaf.reshape(-1).to(torch.float64) for leaf in leaves])
            for leaves in (ours, theirs)
        )
        # Other sizes may sum rows in another order. In this form, nan counts as a difference.
        is_wrong = ~((first - second).abs() <= 1e-4 + 1e-5 * second.abs()).all()
        self._first = torch.where(is_wrong & (self._first < 0), number, self._first)

    def raise_if_wrong(self, what: str) -> None:
        """Wait for the device, and raise if a compared result differed.

        Raises:
            SoakError: A result differed from eager.
        """
        first = int(self._first)
        if first >= 0:
            raise SoakError(f"{what} {first} returned a result that differs from eager.")


def plugins_with_faults(faults: Faults) -> PluginSet:
    """Return the installed plugins and one whose policies and observers sometimes raise."""

    class FlakyMember:
        name = "flaky-member"
        traits = frozenset[str]()

        def declare(self, config: Any) -> list[Any]:
            """Return no keys."""
            return []

        def decide(self, batch: Any, graphs: Any) -> Decision | None:
            """Leave every batch to other policies, or raise."""
            if faults.use("policy raised"):
                raise PlannedError("injected in a policy")
            return None

        def observe(self, outcome: Any) -> None:
            """Learn nothing, or raise."""
            if faults.use("learning raised"):
                raise PlannedError("injected in an update of a policy")

    class FlakyPolicy(FlakyMember):
        """Policy that is used without a composite, so no other policy decides if it raises."""

        name = "flaky-policy"

        def __init__(self) -> None:
            self.base = plugins.create_policy("vllm")

        def declare(self, config: Any) -> Any:
            """Return the keys of the base policy."""
            return self.base.declare(config)

        def decide(self, batch: Any, graphs: Any) -> Decision | None:
            """Return the decision of the base policy, or raise."""
            super().decide(batch, graphs)
            return self.base.decide(batch, graphs)

    module: Any = types.ModuleType("soak_plugin")

    @hookimpl
    def dispatchkit_register_policies() -> list[PolicySpec]:
        return [PolicySpec("flaky-member", FlakyMember), PolicySpec("flaky-policy", FlakyPolicy)]

    def raise_if_due(event: Any) -> None:
        if faults.use("observer raised"):
            raise PlannedError("injected in an observer")

    module.dispatchkit_register_policies = dispatchkit_register_policies

    class Raising:
        """Observer of all events, which sometimes raises."""

        def __init__(self) -> None:
            for event in EVENTS:
                setattr(self, event.callback, raise_if_due)

    @hookimpl
    def dispatchkit_register_observers() -> list[ObserverSpec]:
        return [ObserverSpec("raising", Raising)]

    module.dispatchkit_register_observers = dispatchkit_register_observers
    plugins = load_plugins(extra=[("soak", module)])
    plugins.create_observer("raising")
    return plugins
