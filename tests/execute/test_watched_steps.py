"""Watched steps: timelines for Perfetto, NVTX ranges, and custom watchers."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest

torch = pytest.importorskip("torch")

from dispatchkit import load_plugins  # noqa: E402
from dispatchkit.errors import BackendUnavailableError, ConfigError, TraceError  # noqa: E402
from dispatchkit.execute import NvtxRanges  # noqa: E402
from dispatchkit.observe import Timeline  # noqa: E402


class Log:
    """Records its events."""

    def __init__(self):
        self.told = []

    def enter(self, decision, lane):
        self.told.append(("enter", str(decision.key), lane))

    def leave(self, *, failed):
        self.told.append(("leave", failed))


def spans(data, category="step"):
    return [one for one in data["traceEvents"] if one["ph"] == "X" and one["cat"] == category]


def test_a_timeline_is_what_chrome_and_perfetto_open(make_runner, quiet, tmp_path):
    """The file is read back: format, order, no overlaps, and correct counts."""
    runner = make_runner(lambda tokens: tokens + 1)
    runner.capture()
    timeline = Timeline()
    runner.taps.watch_steps(timeline)
    for rows in (3, 4, 1, 7):
        runner(torch.arange(rows))
    runner(torch.arange(2), ceiling=0)
    runner.taps.watch_steps(None)
    runner(torch.arange(3))
    assert timeline.save(tmp_path / "steps.json") == 5
    data = json.loads((tmp_path / "steps.json").read_text())
    assert set(data) == {"displayTimeUnit", "otherData", "traceEvents"}
    about = [one for one in data["traceEvents"] if one["ph"] == "M"]
    rows = {one["tid"]: one["args"]["name"] for one in about if one["name"] == "thread_name"}
    assert list(rows.values()) == ["lane 0"]
    # that would be the main thread of a process
    assert not set(rows) & {one["pid"] for one in about}
    found = spans(data)
    for one in found:
        assert set(one) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert one["tid"] in rows
        assert one["ts"] >= 0
        assert one["dur"] > 0
    for before, after in itertools.pairwise(found):
        assert before["ts"] + before["dur"] <= after["ts"]
    assert [one["args"]["num_tokens"] for one in found] == [3, 4, 1, 7, 2]
    assert found[0]["name"] == "FULL tokens=4"
    assert found[-1]["name"] == "eager: ceiling"
    stats = runner.stats()
    by_mode = [one["args"]["mode"] for one in found]
    assert by_mode.count("FULL") == stats.steps_by_mode["FULL"] - 1
    padding = sum(one["args"]["padded_num_tokens"] - one["args"]["num_tokens"] for one in found)
    assert padding == 2


def test_rare_events_have_a_row_of_their_own(make_runner, policy, tmp_path):
    plugins = load_plugins(allow=["vllm"], environ={})
    timeline = Timeline()
    plugins.notifier.attach(timeline, "timeline")
    runner = make_runner(lambda tokens: tokens + 1, lazy=True, policy=plugins.with_policy(policy))
    runner.taps.watch_steps(timeline)
    runner(torch.arange(3))
    runner.clear()
    timeline.save(tmp_path / "steps.json.gz")
    with gzip.open(tmp_path / "steps.json.gz", "rt") as stream:
        data = json.load(stream)
    names = [one["name"] for one in spans(data, "event")]
    assert names[0].startswith("policy ")
    assert names[1:] == ["capture FULL tokens=4", "evict FULL tokens=4"]
    (capture,) = [one for one in spans(data, "event") if one["name"].startswith("capture")]
    assert capture["dur"] > 0


def test_a_timeline_is_bounded_and_says_what_it_lost(make_runner):
    runner = make_runner(lambda tokens: tokens + 1)
    runner.capture()
    timeline = Timeline(capacity=2)
    runner.taps.watch_steps(timeline)
    for rows in (1, 2, 3):
        runner(torch.arange(rows))
    data = timeline.to_json()
    assert [one["args"]["num_tokens"] for one in spans(data)] == [2, 3]
    assert timeline.num_lost == data["otherData"]["spans_lost"] == 1
    with pytest.raises(ConfigError, match="capacity"):
        Timeline(0)


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(TraceError):
        Timeline().save(tmp_path / "no" / "steps.json")


def test_a_watcher_hears_every_step_between_enter_and_leave(make_runner, quiet):
    """Results are equal, a raising step counts as failed, unwatched steps are unchanged."""
    is_broken = []

    def step(tokens):
        if is_broken:
            raise ZeroDivisionError("of the step")
        return tokens + 1

    runner = make_runner(step)
    runner.capture()
    plain = runner.lanes[0].decide
    log = Log()
    runner.taps.watch_steps(log)
    assert torch.equal(runner(torch.arange(3)), torch.arange(3) + 1)
    assert log.told == [("enter", "FULL tokens=4", 0), ("leave", False)]
    is_broken.append(True)
    with pytest.raises(ZeroDivisionError):
        runner(torch.arange(3), ceiling=0)
    assert log.told[-1] == ("leave", True)
    runner.taps.watch_steps(None)
    assert runner.lanes[0].decide == plain
    runner(torch.arange(3))
    assert len(log.told) == 4


def test_step_that_captures_is_watched_to_its_end(make_runner):
    """The launch after a lazy capture is inside, and there is one step."""
    runner = make_runner(lambda tokens: tokens + 1, lazy=True)
    log = Log()
    runner.taps.watch_steps(log)
    recorder = runner.start_recording()
    steps = []
    log.leave = lambda *, failed: steps.append(runner.stats().steps)
    for _ in range(2):
        assert torch.equal(runner(torch.arange(3)), torch.arange(3) + 1)
    assert steps == [1, 2]
    assert recorder.num_steps == 2


def test_watching_and_recording_go_together(make_runner):
    runner = make_runner(lambda tokens: tokens + 1)
    runner.capture()
    log, seen = Log(), []
    recorder = runner.start_recording()
    runner.taps.on_decision(seen.append)
    runner.taps.watch_steps(log)
    runner(torch.arange(3))
    assert (recorder.num_steps, len(seen), len(log.told)) == (1, 1, 2)
    runner.stop_recording()
    runner(torch.arange(3))
    assert (recorder.num_steps, len(seen), len(log.told)) == (1, 2, 4)


def test_nvtx_ranges_are_pushed_and_popped_around_each_step(make_runner, monkeypatch):
    """Checked by calls, because a profiler needs a GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda text: calls.append(("mark", text)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: calls.append(("push", text)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(("pop",)))
    runner = make_runner(lambda tokens: tokens + 1)
    runner.capture()
    runner.taps.watch_steps(NvtxRanges())
    runner(torch.arange(3))
    runner(torch.arange(3), ceiling=0)
    assert calls[1:] == [
        ("push", "dispatchkit FULL tokens=4"),
        ("pop",),
        ("push", "dispatchkit eager: ceiling"),
        ("pop",),
    ]


def test_without_nvtx_one_line_says_so(monkeypatch):
    def missing(text):
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", missing)
    with pytest.raises(BackendUnavailableError, match="CUDA build of torch"):
        NvtxRanges()
