"""Histograms, and vLLM's printed table of statistics."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dispatchkit.errors import TraceError
from dispatchkit.observe.trace import StepTrace, read_trace

from dispatchkit_plan.traffic import (
    SizeHistogram,
    StepKind,
    counts,
    read_cudagraph_stats,
    read_histogram,
    read_steps,
    read_workload,
)

TRACES = Path(__file__).parents[3] / "tests" / "data" / "traces"

LOG = """\
INFO 11-28 10:00:00 [engine.py:12] something else | with a bar
INFO 11-28 10:00:01 [cuda_graph.py:120] **CUDAGraph Config Settings:**

- Mode: FULL_AND_PIECEWISE
- Capture sizes: [1, 2, 4, 8]

**CUDAGraph Stats:**

| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
|-----------------|---------------|--------------|--------------|-------|
| 6               | 8             | 2            | FULL         | 31    |
| 5               | 8             | 3            | PIECEWISE    | 4     |
| 415             | 415           | 0            | NONE         | 1     |

INFO 11-28 10:00:09 [engine.py:12] one line between
(EngineCore pid=7) | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
(EngineCore pid=7) |-----|-----|-----|-----|-----|
(EngineCore pid=7) | 6 | 8 | 2 | FULL | 9 |
"""


def write(path, text):
    path.write_text(text)
    return path


def test_vllms_table_is_read_out_of_a_log(tmp_path):
    """All tables of a log are added up, and its settings are read."""
    stats = read_cudagraph_stats(write(tmp_path / "server.log", LOG))
    assert stats.config_mode == "FULL_AND_PIECEWISE"
    assert stats.sizes == (1, 2, 4, 8)
    assert len(stats.rows) == 4
    assert stats.histogram().counts == {
        StepKind(6, uniform=True): 40,
        StepKind(5, uniform=False): 4,
        StepKind(415): 1,
    }
    assert stats.waste_pct == pytest.approx(100 * (40 * 2 + 4 * 3) / (40 * 6 + 4 * 5))


def test_a_step_of_unknown_kind_takes_the_kind_of_no_other(tmp_path):
    """Most logs contain a step without a graph, whose kind vLLM's table omits."""
    steps = read_steps(write(tmp_path / "a.log", LOG))
    rows = Counter(zip(steps.column("num_tokens"), steps.column("uniform_decode"), strict=True))
    assert rows == {(6, 1): 40, (5, 0): 4, (415, 0): 1}


def test_uniform_is_not_guessed_without_the_mode(tmp_path):
    """In other modes FULL serves mixed batches too, so the kind is unknown."""
    table = LOG.replace("FULL_AND_PIECEWISE", "FULL")
    counts = read_cudagraph_stats(write(tmp_path / "a.log", table)).histogram().counts
    assert counts == {StepKind(6): 40, StepKind(5): 4, StepKind(415): 1}


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "| 2            | FULL         | 31",
            "| 3            | FULL         | 31",
            11,
            r"num paddings must be 2 \(8 padded tokens - 6 unpadded tokens\), got 3",
        ),
        (
            "| 8             | 2",
            "| 4             | 2",
            11,
            "padded tokens must be at least 6, .* got 4",
        ),
        ("| FULL         | 31    |", "| HALF         | 31    |", 11, "runtime mode must be"),
        ("| 31    |", "| -31    |", 11, "count must be from 0 to"),
        ("| 31    |", "| many    |", 11, "count must be an integer"),
        ("| FULL         | 31    |", "| FULL         |", 11, "4 cells"),
        ("Unpadded Tokens | Padded", "Unpaded Token | Padded", 9, "vLLM's table has the columns"),
    ],
)
def test_a_damaged_table_is_named_by_line(old, new, line, message, tmp_path):
    assert LOG.count(old) >= 1
    with pytest.raises(TraceError, match=message) as caught:
        read_cudagraph_stats(write(tmp_path / "a.log", LOG.replace(old, new, 1)))
    assert caught.value.line == line


def test_a_log_without_table_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cudagraph-metrics"):
        read_cudagraph_stats(write(tmp_path / "a.log", "INFO nothing here\n"))
    with pytest.raises(TraceError, match="no table of CUDA graph statistics has rows"):
        read_cudagraph_stats(write(tmp_path / "b.log", LOG.splitlines()[8] + "\n"))


