"""Find varying dimensions other than the batch, and test whether padding changes results.

The calls of a family differ only in sizes. A dimension varies if its size differs between two of
these calls. Dimensions whose sizes are equal to each other in every call form one axis.
Calls are padded along an axis only after a proof that padding does not change their results.

The proof takes the first half of a call along each axis, pads it to the size of the call, and
compares the results with those of the half alone. The half is padded twice: once with the fill
value, and once with the second half of the call. The two padded results have equal sizes, so they
are compared bit by bit. The comparison with the half alone must allow for rounding, so it could
miss a small dependency.

Masks are padded both times with a value that hides positions. The value is found by trial: False or
True for Boolean masks, 0 for masks of 0 and 1. Masks that are added to scores are padded with minus
infinity or the smallest finite number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch

from dispatchkit.errors import format_value
from dispatchkit.execute.capture.effects import bits_equal
from dispatchkit.execute.io.structure import flatten, is_same_value

#: For each tensor of a call, the sizes of all dimensions; None for the batch.
Shapes = tuple[tuple[int | None, ...], ...]

#: Allowed difference between results of different kernels: relative to the norm of an output, and
#: absolute per element.
_RELATIVE, _ABSOLUTE = 2e-2, 1e-5
#: Largest mask value that hides a position if added to scores; -1e4 is common in half precision.
_HIDES: Final = -1e4
#: Maximum number of combinations of padding values to try.
_MAX_PROOFS: Final = 9


@attrs.frozen
class Axes:
    """The axes of calls, by tensor and dimension.

    Attributes:
        shapes: Shape of each tensor, with None for the batch and a name for an axis. An axis
            ``dim_1`` is dimension 1 of the first tensor that has the axis.
    """

    shapes: tuple[tuple[int | str | None, ...], ...]

    def sizes(self, shapes: Shapes) -> dict[str, int] | None:
        """Return the size of each axis in a call; None if the call does not match."""
        found: dict[str, int] = {}
        for own, shape in zip(self.shapes, shapes, strict=True):
            for name, size in zip(own, shape, strict=True):
                if size is None:
                    continue
                if size != (found.setdefault(name, size) if isinstance(name, str) else name):
                    return None
        return found

    def narrowed(self, tensor: torch.Tensor, index: int, sizes: dict[str, int]) -> torch.Tensor:
        """Return the beginning of a tensor, with a given size along each axis.

        Args:
            tensor: Tensor of a call.
            index: Position of the tensor among the tensors of the call.
            sizes: Size to keep along each axis, by name.
        """
        for dim, name in enumerate(self.shapes[index]):
            if isinstance(name, str):
                tensor = tensor.narrow(dim, 0, sizes[name])
        return tensor


def guess_axes(calls: Sequence[Shapes]) -> Axes:
    """Return the axes of calls of one family.

    Args:
        calls: Shapes of one or more calls, with the same numbers of tensors and dimensions.
    """
    names: dict[tuple[int | None, ...], str] = {}
    found: list[tuple[int | str | None, ...]] = []
    for index, shape in enumerate(calls[0]):
        own: list[int | str | None] = []
        for dim, size in enumerate(shape):
            sizes = tuple(call[index][dim] for call in calls)
            if len(set(sizes)) == 1:
                own.append(size)
                continue
            name = f"dim_{dim}"
            while name in names.values() and sizes not in names:
                name += "_"
            own.append(names.setdefault(sizes, name))
        found.append(tuple(own))
    return Axes(tuple(found))


@attrs.frozen
class PaddingProof:
    """The effect of padding along axes on the results of a call.

    Attributes:
        fills: Padding value of each tensor, or None if padding changes results.
        problem: Description of the change; empty if padding changes nothing.
    """

    fills: tuple[float, ...] | None
    problem: str = ""


def prove_padding(
    axes: Axes,
    shapes: Shapes,
    tensors: Sequence[torch.Tensor],
    run: Callable[[Sequence[torch.Tensor]], Any],
) -> PaddingProof | None:
    """Test whether a call may be padded along its axes; return None if an axis is too short.

    Args:
        axes: Axes along which padding is tested.
        shapes: Shapes of the call's tensors, with None for the batch.
        tensors: Tensors of the call.
        run: Function that runs the model eager on tensors like these. It must have no effects and
            draw no random numbers.
    """
    whole = axes.sizes(shapes) or {}
    half = {name: size // 2 for name, size in whole.items()}
    if not half or min(half.values()) < 1:
        return None
    short = [axes.narrowed(one, index, half).contiguous() for index, one in enumerate(tensors)]
    is_varied = [any(isinstance(size, str) for size in shape) for shape in axes.shapes]
    fills = [
        _possible_fills(one) if varies else [_Fill(0)]
        for varies, one in zip(is_varied, tensors, strict=True)
    ]
    problem = ""
    for chosen in itertools.islice(itertools.product(*fills), _MAX_PROOFS):
        filled, kept = [], []
        for index, (one, fill) in enumerate(zip(tensors, chosen, strict=True)):
            padded = torch.full_like(one, fill.value)
            axes.narrowed(padded, index, half).copy_(short[index])
            filled.append(padded if is_varied[index] else one)
            kept.append(padded if fill.hides else one)
        try:
            found = _difference(half, whole, run(short), run(filled), run(kept))
        except Exception as error:  # noqa: BLE001 - any error shows that padding is unsupported
            found = f"the function raised {type(error).__name__}: {error}"
        if not found:
            return PaddingProof(tuple(fill.value for fill in chosen))
        problem = problem or found
    return PaddingProof(None, problem)


@attrs.frozen
class _Fill:
    """A candidate padding value of a tensor.

    Attributes:
        value: Number to fill the padding with.
        hides: Whether the tensor may be a mask in which this value hides positions. If so, the
            proof does not pad the tensor with values of the call.
    """

    value: float
    hides: bool = False


def _possible_fills(tensor: torch.Tensor) -> list[_Fill]:
    """Return the candidate padding values of a tensor, in the order to try them."""
    if tensor.dtype is torch.bool:  # True may hide a position or show it
        return [_Fill(0, hides=True), _Fill(1, hides=True)]
    is_flags = bool(((tensor == 0) | (tensor == 1)).all())
    fills = [_Fill(0, hides=is_flags)]
    # A mask added to scores is all zeros in a call that hides nothing.
    if tensor.dtype.is_floating_point and (not tensor.any() or bool((tensor <= _HIDES).any())):
        fills.append(_Fill(-math.inf, hides=True))
        fills.append(_Fill(torch.finfo(tensor.dtype).min, hides=True))
    return fills


def _difference(
    half: dict[str, int], whole: dict[str, int], short: Any, filled: Any, kept: Any
) -> str:
    """Describe how padding changes the results of a half; empty if it does not."""
    want, structure = flatten(short)
    results = []
    for padded in (filled, kept):
        leaves, other = flatten(padded)
        if other != structure:
            return "padding changes the structure of the results"
        results.append(leaves)
    for index, (one, first, second) in enumerate(zip(want, *results, strict=True)):
        if not isinstance(one, torch.Tensor):
            for each in (first, second):
                if not is_same_value(one, each):
                    return (
                        f"output {index} is {format_value(one)} without padding, but "
                        f"{format_value(each)} with padding"
                    )
            continue
        cuts = [_cut(each, one, half, whole) for each in (first, second)]
        if cuts[0] is None or cuts[1] is None:
            each = first if cuts[0] is None else second
            if not isinstance(each, torch.Tensor):
                return (
                    f"output {index} is a tensor without padding, but {format_value(each)} with "
                    "padding"
                )
            return (
                f"output {index} has shape {tuple(one.shape)} without padding, but "
                f"{tuple(each.shape)} with padding"
            )
        if not bits_equal(cuts[0], cuts[1]):
            return f"output {index} depends on the values of the padding"
        if not _is_close(cuts[0], one):
            return f"output {index} depends on the padded size"
    return ""


def _cut(
    padded: Any, short: torch.Tensor, half: dict[str, int], whole: dict[str, int]
) -> torch.Tensor | None:
    """Return the part of a padded result without the padding; None if the shapes do not match."""
    if not isinstance(padded, torch.Tensor) or padded.dim() != short.dim():
        return None
    growth = {whole[name] - half[name] for name in half}
    found: torch.Tensor = padded
    for dim, size in enumerate(short.shape):
        more = found.shape[dim] - size
        if more and more not in growth:
            return None
        found = found.narrow(dim, 0, size)
    return found


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    ours, theirs = one.to(wide), other.to(wide)
    is_finite = theirs.isfinite()
    if not torch.equal(ours.isfinite(), is_finite):
        return False
    ours, theirs = ours[is_finite], theirs[is_finite]
    error, size = torch.linalg.vector_norm(ours - theirs), torch.linalg.vector_norm(theirs)
    return bool(error <= _RELATIVE * size + _ABSOLUTE * theirs.numel() ** 0.5)


class Family:
    """Calls that differ only in sizes, and the axes along which they are padded.

    Attributes:
        axes: Axes that are padded to buckets; None if no axes are proven yet.
        fills: Padding value of each tensor.
    """

    def __init__(self) -> None:
        self.axes: Axes | None = None
        self.fills: tuple[float, ...] = ()
        self._calls: list[Shapes] = []
        self._is_refused = False

    @property
    def first(self) -> Shapes:
        """The shapes of the first call."""
        return self._calls[0]

    def sizes(self, shapes: Shapes) -> dict[str, int] | None:
        """Return the size of each axis in a call; None if the call does not fit the axes."""
        return None if self.axes is None else self.axes.sizes(shapes)

    def may_vary(self, shapes: Shapes) -> bool:
        """Return whether a call has dimensions that may be tried as axes."""
        return not self._is_refused and bool(self._calls) and shapes != self._calls[0]

    def note_first(self, shapes: Shapes) -> None:
        """Store the shapes of the first call, for comparison with later calls."""
        if not self._calls:
            self._calls.append(shapes)

    def try_axes(
        self,
        shapes: Shapes,
        tensors: Sequence[torch.Tensor],
        run: Callable[[Sequence[torch.Tensor]], Any],
    ) -> str:
        """Find the axes of a call and test padding along them; return the problem, if any.

        Args:
            shapes: Shapes of the call's tensors, with None for the batch.
            tensors: Tensors of the call.
            run: Function that runs the model eager, as for ``prove_padding``.
        """
        axes = guess_axes([*self._calls, shapes])
        proof = prove_padding(axes, shapes, tensors, run)
        if proof is None:
            return ""
        if proof.fills is None:
            self._is_refused = True
            names = {size for shape in axes.shapes for size in shape if isinstance(size, str)}
            return f"padding {', '.join(sorted(names))} is not possible: {proof.problem}"
        self._calls.append(shapes)
        self.axes, self.fills = axes, proof.fills
        return ""
