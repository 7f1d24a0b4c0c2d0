"""Small device inputs and their tails, brought in by one call of the backend past torch.

What such a call cannot do is left to torch, step by step: inputs that are not contiguous, or that
torch would conjugate, negate or convert on the way; large ones, which its own copies move faster.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from dispatchkit.backends.base import GraphBackend

_logger = logging.getLogger(__name__)

MAX_PIECES = 16
#: Bytes of one input from which on torch copies.
MAX_BYTES = 256 << 10
# The driver has no context in a thread that has not used the device yet; torch's copy gives it one.
_NO_CONTEXT = 201


def small_copy(backend: GraphBackend | None, targets: Sequence[torch.Tensor]) -> SmallCopy | None:
    """Return what copies into these targets, None where it is torch's to do."""
    make = getattr(backend, "piece_copy", None)
    fits = 2 * len(targets) <= MAX_PIECES and all(
        target.is_contiguous() and target.dtype.itemsize % 4 == 0 and target.nbytes <= MAX_BYTES
        for target in targets
    )
    copy = make() if make is not None and fits else None
    return None if copy is None else SmallCopy(copy, targets)


class SmallCopy:
    """Copies of calls of one size.

    Args:
        copy: The backend's call.
        targets: Where to, in declared order.
    """

    def __init__(self, copy: Any, targets: Sequence[torch.Tensor]) -> None:
        self._copy: Any = copy
        self._count = self._with_tails = len(targets)
        self._kept: list[torch.Tensor] = list(targets)
        for index, target in enumerate(targets):
            copy.put(index, 0, target.data_ptr(), target.nbytes)

    def add_tails(
        self, tails: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    ) -> None:
        """Note what is to be set back where rows behind a call are stale; once is enough."""
        if self._with_tails > self._count or self._copy is None:
            return
        pairs = [pair for stale, fills in tails for pair in zip(stale, fills, strict=True)]
        for index, (stale, fill) in enumerate(pairs, self._count):
            self._copy.put(index, fill.data_ptr(), stale.data_ptr(), stale.nbytes)
            self._kept += [stale, fill]
        self._with_tails = self._count + len(pairs)

    def run(self, values: Sequence[Any], stream: int, *, with_tails: bool = False) -> bool:
        """Queue the copies of a checked call; False if nothing was done."""
        copy = self._copy
        if copy is None or not all(map(_is_plain, values)):
            return False
        sources = [value.data_ptr() for value in values]
        if 0 in sources:
            return False  # no memory: empty, or zeros that torch never wrote down
        code = copy(sources, self._with_tails if with_tails else self._count, stream)
        if code and code != _NO_CONTEXT:
            _logger.warning("Copies by a kernel failed with CUDA error %s: torch copies now.", code)
            self._copy = None
        return not code


def _is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor's memory is what it says, row by row."""
    return (
        type(value) is torch.Tensor
        and value.is_contiguous()
        and not value.is_neg()
        and not value.is_conj()
    )
