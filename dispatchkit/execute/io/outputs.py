"""Outputs: their batch dimensions, the memory that graphs write to, and cutting.

The batch dimension of an output is declared (``output_batch_dims``) or measured: the step runs at
two sizes, and the one dimension that equals the size both times is the batch. Equality at one size
would prove nothing. An output with two candidates, or with a dimension that grows differently, is
*open*: it cannot be cut, so that only full buckets replay.

All graphs of a lane write their outputs to shared memory, since a lane runs one step at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from dispatchkit.backends.watching.dispatch_mode import inference_mode
from dispatchkit.errors import CaptureError, ConfigError
from dispatchkit.execute.io.static_input import Allocate, plainly
from dispatchkit.execute.io.structure import (
    Structure,
    flatten,
    is_immutable,
    is_same_value,
)
from dispatchkit.keys.checks import whole_number
from dispatchkit.options import DERIVED

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@attrs.frozen
class LeafLayout:
    """One leaf of the outputs.

    Attributes:
        kind: ``tensor``; ``open``, a tensor that cannot be cut; ``value``, a Python value that may
            depend on the number of rows; ``rows``, a number declared to be the number of rows;
            ``constant``, a value declared to be constant; or ``kept``, in an object that the step
            itself keeps.
        shape: A tensor's shape with None at its batch dimension.
        dtype: A tensor's type.
        value: A constant's value, or the value at some number of rows.
    """

    kind: str
    shape: tuple[int | None, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None

    @property
    def batch_dim(self) -> int | None:
        """Index of the batch dimension, or None."""
        return self.shape.index(None) if None in self.shape else None

    def fits(self, leaf: Any, size: int) -> bool:
        """Return whether a leaf computed at a size has this layout."""
        if self.kind == "tensor":
            return (
                isinstance(leaf, torch.Tensor)
                and leaf.dtype is self.dtype
                and leaf.dim() == len(self.shape)
                and all(
                    have == (size if want is None else want)
                    for have, want in zip(leaf.shape, self.shape, strict=True)
                )
            )
        if self.kind == "open":
            return isinstance(leaf, torch.Tensor) and leaf.dtype is self.dtype
        if self.kind == "kept":
            return True
        if isinstance(leaf, torch.Tensor):
            return False
        if self.kind == "value":
            return type(leaf) is type(self.value)
        return is_same_value(leaf, size if self.kind == "rows" else self.value)

    @property
    def is_mutable_value(self) -> bool:
        """Whether a caller could modify such a value."""
        return self.kind == "value" and not is_immutable(self.value)


@attrs.frozen
class OutputLayout:
    """The structure of a step's outputs and the layout of each leaf."""

    structure: Structure
    leaves: tuple[LeafLayout, ...]

    @property
    def has_values(self) -> bool:
        """Whether there are values that may depend on the number of rows."""
        return any(one.kind == "value" for one in self.leaves)

    @property
    def open_output(self) -> int | None:
        """Index of the first output that cannot be cut to a batch, or None."""
        found = (index for index, leaf in enumerate(self.leaves) if leaf.kind == "open")
        return next(found, None)

    def fits(self, outputs: Any, size: int) -> bool:
        """Return whether outputs computed at a size have this layout."""
        leaves, structure = flatten(outputs)
        return structure == self.structure and all(
            one.fits(leaf, size) for one, leaf in zip(self.leaves, leaves, strict=True)
        )

    def values(self, outputs: Any, size: int) -> dict[int, Any]:
        """Return the Python values of outputs computed at a size, by leaf.

        Raises:
            CaptureError: The outputs have a different layout.
        """
        leaves, structure = flatten(outputs)
        fits = structure == self.structure and len(leaves) == len(self.leaves)
        for index, one in enumerate(self.leaves):
            if not fits or not one.fits(leaves[index], size):
                raise CaptureError(
                    f"Output {index} at {size} rows has a different structure than at other sizes.",
                    reason="output_layout",
                )
        return {
            index: leaves[index] for index, one in enumerate(self.leaves) if one.kind == "value"
        }


