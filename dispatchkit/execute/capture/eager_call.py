"""EagerCall: a call between two segments of a step, repeated at each replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import torch

from dispatchkit.execute.io.structure import Structure, flatten, is_same_value

#: Number of row counts whose views are cached.
_MAX_VIEWS: Final = 64


class DifferentResultError(Exception):
    """A call between two segments returned something different than in the capture.

    Args:
        line: File and line of the call.
        problem: The difference.
    """

    def __init__(self, line: str, problem: str) -> None:
        self.line, self.problem = line, problem
        super().__init__(f"{line}: {problem}")


@attrs.frozen(eq=False)
class Result:
    """One value that a call returned in the capture.

    Attributes:
        value: What later segments read: a tensor, or a Python value built into them.
        is_copied: It is in the lane's memory, and each result is copied to it. Otherwise each call
            returns the same memory: an argument, a static input or state.
        stride: Strides of the returned tensor, which may differ from the copy's.
        batch_dim: The batch dimension of the copy, as measured at two sizes.
    """

    value: Any
    is_copied: bool = False
    stride: tuple[int, ...] = ()
    batch_dim: int | None = None

    def difference(self, now: Any) -> str:
        """Describe how a value differs from the capture; empty if it does not."""
        was = self.value
        if not isinstance(was, torch.Tensor):
            return "" if is_same_value(was, now) else f"{was!r:.40} in the capture, {now!r:.40} now"
        if not isinstance(now, torch.Tensor):
            return f"a tensor in the capture, {now!r:.40} now"
        if now.shape != was.shape:
            return f"of shape {tuple(was.shape)} in the capture, {tuple(now.shape)} now"
        if now.dtype is not was.dtype or now.device != was.device:
            return f"{was.dtype} on {was.device} in the capture, {now.dtype} on {now.device} now"
        if now.stride() != self.stride:
            return f"with strides {self.stride} in the capture, {now.stride()} now"
        if not self.is_copied and now.data_ptr() != was.data_ptr():
            return "in existing memory in the capture, in other memory now"
        return ""


@attrs.define(eq=False)
class EagerCall:
    """A call that runs eager between two segments, in the capture and at each replay.

    Attributes:
        fn: The function.
        args: Its arguments, whose tensors are kept alive here.
        kwargs: Its keyword arguments.
        line: File and line of the call.
        around: Enters the contexts that the step had active at the call, such as autocast; None if
            there were none.
        results: Its results, flattened.
        structure: Their structure.
        written: Arguments that it writes, with the batch dimension of each.
        num_rows: Rows of the graph.
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
        """Whether it returns anything new, which may differ at a replay."""
        return any(one.is_copied or one.value is not None for one in self.results)

    def run(self, num_rows: int) -> None:
        """Call it and pass its results to the next segment.

        Rows beyond the batch are cleared, since a call may leave anything there.

        Args:
            num_rows: Rows of the batch.

        Raises:
            DifferentResultError: Its results differ from those of the capture.
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
        """Return the results to copy.

        Raises:
            DifferentResultError: A result differs from the capture.
        """
        results = self.results
        if len(results) == 1 and self.structure.is_leaf:
            leaves = [value]
        else:
            leaves, structure = flatten(value)
            if structure != self.structure:
                problem = f"{len(results)} values in the capture, {len(leaves)} now"
                raise DifferentResultError(self.line, problem + ", or in a different structure")
        copies = []
        for number, (result, leaf) in enumerate(zip(results, leaves, strict=True)):
            if problem := result.difference(leaf):
                raise DifferentResultError(self.line, f"result {number} was {problem}")
            if result.is_copied:
                copies.append((result, leaf))
        return copies

    def _views_at(self, num_rows: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Return each copied result's rows of a batch, and the rows after the batch."""
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
