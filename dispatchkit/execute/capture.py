"""Capture of one key: warmup, the layout of its outputs, and its graphs.

Everything a warmup changes is put back; a capture itself changes nothing (the backend's
promise). Whatever happens, the step has not been run for the caller when this returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dispatchkit.backends.base import CapturedGraph, GraphBackend
from dispatchkit.errors import CaptureError, ConfigError
from dispatchkit.execute.captured import (
    CapturedStep,
    EagerPart,
    FullStep,
    GraphPart,
    Link,
    PiecewiseStep,
)
from dispatchkit.execute.guard import Guard
from dispatchkit.execute.inputs import InputSet
from dispatchkit.execute.lanes import Lane
from dispatchkit.execute.outputs import (
    DERIVED,
    OutputLayout,
    check_batch_dims,
    declared_layout,
    measure_layout,
)
from dispatchkit.execute.pieces import Step
from dispatchkit.execute.state import (
    DEFAULT_STATE_LIMIT,
    Known,
    Snapshot,
    WriteWatch,
    restored,
)
from dispatchkit.keys.batch import GraphKey
from dispatchkit.keys.modes import RuntimeMode

# Keys that differ in size only: one watched warmup and one layout serve them all.
Family = tuple[Any, ...]


def family_of(key: GraphKey) -> Family:
    """Return what a key shares with those that differ from it in size only."""
    own = key.descriptor
    return (key.mode, own.uniform, own.query_len, own.max_query_len, own.num_active_loras, own.axes)


class Capturer:
    """Captures keys of one runner.

    Args:
        step: What is run.
        inputs: What is declared of its inputs.
        backend: The device.
        guard: Reads what graphs are made under.
        row_count: Name of the input that tells the true row count.
        state: Tensors that the step changes; saved and put back around warmups.
        scratch: Tensors that the step may write in a warmup without harm.
        state_limit_bytes: Most bytes of undeclared state to save.
        output_batch_dims: Declared batch dimensions of the outputs.
        warmups: Eager runs before each capture, after the watched one.
        share_outputs: Graphs write their outputs to one memory of the lane.
        generators: Random generators that the step draws from, beside the default ones.

    Raises:
        ConfigError: ``warmups`` or ``output_batch_dims`` cannot be used.
    """

    def __init__(
        self,
        step: Step,
        inputs: InputSet,
        backend: GraphBackend,
        guard: Guard,
        *,
        row_count: str | None = None,
        state: Iterable[torch.Tensor] = (),
        scratch: Iterable[torch.Tensor] = (),
        state_limit_bytes: int = DEFAULT_STATE_LIMIT,
        output_batch_dims: Any = DERIVED,
        warmups: int = 1,
        share_outputs: bool = True,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        if isinstance(warmups, bool) or not isinstance(warmups, int) or warmups < 0:
            raise ConfigError("warmups", warmups, "a whole number of at least 0")
        check_batch_dims(output_batch_dims)
        for setting, tensors in (("state", state), ("scratch", scratch)):
            for tensor in tensors:
                if not isinstance(tensor, torch.Tensor):
                    raise ConfigError(setting, tensor, "a list of tensors")
        self._step, self._inputs, self._backend, self._guard = step, inputs, backend, guard
        self._row_count = row_count
        self._state = Known(state)
        self._written = Known()  # by any watched warmup, beside the declared state
        self._scratch = tuple(scratch)
        self._state_limit = state_limit_bytes
        self._batch_dims = output_batch_dims
        self._warmups = warmups
        self._share_outputs = share_outputs
        self._generators = tuple(generators)
        self._layouts: dict[Family, list[OutputLayout]] = {}
        self._peaks: dict[Family, tuple[int, int]] = {}

    def forecast_bytes(self, key: GraphKey) -> int | None:
        """Return the memory that a graph of a key is expected to need; None if not known.

        From the watched warmup of its family, in proportion to the size.
        """
        known = self._peaks.get(family_of(key))
        return None if known is None else known[0] * key.num_tokens // known[1]

    def capture(
        self,
        key: GraphKey,
        lane: Lane,
        other_sizes: Sequence[int],
        admit: Callable[[], None] = lambda: None,
    ) -> CapturedStep:
        """Capture a key; the step's state, the generators and other keys are as before.

        Args:
            key: What to capture.
            lane: Where.
            other_sizes: Further sizes the step can be run at, to measure its outputs.
            admit: Called when the memory needed is forecast; raises to give up.

        Raises:
            CaptureError: It cannot be captured, for a reason to count.
        """
        if key.num_tokens > lane.buffers.num_rows:
            raise CaptureError(
                f"{key} is larger than the static inputs ({lane.buffers.num_rows} rows). Declare "
                "it before the runner is made.",
                key=str(key),
                reason="too_large",
            )
        snapshot = Snapshot(self._inputs.device, self._generators)
        # Graphs carry no gradients, and their memory must be usable outside inference mode.
        with torch.inference_mode(False), torch.no_grad(), restored(snapshot):
            for storage in (*self._state, *self._written):
                snapshot.save(storage)
            lane.order()
            lane.buffers.reset()
            lane.set_rows(key.num_tokens)
            outputs = self._warm_up(key, lane, snapshot)
            layout = self._layout(key, lane, outputs, other_sizes)
            admit()
            if key.mode is RuntimeMode.FULL:
                return self._capture_full(key, lane, outputs, layout)
            return self._capture_pieces(key, lane, outputs, layout)

    # -- warmup -------------------------------------------------------------------------

    def _views(self, lane: Lane, num_rows: int) -> dict[str, torch.Tensor]:
        views = dict(zip(self._inputs.names, lane.buffers.views(num_rows), strict=True))
        if self._row_count is not None and lane.row_count is not None:
            views[self._row_count] = lane.row_count
        return views

    def _warm_up(self, key: GraphKey, lane: Lane, snapshot: Snapshot) -> Any:
        """Run the step at the key's size, watched the first time for each family."""
        views = self._views(lane, key.num_tokens)
        outputs: Any = None
        family = family_of(key)
        if self._warmups and family not in self._peaks:
            ignore = Known([*lane.buffers.tensors, *self._scratch])
            if lane.row_count is not None:
                ignore.add(lane.row_count)
            watch = WriteWatch(
                ignore=ignore,
                declared=self._state,
                snapshot=snapshot,
                limit=self._state_limit,
            )

            def watched() -> Any:
                with watch:
                    return self._step(views)

            outputs = self._backend.warmup(watched, stream=lane.stream)
            for tensor in watch.written:
                self._written.add(tensor)
            self._peaks[family] = (watch.peak_bytes, key.num_tokens)
        if self._warmups:
            outputs = self._backend.warmup(
                lambda: self._step(views), stream=lane.stream, iterations=self._warmups
            )
        elif self._batch_dims == DERIVED and family not in self._layouts:
            raise CaptureError(
                "With warmups=0 nothing tells the batch dimension of the outputs. Give "
                "output_batch_dims, or leave one warmup.",
                key=str(key),
                reason="output_layout",
            )
        return outputs

    def _layout(
        self, key: GraphKey, lane: Lane, outputs: Any, other_sizes: Sequence[int]
    ) -> OutputLayout | None:
        """Return the layout of a key's outputs, measuring it once for each family."""
        if not self._warmups:
            return None
        size = key.num_tokens
        known = self._layouts.setdefault(family_of(key), [])
        for layout in known:
            if layout.fits(outputs, size):
                return layout
        if self._batch_dims == DERIVED:
            other, second = self._at_another_size(key, lane, other_sizes)
            layout = measure_layout(outputs, size, second, other)
        else:
            layout = declared_layout(outputs, size, self._batch_dims)
        known.append(layout)
        return layout

    def _at_another_size(
        self, key: GraphKey, lane: Lane, other_sizes: Sequence[int]
    ) -> tuple[int, Any]:
        size = key.num_tokens
        below = [one for one in other_sizes if one < size]
        above = [one for one in other_sizes if one > size]
        # A size of 1 says least: broadcasting makes dimensions of 1 out of nothing.
        other = max(below, default=0)
        if other <= 1:
            other = min(above, default=other or 2 * size)
        if other <= lane.buffers.num_rows:
            views = self._views(lane, other)
        else:
            views = self._views(lane, size)
            for name, spec in self._inputs.specs.items():
                if spec.batch_dim is not None:
                    views[name] = spec.full(other, self._inputs.device)
        lane.set_rows(other)
        try:
            outputs = self._backend.warmup(lambda: self._step(views), stream=lane.stream)
        except Exception as error:
            raise CaptureError(
                f"To measure its outputs the step was run at {other} rows, and raised "
                f"{type(error).__name__}: {error}. Give output_batch_dims, and it is not run so.",
                key=str(key),
                reason="output_layout",
            ) from error
        finally:
            lane.set_rows(size)
        return other, outputs

    # -- graphs -------------------------------------------------------------------------

    def _graph(self, run: Callable[[], Any], lane: Lane) -> CapturedGraph:
        return self._backend.capture(
            run, stream=lane.stream, pool=lane.pool, generators=self._generators
        )

    def _is_state(self, leaf: torch.Tensor) -> bool:
        return leaf in self._state or leaf in self._written

    def _homes(self, lane: Lane, outputs: Any) -> list[torch.Tensor | None]:
        """Return where the graph is to write each output; None where it stays as it is."""
        return [
            lane.outputs.take(index, leaf.shape, leaf.dtype)
            if self._share_outputs and isinstance(leaf, torch.Tensor) and not self._is_state(leaf)
            else None
            for index, leaf in enumerate(tree_leaves(outputs))
        ]

    def _writing_home(
        self, run: Callable[[], Any], homes: list[torch.Tensor | None], found: list[Any]
    ) -> Callable[[], Any]:
        """Return a callable that also brings its outputs to the lane's memory."""

        def captured() -> Any:
            leaves, spec = tree_flatten(run())
            targets = homes or [None] * len(leaves)
            if len(targets) != len(leaves):
                raise CaptureError(
                    f"The step returned {len(leaves)} values in the capture and "
                    f"{len(targets)} in the warmup; it must not depend on being captured.",
                    reason="output_layout",
                )
            for home, leaf in zip(targets, leaves, strict=True):
                if home is not None:
                    home.copy_(leaf)
            # Only what stays where it is may outlive the capture: the rest is free again.
            final = [
                leaf if home is None else home for home, leaf in zip(targets, leaves, strict=True)
            ]
            found[:] = [tree_unflatten(final, spec)]
            return found[0]

        return captured

    def _capture_full(
        self, key: GraphKey, lane: Lane, outputs: Any, layout: OutputLayout | None
    ) -> CapturedStep:
        views = self._views(lane, key.num_tokens)
        found: list[Any] = []
        homes = self._homes(lane, outputs) if layout is not None else []
        run = self._writing_home(lambda: self._step(views), homes, found)
        graph = self._graph(run, lane)
        return FullStep(**self._common(key, lane, found[0], layout, (graph,)))

    def _common(
        self,
        key: GraphKey,
        lane: Lane,
        outputs: Any,
        layout: OutputLayout | None,
        graphs: tuple[CapturedGraph, ...],
    ) -> dict[str, Any]:
        """Return the fields that every captured step has."""
        if layout is None:
            layout = declared_layout(outputs, key.num_tokens, self._batch_dims)
        elif not layout.fits(outputs, key.num_tokens):
            raise CaptureError(
                "The step's outputs were of another structure, shape or type in the capture "
                "than in the warmup; it must not depend on being captured.",
                key=str(key),
                reason="output_layout",
            )
        leaves = tuple(tree_leaves(outputs))
        return {
            "key": key,
            "lane": lane,
            "buffers": lane.buffers,
            "layout": layout,
            "leaves": leaves,
            "clones": tuple(
                isinstance(leaf, torch.Tensor) and not self._is_state(leaf) for leaf in leaves
            ),
            "graphs": graphs,
            "holds": (*self._state, *self._written, self._step),
            "guard": self._guard.now(),
            "has_effect": bool(len(self._state) or len(self._written))
            or any(graph.has_random_state for graph in graphs),
        }

    def _capture_pieces(
        self, key: GraphKey, lane: Lane, outputs: Any, layout: OutputLayout | None
    ) -> CapturedStep:
        """Capture piece by piece, replaying each so that eager pieces see real values."""
        views = self._views(lane, key.num_tokens)
        stable = Known([*views.values(), *self._scratch])
        parts: list[GraphPart | EagerPart] = []
        graphs: list[CapturedGraph] = []
        value: Any = None
        last = len(self._step.pieces) - 1
        try:
            for index, piece in enumerate(self._step.pieces):
                inputs = piece.pick(views)
                if not piece.is_graph:
                    value = piece.fn(*(() if index == 0 else (value,)), **inputs)
                    parts.append(EagerPart(piece, inputs, is_first=index == 0))
                    continue
                link = None
                args: tuple[Any, ...] = ()
                if index > 0:
                    link, static = self._link(lane, index, value, stable)
                    args = (static,)
                    if isinstance(parts[-1], GraphPart):
                        link = None  # straight from graph to graph: nothing moves
                found: list[Any] = []
                homes = self._homes(lane, outputs) if index == last and layout else []
                run = self._writing_home(_calling(piece.fn, args, inputs), homes, found)
                graph = self._graph(run, lane)
                graphs.append(graph)
                parts.append(GraphPart(graph, link, found[0]))
                graph.replay()
                value = found[0]
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        stable.add(leaf)
            common = self._common(key, lane, value, layout, tuple(graphs))
        except BaseException:
            for graph in graphs:
                graph.release()
            raise
        ends_eager = not self._step.pieces[last].is_graph
        if ends_eager:
            common["leaves"] = ()
        return PiecewiseStep(**common, parts=tuple(parts), ends_eager=ends_eager)

    def _link(self, lane: Lane, index: int, value: Any, stable: Known) -> tuple[Link, Any]:
        """Return how a value reaches the graph of a piece, and the static form of it."""
        leaves, spec = tree_flatten(value)
        link = Link([], [], [])
        static: list[Any] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                link.constants.append((number, leaf))
                static.append(leaf)
            elif leaf in stable or self._is_state(leaf):
                link.fixed.append((number, leaf.data_ptr(), leaf.shape))
                static.append(leaf)
            else:
                own = lane.between.take((index, number), leaf.shape, leaf.dtype)
                own.copy_(leaf)
                link.copies.append((number, own))
                static.append(own)
        return link, tree_unflatten(static, spec)


def _calling(
    fn: Callable[..., Any], args: tuple[Any, ...], inputs: Mapping[str, Any]
) -> Callable[[], Any]:
    return lambda: fn(*args, **inputs)
