"""Measure decision times in vLLM's second model runner, for vLLM's own rule and for policies.

    .vllm/cpu-0.32.0/bin/python plugins/dispatchkit-vllm/upstream/decisions.py [--steps 1000]

Runs without a model, in an environment made by ``cpu_engine.py``. The steps come from a trace.
Between steps, the CPU caches are overwritten as in a forward pass: with warm caches, a decision
takes a tenth of the time. In every round, the policies are created again and take turns. The means
use the shortest time of each step over all rounds. Prints one JSON line per policy: the mean time
of a decision, its ratio to the mean time of vLLM's own decisions, and the mean time of measuring
and learning per step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DISPATCHKIT_POLICY"] = "vllm"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from dispatchkit.observe import read_trace

from dispatchkit_vllm import engine

TRACE = Path(__file__).resolve().parents[3] / "tests/data/traces/step_azure_conv_high.csv.gz"
SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's default
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {}),
    "vllm": ("vllm", {}),
    "threshold": ("threshold", {}),
    "threshold max_tokens=64": ("threshold", {"max_tokens": 64}),
    "threshold prefer_piecewise": ("threshold", {"prefer_piecewise": True}),
    "composite": ("composite", {"members": "vllm"}),
    "composite with adaptive": ("composite", {"members": "vllm,adaptive"}),
    "adaptive": ("adaptive", {}),
}
#: Device times reported to policies, by runtime mode: (constant, per token) in microseconds.
MODELLED_US = {"FULL": (900.0, 2.0), "PIECEWISE": (2500.0, 2.0), "NONE": (8000.0, 2.0)}

Shape = tuple[int, int, int | None]


def runner_module() -> Any:
    """Import the second runner, with stubs for functions that fail on a CPU."""
    engine.install()
    from vllm.v1.worker.gpu import model_runner as module

    names = module.ModelCudaGraphManager.replaces.__init__.__globals__
    names["current_platform"] = SimpleNamespace(get_global_graph_pool=object)
    names["get_pp_group"] = lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True)
    return module


def new_manager(module: Any) -> Any:
    """Return a manager with vLLM's default sizes, marked as captured."""
    from vllm.config import CUDAGraphMode

    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=SIZES,
            max_cudagraph_capture_size=SIZES[-1],
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            compile_sizes=None,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(
            world_size=1, data_parallel_size=1, tensor_parallel_size=1, rank=0
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        num_speculative_tokens=0,
        lora_config=None,
        additional_config={},
    )
    made = module.ModelCudaGraphManager(config, "cpu", CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    made._graphs_captured = True  # noqa: SLF001 - vLLM's name
    return made


class ModelledClock:
    """A clock that returns the time assigned to ``us``."""

    name = "device"
    us = 0.0

    def is_busy(self) -> bool:
        """Return True, because asynchronous scheduling keeps the device busy."""
        return True

    def new_mark(self) -> object:
        """Return a mark."""
        return object()

    def set_mark(self, mark: object) -> None:
        """Do nothing."""

    def is_reached(self, mark: object) -> bool:
        """Return True."""
        return True

    def elapsed_us(self, start: object, end: object) -> float:
        """Return the assigned time."""
        return self.us


def decide_all(
    module: Any, manager: Any, name: str, steps: list[Shape], evict_caches: Callable[[], None]
) -> tuple[list[int], list[int]]:
    """Return the nanoseconds of each decision, and of measuring and learning in each step."""
    policy, options = POLICIES[name]
    controller, clock, now = manager.controller, ModelledClock(), time.perf_counter_ns
    controller._clock = lambda _: clock  # noqa: SLF001
    controller.activate(controller.make(policy, **options) if policy else None)
    own = (module.ModelCudaGraphManager.replaces if not policy else type(manager)).dispatch
    decisions: list[int] = []
    learning: list[int] = []

    def dispatch(reqs: int, tokens: int, uniform: int | None, **facts: Any) -> Any:
        now()  # the first call after a step takes microseconds
        begun = now()
        found = own(manager, reqs, tokens, uniform, **facts)
        decisions.append(now() - begun)
        return found

    manager.dispatch = dispatch
    timer = controller.timer
    for num_reqs, num_tokens, uniform in steps:
        evict_caches()
        found = module.dispatch_cg_and_sync_dp(manager, num_reqs, num_tokens, uniform, 1, 0)[0]
        if timer is not None:
            fixed, each = MODELLED_US[found.cg_mode.name]
            clock.us = fixed + each * found.num_tokens
            evict_caches()
            begun = now()
            timer.begin(controller.take_answer())
            timer.end()
            learning.append(now() - begun)
    del manager.dispatch
    controller.activate(None)
    return decisions, learning


def main() -> None:
    """Measure all policies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cold-mib", type=int, default=64, help="MiB to overwrite between steps; 0 for warm caches"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    trace = list(read_trace(given.trace))[: given.steps]
    steps = [(one.num_reqs, one.num_tokens, 1 if one.uniform_decode else None) for one in trace]
    memory = torch.zeros(given.cold_mib * 2**20, dtype=torch.uint8)
    module = runner_module()
    manager = new_manager(module)
    found: dict[str, list[tuple[list[int], list[int]]]] = {name: [] for name in POLICIES}
    for _ in range(given.rounds):
        for name in POLICIES:
            found[name].append(decide_all(module, manager, name, steps, lambda: memory.add_(1)))

    def mean_us(name: str, part: int) -> float:
        least = [min(times) for times in zip(*(one[part] for one in found[name]), strict=True)]
        return statistics.fmean(least) / 1e3 if least else 0.0

    plain = mean_us("plain", 0)
    for name in POLICIES:
        line = {
            "policy": name,
            "decision_us": round(mean_us(name, 0), 2),
            "of_plain": round(mean_us(name, 0) / plain, 3),
            "learning_us": round(mean_us(name, 1), 2),
            "steps": len(steps),
        }
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
