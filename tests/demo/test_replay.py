"""The demo runs a trace twice, compares every step and detects wrong results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("dispatchkit_vllm")

from dispatchkit.demo import replay  # noqa: E402
from dispatchkit.demo.decoder import Decoder, DecoderShape, KVCache  # noqa: E402
from dispatchkit.demo.replay import DemoOptions, resolve_device, run_demo  # noqa: E402
from dispatchkit.demo.report import DemoReport  # noqa: E402
from dispatchkit.errors import (  # noqa: E402
    BackendUnavailableError,
    ConfigError,
    TraceError,
    UnknownNameError,
)
from dispatchkit.keys import CaptureSizeWarning  # noqa: E402
from dispatchkit.settings import load_settings  # noqa: E402

SMALL = DecoderShape(num_layers=1, num_heads=2, head_dim=8, cache_len=32, vocab=32)
HEADER = "num_tokens,num_reqs,max_query_len,uniform_decode\n"
ROWS = ["3,3,1,1", "3,3,1,1", "14,4,11,0", "4,4,1,1", "9,2,8,0", "2,2,1,1", "4,4,1,1"]


def write(folder: Path, rows: list[str], header: str = HEADER) -> Path:
    path = folder / "trace.csv"
    path.write_text(header + "".join(f"{row}\n" for row in rows))
    return path


def run(trace: Path, steps: int = 100, **settings: Any) -> DemoReport:
    given = load_settings(backend="tape", environ={}, **settings)
    return run_demo(DemoOptions(settings=given, trace=trace, steps=steps, shape=SMALL))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> DemoReport:
    """Return a short run with steps of both kinds, one of them above the largest size."""
    folder = tmp_path_factory.mktemp("demo")
    rows = [*ROWS, "30,4,25,0"]
    with pytest.warns(CaptureSizeWarning, match="17 to 30 tokens run eager"):
        return run(write(folder, rows), sizes="1,2,4,8,16")


def test_every_step_and_the_final_caches_equal_eager(report: DemoReport) -> None:
    """All real rows must be equal, for any contents of the padding."""
    assert report.comparison.is_equal
    assert report.comparison.steps == 8
    assert 0 <= report.comparison.worst < 1e-4
    assert 0 <= report.comparison.worst_cache < 1e-4


def test_decode_runs_full_mixed_runs_piecewise_and_large_runs_eager(report: DemoReport) -> None:
    """With breaks at attention, each kind gets its best mode; eager steps have a reason."""
    by_kind = {(row.kind, row.mode): row.steps for row in report.times}
    assert by_kind == {("decode", "FULL"): 5, ("mixed", "PIECEWISE"): 2, ("mixed", "NONE"): 1}
    assert report.eager_reasons == {"above_largest_size": 1}


def test_padding_is_what_the_buckets_add(report: DemoReport) -> None:
    """3 -> 4, 14 -> 16, 9 -> 16; 2 and 4 fit."""
    paddings = {(row.kind, row.mode): row.padding for row in report.times}
    assert paddings["decode", "FULL"] == 2
    assert paddings["mixed", "PIECEWISE"] == 2 + 7
    assert paddings["mixed", "NONE"] == 0
    assert report.padding == 11
    assert report.num_tokens == report.traffic.num_tokens


def test_times_memory_and_batch_1_are_reported(report: DemoReport) -> None:
    """Values are positive, and the ratio follows from them."""
    assert report.capture["num_graphs"] > 0
    assert report.capture["num_bytes"] > 0
    assert report.capture["failed"] == {}
    assert all(row.eager_ms > 0 and row.dispatched_ms > 0 for row in report.times)
    assert report.batch1.mode == "FULL"
    assert report.batch1.ratio == report.batch1.eager_us / report.batch1.dispatched_us


def test_the_tape_claims_no_speed_up(report: DemoReport) -> None:
    """The output states it, so that its times are not quoted."""
    assert "do not predict times on a GPU" in " ".join(report.meaning())


def test_the_report_is_plain_json(report: DemoReport) -> None:
    """The report contains everything a script needs, and no torch objects."""
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert value["ok"] is True
    assert value["batch1"]["ratio"] == report.batch1.ratio
    assert value["traffic"]["num_steps"] == 8


def plant(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, KVCache], torch.Tensor]
) -> None:
    """Change the results or writes of dispatched steps."""
    plain = Decoder.step

    def planted(self: Decoder, cache: KVCache) -> Any:
        step = plain(self, cache)
        return lambda tokens, positions, slots: change(step(tokens, positions, slots), cache)

    monkeypatch.setattr(Decoder, "step", planted)


def test_a_wrong_step_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault in the larger graphs only, exactly the affected steps are reported."""

    def off(logits: torch.Tensor, cache: KVCache) -> torch.Tensor:
        if logits.shape[0] >= 8:
            logits = logits.clone()
            logits[0, 0] += 0.5
        return logits

    plant(monkeypatch, off)
    compared = run(write(tmp_path, ROWS), sizes="4,14").comparison
    assert not compared.is_equal
    assert [(each.step, each.mode) for each in compared.different] == [
        (2, "PIECEWISE"),
        (4, "PIECEWISE"),
    ]
    assert compared.worst == pytest.approx(0.5, abs=1e-3)
    assert not compared.caches_differ


