"""What check mode compares of the state that a step changes.

Rows of fill may write to a place that no row of a batch uses, a sink, and eager does not write
there. Where that is need not be declared: it is what fill alone has ever changed. Once both have
changed the same element, the fill of some input names a place that is not free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dispatchkit.execute.state import Snapshot, typed

#: Storages that a step changes, by name, with the type of what is in them.
State = Mapping[str, tuple[torch.UntypedStorage, torch.dtype]]

_BY_ROWS, _BY_FILL = 1, 2


class StateCheck:
    """Compares the state after a replay with the state after the same step run eager.

    Args:
        state: Returns what the step is known to change.
        relative: Relative tolerance of numbers with a fraction.
        absolute: Absolute tolerance of them.
    """

    def __init__(self, state: Callable[[], State], relative: float, absolute: float) -> None:
        self._state, self._relative, self._absolute = state, relative, absolute
        # For each element, who has changed it so far.
        self._changed: dict[str, torch.Tensor] = {}

    def now(self) -> dict[str, torch.Tensor]:
        """Return copies of the state as it is."""
        return {name: typed(*one).clone() for name, one in self._state().items()}

    def difference(
        self, before: Snapshot, replayed: Mapping[str, torch.Tensor], *, is_padded: bool
    ) -> str:
        """Return in words how the state is another than after the replay; empty if it is not.

        Args:
            before: The state before the step, to which both ways were run.
            replayed: What ``now`` gave after the replay.
            is_padded: The replay had rows of fill.
        """
        found = []
        for name, (storage, dtype) in self._state().items():
            got = replayed[name]
            got, want, old = map(
                _comparable, (got, typed(storage, dtype), before.saved(storage, dtype))
            )
            by_rows = (want != old) & ~(want.isnan() & old.isnan())
            changed = self._changed.setdefault(name, torch.zeros_like(by_rows, dtype=torch.uint8))
            changed |= by_rows * _BY_ROWS
            if torch.equal(got, want):
                continue
            wrong = ~self._is_close(got, want)
            if is_padded:
                by_fill = wrong & ~by_rows
                changed |= by_fill * _BY_FILL
                wrong &= changed & _BY_ROWS != 0
            number = int(wrong.sum())
            if number:
                at = int(wrong.nonzero()[0])
                found.append(
                    f"{number} of {wrong.numel()} elements of {name} differ, the first at {at}: "
                    f"{got[at].item()} by the replay, {want[at].item()} by eager."
                )
                if not (wrong & by_rows).any():
                    found.append("Rows of fill changed what rows of a batch use: give them a sink.")
        return " ".join(found)

    def _is_close(self, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        if not (want.dtype.is_floating_point or want.dtype.is_complex):
            return got == want
        return torch.isclose(got, want, rtol=self._relative, atol=self._absolute, equal_nan=True)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a type that torch compares: it does not for floats of one byte."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
