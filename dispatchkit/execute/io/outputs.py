"""Outputs: batch dimensions, shared output memory, and cutting to the real rows.

The batch dimension of an output is declared with ``output_batch_dims`` or measured by running the
step at two sizes. The dimension whose size equals the number of rows in both runs is the batch
dimension. A single run would not be enough, because another dimension may happen to have the same
size. An output is *open* in three cases: two dimensions may be the batch dimension, the two runs
return different numbers of dimensions, or another dimension differs in size between the runs. Open
outputs cannot be cut, so the graph serves only batches that fill its bucket.

The graphs of a lane can share output memory, because a lane runs one step at a time.
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
from dispatchkit.errors import CaptureError, ConfigError, counted, format_value
from dispatchkit.execute.io.static_input import Allocate, allocate_default
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
    """The layout of one leaf of the outputs.

    Attributes:
        kind: One of ``tensor``, ``open`` (a tensor that cannot be cut), ``value`` (a Python value
            that may depend on the number of rows), ``rows`` (a Python value that is declared to be
            the number of rows), ``constant`` (a Python value that is the same at all sizes) and
            ``kept`` (part of an object that the step keeps and returns every time).
        shape: Shape of a ``tensor``, with None as the batch dimension if it has one.
        dtype: Data type of a tensor.
        value: The Python value of a ``constant``, or an example of a ``value``.
    """

    kind: str
    shape: tuple[int | None, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None

    @property
    def batch_dim(self) -> int | None:
        """The index of the batch dimension, or None."""
        return self.shape.index(None) if None in self.shape else None

    def fits(self, leaf: Any, size: int) -> bool:
        """Return whether a leaf computed on ``size`` rows has this layout."""
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

    def describe(self, size: int) -> str:
        """Describe the leaf that this layout requires on ``size`` rows."""
        if self.kind == "tensor":
            shape = tuple(size if want is None else want for want in self.shape)
            return f"a {self.dtype} tensor of shape {shape}"
        if self.kind == "open":
            return f"a {self.dtype} tensor"
        if self.kind == "value":
            return f"a value of type {type(self.value).__name__}"
        return describe_value(size if self.kind == "rows" else self.value)

    @property
    def is_mutable_value(self) -> bool:
        """Whether the leaf is a ``value`` that a caller could modify."""
        return self.kind == "value" and not is_immutable(self.value)


@attrs.frozen
class OutputLayout:
    """The structure of a step's outputs and the layout of each leaf."""

    structure: Structure
    leaves: tuple[LeafLayout, ...]

    @property
    def has_values(self) -> bool:
        """Whether any leaf is a Python value that may depend on the number of rows."""
        return any(one.kind == "value" for one in self.leaves)

    @property
    def open_output(self) -> int | None:
        """The index of the first output that cannot be cut, or None."""
        found = (index for index, leaf in enumerate(self.leaves) if leaf.kind == "open")
        return next(found, None)

    def fits(self, outputs: Any, size: int) -> bool:
        """Return whether outputs computed on ``size`` rows have this layout."""
        return not self.mismatch(*flatten(outputs), size)

    def mismatch(self, leaves: Sequence[Any], structure: Structure, size: int) -> str:
        """Describe the first difference between flattened outputs and this layout.

        Args:
            leaves: Leaves computed on ``size`` rows.
            structure: Structure of the outputs.
            size: Number of rows.

        Returns:
            A clause such as "output 0 is 3 instead of 4"; empty if the outputs fit.
        """
        if structure != self.structure:
            return "the structure of the outputs is different"
        for index, (one, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if not one.fits(leaf, size):
                return f"output {index} is {describe_value(leaf)} instead of {one.describe(size)}"
        return ""

    def values(self, outputs: Any, size: int) -> dict[int, Any]:
        """Return the Python values in outputs computed on ``size`` rows, by leaf index.

        Raises:
            CaptureError: The outputs do not have this layout.
        """
        leaves, structure = flatten(outputs)
        if problem := self.mismatch(leaves, structure, size):
            raise CaptureError(
                f"The outputs at {counted(size, 'row')} do not match those at other sizes: "
                f"{problem}. Return the same structure, types, dtypes and shapes at all sizes, "
                "apart from the batch dimension.",
                reason="output_layout",
            )
        return {
            index: leaves[index] for index, one in enumerate(self.leaves) if one.kind == "value"
        }


def describe_value(value: Any) -> str:
    """Describe a tensor by its dtype and shape, and any other value by its repr."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return format_value(value)


def _undeclared(index: int, problem: str) -> CaptureError:
    return CaptureError(
        f"Output {index} {problem}. Declare its batch dimension with output_batch_dims (the index "
        "of the dimension, or None for an output without a batch dimension).",
        reason="output_layout",
    )


def measure_layout(first: Any, size: int, second: Any, other_size: int) -> OutputLayout:
    """Derive the output layout from outputs computed at two sizes.

    Raises:
        CaptureError: The outputs differ in structure or type, or contain a tensor subclass; the
            reason is ``output_layout``.
    """
    leaves, structure = flatten(first)
    others, other_structure = flatten(second)
    if structure != other_structure:
        raise CaptureError(
            f"The structure of the outputs depends on the number of rows: {structure} at "
            f"{counted(size, 'row')}, {other_structure} at {counted(other_size, 'row')}. Return "
            "the same structure at all sizes.",
            reason="output_layout",
        )
    structure = structure.with_kept_objects(first, second)
    found = []
    for index, (leaf, other, is_kept) in enumerate(
        zip(leaves, others, structure.kept_leaves(), strict=True)
    ):
        if is_kept:
            found.append(LeafLayout("kept"))
            continue
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) is not type(other):
                raise CaptureError(
                    f"Output {index} has type {type(leaf).__name__} at {counted(size, 'row')}, but "
                    f"{type(other).__name__} at {counted(other_size, 'row')}. Return the same "
                    "type at all sizes.",
                    reason="output_layout",
                )
            is_object = leaf is other and not is_immutable(leaf)  # an object that the step keeps
            # The value at another size is measured when a batch of that size first occurs.
            kind = "constant" if leaf is None or is_object else "value"
            found.append(LeafLayout(kind, value=leaf))
            continue
        if type(leaf) not in _PLAIN_TENSORS:
            raise CaptureError(
                f"Output {index} has type {type(leaf).__name__}, but graphs return plain tensors. "
                "Return a plain tensor, for example output.as_subclass(torch.Tensor), and convert "
                "it outside the step.",
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
    """Return the output layout that follows from ``output_batch_dims``.

    Args:
        outputs: Outputs of the step.
        size: Number of rows that the outputs were computed on.
        batch_dims: Value of ``output_batch_dims``: an index or None for all outputs, or a structure
            with one entry per output.

    Raises:
        CaptureError: The declaration does not match the outputs; reason ``output_layout``.
    """
    leaves, structure = flatten(outputs)
    whole = batch_dims is None or isinstance(batch_dims, int)
    dims = [batch_dims] * len(leaves) if whole else tree_leaves(batch_dims)
    if len(dims) != len(leaves):
        raise CaptureError(
            f"output_batch_dims describes {counted(len(dims), 'output')}, but the step returns "
            f"{len(leaves)}. Pass a structure with one entry per output, or a single index or None "
            "for all outputs.",
            reason="output_layout",
        )
    found = []
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            if whole and is_same_value(leaf, size):
                raise CaptureError(
                    f"Output {index} is {leaf!r}, which may be the number of rows or a constant. "
                    "Pass output_batch_dims as a structure with one entry per output. For this "
                    "output, enter 0 if it is the number of rows, or None if it is a constant.",
                    reason="output_layout",
                )
            is_rows = dim is not None and is_same_value(leaf, size)
            found.append(LeafLayout("rows") if is_rows else LeafLayout("constant", value=leaf))
            continue
        shape: list[int | None] = list(leaf.shape)
        if dim is not None:
            if not -leaf.dim() <= dim < leaf.dim() or leaf.shape[dim] != size:
                raise CaptureError(
                    f"Output {index} has shape {tuple(leaf.shape)} at {counted(size, 'row')}, but "
                    f"output_batch_dims declares dimension {dim} as its batch dimension. Declare a "
                    f"dimension of size {size}, or None if this output has no batch dimension. To "
                    "declare each output separately, pass a structure with one entry per output.",
                    reason="output_layout",
                )
            shape[dim] = None
        found.append(LeafLayout("tensor", tuple(shape), leaf.dtype))
    return OutputLayout(structure, tuple(found))


def check_batch_dims(value: Any, *, may_derive: bool = False) -> None:
    """Raise ConfigError unless ``value`` is a valid ``output_batch_dims``.

    Args:
        value: Value to check.
        may_derive: Whether ``"derived"`` is allowed.
    """
    if may_derive and value == DERIVED:
        return
    for dim in tree_leaves(value):
        if dim is not None and whole_number(dim) is None:
            allowed = (
                "the index of a dimension, None, or a structure with an index or None per output"
            )
            if may_derive:
                allowed = f"{DERIVED!r}, {allowed}"
            raise ConfigError("output_batch_dims", value, allowed)


class SharedMemory:
    """Output memory shared by the graphs of a lane, with one block per slot.

    A slot is any hashable value that identifies an output, usually its index. If the largest graph
    is captured first, the outputs of smaller graphs fit into its blocks. If a later graph needs a
    larger block, the slot gets a new block, and earlier graphs keep the old block alive.

    Args:
        device: Device of the memory.
        allocate: Function that allocates a tensor, for example in a graph pool.
    """

    def __init__(
        self,
        device: torch.device,
        allocate: Allocate = allocate_default,
    ) -> None:
        self._device, self._allocate = device, allocate
        self._blocks: dict[Any, torch.Tensor] = {}
        self._replaced: list[tuple[StorageWeakRef, int]] = []

    def tensor_at(self, slot: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor at the start of a slot's block.

        If the slot has no block, or its block is too small, allocate a new block.
        """
        num_bytes = _num_bytes(shape, dtype)
        if growth := self.growth(slot, shape, dtype):
            if (old := self._blocks.get(slot)) is not None:
                self._replaced.append((StorageWeakRef(old.untyped_storage()), old.numel()))
            with inference_mode(False):
                self._blocks[slot] = self._allocate(
                    lambda: torch.zeros(growth, dtype=torch.uint8, device=self._device)
                )
        with inference_mode(False):
            return self._blocks[slot][:num_bytes].view(dtype).view(tuple(shape))

    def growth(self, slot: Any, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that ``tensor_at`` would allocate; 0 if the block is large enough."""
        num_bytes = _num_bytes(shape, dtype)
        block = self._blocks.get(slot)
        return 0 if block is not None and block.numel() >= num_bytes else max(num_bytes, 16)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in a current block."""
        return self.owns(tensor.untyped_storage())

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage belongs to a current block."""
        identity = storage._cdata
        return any(block.untyped_storage()._cdata == identity for block in self._blocks.values())

    def clear(self) -> None:
        """Release all blocks; existing tensors in them stay valid."""
        for block in self._blocks.values():
            self._replaced.append((StorageWeakRef(block.untyped_storage()), block.numel()))
        self._blocks.clear()

    @property
    def num_bytes(self) -> int:
        """The size of all live blocks in bytes, including replaced blocks still in use."""
        self._replaced = [pair for pair in self._replaced if not pair[0].expired()]
        replaced = sum(num_bytes for _, num_bytes in self._replaced)
        return replaced + sum(block.numel() for block in self._blocks.values())


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def cut(
    layout: OutputLayout, leaves: Sequence[Any], num_rows: int, values: Mapping[int, Any]
) -> list[Any]:
    """Cut padded output leaves to the real rows.

    Args:
        layout: Layout of the leaves.
        leaves: Leaves computed at the bucket of the graph.
        num_rows: Number of real rows.
        values: Python values measured at this number of rows, by index of the leaf to replace.

    Raises:
        CaptureError: A leaf has fewer rows than the call; reason ``output_layout``.
    """
    result: list[Any] = []
    for index, (one, leaf) in enumerate(zip(layout.leaves, leaves, strict=True)):
        if one.kind == "rows":
            result.append(num_rows)
        elif one.kind == "constant":
            result.append(one.value)
        elif one.kind in ("value", "kept"):
            result.append(values.get(index, leaf))
        elif (dim := one.batch_dim) is None:  # includes open outputs, which are never cut
            result.append(leaf)
        elif leaf.shape[dim] < num_rows:
            raise _undeclared(
                index,
                f"has only {counted(leaf.shape[dim], 'row')} in a call with "
                f"{counted(num_rows, 'row')}",
            )
        else:
            result.append(leaf.narrow(dim, 0, num_rows))
    return result
