"""Form: calls that share their graphs, and the runner of these graphs.

The tensors of a call are the inputs of its graphs. Everything else is built into the graphs: values
that are not tensors, keywords, and the nesting, dtypes and fixed dimensions of tensors. Calls that
differ in any of these have different forms. Calls of one form differ only in the sizes of the
batch and axes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten_with_path,
    tree_unflatten,
)

from dispatchkit.dispatch import Reason
from dispatchkit.errors import CaptureError
from dispatchkit.execute.executor import Executor
from dispatchkit.execute.graphed.buckets import Buckets
from dispatchkit.execute.io.static_input import StaticInput
from dispatchkit.execute.io.tree import tree_flatten
from dispatchkit.execute.runner import GraphRunner
from dispatchkit.keys.axes import Axis
from dispatchkit.keys.batch import GraphKey
from dispatchkit.observe.counters import RunnerStats
from dispatchkit.options import FIRST, RunnerOptions
from dispatchkit.registry import KeyState

_logger = logging.getLogger(__name__)


def geometric_sizes(largest: int) -> tuple[int, ...]:
    """Return sizes up to the largest, two per doubling.

    At most a third of the rows of a graph are padding.
    """
    sizes = {largest}
    size = 1
    while size < largest:
        sizes |= {size, size * 3 // 2}
        size *= 2
    return tuple(sorted(one for one in sizes if one <= largest))


class Form:
    """A form of calls, with its runner.

    Args:
        target: Module or function that the step calls.
        settings: Arguments of the runner, by name.
        grows: Whether no capture sizes were given, so that the sizes grow with the largest batch.
        args: Arguments of the first call.
        kwargs: Keyword arguments of the first call.
        shapes: Shape of each tensor, in order, with None for the batch and a name for an axis.
        fills: Padding value of each tensor.
        names: Input name of each tensor.
        arguments: Names of the arguments. An argument with several values, such as a list, is named
            once per value.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        settings: dict[str, Any],
        grows: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shapes: Sequence[tuple[int | str | None, ...]],
        fills: Sequence[float],
        names: Sequence[str],
        arguments: Sequence[str],
    ) -> None:
        self._target, self._settings, self._grows = target, settings, grows
        leaves, self._spec = tree_flatten((args, kwargs))
        self.constants = [None if isinstance(one, torch.Tensor) else one for one in leaves]
        self._places = [at for at, one in enumerate(leaves) if isinstance(one, torch.Tensor)]
        self._names, self.arguments = names, arguments
        # A graph reads part of the buffer of an input. The part is not contiguous if the batch
        # dimension is not the first.
        self._strided = [
            name for name, shape in zip(names, shapes, strict=True) if None in shape[1:]
        ]
        self.inputs: dict[str, Any] = {}
        for name, at, shape, fill in zip(names, self._places, shapes, fills, strict=True):
            self.inputs[name] = StaticInput(shape, leaves[at].dtype, fill=fill)
        needs_own = bool(self._strided) or _has_mutable(self._spec)
        self._call: _CurrentCall | None = _CurrentCall() if needs_own else None
        self.device: Any = leaves[self._places[0]].device
        self.top: int = 0
        self.buckets: dict[str, Buckets] = {}
        for shape in shapes:
            self.buckets.update({size: Buckets() for size in shape if isinstance(size, str)})
        self.runner: GraphRunner | None = None
        self._words = ""  # description of the form when the runner was created
        self.outgrown: dict[str, RunnerStats] = {}

    def run(
        self,
        runner: GraphRunner,
        tensors: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call; an eager step receives the caller's own containers.

        Args:
            runner: Runner that ``runner_for`` returned for the call.
            tensors: Tensors of the call.
            sizes: Size of the call along each axis, by name.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        own = self._call
        if own is None:
            return runner(*tensors, **sizes)
        before, own.now = own.now, (args, kwargs, tensors)
        try:
            return runner(*tensors, **sizes)
        finally:
            own.now = before

    def runner_for(self, rows: int, sizes: Mapping[str, int]) -> GraphRunner:
        """Return a runner with capacity for the rows and axis sizes of a call.

        The runner is replaced if its capacity is too small or its buckets changed. The capacity for
        rows grows only if no capture sizes were given.
        """
        runner = self.runner
        is_new = runner is None or (rows > self.top and self._grows)
        for name, size in sizes.items():
            is_new |= self.buckets[name].note(size)
        if runner is None or is_new:
            if runner is not None:
                self.outgrown[self._words] = runner.stats()
                runner.clear()
                _logger.info("Graphs are captured again for %s", self)
            runner = self.runner = self._make(rows)
            self._words = str(self)
        return runner

    def fix_buckets(self) -> None:
        """Disable further planning of buckets, because graphs were captured for all of them."""
        for one in self.buckets.values():
            one.is_fixed = True

    def _captured(self) -> Iterator[tuple[Executor, GraphKey]]:
        """Yield the executor and the key of each captured graph."""
        for lane in () if self.runner is None else self.runner.lanes:
            for key, entry in lane.registry.entries.items():
                if entry.state is KeyState.CAPTURED:
                    yield lane, key

    def has_graphs(self) -> bool:
        """Return whether at least one graph is captured."""
        return any(True for _ in self._captured())

    def is_pure(self) -> bool:
        """Return whether a capture has shown that the target has no effects besides its results."""
        if self.runner is None or self.runner.backend.is_capturing():
            return False
        return any(lane.warmups.is_pure(key) for lane, key in self._captured())

    def run_on(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the target on the given tensors, without graphs."""
        leaves = list(self.constants)
        for at, one in zip(self._places, tensors, strict=True):
            leaves[at] = one
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._target(*args, **kwargs)

    def stats(self) -> dict[str, RunnerStats]:
        """Return the counters of the current and all replaced runners, by description."""
        now = {} if self.runner is None else {self._words: self.runner.stats()}
        return {**self.outgrown, **now}

    def _make(self, rows: int) -> GraphRunner:
        settings = dict(self._settings)
        top = max(8, self.top, 1 << (rows - 1).bit_length()) if self._grows else 0
        if top:
            settings["sizes"] = geometric_sizes(top)
        if self.buckets:
            settings["axes"] = [Axis(name, one.sizes) for name, one in self.buckets.items()]
            options = settings["options"]
            if options.check is None and settings["lanes"].count == 1:
                settings["options"] = attrs.evolve(options, check=FIRST)
        if "backend" not in settings:
            options = settings.get("options", RunnerOptions())
            if options.device is None:
                settings["options"] = attrs.evolve(options, device=self.device)
        step = _step_of(self._target, self.constants, self._places, self._names, self._spec)
        if self._strided:
            step = _with_contiguous(step, self._strided)
        if self._call is not None:
            step = _with_own_arguments(self._target, step, self._names, self._call)
        runner = GraphRunner(step, self.inputs, **settings)
        if isinstance(self._target, torch.nn.Module):
            runner.lanes[0].work.guard.add(self._target)
        self.top = top  # set last, because creating the runner may fail
        return runner

    def shapes(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each tensor with its type and shape, such as ``float32[n, 8]``."""
        for name, one in self.inputs.items():
            sizes = ", ".join("n" if size is None else str(size) for size in one.shape)
            yield name, f"{str(one.dtype).removeprefix('torch.')}[{sizes}]"

    def __str__(self) -> str:
        shapes = ", ".join(f"{name}: {text}" for name, text in self.shapes())
        others = [one for one in self.constants if one is not None]
        text = f"({shapes})" + (f" with {', '.join(map(repr, others)):.80}" if others else "")
        text += f", n <= {self.top}" if self.top else ""
        return text + "".join(f", {name} {one}" for name, one in self.buckets.items() if one.sizes)


class _CurrentCall(threading.local):
    """The current call of a thread: its arguments, and its tensors in order."""

    now: tuple[tuple[Any, ...], dict[str, Any], Sequence[torch.Tensor]] | None = None


def _has_mutable(spec: TreeSpec) -> bool:
    """Return whether a call has containers that a step could write to."""
    args, kwargs = spec.children()
    inside = [*args.children(), *kwargs.children()]
    while inside:
        one = inside.pop()
        if not (one.is_leaf() or one.type is tuple):
            return True
        inside += one.children()
    return False


def _step_of(
    target: Callable[..., Any],
    constants: Sequence[Any],
    places: Sequence[int],
    names: Sequence[str],
    spec: TreeSpec,
) -> Callable[..., Any]:
    """Return a step that calls the target with new arguments nested as in a form.

    The step raises a CaptureError if the target writes to the containers of these arguments. It is
    a closure rather than a method, because the search for effects reads its cells.
    """
    has_mutable = _has_mutable(spec)

    def step(**inputs: torch.Tensor) -> Any:
        leaves = list(constants)
        for at, name in zip(places, names, strict=True):
            leaves[at] = inputs[name]
        args, kwargs = tree_unflatten(leaves, spec)
        result = target(*args, **kwargs)
        if has_mutable:
            _check_unchanged(leaves, spec, (args, kwargs))
        return result

    return step


def _with_own_arguments(
    target: Callable[..., Any],
    step: Callable[..., Any],
    names: Sequence[str],
    call: _CurrentCall,
) -> Callable[..., Any]:
    """Return a step that passes the caller's own arguments to the target in an eager call.

    For other tensors, such as dummy rows and static inputs, it calls ``step``.
    """

    def own_step(**inputs: torch.Tensor) -> Any:
        own = call.now
        if own is not None:
            args, kwargs, tensors = own
            if all(inputs[name] is one for name, one in zip(names, tensors, strict=True)):
                return target(*args, **kwargs)
        return step(**inputs)

    return own_step


def _with_contiguous(step: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return a step that passes contiguous inputs to ``step``.

    cuDNN requires contiguous recurrent states. An input that is not contiguous is copied. Writing
    to the copy is rejected, as writing to the input would be.

    Args:
        step: Step that takes inputs by name.
        names: Names of inputs that are not contiguous in the memory that a graph reads.
    """

    def contiguous_step(**inputs: torch.Tensor) -> Any:
        copies = {}
        with torch.inference_mode(False):  # inference tensors have no version counter
            for name in names:
                if not inputs[name].is_contiguous():
                    copies[name] = inputs[name].contiguous()
        versions = {name: one._version for name, one in copies.items()}
        result = step(**{**inputs, **copies})
        for name, one in copies.items():
            if one._version != versions[name]:
                raise CaptureError(
                    f"The step writes to its input {name!r}. An eager step would change the "
                    "caller's tensor, but a replay would change only a copy. Clone the input in "
                    "the step before writing to it.",
                    reason="input_written",
                )
        return result

    return contiguous_step


def _check_unchanged(leaves: Sequence[Any], spec: TreeSpec, call: Any) -> None:
    """Check that a step has not written to containers in its arguments.

    Raises:
        CaptureError: The step has written to a container; reason ``container_written``.
    """
    now, now_spec = tree_flatten(call)
    if now_spec == spec and all(one is other for one, other in zip(leaves, now, strict=True)):
        return
    before = _by_path(tree_unflatten(leaves, spec))
    after = _by_path(call)
    changed = [
        path
        for path in {**before, **after}
        if path not in before or path not in after or before[path] is not after[path]
    ]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    raise CaptureError(
        f"The step changes elements of its arguments ({', '.join(changed[:3])}{more}), which a "
        "replay would not do. Return the new values, and assign them outside the step.",
        reason=Reason.CONTAINER_WRITTEN,
    )


def _by_path(call: Any) -> dict[str, Any]:
    """Return the leaves of a call by their paths, such as ``args[0]['h']``."""
    args, kwargs = call
    found = {f"args{keystr(path)}": one for path, one in tree_flatten_with_path(args)[0]}
    return found | {f"kwargs{keystr(path)}": one for path, one in tree_flatten_with_path(kwargs)[0]}
