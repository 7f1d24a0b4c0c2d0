"""The facades agree with golden vectors, and the comparison detects changed copies."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispatchkit_vllm.conformance import check_file
from dispatchkit_vllm.conformance.__main__ import main

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*.jsonl.gz"))
NUM_RECORDS = 840

pytestmark = pytest.mark.filterwarnings("ignore::dispatchkit.keys.CaptureSizeWarning")


@functools.cache
def parsed(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def records(name: str, suits: Callable[[Any], bool] = bool) -> list[dict[str, Any]]:
    """Return copies of a file's records, which may be changed."""
    # Faster than copy.deepcopy.
    return [json.loads(json.dumps(record)) for record in parsed(name) if suits(record)]


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("name", ["vllm-newest", "seed-003-lora", "vllm-newest-manager"])
def test_a_sample_agrees(name: str):
    """A quick check of some files; the next test compares all records."""
    report = check_file(DATA / f"{name}.jsonl.gz", every=7)
    assert [record.problems for record in report.failed] == []
    assert report.num_compared > len(report.records)


@pytest.mark.slow
def test_every_record_agrees():
    """Each dialect answers as the pinned release, even if ladders interleave."""
    pytest.importorskip("torch")
    reports = [check_file(path) for path in FILES]
    assert [record for report in reports for record in report.failed] == []
    assert sum(report.num_passed for report in reports) == NUM_RECORDS


# -- detected changes -----------------------------------------------------------------------


def flip(record: dict[str, Any]) -> None:
    row = next(row for group in record["dispatch"] for row in group["r"] if row[1] == "PIECEWISE")
    row[1] = "FULL"


def drop_key(record: dict[str, Any]) -> None:
    record["keys"]["FULL"].pop()


def reorder(record: dict[str, Any]) -> None:
    order = record["capture_order"]
    pairs = order["FULL"] if isinstance(order, dict) else order[-1][1]
    pairs[0], pairs[1] = pairs[1], pairs[0]


def pad_more(record: dict[str, Any]) -> None:
    record["pad"][1][1] += 1


def expect_error(record: dict[str, Any]) -> None:
    record["dispatch"][0]["r"][0][1:] = ["!AssertionError"]


def rich(record: dict[str, Any]) -> bool:
    """Return whether a record contains every field that tests change."""
    return (
        len(record.get("keys", {}).get("FULL", ())) > 1
        and "PIECEWISE" in record["keys"]
        and any(row[1] == "PIECEWISE" for group in record["dispatch"] for row in group["r"])
    )


@pytest.mark.parametrize(
    ("tamper", "where"),
    [
        (flip, "dispatch"),
        (drop_key, "keys"),
        (reorder, "capture_order"),
        (pad_more, "pad"),
        (expect_error, "dispatch"),
    ],
)
def test_a_changed_copy_is_reported(tamper: Callable[[Any], None], where: str, tmp_path: Path):
    record = records("vllm-newest", rich)[0]
    before = copy.deepcopy(record)
    tamper(record)
    assert record != before
    report = check_file(write(tmp_path / "copy.jsonl", before, record))
    assert report.num_passed == 1
    (failed,) = report.failed
    assert failed.line == 2
    assert any(problem.startswith(where) for problem in failed.problems)
    assert all("expected" in problem and "got" in problem for problem in failed.problems)


@pytest.mark.parametrize("name", ["vllm-0.11", "vllm-0.13", "seed-003-lora", "seed-002-drafter"])
def test_a_flipped_result_is_reported_for_each_kind(name: str, tmp_path: Path):
    record = records(name, rich)[0]
    flip(record)
    assert len(check_file(write(tmp_path / "copy.jsonl", record)).failed) == 1


def test_a_flipped_result_of_the_manager_is_reported(tmp_path: Path):
    record = records("vllm-newest-manager", lambda each: each["capture"])[0]
    record["dispatch"][3][6] += 1
    assert len(check_file(write(tmp_path / "copy.jsonl", record)).failed) == 1


