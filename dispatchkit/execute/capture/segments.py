"""Capture a step in segments: graphs before, between and after its eager calls.

The step runs once. At each eager call, the capture of the segment ends and the segment is replayed,
so that the call reads real values. New tensors that the call returns are copied to fixed memory,
and the next segment begins. A segment without operations is not replayed, but its graph is kept,
because memory that the segment allocated stays in the pool only as long as a graph of the pool
exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_map_only, tree_unflatten

from dispatchkit.backends.optional import SegmentedCapture, SegmentGraph, features_of
from dispatchkit.backends.watching.dispatch_mode import DispatchMode, inference_mode
from dispatchkit.errors import CaptureError, format_value
from dispatchkit.execute.capture.budget import Admission
from dispatchkit.execute.capture.captured import GraphPart
from dispatchkit.execute.capture.eager_call import EagerCall, Result
from dispatchkit.execute.capture.effects import bits_equal
from dispatchkit.execute.io.structure import flatten, leaves_of
from dispatchkit.execute.io.tree import tree_flatten
from dispatchkit.execute.io.weak_tensor import weak_tensor
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.step.breaks import use_breaker
from dispatchkit.execute.step.state import OperatorWrites, StorageSet, plain_tensor
from dispatchkit.once import line_of_call

#: Advice in errors if later segments cannot read the result of an eager function or operator.
_CONVERT_RESULT = "Convert the tensor inside the eager function."
_CONVERT_OPERATOR = (
    "Put the operator and a conversion of its result into one function decorated with "
    "@eager_region."
)


@attrs.frozen
class CallShapes:
    """The shapes of tensors in an eager call, or their batch dimensions derived from two runs.

    Attributes:
        line: File and line of the call.
        given: Shape or batch dimension of each tensor argument; None without a batch dimension.
        returned: Shape or batch dimension of each result; None without a batch dimension, and for
            values other than tensors.
        written: For each tensor argument, whether an operator wrote to it.
    """

    line: str
    given: tuple[Any, ...]
    returned: tuple[Any, ...]
    written: tuple[bool, ...]


class ShapeRecorder:
    """Breaker that records the shapes and writes of eager calls in a run without capture.

    Attributes:
        calls: Recorded calls, in order.
    """

    def __init__(self) -> None:
        self.calls: list[CallShapes] = []
        self._is_inside = False

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, line: str) -> Any:
        """Call a function, and record the shapes and writes of the call."""
        if self._is_inside:
            return fn(*args, **kwargs)
        given, writes = _tensors(args, kwargs), OperatorWrites()
        self._is_inside = True
        try:
            with writes:
                value = fn(*args, **kwargs)
        finally:
            self._is_inside = False
        written = tuple(tensor in writes.written for tensor in given)
        self.calls.append(CallShapes(line, _shapes(given), _shapes(value), written))
        return value

    def split(self) -> None:
        """Do nothing, because there are no segments."""

    def enter_block(self, line: str) -> None:
        """Do nothing, because the capture checks ``with eager_region():`` blocks."""


class ArgumentHolder:
    """Breaker that keeps values alive during a memory measurement, as a capture would.

    CUDA tensors are not kept alive, because the pool retains the memory of segments.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._is_inside = False

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, line: str) -> Any:
        """Call a function and keep its arguments and results alive."""
        if self._is_inside:
            return fn(*args, **kwargs)
        self._is_inside = True
        try:
            value = fn(*args, **kwargs)
        finally:
            self._is_inside = False
        held = tree_map_only(torch.Tensor, weak_tensor, (args, kwargs, value))
        self._held.append(held)
        return value

    def split(self) -> None:
        """Do nothing, because there are no segments."""

    def enter_block(self, line: str) -> None:
        """Do nothing, because the capture checks ``with eager_region():`` blocks."""


