"""Writes that no schema declares are detected by contents, in small and large tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.execute.step.state import ContentWatch  # noqa: E402


def _tensors() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, generator=generator),
        torch.randint(0, 9, (7,), generator=generator, dtype=torch.uint8),
        torch.rand(5000, generator=generator) > 0.5,
        torch.randn(64, 96, generator=generator, dtype=torch.float64),
        torch.randn(40, 1021, generator=generator, dtype=torch.bfloat16),
    ]


WRITES: dict[str, Callable[[Any], Any]] = {
    "one value": lambda one: one.view(-1)[:1].copy_(one.view(-1)[:1] == 0),
    "the last value": lambda one: one.view(-1)[-1:].copy_(one.view(-1)[-1:] == 0),
    "all": lambda one: one.copy_(one == 0),
    "a roll": lambda one: one.view(-1).copy_(one.view(-1).roll(1)),
    "rows that change places": lambda one: one.copy_(one.flip(0)),
}


@pytest.mark.parametrize("limit", [0, 100, 6000, 1 << 20])
@pytest.mark.parametrize("write", WRITES)
def test_what_was_written_is_found_and_nothing_else(write: str, limit: int) -> None:
    """Tensors up to the limit also get a copy of the old value."""
    for index in range(len(_tensors())):
        tensors = _tensors()
        watch = ContentWatch([*tensors, tensors[0][1:]], limit)
        assert not watch.changed()
        assert not watch.changed_beyond_limit()
        before = tensors[index].clone()
        WRITES[write](tensors[index])
        copied, summed = watch.changed(), watch.changed_beyond_limit()
        assert [one.data_ptr() for one, _ in copied] + [one.data_ptr() for one in summed] == [
            tensors[index].data_ptr()
        ]
        for tensor, saved in copied:
            tensor.untyped_storage().copy_(saved)
            assert torch.equal(tensor, before)


def test_all_tensors_are_copied_while_they_fit() -> None:
    """The smallest come first; tensors beyond the limit cannot be put back."""
    tensors = _tensors()
    watch = ContentWatch(tensors, sum(one.nbytes for one in tensors[:3]))
    for one in tensors:
        WRITES["all"](one)
    assert len(watch.changed()) == 3
    assert len(watch.changed_beyond_limit()) == 2
