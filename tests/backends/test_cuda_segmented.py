"""Memory reported by a capture in segments, from allocator statistics; needs no device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.cuda.segmented import CudaSegments  # noqa: E402
from dispatchkit.errors import CaptureError  # noqa: E402


def test_kept_is_what_was_handed_out_in_the_capture_and_lies_in_the_pool(monkeypatch) -> None:
    """A block that was in use before the capture is not counted."""
    monkeypatch.setattr("dispatchkit.backends.cuda.segmented.make_current", lambda stream: None)
    free, older, tensor, other = (row.clone() for row in torch.zeros(4, 64, dtype=torch.uint8))
    blocks = {"free": "inactive", "older": "active_allocated", "tensor": "inactive"}
    places = dict(zip(blocks, (free, older, tensor), strict=True))

    def segments():
        return [
            # A small block in front of each makes addresses follow from sizes.
            {
                "address": place.untyped_storage().data_ptr() - 16,
                "total_size": 80,
                "blocks": [{"size": 16, "state": "inactive"}, {"size": 64, "state": blocks[name]}],
            }
            for name, place in places.items()
        ]

    def refuse():
        raise RuntimeError("no device")

    capture = CudaSegments(None, lambda: None, None, None, segments)
    monkeypatch.setattr(capture, "begin", refuse)
    with pytest.raises(CaptureError, match="no device"):
        capture.run(lambda capture: None, None)
    blocks["tensor"] = "active_allocated"
    assert capture.keeps(tensor)
    assert capture.keeps(tensor[3:5])
    assert not capture.keeps(older)
    assert not capture.keeps(older[3:5])
    assert not capture.keeps(other)
    assert not capture.keeps(torch.empty(0))
