"""The order of CUDA graphs that draw, on a fake device that records calls."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from dispatchkit.backends.cuda.draw_order import DrawOrder  # noqa: E402
from dispatchkit.errors import ReplayError  # noqa: E402


class Stream:
    """A stream of torch, or an external one whose id is even."""

    def __init__(self, handle, *, is_foreign=False):
        self.cuda_stream = handle
        self.stream_id = 16 * handle if is_foreign or not handle else 2 * handle + 1

    def __str__(self):
        return str(self.cuda_stream)


class Device:
    """Imitates torch.cuda and records its calls."""

    def __init__(self):
        self.said = []
        self.streams = threading.local()
        self.captured = set()
        self.foreign = set()

    @property
    def stream(self):
        return getattr(self.streams, "current", 0)

    def event(self):
        said = self.said

        class Event:
            def wait(self, stream):
                said.append(f"{stream} waits")

            def record(self, stream):
                said.append(f"recorded on {stream}")

            def synchronize(self):
                said.append("host waits")

        return Event()


@pytest.fixture
def device(monkeypatch):
    device = Device()
    raw = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda index: Stream(device.stream, is_foreign=device.stream in device.foreign),
    )
    monkeypatch.setattr(torch._C, raw, lambda index: device.stream, raising=False)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: device.stream in device.captured
    )
    return device


def test_each_launch_waits_for_the_last_and_is_waited_for(device):
    order = DrawOrder(0)
    for device.streams.current in (1, 2, 2):
        order.replay(lambda: device.said.append("launch"))
    one, two = ([f"{stream} waits", "launch", f"recorded on {stream}"] for stream in (1, 2))
    assert device.said == one + two + two[1:]


def test_stream_of_somebody_else_waits_each_time(device):
    """The stream may have been destroyed and its handle reused."""
    order = DrawOrder(0)
    device.foreign.add(3)
    device.streams.current = 3
    order.replay(lambda: None)
    order.replay(lambda: None)
    assert device.said == ["3 waits", "recorded on 3"] * 2


def test_launch_that_fails_is_waited_for_too(device):
    order = DrawOrder(0)

    def launch():
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        order.replay(launch)
    assert device.said == ["0 waits", "recorded on 0"]


def test_draw_inside_a_capture_of_the_caller_is_refused_and_leaves_it_alone(device):
    """Events from outside would void the capture, and its graph would repeat the same numbers."""
    order = DrawOrder(0)
    device.captured.add(0)
    with pytest.raises(ReplayError, match="inside a capture"):
        order.replay(lambda: device.said.append("launch"))
    assert device.said == []


def test_capture_comes_after_draws_and_before_the_next(device):
    order = DrawOrder(0)
    device.streams.current = 7

    def capture():
        device.captured.add(7)
        device.said.append("capture")
        device.captured.discard(7)

    order.capture(Stream(7), capture)
    order.replay(lambda: device.said.append("same stream"))
    device.streams.current = 1
    order.replay(lambda: device.said.append("another"))
    assert device.said == [
        *("7 waits", "capture", "recorded on 7"),
        *("same stream", "recorded on 7"),
        *("1 waits", "another", "recorded on 1"),
    ]


def test_capture_that_could_not_be_ended_is_no_event(device):
    order = DrawOrder(0)
    device.streams.current = 7

    def lose():
        device.captured.add(7)
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        order.capture(Stream(7), lose)
    assert device.said == ["7 waits"]


def test_no_launch_comes_between_another_threads_fill_and_launch(device):
    order = DrawOrder(0)
    inside, go_on = threading.Event(), threading.Event()

    def slow():
        inside.set()
        assert go_on.wait(20)
        device.said.append("first")

    first = threading.Thread(target=order.replay, args=(slow,))
    first.start()
    assert inside.wait(20)
    second = threading.Thread(target=order.replay, args=(lambda: device.said.append("second"),))
    second.start()
    go_on.set()
    first.join()
    second.join()
    said = [one for one in device.said if one != "0 waits"]
    assert said == ["first", "recorded on 0", "second", "recorded on 0"]
