"""Check mode: compare the state after a replay with the state after an eager run.

Padding rows may write to a *sink*: elements of the state that no row of a batch uses. An eager run
does not write there. The sink need not be declared: it consists of the elements that only padding
has changed. If padding changes an element that rows of a batch have also changed, the fill value of
an input points to state in use. Changes made by other runners and by replays that are not compared
are not recorded. Eager steps are recorded only if every replay is compared (``check=1``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch

from dispatchkit.errors import counted
from dispatchkit.execute.step.state import Snapshot, typed

#: The storages that a step changes, by name, with their dtype.
State = Mapping[str, tuple[torch.UntypedStorage, torch.dtype]]

#: Number of elements compared at a time, which limits the memory of a comparison.
_CHUNK: Final = 1 << 22


@attrs.define
class _Differences:
    """Differences between a replay and an eager run.

    Attributes:
        number: Number of elements that differ.
        first: Index of the first element that differs.
        is_any_by_rows: Whether the eager run changed any of these elements in this step.
    """

    number: int = 0
    first: int = 0
    is_any_by_rows: bool = False

    def add(self, wrong: torch.Tensor, by_rows: torch.Tensor, offset: int) -> None:
        """Add the differences of a chunk that starts at an offset."""
        number = int(torch.count_nonzero(wrong))
        if number and not self.number:
            self.first = offset + int(wrong.view(torch.uint8).argmax())
        self.number += number
        self.is_any_by_rows |= bool(number) and bool((wrong & by_rows).any())


class StateCheck:
    """A comparison of the state after a replay with the state after an eager run of the same step.

    State of dtypes that torch cannot compare (quantized, bits, four-bit floats) is skipped.

    Args:
        state: Function that returns the state known to change in a step.
        relative: Relative tolerance for floats.
        absolute: Absolute tolerance for floats.
    """

    def __init__(self, state: Callable[[], State], relative: float, absolute: float) -> None:
        self._state, self._relative, self._absolute = state, relative, absolute
        # For each element, whether rows of a batch have changed it so far.
        self._changed: dict[str, torch.Tensor] = {}

    def now(self) -> dict[str, torch.Tensor]:
        """Return copies of the current state."""
        return {
            name: typed(storage, dtype).clone()
            for name, (storage, dtype) in self._state().items()
            if is_comparable(dtype, storage.device)
        }

    def difference(
        self, before: Snapshot, replayed: Mapping[str, torch.Tensor], *, is_padded: bool
    ) -> str:
        """Describe how the current state differs from the state after the replay; empty if equal.

        Args:
            before: State before the step, from which both runs started.
            replayed: Result of ``now`` after the replay.
            is_padded: Whether the replay had padding rows.
        """
        found = []
        for name, (storage, dtype) in self._state().items():
            if name not in replayed:
                continue
            want, old = typed(storage, dtype), before.saved(storage, dtype)
            said = self._resized(name, replayed[name], want, old)
            if said:
                found.append(said)
                continue
            wrong = self._compare(name, replayed[name], want, old, is_padded=is_padded)
            if wrong.number:
                got, eager = (comparable(one[wrong.first]).item() for one in (replayed[name], want))
                where = "differ, the first" if wrong.number > 1 else "differs,"
                found.append(
                    f"{wrong.number} of {counted(want.numel(), 'element')} of {name} {where} at "
                    f"index {wrong.first}: {got} in the replay, {eager} in the eager run."
                )
                if is_padded and not wrong.is_any_by_rows:
                    found.append(
                        "The rows of this batch do not change these elements in an eager run, so "
                        "padding rows probably changed them. Choose fill values that refer to "
                        "elements that no batch uses."
                    )
        return " ".join(found)

    def note(self, before: Mapping[str, torch.Tensor]) -> None:
        """Record the elements that an eager step changed.

        Args:
            before: Result of ``now`` before the step.
        """
        for name, (storage, dtype) in self._state().items():
            if name in before:
                want, old = typed(storage, dtype), before[name]
                if not self._resized(name, want, want, old):
                    self._compare(name, want, want, old, is_padded=False)

    def _resized(self, name: str, got: torch.Tensor, want: torch.Tensor, old: torch.Tensor) -> str:
        """Describe a change in size; empty if there is none.

        A change in size or device resets the record of changed elements.
        """
        changed = self._changed.get(name)
        before = old if changed is None else changed
        sizes = [one.numel() for one in (before, old, got, want)]
        if changed is None or changed.device != want.device or len(set(sizes)) > 1:
            self._changed[name] = torch.zeros_like(want, dtype=torch.bool)
        if len(set(sizes)) == 1:
            return ""
        return (
            f"{name} was resized. It had {counted(sizes[0], 'element')} when last compared, "
            f"{sizes[1]:,} before the step, {sizes[2]:,} after the replay and {sizes[3]:,} after "
            "the eager run."
        )

    def _compare(
        self,
        name: str,
        got: torch.Tensor,
        want: torch.Tensor,
        old: torch.Tensor,
        *,
        is_padded: bool,
    ) -> _Differences:
        found = _Differences()
        parts = (one.split(_CHUNK) for one in (got, want, old, self._changed[name]))
        for number, (*values, changed) in enumerate(zip(*parts, strict=True)):
            got, want, old = map(comparable, values)
            by_rows = (want != old) & ~(want.isnan() & old.isnan())
            changed |= by_rows
            if torch.equal(got, want):
                continue
            wrong = ~self._is_close(got, want, tolerance(values[0].dtype, self._relative))
            if is_padded:
                wrong &= changed
            found.add(wrong, by_rows, number * _CHUNK)
        return found

    def _is_close(self, got: torch.Tensor, want: torch.Tensor, relative: float) -> torch.Tensor:
        if not (want.dtype.is_floating_point or want.dtype.is_complex):
            return got == want
        return torch.isclose(got, want, rtol=relative, atol=self._absolute, equal_nan=True)


def is_coarse(value: Any) -> bool:
    """Return whether a value is a tensor of one-byte floats."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize == 1


def tolerance(dtype: torch.dtype, relative: float) -> float:
    """Return the relative tolerance for a dtype, which is larger for one-byte floats."""
    is_float = dtype.is_floating_point and dtype.itemsize == 1
    return max(relative, torch.finfo(dtype).eps) if is_float else relative


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that torch can compare, converted if necessary."""
    if tensor.dtype is torch.complex32:
        return tensor.to(torch.complex64)
    return tensor.float() if is_coarse(tensor) else tensor


@functools.cache
def is_comparable(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch can compare a dtype on a device."""
    try:
        one = comparable(torch.empty(1, dtype=dtype, device=device))
        torch.isclose(one, one)
        torch.equal(one, one)
    except RuntimeError:  # includes NotImplementedError
        return False
    return not one.is_quantized