def test_histograms_add_up(tmp_path):
    path = write(tmp_path / "h.csv", "size,count\n8,3\n1,2\n8,4\n")
    assert read_histogram(path).counts == {StepKind(8): 7, StepKind(1): 2}
    keyed = "num_tokens,uniform_decode,num_active_loras,count\n8,1,2,3\n8,0,0,1\n"
    histogram = read_histogram(write(tmp_path / "k.csv", keyed))
    assert histogram.counts == {StepKind(8, True, 2): 3, StepKind(8, False, 0): 1}
    assert histogram.has_uniform
    assert histogram.num_steps == 4


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "is empty"),
        ("size,count\n", None, "no sizes"),
        ("size,counts\n1,2\n", 1, "Did you mean 'count'"),
        ("size\n1\n", 1, "needs `count`"),
        ("size,num_tokens,count\n1,1,2\n", 1, "one of num_tokens and size"),
        ("size,count\n1\n", 2, "truncated"),
        ("size,count\n1,-2\n", 2, "count must be from 0 to"),
        ("size,count\n1,1e3\n", 2, "count must be an integer"),
        ("size,count,uniform_decode\n1,1,7\n", 2, "uniform_decode must be 0 or 1"),
    ],
)
def test_a_damaged_histogram_is_named_by_line(text, line, message, tmp_path):
    with pytest.raises(TraceError, match=message) as caught:
        read_histogram(write(tmp_path / "h.csv", text))
    assert caught.value.line == line


def test_a_histogram_of_a_trace_counts_its_steps():
    trace = read_trace(TRACES / "step_azure_conv_lora.csv.gz")
    histogram = SizeHistogram.from_trace(trace)
    assert histogram.num_steps == len(trace)
    assert histogram.has_uniform
    assert max(kind.num_active_loras for kind in histogram.counts) == 8


def test_a_file_is_told_apart_by_its_content(tmp_path):
    trace = read_workload(TRACES / "step_mooncake_low.csv.gz")
    assert isinstance(trace, StepTrace)
    assert isinstance(read_workload(write(tmp_path / "a", "num_tokens\n3\n")), StepTrace)
    assert isinstance(read_workload(write(tmp_path / "b", '{"num_tokens":3}\n')), StepTrace)
    assert isinstance(read_workload(write(tmp_path / "c", "size,count\n3,4\n")), SizeHistogram)
    assert isinstance(read_workload(write(tmp_path / "d", LOG)), SizeHistogram)
    for text, message in [
        ("", "is empty"),
        ("a,b\n1,2\n", "no column 'num_tokens'"),
        ("step,num_tokn\n1,2\n", "Did you mean 'num_tokens'"),
        ("hello\n", "no column 'num_tokens'"),
    ]:
        with pytest.raises(TraceError, match=message):
            read_workload(write(tmp_path / "e", text))


def test_a_count_of_hundreds_of_digits_is_named_and_no_overflow(tmp_path):
    path = tmp_path / "sizes.csv"
    path.write_text("size,count\n4," + "1" * 400 + "\n")
    with pytest.raises(TraceError, match=r"line 2: count must be from 0 to \d+, got 1{40}\.\.\."):
        read_histogram(path)


def test_a_list_of_sizes_is_read_however_a_log_writes_it(tmp_path):
    path = tmp_path / "server.log"
    table = "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |"
    path.write_text(f"- Capture sizes: [1 2 4, 8]\n{table}\n| 1 | 1 | 0 | FULL | 3 |\n")
    assert read_cudagraph_stats(path).sizes == (1, 2, 4, 8)


def test_reading_traffic_loads_no_numpy():
    code = (
        "import sys\n"
        "from dispatchkit_plan.traffic import read_workload\n"
        f"read_workload({str(TRACES / 'step_mooncake_low.csv.gz')!r})\n"
        "assert not {'numpy', 'torch'} & set(sys.modules), 'heavy imports'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counts_of_endless_steps_are_not_gone_through_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "MAX_STEPS", 50_000)
    path = write(tmp_path / "h.csv", "size,count\n5,50001\n")
    with pytest.raises(TraceError, match=r"counts 50,001 steps.* Divide .* by at least 2\."):
        read_steps(path)
    assert read_workload(path).num_steps == 50_001