def test_a_wrong_cache_is_found_though_every_step_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is compared too; the fault is in the last row of a slot that never fills."""

    def writes(logits: torch.Tensor, cache: KVCache) -> torch.Tensor:
        cache.values[0][31].add_(1.0)
        return logits

    plant(monkeypatch, writes)
    report = run(write(tmp_path, ROWS), sizes="4,14")
    assert report.comparison.different == ()
    assert report.comparison.caches_differ
    assert not report.to_dict()["ok"]
    sentence = "All dispatched steps match the eager run, but the final caches do NOT."
    assert sentence in report.meaning()[0]


def test_a_request_on_a_gpu_is_described_by_the_mode_it_ran_in(report: DemoReport) -> None:
    """An eager request gains nothing, so no share of the eager time is given."""
    gpu = attrs.evolve(report, backend="cuda", batch1=attrs.evolve(report.batch1, ratio=4.0))
    assert "When dispatched, a single request takes 25% of its eager time" in gpu.meaning()[1]
    eager = attrs.evolve(gpu, batch1=attrs.evolve(gpu.batch1, mode="NONE"))
    assert "a single request also ran eager when dispatched" in eager.meaning()[1]


@pytest.mark.slow
def test_a_result_that_is_not_a_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN equals nothing, and JSON cannot represent it."""
    plant(monkeypatch, lambda logits, cache: logits * float("nan"))
    report = run(write(tmp_path, ROWS), steps=3)
    assert len(report.comparison.different) == 3
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert value["ok"] is False
    assert value["comparison"]["worst"] is None


def test_steps_limits_how_much_of_the_trace_runs(tmp_path: Path) -> None:
    assert run(write(tmp_path, ROWS), steps=2).comparison.steps == 2


def test_a_uniform_step_of_several_tokens_per_request_runs_full(tmp_path: Path) -> None:
    """Steps that verify drafts are uniform decode too."""
    report = run(write(tmp_path, ["8,2,4,1", "8,2,4,1", "12,3,4,1"]))
    assert report.comparison.is_equal
    assert {(row.kind, row.mode) for row in report.times} == {("decode", "FULL")}


@pytest.mark.gpu
def test_on_a_gpu_every_step_equals_eager_and_decode_replays() -> None:
    """The first steps of the excerpt, with the decoder for a GPU."""
    report = run_demo(DemoOptions(steps=60, settings=load_settings(backend="cuda")))
    assert report.backend == "cuda"
    assert report.capture["failed"] == {}
    assert report.comparison.is_equal
    assert {row.mode for row in report.times if row.kind == "decode"} == {"FULL"}
    assert report.batch1.mode == "FULL"


