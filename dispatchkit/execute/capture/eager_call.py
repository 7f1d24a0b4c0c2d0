"""EagerCall: a call between two segments of a step, repeated in each replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import torch

from dispatchkit.errors import counted, format_value
from dispatchkit.execute.io.structure import Structure, flatten, is_same_value

#: Maximum number of batch sizes whose views are cached.
_MAX_VIEWS: Final = 64


class DifferentResultError(Exception):
    """A call between two segments returned a different value than in the capture.

    Args:
        line: File and line of the call.
        problem: Description of the difference.
    """

    def __init__(self, line: str, problem: str) -> None:
        self.line, self.problem = line, problem
        super().__init__(f"{line}: {problem}")


@attrs.frozen(eq=False)
class Result:
    """One value that a call returned in the capture.

    Attributes:
        value: Tensor that later segments read, or Python value that is built into them.
        is_copied: Whether ``value`` is in memory of the lane and each result is copied into it.
            If False, each call must return the same tensor memory (an argument, a static input or
            state) or an equal Python value.
        stride: Strides of the returned tensor, which may differ from those of the copy.
        batch_dim: Batch dimension of the copy, measured at two sizes; None if it is not batched.
    """

    value: Any
    is_copied: bool = False
    stride: tuple[int, ...] = ()
    batch_dim: int | None = None

    def difference(self, now: Any) -> str:
        """Return how a value differs from this result, as the end of a sentence; empty if equal."""
        was = self.value
        if not isinstance(was, torch.Tensor):
            return (
                ""
                if is_same_value(was, now)
                else f"was {format_value(was)} in the capture and is {format_value(now)} now"
            )
        if not isinstance(now, torch.Tensor):
            return f"was a tensor in the capture and is {format_value(now)} now"
        if now.shape != was.shape:
            return (
                f"had shape {tuple(was.shape)} in the capture and has shape {tuple(now.shape)} now"
            )
        if now.dtype is not was.dtype or now.device != was.device:
            return (
                f"was a {was.dtype} tensor on {was.device} in the capture and is a {now.dtype} "
                f"tensor on {now.device} now"
            )
        if now.stride() != self.stride:
            return f"had strides {self.stride} in the capture and has strides {now.stride()} now"
        if not self.is_copied and now.data_ptr() != was.data_ptr():
            return "was an argument, an input or state in the capture and is another tensor now"
        return ""


@attrs.define(eq=False)
class EagerCall:
    """A call that runs eager between two segments, in the capture and in each replay.

    Attributes:
        fn: Function to call.
        args: Positional arguments. Tensors are kept alive here, unless segments allocated them.
        kwargs: Keyword arguments, kept alive in the same way.
        line: File and line of the call.
        around: Function that returns a context manager for the contexts active at the call, such as
            autocast; None if no context was active.
        results: Flattened results of the capture.
        structure: Structure of the results.
        written: Arguments that the call writes, each with its batch dimension.
        num_rows: Number of rows that the graph computes.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    line: str
    around: Callable[[], AbstractContextManager[Any]] | None
    results: tuple[Result, ...]
    structure: Structure
    written: tuple[tuple[torch.Tensor, int], ...]
    num_rows: int
    _views: dict[int, tuple[list[Any], list[torch.Tensor]]] = attrs.field(factory=dict)

    @property
    def may_differ(self) -> bool:
        """Whether the call returns a value that may differ in a replay."""
        return any(one.is_copied or one.value is not None for one in self.results)

    def run(self, num_rows: int) -> None:
        """Make the call and pass its results to the next segment.

        Padding rows are set to zero, because the call may write arbitrary values there.

        Args:
            num_rows: Number of rows in the batch.

        Raises:
            DifferentResultError: A result differs from the capture.
        """
        if self.around is None:
            value = self.fn(*self.args, **self.kwargs)
        else:
            with self.around():
                value = self.fn(*self.args, **self.kwargs)
        copies = self._compared(value)
        if num_rows == self.num_rows:
            for result, leaf in copies:
                result.value.copy_(leaf)
            return
        fronts, tails = self._views_at(num_rows)
        for (result, leaf), front in zip(copies, fronts, strict=True):
            dim = result.batch_dim
            front.copy_(leaf if dim is None else leaf.narrow(dim, 0, num_rows))
        if len(tails) == 1:
            tails[0].zero_()
        elif tails:
            torch._foreach_zero_(tails)

    def _compared(self, value: Any) -> Sequence[tuple[Result, torch.Tensor]]:
        """Compare the results with the capture, and return the results that must be copied.

        Raises:
            DifferentResultError: A result differs from the capture.
        """
        results = self.results
        if len(results) == 1 and self.structure.is_leaf:
            leaves = [value]
        else:
            leaves, structure = flatten(value)
            if structure != self.structure:
                problem = "the returned values have a different structure than in the capture"
                if len(leaves) != len(results):
                    got = counted(len(leaves), "value")
                    problem = f"the call returned {got} instead of {len(results)}"
                raise DifferentResultError(self.line, problem)
        copies = []
        for number, (result, leaf) in enumerate(zip(results, leaves, strict=True)):
            if problem := result.difference(leaf):
                raise DifferentResultError(self.line, f"result {number} {problem}")
            if result.is_copied:
                copies.append((result, leaf))
        return copies

    def _views_at(self, num_rows: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Return views of the batch rows in copied results, and of the padding rows to clear."""
        found = self._views.get(num_rows)
        if found is not None:
            return found
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        behind = self.num_rows - num_rows
        copied = [(one.value, one.batch_dim) for one in self.results if one.is_copied]
        fronts = [
            tensor if dim is None else tensor.narrow(dim, 0, num_rows) for tensor, dim in copied
        ]
        tails = [
            tensor.narrow(dim, num_rows, behind)
            for tensor, dim in (*copied, *self.written)
            if dim is not None
        ]
        found = self._views[num_rows] = fronts, tails
        return found