def _undeclared(index: int, problem: str) -> CaptureError:
    return CaptureError(
        f"Output {index} {problem}. Declare which dimension is the batch with "
        "output_batch_dims (an index, or None for outputs without one).",
        reason="output_layout",
    )


def measure_layout(first: Any, size: int, second: Any, other_size: int) -> OutputLayout:
    """Return the common layout of outputs computed at two sizes.

    Raises:
        CaptureError: The layouts differ, with reason ``output_layout``.
    """
    leaves, structure = flatten(first)
    others, other_structure = flatten(second)
    if structure != other_structure:
        raise CaptureError(
            f"The structure of the outputs depends on the batch: {structure} at {size} rows, "
            f"{other_structure} at {other_size}.",
            reason="output_layout",
        )
    structure = structure.keeping(first, second)
    found = []
    for index, (leaf, other, is_kept) in enumerate(
        zip(leaves, others, structure.kept(), strict=True)
    ):
        if is_kept:
            found.append(LeafLayout("kept"))
            continue
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) is not type(other):
                raise CaptureError(
                    f"Output {index} is a {type(leaf).__name__} at {size} rows and a "
                    f"{type(other).__name__} at {other_size}. Return the same kind of value for "
                    "all sizes.",
                    reason="output_layout",
                )
            is_object = leaf is other and not is_immutable(leaf)  # an object that the step keeps
            # Other values at a number of rows are measured when that number occurs.
            kind = "constant" if leaf is None or is_object else "value"
            found.append(LeafLayout(kind, value=leaf))
            continue
        if type(leaf) not in _PLAIN_TENSORS:
            raise CaptureError(
                f"Output {index} is a {type(leaf).__name__}, but a graph computes plain tensors. "
                "Return as_subclass(torch.Tensor), and convert it outside the step.",
                reason="output_layout",
            )
        if not isinstance(other, torch.Tensor) or other.dim() != leaf.dim():
            found.append(LeafLayout("open", dtype=leaf.dtype))
            continue
        pairs = list(zip(leaf.shape, other.shape, strict=True))
        batch = [dim for dim, pair in enumerate(pairs) if pair == (size, other_size)]
        moved = [dim for dim, (have, then) in enumerate(pairs) if have != then]
        if len(batch) > 1 or moved != batch:
            found.append(LeafLayout("open", dtype=leaf.dtype))
            continue
        shape: list[int | None] = list(leaf.shape)
        if batch:
            shape[batch[0]] = None
        found.append(LeafLayout("tensor", tuple(shape), leaf.dtype))
    return OutputLayout(structure, tuple(found))


def declared_layout(outputs: Any, size: int, batch_dims: Any) -> OutputLayout:
    """Return the layout declared by the user, for outputs computed at a size.

    Args:
        outputs: The outputs of the step.
        size: Number of rows that it ran at.
        batch_dims: An index or None for all outputs, or a structure with one per output.

    Raises:
        CaptureError: It does not match the outputs, with reason ``output_layout``.
    """
    leaves, structure = flatten(outputs)
    whole = batch_dims is None or isinstance(batch_dims, int)
    dims = [batch_dims] * len(leaves) if whole else tree_leaves(batch_dims)
    if len(dims) != len(leaves):
        raise CaptureError(
            f"output_batch_dims has {len(dims)} entries, but the step returns {len(leaves)} "
            "outputs.",
            reason="output_layout",
        )
    found = []
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            if whole and is_same_value(leaf, size):
                raise CaptureError(
                    f"Output {index} is the number {leaf!r}, equal to the rows it was computed "
                    "at. Give output_batch_dims as a structure: 0 for it if it is the number of "
                    "rows, None if it is a constant.",
                    reason="output_layout",
                )
            is_rows = dim is not None and is_same_value(leaf, size)
            found.append(LeafLayout("rows") if is_rows else LeafLayout("constant", value=leaf))
            continue
        shape: list[int | None] = list(leaf.shape)
        if dim is not None:
            if not -leaf.dim() <= dim < leaf.dim() or leaf.shape[dim] != size:
                raise CaptureError(
                    f"Output {index} has shape {tuple(leaf.shape)} at {size} rows, but "
                    f"output_batch_dims declares dimension {dim} as the batch.",
                    reason="output_layout",
                )
            shape[dim] = None
        found.append(LeafLayout("tensor", tuple(shape), leaf.dtype))
    return OutputLayout(structure, tuple(found))