class SegmentRecorder:
    """Breaker that splits a step into segments during its capture.

    Args:
        lane: Lane of the capture.
        num_rows: Number of rows that the graphs compute.
        dims: Batch dimensions of the tensors in each call; empty if unknown.
        is_fixed: Function that returns whether a tensor has a fixed address (static input, state).
        admission: Check of the memory budgets; None if there is no limit.

    Attributes:
        parts: Segments and eager calls of a replay, in order.
        graphs: All captured graphs, including those without operations.
    """

    def __init__(
        self,
        lane: Lane,
        num_rows: int,
        dims: Sequence[CallShapes],
        is_fixed: Callable[[torch.Tensor], bool],
        admission: Admission | None,
    ) -> None:
        self.parts: list[GraphPart | EagerCall] = []
        self.graphs: list[SegmentGraph] = []
        self._lane, self._num_rows, self._dims = lane, num_rows, dims
        self._is_fixed, self._admission = is_fixed, admission
        self._device = torch.device(lane.backend.torch_device)
        self._capture: SegmentedCapture | None = None
        self._num_calls = 0
        self._is_inside = False
        self._ambient = _CallContext.now(self._device.type)
        self._num_modes = 0, 0

    @contextmanager
    def recording(self, capture: SegmentedCapture) -> Iterator[None]:
        """Split the step in a ``with`` block into segments, and end the last segment on exit."""
        self._num_modes = _num_modes()
        try:
            with use_breaker(self):
                self._capture = capture
                yield
            self._end(capture)
        finally:  # stops splitting even if an interrupt skipped the end of the block
            self._capture = None

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, line: str) -> Any:
        """End the segment, call a function, and begin the next segment.

        Raises:
            CaptureError: A replay cannot repeat the call, or later segments cannot read the results
                of the call.
        """
        capture = self._capture
        if self._is_inside or capture is None:
            return fn(*args, **kwargs)
        if _num_modes() != self._num_modes:
            raise CaptureError(
                f"The eager call at {line} is inside a torch mode that the step has entered, such "
                "as torch.device or a dispatch mode. A replay would make the call outside the "
                "mode. Enter the mode inside the eager function.",
            )
        return self._call(capture, fn, args, kwargs, line, _CONVERT_RESULT)

    def call_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """End the segment, call an operator, and begin the next segment.

        Raises:
            CaptureError: The operator returns a value that is not a tensor, or a tensor that later
                segments cannot read.
        """
        capture, line = self._capture, line_of_call()
        if self._is_inside or capture is None:
            return func(*args, **kwargs)
        value = self._call(capture, func, args, kwargs, line, _CONVERT_OPERATOR)
        if any(
            leaf is not None and not isinstance(leaf, torch.Tensor) for leaf in leaves_of(value)
        ):
            raise CaptureError(
                f"{func} at {line} returns {format_value(value)}, which would be built into later "
                "segments. Put the call and the code that reads the value into one function "
                "decorated with @eager_region.",
                reason="host_sync",
            )
        return value

    def split(self) -> None:
        """End the segment, and begin the next segment."""
        capture = self._capture
        if capture is not None and not self._is_inside:
            self._end(capture)
            capture.begin()

    def enter_block(self, line: str) -> None:
        """Reject a ``with eager_region():`` block.

        Raises:
            CaptureError: The block is not inside a function that runs eager.
        """
        if self._capture is not None and not self._is_inside:
            raise CaptureError(
                f"A replay cannot run the block `with eager_region():` at {line} again. Put its "
                "code into a function decorated with @eager_region, or split the step with "
                "split_module.",
            )

    def _end(self, capture: SegmentedCapture) -> None:
        """End a segment and replay it, so that the next eager call can read its results."""
        lane = self._lane
        graph = capture.end()
        self.graphs.append(graph)
        if graph.num_operations:
            uploads = features_of(lane.backend).uploads
            if uploads is not None:
                uploads.upload(graph, lane.stream)
            start, end = (lane.backend.new_event(timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            us = start.elapsed_us(end)
            self.parts.append(GraphPart(graph, None, None, graph.num_operations, us))

    def _call(
        self,
        capture: SegmentedCapture,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
        line: str,
        next_step: str,
    ) -> Any:
        self._end(capture)
        dims = self._dims[self._num_calls] if self._num_calls < len(self._dims) else None
        self._num_calls += 1
        if dims is not None and dims.line != line:
            dims = None
        given = _tensors(args, kwargs)
        known = () if dims is None else zip(given, dims.given, dims.written, strict=False)
        before = [
            # A write by an operator counts even if it leaves the contents unchanged (zeros over
            # zeros). Other writes are found by comparing with a copy.
            (tensor, dim, None if is_written else tensor.clone())
            for tensor, dim, is_written in known
            if dim is not None and not self._is_fixed(tensor)
        ]
        self._is_inside = True
        try:
            value = fn(*args, **kwargs)
        finally:
            self._is_inside = False
        hold = partial(self._hold, capture)
        written = tuple(
            (hold(tensor), dim)
            for tensor, dim, content in before
            if content is None or not bits_equal(tensor, content)
        )
        arguments = StorageSet(given)
        leaves, structure = flatten(value)
        stored = [
            self._store_result(number, leaf, arguments, dims, line, next_step)
            for number, leaf in enumerate(leaves)
        ]
        results = tuple(
            attrs.evolve(one, value=hold(one.value)) if isinstance(one.value, torch.Tensor) else one
            for one in stored
        )
        ambient = _CallContext.now(self._device.type)
        self.parts.append(
            EagerCall(
                fn=fn,
                args=tuple(_with_tensors(one, hold) for one in args),
                kwargs={name: _with_tensors(one, hold) for name, one in kwargs.items()},
                line=line,
                around=None if ambient == self._ambient else ambient.entered,
                results=results,
                structure=structure,
                written=written,
                num_rows=self._num_rows,
            )
        )
        capture.begin()
        return structure.build([one.value for one in stored])

    def _hold(self, capture: SegmentedCapture, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of a tensor for use in replays, even outside inference mode.

        The alias does not keep memory of segments alive, so that graphs of all sizes can reuse this
        memory. This is safe, because a replay writes the memory before a call reads it, and nothing
        else runs in between. The alias keeps all other memory alive.
        """
        lane = self._lane
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or self._is_fixed(tensor)
            or tensor in lane.between
            or tensor in lane.outputs
            or not capture.keeps(tensor)
        ):
            return plain_tensor(tensor)
        with inference_mode(False):
            return weak_tensor(tensor)

    def _store_result(
        self,
        number: int,
        leaf: Any,
        arguments: StorageSet,
        dims: CallShapes | None,
        line: str,
        next_step: str,
    ) -> Result:
        """Copy a returned value to fixed memory if necessary, and return its ``Result``."""
        if not isinstance(leaf, torch.Tensor):
            return Result(leaf)
        if leaf.device != self._device or leaf.layout is not torch.strided:
            raise CaptureError(
                f"The eager call at {line} must return strided tensors on {self._device}, got a "
                f"{leaf.layout} tensor on {leaf.device}. {next_step}",
            )
        if leaf in arguments or self._is_fixed(leaf):
            return Result(plain_tensor(leaf), stride=leaf.stride())
        place = (self._num_calls, number), leaf.shape, leaf.dtype
        if self._admission is not None:
            self._admission.ensure_fits(self._lane.between.growth(*place))
        own = self._lane.between.tensor_at(*place)
        own.copy_(leaf)
        dim = None if dims is None else dims.returned[number]
        return Result(own, is_copied=True, stride=leaf.stride(), batch_dim=dim)


@attrs.frozen
class Operators:
    """Operators at which a step breaks.

    Attributes:
        names: Qualified names of operators.
        tags: Tags of additional operators.
    """

    names: frozenset[str] = frozenset()
    tags: frozenset[torch.Tag] = frozenset()

    def breaking(self, recorder: SegmentRecorder) -> AbstractContextManager[Any]:
        """Return a context manager under which a recorder breaks the step at these operators."""
        return _OperatorBreaks(recorder, self) if self.names or self.tags else nullcontext()


class _OperatorBreaks(DispatchMode):
    """Dispatch mode that lets a recorder call the operators at which the step breaks."""

    def __init__(self, recorder: SegmentRecorder, operators: Operators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._recorder, self._operators = recorder, operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run compiled, without breaks inside them."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, wanted = kwargs or {}, self._operators
        if isinstance(func, torch._ops.OpOverload) and (
            func._schema.name in wanted.names or not wanted.tags.isdisjoint(func.tags)
        ):
            return self._recorder.call_operator(func, args, kwargs)
        return func(*args, **kwargs)


def batch_dims(
    calls: Sequence[CallShapes], others: Sequence[CallShapes], size: int, other: int
) -> list[CallShapes]:
    """Derive the batch dimensions of the tensors in each call from two runs of a step.

    An argument counts as written if either run wrote it.

    Args:
        calls: Calls of the first run.
        others: Calls of the second run.
        size: Number of rows in the first run.
        other: Number of rows in the second run.

    Returns:
        For each call, the batch dimension of each tensor, or None. Empty if the runs made different
        calls.
    """

    def dims(shapes: Iterable[Any], second: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(_batch_dim(*pair, size, other) for pair in zip(shapes, second, strict=True))

    found = []
    if len(calls) != len(others):
        return []
    for one, two in zip(calls, others, strict=True):
        numbers = len(one.given), len(one.returned)
        if one.line != two.line or numbers != (len(two.given), len(two.returned)):
            return []
        given, returned = dims(one.given, two.given), dims(one.returned, two.returned)
        written = tuple(map(any, zip(one.written, two.written, strict=True)))
        found.append(CallShapes(one.line, given, returned, written))
    return found


def _batch_dim(one: Any, two: Any, size: int, other: int) -> int | None:
    if one is None or two is None or len(one) != len(two):
        return None
    pairs = enumerate(zip(one, two, strict=True))
    return next((dim for dim, pair in pairs if pair == (size, other)), None)


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in a value, or return the value itself if no tensor changes.

    If the value itself is returned, replays see changes that a caller makes to it between steps,
    for example to a list.
    """
    leaves, spec = tree_flatten(value)
    made = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if all(one is leaf for one, leaf in zip(made, leaves, strict=True)):
        return value
    return tree_unflatten(made, spec)


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [one for one in leaves_of((args, dict(kwargs))) if isinstance(one, torch.Tensor)]


def _shapes(value: Any) -> tuple[Any, ...]:
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves_of(value)
    )


def _num_modes() -> tuple[int, int]:
    """Return the numbers of active dispatch modes and function modes in this thread."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


@attrs.frozen
class _CallContext:
    """The contexts around a call, which a replay must enter too."""

    device_type: str
    autocast: bool
    dtype: torch.dtype
    grad: bool
    inference: bool

    @classmethod
    def now(cls, device_type: str) -> _CallContext:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        with (
            inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device_type, self.dtype, enabled=self.autocast),
        ):
            yield
