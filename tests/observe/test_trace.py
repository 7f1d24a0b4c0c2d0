"""Step traces: reading, writing, and errors for damaged files."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchkit.errors import ConfigError, DispatchkitError, TraceError
from dispatchkit.observe import trace as trace_module
from dispatchkit.observe.trace import (
    MAX_COUNT,
    TRACE_COLUMNS,
    StepTrace,
    TraceStep,
    read_trace,
)
from dispatchkit.observe.trace_writer import TraceWriter, write_trace

TRACES = Path(__file__).parents[1] / "data" / "traces"
HEADER = ",".join(TRACE_COLUMNS)


@st.composite
def steps(draw):
    """Draw valid steps, uniform and mixed."""
    uniform = draw(st.booleans())
    num_reqs = draw(st.integers(0, 600))
    longest = draw(st.integers(1, 9)) if num_reqs else 0
    tokens = num_reqs * longest
    if not uniform and num_reqs:
        tokens += draw(st.integers(0, 9000))
    return TraceStep(
        num_tokens=tokens,
        num_reqs=num_reqs,
        max_query_len=longest,
        uniform_decode=uniform,
        num_active_loras=draw(st.integers(0, 8)),
        step=draw(st.integers(0, MAX_COUNT)),
        t_s=draw(st.floats(0, 1e9)),
    )


def write(path, text):
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(data)
    return path


@pytest.mark.slow_except("t.csv.gz", "t.jsonl")
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl", "t.jsonl.gz"])
@given(rows=st.lists(steps(), min_size=1, max_size=30))
def test_what_was_written_is_read_back(rows, name, tmp_path_factory):
    """Floats come back bit for bit in every format."""
    path = tmp_path_factory.mktemp("trace") / name
    assert write_trace(path, rows) == len(rows)
    trace = read_trace(path)
    assert list(trace) == rows
    assert trace == StepTrace.from_steps(rows)


def test_shipped_traces_are_read_whole():
    """Every trace has its steps, and reading them again gives the same trace."""
    files = sorted(TRACES.glob("*.csv.gz"))
    assert len(files) == 9
    for path in files:
        trace = read_trace(path)
        assert trace.columns == TRACE_COLUMNS
        assert len(trace) == 5000
        assert trace[0].step == 0
        assert max(trace.column("num_tokens")) <= 8192


def test_a_torn_end_of_line_does_not_matter(tmp_path):
    """CRLF, a byte order mark, quotes, blank lines and a missing last newline are accepted."""
    plain = read_trace(write(tmp_path / "a.csv", f"{HEADER}\n0,0.5,3,3,1,1,0\n1,1,8,2,7,0,2\n"))
    variants = [
        f"\ufeff{HEADER}\r\n0,0.5,3,3,1,1,0\r\n1,1,8,2,7,0,2\r\n",
        f"{HEADER}\n0,0.5,3,3,1,1,0\n1,1,8,2,7,0,2",
        f"\n{HEADER}\n\n0,0.5,3,3,1,1,0\n\n1,1,8,2,7,0,2\n\n\n",
        f'{HEADER}\n"0","0.5","3","3","1","1","0"\n1, 1, 8, 2, 7, 0, 2\n',
    ]
    for number, text in enumerate(variants):
        assert read_trace(write(tmp_path / f"{number}.csv", text)) == plain


def test_only_num_tokens_is_needed(tmp_path):
    """A recorder with sizes only is still useful, and missing columns have a message."""
    trace = read_trace(write(tmp_path / "t.csv", "num_tokens,note\n5,hello\n7,x\n"))
    assert [step.num_tokens for step in trace] == [5, 7]
    assert trace[0].uniform_decode is None
    assert trace.ignored_columns == ("note",)
    with pytest.raises(TraceError, match="no column 'uniform_decode'"):
        trace.column("uniform_decode")


def test_a_slice_is_a_trace():
    """Halves keep the order and all steps."""
    trace = StepTrace({"num_tokens": [1, 2, 3, 4, 5]})
    first, second = trace.halves()
    assert [s.num_tokens for s in first] == [1, 2]
    assert [s.num_tokens for s in second] == [3, 4, 5]
    assert trace[-1].num_tokens == 5
    assert isinstance(trace[1:3], StepTrace)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "is empty"),
        ("\n\n", None, "is empty"),
        (f"{HEADER}\n", None, "no steps"),
        ("steps,tokens\n1,2\n", 1, "Did you mean 'step'"),
        ("step,num_token\n1,2\n", 1, "Did you mean 'num_tokens'"),
        ("a,b\n1,2\n", 1, "no column 'num_tokens'"),
        ("num_tokens;num_reqs\n1;1\n", 1, "Separate the columns with commas"),
        ("57,57\n58,58\n", 1, "no column 'num_tokens', which is required; the first line has '57'"),
        ('{\n"num_tokens": 3}\n', 1, "Write each object on a single line"),
        ("num_tokens,num_tokens\n1,1\n", 1, "is given twice"),
        (f"{HEADER}\n0,0,3,3,1,1,0\n1,1,4,4\n", 3, "cut off"),
        (f"{HEADER}\n0,0,3,3,1,1,0\n1,1,4,4,1,1,0,9\n", 3, "8 columns"),
        (f"{HEADER}\n0,0,-3,3,1,1,0\n", 2, "num_tokens must be a whole number from 0 to"),
        (f"{HEADER}\n0,0,3,3,1,1,0\n\n1,0,x,3,1,1,0\n", 4, "num_tokens must be a whole number"),
        (f"{HEADER}\n0,0,3.0,3,1,1,0\n", 2, "2147483647, got '3.0'"),
        (f"{HEADER}\n0,0,1_0,3,1,1,0\n", 2, "2147483647, got '1_0'"),
        (f"{HEADER}\n0,0,\u0663,3,1,1,0\n", 2, "whole number"),
        (f"{HEADER}\n0,nan,3,3,1,1,0\n", 2, "t_s must be a finite"),
        (f"{HEADER}\n0,inf,3,3,1,1,0\n", 2, "t_s must be a finite"),
        (f"{HEADER}\n0,-1,3,3,1,1,0\n", 2, "t_s must be a finite, non-negative number"),
        (f"{HEADER}\n0,now,3,3,1,1,0\n", 2, "t_s must be a finite, non-negative number"),
        (f"{HEADER}\n0,0,99999999999,3,1,0,0\n", 2, "num_tokens must be a whole number from 0 to"),
        (f"{HEADER}\n0,0,{'9' * 5000},3,1,0,0\n", 2, "num_tokens must be"),
        (f"{HEADER}\n0,0,{'9' * 300},3,1,0,0\n", 2, "more than 30 digits"),
        (f"{HEADER}\n0,0,3,4,1,0,0\n", 2, "num_reqs is 4, but the step has only 3 tokens"),
        (f"{HEADER}\n0,0,3,1,4,0,0\n", 2, "max_query_len is 4, but the step has only 3 tokens"),
        (f"{HEADER}\n0,0,3,2,1,1,0\n", 2, "num_reqs x max_query_len"),
        (f"{HEADER}\n0,0,3,3,1,2,0\n", 2, "uniform_decode must be 0 or 1"),
        ('{"num_tokens": 3}\n{"num_tokens": 4\n', 2, "cut off"),
        ('{"num_tokens": 3}\n[4]\n', 2, "each line must be a JSON object"),
        ('{"num_tokens": 3}\n{"num_token": 4}\n', 2, "same fields as the first line"),
        ('{"num_tokens": 3}\n{"num_tokens": NaN}\n', 2, "2147483647, got nan"),
        ('{"num_tokens": true}\n', 1, "2147483647, got True"),
        ('{"num_tokens": "3"}\n', 1, "2147483647, got '3'"),
        ('{"num_tokens": 3, "t_s": 1e999}\n', 1, "t_s must be a finite"),
        ('{"num_tokens": 3, "t_s": 1' + "0" * 400 + "}\n", 1, "t_s must be a finite"),
        ('{"num_tokens": ' + "[" * 50_000 + "\n", 1, "is not a JSON object"),
    ],
)
def test_a_damaged_file_is_named_by_line(text, line, message, tmp_path):
    """The message names file, line and the expected value."""
    path = write(tmp_path / "trace.csv", text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert caught.value.path == str(path)


@pytest.mark.parametrize("columns", [3, ["num_tokens"], "num_tokens"])
def test_columns_are_values_by_name(columns):
    with pytest.raises(ConfigError, match="columns must be a dictionary of values by column name"):
        StepTrace(columns)
    with pytest.raises(ConfigError, match=r"columns\['num_tokens'\] must be a list of values"):
        StepTrace({"num_tokens": "34"})


@pytest.mark.parametrize("columns", [3, "num_tokens"])
def test_columns_to_write_are_a_list(columns, tmp_path):
    with pytest.raises(ConfigError, match="columns must be a list of column names, or None, got"):
        TraceWriter(tmp_path / "trace.csv", columns)


def test_a_bad_value_deep_in_a_long_file_is_named(tmp_path):
    """The fast path over whole blocks keeps line numbers."""
    lines = [HEADER] + [f"{i},{i},8,8,1,1,0" for i in range(20_000)]
    lines[17_000] = "16999,1,8,8,1,1,"
    with pytest.raises(TraceError, match="num_active_loras must be a whole number") as caught:
        read_trace(write(tmp_path / "long.csv", "\n".join(lines)))
    assert caught.value.line == 17_001


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfen\x00u\x00m\x00", "UTF-16"),
        (HEADER.encode() + b"\n0,0,3,3,1,1,\xff\n", "so the file is not UTF-8 text"),
        (b"\x00\x01\x02\x03", "line 1: the line contains byte 0x00, so the file is not UTF-8 text"),
        (bytes(200_000), "line 1: the line contains byte 0x00"),
        (b"x" * 200_000, "no line break"),
        (b"\x1f\x8b\x08\x00", "truncated"),
        (b"\x1f\x8bnonsense that is no gzip file", "damaged"),
    ],
)
def test_what_is_no_text_is_refused(data, message, tmp_path):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t", data))


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(TraceError, match="is a folder"):
        read_trace(tmp_path)


def test_a_gzip_bomb_stops_at_the_limit(tmp_path):
    """Unpacking stops at the limit."""
    row = b"0,0,3,3,1,1,0\n"
    packed = gzip.compress(HEADER.encode() + b"\n" + row * 400_000)
    assert len(packed) < 50_000
    path = write(tmp_path / "bomb.csv.gz", packed)
    with pytest.raises(TraceError, match="larger than the limit of 1,000,000 uncompressed bytes"):
        read_trace(path, max_bytes=1_000_000)
    with pytest.raises(ConfigError, match="max_bytes"):
        read_trace(path, max_bytes=0)


@pytest.mark.parametrize("packed", [False, True])
@given(data=st.data())
def test_any_damage_gives_a_trace_or_a_typed_error(data, packed, tmp_path_factory):
    """With any cut and any overwritten byte, there is no other exception and no hang."""
    good = f"{HEADER}\n" + "".join(f"{i},{i}.5,{i + 1},1,{i + 1},0,0\n" for i in range(20))
    raw = gzip.compress(good.encode(), mtime=0) if packed else good.encode()
    cut = data.draw(st.integers(0, len(raw)))
    at = data.draw(st.integers(0, max(0, cut - 1)))
    noise = data.draw(st.binary(max_size=4))
    damaged = raw[:at] + noise + raw[at + len(noise) : cut]
    path = write(tmp_path_factory.mktemp("torn") / "t.csv", damaged)
    try:
        outcome = read_trace(path)
    except TraceError as error:
        outcome = error
    if isinstance(outcome, TraceError):
        assert outcome.path == str(path)
    else:
        assert 1 <= len(outcome) <= 21


def test_nothing_half_written_is_left(tmp_path):
    """An invalid step leaves the old file unchanged, and no partial new one."""
    path = tmp_path / "t.csv"
    write_trace(path, [TraceStep(num_tokens=3, num_reqs=3)])
    before = path.read_bytes()
    with pytest.raises(TraceError, match="num_reqs is 9"):
        write_trace(
            path, [TraceStep(num_tokens=9, num_reqs=1), TraceStep(num_tokens=3, num_reqs=9)]
        )
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(tmp_path / "no" / "folder.csv", [TraceStep(num_tokens=1)])


def test_the_writer_numbers_steps_and_needs_its_with_statement(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    writer = TraceWriter(path, ["step", "num_tokens"])
    with pytest.raises(ConfigError, match="with"):
        writer.write(TraceStep(num_tokens=1))
    with writer:
        writer.write(TraceStep(num_tokens=4))
        writer.write(TraceStep(num_tokens=5))
        assert not path.exists()
    lines = gzip.decompress(path.read_bytes()).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "num_tokens": 4},
        {"step": 1, "num_tokens": 5},
    ]
    with pytest.raises(TraceError, match="unknown column 'nope'"):
        TraceWriter(path, ["nope"])


def test_impossible_columns_are_refused_in_memory():
    with pytest.raises(TraceError, match="must have the same length"):
        StepTrace({"num_tokens": [1, 2], "num_reqs": [1]})
    with pytest.raises(TraceError, match="unknown column"):
        StepTrace({"num_tokens": [1], "colour": [1]})
    with pytest.raises(DispatchkitError, match="0 to"):
        StepTrace({"num_tokens": [-1]})


def test_reading_a_trace_loads_no_numpy():
    """Importing this package stays light: a recorder needs no numpy."""
    code = (
        "import sys\n"
        "from dispatchkit.observe.trace import read_trace\n"
        f"read_trace({str(TRACES / 'step_mooncake_low.csv.gz')!r})\n"
        "assert not {'numpy', 'torch'} & set(sys.modules), 'heavy imports'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_million_steps_are_read(tmp_path):
    """A trace of a million steps is read whole (bench/plan.py measures the time)."""
    path = tmp_path / "million.csv"
    with path.open("w") as out:
        out.write(HEADER + "\n")
        for start in range(0, 1_000_000, 1000):
            out.write(
                "".join(
                    f"{i},{i * 0.01:.2f},{i % 500 + 1},1,{i % 500 + 1},0,0\n"
                    for i in range(start, start + 1000)
                )
            )
    trace = read_trace(path)
    assert len(trace) == 1_000_000
    assert sum(trace.column("num_tokens")) == 2000 * sum(range(1, 501))


AXES_HEADER = HEADER + ",axis.length,axis.kind"
AXES_ROWS = ["0,0.0,4,4,1,1,0,40,3", "1,0.5,9,2,8,0,1,7,0"]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl"])
def test_axes_are_columns_that_come_back(tmp_path, name):
    """Handwritten files and files of this package both keep them."""
    path = tmp_path / "by_hand.csv"
    path.write_text("\n".join([AXES_HEADER, *AXES_ROWS]) + "\n")
    trace = read_trace(path)
    assert trace.axes == ("length", "kind")
    assert trace.ignored_columns == ()
    assert trace[0].axes == {"length": 40, "kind": 3}
    assert list(trace.column("axis.length")) == [40, 7]
    assert trace[1:].axes == trace.axes
    write_trace(tmp_path / name, trace)
    assert read_trace(tmp_path / name) == trace
    with TraceWriter(tmp_path / name) as writer:
        for step in trace:
            writer.write(step)
    assert read_trace(tmp_path / name) == trace
    assert StepTrace.from_steps(trace) == trace
    assert read_trace(path, max_bytes=1 << 20).halves()[0].axes == trace.axes


def test_traces_without_axes_are_as_ever(tmp_path):
    with TraceWriter(tmp_path / "t.csv"):
        pass
    assert (tmp_path / "t.csv").read_text() == HEADER + "\n"
    step = TraceStep(3)
    assert step.axes == {}
    assert hash(step) == hash(TraceStep(3))


@pytest.mark.parametrize(
    ("header", "row", "says"),
    [
        ("num_tokens,axis_length", "3,4", "axis.NAME"),
        ("num_tokens,axes.length", "3,4", "axis.NAME"),
        ("num_tokens,axis.two words", "3,4", "axis.NAME"),
        ("num_tokens,axis.length,axis.length", "3,4,4", "twice"),
        ("num_tokens,axis.length", "3,x", "axis.length must be a whole number"),
        ("num_tokens,axis.length", "3,-1", "axis.length must be a whole number from 0 to"),
        ("num_tokens,axis.length", "3", "1 column, but"),
    ],
)
def test_faults_of_axis_columns_are_named(tmp_path, header, row, says):
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n{row}\n")
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_steps_with_other_axes_than_the_first_are_refused(tmp_path):
    first, more = TraceStep(3, 3, 1, True, axes={"a": 1}, t_s=0.0), {"a": 1, "b": 2}
    with TraceWriter(tmp_path / "t.csv") as out:
        out.write(first)
        for axes in ({}, {"b": 1}):
            with pytest.raises(TraceError, match=r"no axis\.a, .* or in none"):
                out.write(attrs.evolve(first, axes=axes))
        with pytest.raises(TraceError, match="Axes of the first step: a; of step 1: a, b"):
            out.write(attrs.evolve(first, axes=more))
    with pytest.raises(TraceError, match=r"axis\.b"):
        StepTrace.from_steps([first, attrs.evolve(first, axes=more)])


def test_steps_of_another_type_are_refused():
    with pytest.raises(ConfigError, match=r"steps\[1\] must be a TraceStep, got 3"):
        StepTrace.from_steps([TraceStep(3, 3, 1, True), 3])


def test_axes_of_later_steps_alone_are_refused_and_leave_no_file(tmp_path):
    path = tmp_path / "t.csv"
    with pytest.raises(TraceError, match="Axes of the first step: none; of step 1: length"):
        write_trace(path, [TraceStep(4), TraceStep(4, axes={"length": 3})])
    assert list(tmp_path.iterdir()) == []


def test_a_packed_file_of_endless_steps_is_refused(tmp_path, monkeypatch):
    """It is refused before it fills the memory, even if the file is small."""
    monkeypatch.setattr(trace_module, "MAX_STEPS", 50_000)
    path = write(tmp_path / "t.csv.gz", gzip.compress(b"num_tokens\n" + b"5\n" * 500_000))
    assert path.stat().st_size < 10_000
    with pytest.raises(TraceError, match="more than 50,000 steps"):
        read_trace(path)