def check_batch_dims(value: Any) -> None:
    """Raise ConfigError unless a value is valid as ``output_batch_dims``."""
    if value == DERIVED:
        return
    for dim in tree_leaves(value):
        if dim is not None and whole_number(dim) is None:
            raise ConfigError("output_batch_dims", value, "an index, None, or a structure of these")


class SharedMemory:
    """Output memory that a lane's graphs share, by slot; each graph uses the front.

    The largest graph is captured first, so that the others fit into its memory. A graph that needs
    more gets new memory, and earlier graphs keep theirs.

    Args:
        device: The device.
        allocate: Calls a function that creates a tensor, in a pool's memory.
    """

    def __init__(
        self,
        device: torch.device,
        allocate: Allocate = plainly,
    ) -> None:
        self._device, self._allocate = device, allocate
        self._blocks: dict[Any, torch.Tensor] = {}
        self._replaced: list[tuple[StorageWeakRef, int]] = []

    def take(self, place: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor at the front of a slot's memory."""
        num_bytes = _num_bytes(shape, dtype)
        if growth := self.growth(place, shape, dtype):
            if (old := self._blocks.get(place)) is not None:
                self._replaced.append((StorageWeakRef(old.untyped_storage()), old.numel()))
            with inference_mode(False):
                self._blocks[place] = self._allocate(
                    lambda: torch.zeros(growth, dtype=torch.uint8, device=self._device)
                )
        with inference_mode(False):
            return self._blocks[place][:num_bytes].view(dtype).view(tuple(shape))

    def growth(self, place: Any, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that taking a tensor would add; earlier graphs keep their memory."""
        num_bytes = _num_bytes(shape, dtype)
        block = self._blocks.get(place)
        return 0 if block is not None and block.numel() >= num_bytes else max(num_bytes, 16)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the current memory."""
        return self.owns(tensor.untyped_storage())

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is current memory."""
        identity = storage._cdata
        return any(block.untyped_storage()._cdata == identity for block in self._blocks.values())

    def clear(self) -> None:
        """Release all memory; tensors taken from it keep theirs."""
        for block in self._blocks.values():
            self._replaced.append((StorageWeakRef(block.untyped_storage()), block.numel()))
        self._blocks.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes alive now, including replaced memory that graphs still use."""
        self._replaced = [pair for pair in self._replaced if not pair[0].expired()]
        replaced = sum(num_bytes for _, num_bytes in self._replaced)
        return replaced + sum(block.numel() for block in self._blocks.values())


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def cut(
    layout: OutputLayout, leaves: Sequence[Any], num_rows: int, values: Mapping[int, Any]
) -> list[Any]:
    """Return padded leaves cut to the real rows; too short a leaf is an error.

    Args:
        layout: The layout of the leaves.
        leaves: The leaves, computed at the size of the graph.
        num_rows: The real rows.
        values: Python values at this number of rows, by leaf, if they may differ.

    Raises:
        CaptureError: A leaf has fewer rows than the call, with reason ``output_layout``.
    """
    result: list[Any] = []
    for index, (one, leaf) in enumerate(zip(layout.leaves, leaves, strict=True)):
        if one.kind == "rows":
            result.append(num_rows)
        elif one.kind == "constant":
            result.append(one.value)
        elif one.kind in ("value", "kept"):
            result.append(values.get(index, leaf))
        elif (dim := one.batch_dim) is None:  # also for open ones, which are never cut
            result.append(leaf)
        elif leaf.shape[dim] < num_rows:
            raise _undeclared(index, f"has {leaf.shape[dim]} rows for a call of {num_rows}")
        else:
            result.append(leaf.narrow(dim, 0, num_rows))
    return result