def test_a_changed_event_of_a_wrapper_trace_is_reported(tmp_path: Path):
    pytest.importorskip("torch")
    record = records("wrapper-traces")[0]
    record["steps"][2]["events"].reverse()
    (failed,) = check_file(write(tmp_path / "copy.jsonl", record)).failed
    assert failed.problems[0].startswith("steps[2].events")


# -- the format ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(note="new"),
        lambda record: record["cfg"].update(note="new"),
        lambda record: record["dispatch"][0].update(note="new"),
        lambda record: record.pop("keys"),
        lambda record: record["cfg"].pop("max_num_seqs"),
        lambda record: record["dispatch"][0].pop("uniform"),
        lambda record: record.update(id="vllm-9.9/000"),
        lambda record: record.update(id=7),
        lambda record: record.pop("id"),
    ],
)
def test_an_unknown_or_missing_field_is_an_error(change: Callable[[Any], Any], tmp_path: Path):
    record = records("vllm-newest", rich)[0]
    change(record)
    (failed,) = check_file(write(tmp_path / "copy.jsonl", record)).failed
    assert failed.problems[0].startswith("invalid record")


def test_an_error_about_fields_names_them(tmp_path: Path):
    record = records("vllm-newest", rich)[0]
    problems = []
    for names in (["keys"], ["keys", "max_size"], ["pad"]):
        short = {name: value for name, value in record.items() if name not in names}
        (failed,) = check_file(write(tmp_path / "copy.jsonl", short)).failed
        problems += failed.problems
    assert problems == [
        f"invalid record: {record['id']} lacks the required field keys.",
        f"invalid record: {record['id']} lacks the required fields keys, max_size.",
        "invalid record: the field pad is missing, but the dispatcher has a padding table.",
    ]


@pytest.mark.parametrize("name", ["capture-sizes", "mode-resolution", "mode-enum"])
def test_an_unknown_field_is_an_error_for_configurations_too(name: str, tmp_path: Path):
    record = {**records(name)[0], "note": "new"}
    (failed,) = check_file(write(tmp_path / "copy.jsonl", record)).failed
    assert "note" in failed.problems[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "sizes/1", "id": "sizes/2"}'])
def test_what_is_no_record_is_an_error(text: str, tmp_path: Path):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    assert len(check_file(path).failed) == 1


def test_the_kind_comes_from_the_id_and_not_from_the_name(tmp_path: Path):
    mixed = [records("vllm-0.13")[0], records("capture-sizes")[0], records("mode-enum")[0]]
    report = check_file(write(tmp_path / "vllm-0.11.jsonl", *mixed))
    assert (report.num_passed, len(report.failed)) == (3, 0)


# -- the command --------------------------------------------------------------------------


def test_command_counts_per_file_and_in_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = write(tmp_path / "good.jsonl", *records("mode-enum"))
    record = records("mode-enum")[0]
    record["truthy"] = not record["truthy"]
    bad = write(tmp_path / "bad.jsonl", record, *records("mode-enum")[1:])
    assert main([good]) == 0
    assert "all files: 5 records passed, 0 failed" in capsys.readouterr().out
    assert main([good, bad]) == 1
    out = capsys.readouterr().out
    assert f"{good}: 5 records passed, 0 failed" in out
    assert f"{bad}: 4 records passed, 1 failed" in out
    assert "all files: 9 records passed, 1 failed" in out
    assert "truthy: expected True, got False" in out


def test_command_says_which_file_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "missing.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.endswith("missing.jsonl: No such file or directory.\n")
    damaged = tmp_path / "damaged.jsonl.gz"
    data = gzip.compress(b"{}\n" * 500)
    damaged.write_bytes(data[:12] + b"\xff" * 4 + data[16:])
    assert main([str(damaged)]) == 2
    assert f"Cannot read {damaged}: Error -3" in capsys.readouterr().err
