"""Ranks on GPUs: collectives inside graphs, and common decisions.

Supports any number of GPUs, uses up to eight, and most tests need two.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fault_schedules import check_world, random_worlds  # noqa: E402

# NCCL's first start takes long; a hang ends after this time.
LIMIT = 100.0
NUM_FAULTS, FAULTS_PER_WORLD, FAULTS_AT_ONCE, FAULT_SECONDS = 200, 13, 8, 75.0


@pytest.fixture(scope="module")
def size():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs for two ranks, found {count}")
    return 8 if count >= 8 else 4 if count >= 4 else 2


@pytest.fixture(scope="module")
def worlds():
    from rank_processes import Worlds

    with Worlds() as started:
        yield started


def test_a_collective_of_one_rank_is_captured(worlds):
    """NCCL takes part in captures and replays with a single GPU too."""
    (found,) = worlds.run_one("spread_rows", 1, limit=LIMIT, num_steps=20, device="cuda")
    assert "error" not in found, found
    assert found["worst"] < 1e-4
    assert found["steps"]["NONE"] == found["steps"]["PIECEWISE"] == 0
    assert found["steps"]["FULL"] > 10


def test_rows_of_one_rank_meet_on_its_device(worlds):
    """An NCCL process group is created, used and destroyed."""
    (found,) = worlds.run_one("meet", 1, limit=LIMIT, device="cuda")
    assert found == {"rows": [[1, 0, each] for each in range(3)], "bytes": [[0, 1, 2, 3]]}


def test_rows_of_all_ranks_meet_on_their_devices(worlds, size):
    """Each column gets its largest value."""
    for found in worlds.run_one("meet", size, limit=LIMIT, device="cuda"):
        assert "error" not in found, found
        assert found["rows"] == [[size, 0, each] for each in range(3)]
        assert found["bytes"] == [[0, size, 2 * size, 3 * size]]


@pytest.mark.parametrize("same_batches", [False, True])
def test_tensor_parallel_graphs_compute_what_one_gpu_does(worlds, size, same_batches):
    """All-reduce inside FULL graphs, with prompts and decode steps mixed."""
    arguments = {"num_steps": 60, "device": "cuda", "same_batches": same_batches}
    for found in worlds.run_one("tensor_parallel", size, limit=LIMIT, **arguments):
        assert "error" not in found, found
        assert found["lost"] == 0
        assert found["steps"] == {"NONE": 0, "PIECEWISE": 0, "FULL": 60}
        assert found["kinds"] == [False, True]
        # Sums over ranks round in another order.
        assert found["worst"] < 1e-4 * found["largest"]
        # The first exchange of steps belongs to start-up.
        assert found["exchanges"] == (0 if same_batches else 59)


@pytest.mark.parametrize("same_batches", [False, True])
def test_a_tensor_parallel_decoder_chooses_the_tokens_of_one_gpu(worlds, size, same_batches):
    """Two thousand steps of mixed traffic; each token depends on the earlier steps."""
    arguments = {"num_steps": 2000, "device": "cuda", "same_batches": same_batches}
    for found in worlds.run_one("tensor_parallel", size, limit=LIMIT, **arguments):
        assert "error" not in found, found
        assert found["steps"] == {"NONE": 0, "PIECEWISE": 0, "FULL": 2000}
        assert found["worst"] < 1e-4 * found["largest"]
        assert found["greedy"]["different"] == 0
        assert found["greedy"]["tokens"] > 4000
        assert found["greedy"]["decoded"] > 2000


def test_ranks_with_different_batches_run_graphs_of_one_size(worlds, size):
    """Rows are summed over ranks inside the graph; idle ranks contribute filler rows."""
    found = worlds.run_one("spread_rows", size, limit=LIMIT, num_steps=60, device="cuda")
    for each in found:
        assert "error" not in each, each
        assert each["worst"] < 1e-4
        assert each["steps"] == found[0]["steps"]
        assert each["steps"]["NONE"] == 0
        assert each["steps"]["FULL"] > 50


@pytest.mark.parametrize("rule", ["alone", "leader"])
def test_agreement_over_nccl_is_the_same(worlds, size, rule):
    """Rows are merged on the devices instead of the CPU."""
    arguments = {"seed": 3, "num_steps": 40, "rule": rule}
    on_device = worlds.run_one("schedule", size, limit=LIMIT, device="cuda", **arguments)
    on_cpu = worlds.run_one("schedule", size, limit=LIMIT, **arguments)
    assert on_device == on_cpu
    assert len(on_cpu[0]["decisions"]) == 40


@pytest.mark.parametrize("kind", ["raise", "late"])
def test_a_fault_over_nccl_stops_the_others_and_is_named(worlds, size, kind):
    """NCCL's own watchdog would end the process after ten minutes, without naming a rank."""
    schedule = {
        "seed": 0,
        "num_steps": 5,
        "kind": kind,
        "bad_rank": 1,
        "bad_step": 2,
        "timeout": 10.0,
    }
    found = worlds.run_one("faults", size, limit=LIMIT, device="cuda", schedules=[schedule])
    for rank, each in enumerate(found):
        assert isinstance(each, list), each
        error = each[0]["error"]
        if rank != 1:
            assert error["ranks"] == [1]
            assert error["step"] == 3
            assert error["seconds"] < 15


def test_random_faults_over_nccl_stop_cleanly(worlds, size):
    """Two hundred schedules, as over gloo, within two minutes.

    Several worlds run concurrently, because a fault is mostly waiting.
    """
    deadline, counted, seed = time.monotonic() + FAULT_SECONDS, 0, 0
    while counted < NUM_FAULTS and time.monotonic() < deadline:
        count = FAULTS_AT_ONCE * FAULTS_PER_WORLD
        requests = random_worlds(
            seed,
            min(count, NUM_FAULTS - counted),
            sizes=(size,),
            per_world=FAULTS_PER_WORLD,
            device="cuda",
        )
        found = worlds.run(requests, limit=LIMIT, at_once=FAULTS_AT_ONCE)
        counted += sum(map(check_world, requests, found))
        seed += 1
        print(f"{counted} schedules of faults")
    assert counted >= NUM_FAULTS // 2


@pytest.mark.parametrize(
    "example", [("tensor_parallel.py",), ("data_parallel.py",), ("data_parallel.py", "--learn")]
)
def test_the_examples_run_on_gpus(size, example):
    """All ranks run the same modes; graphs contain the all-reduce where nothing learns."""
    from launched import torchrun

    pytest.importorskip("dispatchkit_vllm")
    pytest.importorskip("dispatchkit_adaptive")
    report = torchrun(f"examples/ranks/{example[0]}", *example[1:], size=size, on_gpus=True)
    steps = re.findall(r"rank \d: steps by mode (\{.*?\})", report)
    assert len(steps) == size, report
    assert len(set(steps)) == 1, report
    assert "not used" not in report
    if "--learn" not in example:
        assert re.fullmatch(r"\{'FULL': \d+\}", steps[0])
    if example == ("tensor_parallel.py",):
        # Lines of two ranks may be interleaved.
        worst = re.findall(r"undivided layer (\d\.\de[+-]\d\d)", report)
        assert len(worst) == size, report
        assert all(float(each) < 1e-4 for each in worst), report
