"""Ten thousand bad inputs lead to an answer or a typed error, and to no partial file.

tests/cli has its own tests of command lines. Every input has its own seed, which a failure prints.
``FUZZ_SEED=7`` before the command draws other inputs.
"""

from __future__ import annotations

import gzip
import importlib
import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from dispatchkit import load_plugins
from dispatchkit.errors import DispatchkitError
from dispatchkit.keys import Batch, BatchDescriptor, DispatchConfig
from dispatchkit.observe import TraceWriter, read_trace
from dispatchkit.settings import SETTINGS, load_settings

from dispatchkit_plan import load_cost_model
from dispatchkit_plan.traffic import read_cudagraph_stats, read_histogram, read_workload

pytestmark = pytest.mark.slow

TRACE = "num_tokens,num_reqs,max_query_len,uniform_decode\n3,3,1,1\n9,4,6,0\n4,4,1,1\n"
JSONL = '{"num_tokens": 3, "num_reqs": 3}\n{"num_tokens": 9, "num_reqs": 4}\n'
SCALARS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 8, -1, 10**6, 2**63, 10**400, True, False, None),
    *(0.5, 1e308, float("nan"), float("inf"), "", "8", "x", "FULL", "vllm", "[1", "1,2", "\0"),
    *(b"1", (), [], {}, {"a": 1}, [1, 2], [2, 1, 2], ["1"], [[1]], {1}, 1j, object, "٣", "é" * 50),
)


