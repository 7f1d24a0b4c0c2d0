"""Facts that a warmup passes to the capture after it, as far as they need no device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends import WarmupNotes  # noqa: E402
from dispatchkit.backends.cuda import CudaBackend  # noqa: E402
from dispatchkit.backends.cuda.watch import WarmupNotes as CudaNotes  # noqa: E402
from dispatchkit.backends.watching.dispatch_mode import DispatchMode  # noqa: E402


class Showing(DispatchMode):
    """Mode that records every operation in notes, as if it ran on a device."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.notes.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def notes_of(run):
    notes = CudaNotes()
    with torch.no_grad(), Showing(notes):
        run()
    return notes


def test_backend_of_a_device_makes_notes():
    assert isinstance(CudaBackend.__new__(CudaBackend).new_notes(), CudaNotes)
    assert CudaNotes.record.__code__.co_varnames[:4] == WarmupNotes.record.__code__.co_varnames[:4]


def test_copies_between_devices_leave_the_watching_to_the_capture():
    x = torch.ones(3)
    assert notes_of(lambda: x.clone().copy_(x).double()).is_plain
    assert not notes_of(lambda: x.to("meta")).is_plain


def test_operations_that_hide_others_leave_the_watching_to_the_capture():
    x = torch.ones(3, 2)

    def hiding():
        with torch.inference_mode():
            return x.reshape(-1)  # returns the whole tensor there

    assert notes_of(lambda: x.reshape(-1)).is_plain
    assert not notes_of(hiding).is_plain


def test_storages_are_noted_without_being_kept():
    """Storages alive at the end are reported; the others are freed as usual."""
    notes, weight, kept = CudaNotes(), torch.ones(3), []
    device = type("OnDevice", (torch.Tensor,), {"is_cuda": True})

    def on_device(tensor):
        return tensor.as_subclass(device)

    gone = torch.ones(3) * 2
    kept.append(torch.ones(3) * 3)
    assert notes._storages.record((on_device(weight), [on_device(gone), 4], on_device(kept[0])))
    assert not notes._storages.record((weight, [weight], "text"))
    del gone
    found = {storage._cdata for storage in notes.outside(())}
    assert found == {one.untyped_storage()._cdata for one in (weight, kept[0])}
    own = {"address": weight.data_ptr(), "total_size": 512}
    assert weight.untyped_storage()._cdata not in {one._cdata for one in notes.outside([own])}