def test_threads_are_as_before(tmp_path: Path) -> None:
    """The demo computes on one thread and restores the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(write(tmp_path, ROWS), steps=1, mode="NONE")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["gpu", "cud", "tape:1", "cuda:x", "cuda:-1", "", "CUDA"])
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    """Names that only torch accepts are refused."""
    with pytest.raises(UnknownNameError, match="auto, cpu, cuda, tape"):
        resolve_device(name)


def test_a_device_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, or an index that is too high."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(BackendUnavailableError, match="doctor"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    with pytest.raises(BackendUnavailableError, match="cuda:0, cuda:1"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("steps", [0, -3, 1.5, True])
def test_impossible_numbers_of_steps_are_refused(steps: object) -> None:
    with pytest.raises(ConfigError, match="steps"):
        DemoOptions(steps=steps)


def test_capture_sizes_beyond_the_traffic_are_refused(tmp_path: Path) -> None:
    """No sizes are dropped silently."""
    with pytest.raises(ConfigError, match="sizes"):
        run(write(tmp_path, ROWS), sizes=[4, 4096])


def test_settings_of_a_runner_hold_in_the_demo(tmp_path: Path) -> None:
    """Budget, lazy capture, mode and query lengths apply, as well as policy and sizes."""
    trace = write(tmp_path, [*ROWS, "8,2,4,1"])
    lazy = run(trace, lazy=True, max_graphs=1, query_lens=(4, 1))
    assert lazy.comparison.is_equal
    assert (lazy.capture["num_graphs"], lazy.capture["lazy"]) == (1, True)
    assert ("decode", "FULL") in {(row.kind, row.mode) for row in lazy.times}
    eager = run(trace, mode="NONE")
    assert eager.capture["num_graphs"] == 0
    assert eager.eager_reasons == {"mode_none": 8}
    few = run(trace, max_graphs=2)
    assert few.capture["num_graphs"] == 2
    assert few.comparison.is_equal


@pytest.mark.parametrize("name", ["max_num_tokens", "max_num_seqs"])
def test_a_limit_below_the_traffic_is_refused(tmp_path: Path, name: str) -> None:
    """The error comes before any capture and names the minimum and the value's source."""
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        run(write(tmp_path, ROWS), **{name: 3})


def test_an_unknown_policy_names_the_nearest(tmp_path: Path) -> None:
    """The error comes before any capture."""
    with pytest.raises(UnknownNameError, match="'vllm'"):
        run(write(tmp_path, ROWS), policy="vlm")


def test_bad_traces_are_refused(tmp_path: Path) -> None:
    """Missing, misspelt, truncated or impossible."""
    with pytest.raises(TraceError, match="does not exist"):
        run(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="num_tokens"):
        run(write(tmp_path, ROWS, header=HEADER.replace("num_tokens", "num_token")))
    with pytest.raises(TraceError, match="line 4"):
        run(write(tmp_path, ["3,3,1,1", "3,3,1,1", "14,4"]))
    with pytest.raises(TraceError, match="line 2"):
        run(write(tmp_path, ["3,-3,1,1"]))


def test_without_the_planner_step_traces_are_replayed_and_others_say_what_reads_them(
    tmp_path, monkeypatch
):
    counts = tmp_path / "counts.csv"
    counts.write_text("size,count\n3,2\n")
    assert len(replay._read_file(counts)) == 2
    monkeypatch.setitem(sys.modules, "dispatchkit_plan", None)
    steps = tmp_path / "steps.csv"
    steps.write_text("num_tokens\n3\n")
    assert len(replay._read_file(steps)) == 1
    with pytest.raises(TraceError) as raised:
        replay._read_file(counts)
    assert "pip install dispatchkit-plan" in raised.value.__notes__[0]