def scalar(rng: random.Random) -> Any:
    """Return a value that a user may pass by mistake."""
    if rng.random() < 0.2:
        return [scalar(rng) for _ in range(rng.randrange(4))]
    return rng.choice(SCALARS)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some removed, repeated, changed or inserted."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + data[at + rng.randint(1, 9) :]
            case 2:
                data = data[:at] + bytes(rng.randrange(256) for _ in range(3)) + data[at:]
            case 3:
                word = rng.choice(["-1", "1e999", "NaN", "null", '"', ",", "\n", "{", "9" * 400])
                data = data[:at] + word.encode() + data[at:]
            case 4:
                data = data + data[: at // 2]
    return data


def typed(number: int, seed: str, attempt: Callable[[random.Random], Any]) -> None:
    """Run attempts, each of which must return or raise one of dispatchkit's errors."""
    refused = 0
    seed = f"{os.environ.get('FUZZ_SEED', '')} {seed}".lstrip()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(number):
            try:
                attempt(random.Random(f"{seed} {index}"))
            except DispatchkitError as error:
                if not str(error).strip():
                    raise AssertionError(f"{seed} {index}: an error without words") from error
                refused += 1
            except Exception as error:
                raise AssertionError(f"{seed} {index}: {type(error).__name__}: {error}") from error
    assert refused > number // 10, f"{seed}: only {refused} of {number} were bad"


def left(folder: Path) -> list[str]:
    """Return the partial files in a folder."""
    return [path.name for path in folder.rglob("*.part*")]


def test_3300_configurations() -> None:
    fields = [field for field in DispatchConfig.__attrs_attrs__ if field.init]
    names = [field.alias for field in fields if not field.alias.startswith("_")]

    def attempt(rng: random.Random) -> None:
        chosen = rng.sample(names, rng.randint(1, 3))
        DispatchConfig(**{name: scalar(rng) for name in chosen})

    typed(3300, "configuration", attempt)


def test_1500_descriptors_and_batches() -> None:
    def attempt(rng: random.Random) -> None:
        kind = rng.choice((Batch, BatchDescriptor))
        names = [field.name for field in kind.__attrs_attrs__ if field.init]
        chosen = {name: scalar(rng) for name in rng.sample(names, rng.randint(1, 3))}
        kind(**{"num_tokens": 4, **chosen})

    typed(1500, "descriptor", attempt)


def test_1000_settings(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"

    def attempt(rng: random.Random) -> None:
        name = rng.choice(list(SETTINGS))
        value = scalar(rng)
        match rng.randrange(3):
            case 0:
                load_settings({name: value}, environ={}, start=tmp_path / "nowhere")
            case 1:
                load_settings(environ={f"DISPATCHKIT_{name.upper()}": str(value)}, start=tmp_path)
            case 2:
                text = f"[tool.dispatchkit]\n{name} = {json.dumps(str(value))}\n"
                file.write_bytes(damaged(rng, text.encode()))
                load_settings(environ={}, file=file)

    typed(1000, "settings", attempt)


def test_2000_trace_files(tmp_path: Path) -> None:
    readers = (read_trace, read_histogram, read_workload, read_cudagraph_stats)

    def attempt(rng: random.Random) -> None:
        text, ending = rng.choice(
            ((TRACE, "csv"), (JSONL, "jsonl"), (TRACE, "log"), ("{}", "json"))
        )
        data = text.encode()
        if rng.random() < 0.3:
            data, ending = gzip.compress(data, mtime=0), f"{ending}.gz"
        path = tmp_path / f"trace.{ending}"
        path.write_bytes(damaged(rng, data))
        rng.choice(readers)(path)

    typed(2000, "trace", attempt)


def test_500_traces_that_cannot_be_written(tmp_path: Path) -> None:
    """The step is refused; the trace has the steps before it, and no partial file remains."""
    from dispatchkit.observe import TraceStep

    def attempt(rng: random.Random) -> None:
        path = tmp_path / rng.choice(("t.csv", "t.csv.gz", "t.jsonl"))
        num_steps = 1
        try:
            with TraceWriter(path) as writer:
                writer.write(TraceStep(num_tokens=3))
                writer.write(TraceStep(num_tokens=scalar(rng), num_reqs=scalar(rng)))
                num_steps = 2
        finally:
            assert list(tmp_path.iterdir()) == [path]
            assert len(read_trace(path)) == num_steps
            path.unlink()

    typed(500, "written", attempt)


def test_500_cost_models(tmp_path: Path) -> None:
    from dispatchkit_plan import save_cost_model

    good = tmp_path / "good.json"
    save_cost_model(load_cost_model("lm-decode-h100"), good)
    whole = good.read_bytes()

    def attempt(rng: random.Random) -> None:
        path = tmp_path / "model.json"
        path.write_bytes(damaged(rng, whole))
        load_cost_model(path)

    typed(500, "cost model", attempt)
    assert left(tmp_path) == []


def test_1000_learned_states(tmp_path: Path) -> None:
    """Truncated, changed, or with a valid digest and impossible arms."""
    pytest.importorskip("dispatchkit_adaptive")
    from dispatchkit_adaptive import state

    good = tmp_path / "good.json"
    state.write_state(good, {"device": "x"}, {})
    whole = good.read_bytes()
    arm: dict[str, Any] = {"clock": "device", "queued": False, "estimate": {"noise": 0.1}}

    def attempt(rng: random.Random) -> None:
        path = tmp_path / "state.json"
        path.write_bytes(damaged(rng, whole))
        if rng.random() < 0.5:
            arms: Any = [{**arm, rng.choice([*arm, "graphs", "eager", "x"]): scalar(rng)}]
            arms = rng.choice((arms, scalar(rng)))
            body = {"fingerprint": {"device": "x"}, "arms": arms}
            try:
                digest = state._digest(body)
            except (TypeError, ValueError):
                body, digest = {"fingerprint": {"device": "x"}, "arms": [None]}, "0"
            told = {"format": state.FORMAT, "version": state.VERSION, "digest": digest, **body}
            path.write_text(json.dumps(told))
        try:
            state.read_state(path, {"device": "x"}, 8)
        except state.StateError as error:
            raise DispatchkitError(str(error)) from error

    typed(1000, "state", attempt)
    assert left(tmp_path) == []


def test_state_on_disk_runs_no_code(tmp_path: Path) -> None:
    """A pickle in place of the state is refused and not unpickled."""
    state = pytest.importorskip("dispatchkit_adaptive.state")
    import pickle

    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    path = tmp_path / "state.json"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(state.StateError):
        state.read_state(path, {}, 8)
    assert not marker.exists()


def test_200_distributions_with_bad_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken ones are skipped and named; the others load."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging.getLogger("dispatchkit"), "disabled", True)
    (tmp_path / "fuzz_module.py").write_text("value = 1\n")
    info = tmp_path / "fuzzed-1.0.dist-info"
    info.mkdir()
    points = "[dispatchkit]\nfuzzed = fuzz_module\n\n[console_scripts]\nx = fuzz_module:value\n"
    words = ["fuzz_module:value", "fuzz_module:nothing", "nowhere", "os:_exit.x", "", ":", "a b"]

    def attempt(rng: random.Random) -> None:
        text = points.replace("fuzz_module", rng.choice(words), 1).encode()
        (info / "entry_points.txt").write_bytes(damaged(rng, text) if rng.random() < 0.7 else text)
        metadata = b"Metadata-Version: 2.1\nName: fuzzed\nVersion: 1.0\n"
        (info / "METADATA").write_bytes(damaged(rng, metadata) if rng.random() < 0.5 else metadata)
        importlib.invalidate_caches()
        found = load_plugins(environ={})
        assert "vllm" in found.policies
        if found.problems:
            raise found.problems[0]

    typed(200, "metadata", attempt)
    assert "fuzz_module" not in sys.modules or sys.modules["fuzz_module"].value == 1
