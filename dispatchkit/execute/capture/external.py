"""External graphs, captured outside the runner, for example by an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from dispatchkit.errors import ConfigError, InputError, counted
from dispatchkit.execute.capture.captured import CapturedKey
from dispatchkit.execute.io.buffers import InputBuffers
from dispatchkit.execute.io.input_path import copied_path
from dispatchkit.execute.io.inputs import InputSet
from dispatchkit.execute.io.outputs import declared_layout
from dispatchkit.execute.io.structure import leaves_of
from dispatchkit.execute.lane import Lane
from dispatchkit.execute.step.guard import Fingerprint
from dispatchkit.keys.batch import GraphKey


@attrs.frozen
class _Replayable:
    """An external graph, adapted to the interface of captured graphs."""

    graph: Any
    outputs: Any
    has_random_state: bool = False

    def replay(self) -> None:
        self.graph.replay()

    def release(self) -> None:
        """Do nothing, because the owner releases the graph."""


def external_step(
    key: GraphKey,
    graph: Any,
    lane: Lane,
    inputs: InputSet,
    tensors: Mapping[str, torch.Tensor],
    outputs: Any,
    output_batch_dims: Any,
    *,
    guard: Fingerprint,
    has_effect: bool,
) -> CapturedKey:
    """Return a captured key for an external graph.

    Raises:
        ConfigError: The graph has no ``replay`` method.
        InputError: The tensors do not match the declared inputs at the key's size.
        CaptureError: The declared batch dimensions do not match the outputs.
    """
    if not callable(getattr(graph, "replay", None)):
        hint = "Pass the captured torch.cuda.CUDAGraph, for example."
        raise ConfigError("graph", graph, "an object with a replay() method", hint)
    bound = inputs.bind((), dict(tensors))
    rows, _ = inputs.as_device().check(bound)
    if rows != key.num_tokens:
        raise InputError(
            inputs.names[0],
            f"The input tensors of {key} must have {counted(key.num_tokens, 'row')}, got {rows}. "
            "Pass the tensors that the graph reads, and a key of the same size.",
        )
    layout = declared_layout(outputs, key.num_tokens, output_batch_dims)
    leaves = tuple(leaves_of(outputs))
    return CapturedKey(
        key=key,
        lane=lane,
        input_path=copied_path(
            InputBuffers(inputs, rows, bound),
            rows,
            "captured outside the runner",
            source=lane.buffers_of(key),
        ),
        layout=layout,
        leaves=leaves,
        clones=tuple(isinstance(leaf, torch.Tensor) for leaf in leaves),
        graphs=(_Replayable(graph, outputs),),
        guard=guard,
        has_effect=has_effect,
    )
