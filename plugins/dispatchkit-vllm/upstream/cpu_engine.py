"""Run whole vLLM engines on the CPU with policies in front of both model runners.

vLLM captures no graphs on a CPU, so a mode is forced on a fresh dispatcher of the runner; each
step then runs as eager whatever is decided, which is what makes equal tokens a fair check. The
second runner needs Triton to generate, so its graph manager is asked directly, step by step.
For each build of vLLM one environment under ``.vllm/``; one JSON line for each check, exit code 1
if one fails.

usage: cpu_engine.py [--python PYTHON]... [RELEASE...]
       cpu_engine.py --inside        (in an environment with a CPU build)
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from environments import BUILDS, environment

from dispatchkit_vllm.engine.timing import HostClock

#: Has glibc hand out memory of zeros. The CPU kernels of vLLM 0.13 read memory that was never
#: written: their logits differ in the last bits from run to run, and at times are NaN.
ZEROED = {"MALLOC_PERTURB_": "255"}
SIZES = [1, 2, 4, 8, 16, 32]
FIVE = {
    "vllm": {},
    "threshold": {"max_tokens": 4},
    "vllm@0.33": {},
    "composite": {"members": "vllm"},
    "adaptive": {},
}


def say(check: str, ok: bool, **facts: object) -> bool:
    """Print one line at once; return whether the check holds."""
    sys.stdout.write(json.dumps({"check": check, "ok": ok, **facts}) + "\n")
    sys.stdout.flush()
    return ok


class CpuEngine:
    """An engine of a tiny Llama, its runner's dispatcher forced into a mode."""

    def __init__(self) -> None:
        from gpu_engine import model_folder
        from vllm import LLM

        self.llm = LLM(
            model=model_folder(256, 2),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            seed=0,
            enforce_eager=True,
        )
        core: Any = self.llm.llm_engine.engine_core
        core = getattr(core, "engine_core", core)
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.decider = self.force()
        self.station = self.decider.station

    def force(self) -> Any:
        """Give the runner a dispatcher that has graphs to choose from."""
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker import gpu_model_runner

        compilation = self.runner.vllm_config.compilation_config
        compilation.cudagraph_capture_sizes = SIZES
        compilation.max_cudagraph_capture_size = SIZES[-1]
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.is_attention_compiled_piecewise = lambda: True
        if hasattr(compilation, "post_init_cudagraph_sizes"):
            compilation.post_init_cudagraph_sizes()
        made = gpu_model_runner.CudagraphDispatcher(self.runner.vllm_config)
        made.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
        self.runner.cudagraph_dispatcher = made
        return made

    def generate(self, requests: list[tuple[list[int], int]]) -> tuple[float, str, int]:
        """Run a batch of requests; return its seconds, a hash of its tokens, and their number."""
        from gpu_engine import Engine

        return Engine.generate(self, requests)  # type: ignore[arg-type]


def talk(rng: random.Random, count: int = 10) -> list[tuple[list[int], int]]:
    """Return short requests."""
    return [
        ([rng.randrange(3, 32000) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 10))
        for _ in range(count)
    ]


def first_runner(engine: CpuEngine) -> bool:
    """Five policies generate the same tokens, and decide as they should."""
    import gpu_engine

    gpu_engine.POLICIES = {name: (name, dict(options)) for name, options in FIVE.items()}
    names = ["plain", *FIVE, "plain again"]
    _, same, watch, _, cores = gpu_engine.turns(engine, names, 2, talk)
    # Where vLLM does not repeat itself, the tokens of policies tell nothing of the policies.
    ok = say("vLLM repeats its own tokens", same["plain again"], tokens=watch.hashes["plain again"])
    for name in names[:-1]:
        asked = sum(watch.modes[name][mode] for mode in ("FULL", "PIECEWISE", "NONE"))
        ok &= say(
            f"first runner, {name}",
            same[name] and asked == len(watch.times[name]) > 0,
            modes=dict(watch.modes[name]),
            tokens_equal=same[name],
            tokens=watch.hashes[name],
        )
    differs = watch.modes["threshold"] != watch.modes["plain"]
    ok &= say("options of threshold act", differs)
    ok &= say("the own rule decides as vLLM", watch.modes["vllm"] == watch.modes["plain"])
    outcomes = engine.station._timers[cores["adaptive"]].num_outcomes  # noqa: SLF001
    return say("adaptive was told outcomes", outcomes > 0, outcomes=outcomes) and ok


class WorkClock(HostClock):
    """What this thread computed, and what ``delay`` adds: a busy machine changes neither."""

    def __init__(self) -> None:
        self._added_ns = 0

    def delay(self, seconds: float) -> None:
        """Let so much time pass on this clock."""
        self._added_ns += int(seconds * 1e9)

    def set_mark(self, mark: list[int]) -> None:
        """Note the time."""
        mark[0] = time.thread_time_ns() + self._added_ns


def put_learner(station: Any) -> WorkClock:
    """Let a policy that learns decide, fast enough to move within some 50 steps."""
    station.put(station.make("adaptive", promise=0.2, explore=0.05))
    clock = station.timer._clock = WorkClock()  # noqa: SLF001
    return clock


def learning_moves(engine: CpuEngine) -> bool:
    """A policy that learns leaves a mode that is made slow."""
    station, decider = engine.station, engine.decider
    clock = put_learner(station)
    seen: list[str] = []
    own_dispatch = type(decider).dispatch

    def dispatch(*args: Any, **options: Any) -> Any:
        found = own_dispatch(decider, *args, **options)
        seen.append(found[0].name)
        return found

    # Under the station's timer, which wraps the class: the slow part must be measured.
    kind = type(engine.runner)
    timed = kind._model_forward  # noqa: SLF001
    inner = timed.__wrapped__

    def slow(this: Any, *args: Any, **options: Any) -> Any:
        if seen[-1] == "FULL":
            clock.delay(0.03)
        return inner(this, *args, **options)

    from dispatchkit_vllm.engine import timing
    from dispatchkit_vllm.engine.first import _timed

    owner = next(one for one in kind.__mro__ if "_model_forward" in vars(one))
    owner._model_forward = _timed(slow)  # noqa: SLF001
    sampled, timing.SAMPLE_EVERY = timing.SAMPLE_EVERY, 1
    decider.dispatch = dispatch
    try:
        for _ in range(6):
            engine.generate([([5, 6, 7], 30)] * 8)
    finally:
        owner._model_forward = timed  # noqa: SLF001
        timing.SAMPLE_EVERY = sampled
        del decider.dispatch
        station.put(None)
    late = Counter(seen[-60:])
    return say(
        "a learning policy leaves a slow mode",
        late["FULL"] < 15,
        first=Counter(seen[:60]),
        last=late,
    )


def second_runner(engine: CpuEngine) -> bool:
    """The second runner's manager: policies are asked, options act, learning moves."""
    try:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu import model_runner as module
    except ImportError as error:
        return say("second runner", True, left_out=f"cannot be imported: {error}")
    from dispatchkit_vllm.engine import second, worker

    unknown = second.why_unknown(module)
    if unknown:
        runner = SimpleNamespace(cudagraph_manager=object())
        return say("second runner is refused by name", bool(worker.why_not(runner)), why=unknown)
    config = engine.runner.vllm_config
    # A CPU has no pool of graphs; nothing is captured into this one.
    module.ModelCudaGraphManager.replaces.__init__.__globals__[
        "current_platform"
    ].get_global_graph_pool = object

    def manager() -> Any:
        found = module.ModelCudaGraphManager(config, "cpu", CUDAGraphMode.FULL_AND_PIECEWISE, 1)
        found._graphs_captured = True  # noqa: SLF001
        return found

    def step(one: Any, tokens: int, reqs: int, uniform: int | None) -> Any:
        return module.dispatch_cg_and_sync_dp(one, reqs, tokens, uniform, 1, 0)[0]

    rng = random.Random(2)
    batches = [
        (n, min(n, 8), 1)
        if rng.random() < 0.5 and n <= 8
        else (n, rng.randrange(1, min(n, 8) + 1), None)
        for n in (rng.randrange(1, 48) for _ in range(300))
    ]
    made = manager()
    made.station.put(None)
    plain = [step(made, *batch) for batch in batches]
    ok = True
    for name in ("vllm", "vllm@0.33-manager", "threshold", "composite"):
        core = made.station.make(name, **({"members": "vllm"} if name == "composite" else {}))
        made.station.put(core)
        ok &= say(f"second runner, {name}", [step(made, *batch) for batch in batches] == plain)
    made.station.put(made.station.make("threshold", max_tokens=4))
    limited = [step(made, *batch) for batch in batches]
    right = all(
        (found.cg_mode == CUDAGraphMode.NONE) == (batch[0] > 4 or was.cg_mode == CUDAGraphMode.NONE)
        for found, was, batch in zip(limited, plain, batches, strict=True)
    )
    ok &= say("options of threshold act in the second runner", right)
    clock = put_learner(made.station)
    timer, modes = made.station.timer, []
    for _ in range(600):
        found = step(made, 8, 8, 1)
        modes.append(found.cg_mode.name)
        timer.begin(made.station.take_answer())
        clock.delay(0.004 if found.cg_mode == CUDAGraphMode.FULL else 0.001)
        timer.end()
    late = Counter(modes[-60:])
    return ok & say("learning moves in the second runner", late["FULL"] < 15, last=late)


def traces(engine: CpuEngine) -> bool:
    """Steps were recorded, and a plan can be made of them."""
    from dispatchkit.observe import read_trace

    from dispatchkit_plan import plan_sizes

    log = engine.station.log
    log.flush()
    trace = read_trace(log.path)
    sizes = plan_sizes(trace, graphs=4, max_size=32).sizes
    return say(
        "the trace is planned on",
        len(trace) > 100 and len(sizes) == 4,
        steps=len(trace),
        sizes=sizes,
    )


def inside() -> bool:
    """Run every check in one engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # vLLM would bind a thread to each core and have them wait for each other, spinning; on a
    # machine that does other work, too, most of the time.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["DISPATCHKIT_POLICY"] = "vllm"
    os.environ["DISPATCHKIT_TRACE"] = str(Path(tempfile.mkdtemp()) / "steps.csv.gz")
    import vllm

    kept: list[str] = []
    # A filter stays where vLLM configures logging again; a handler would not.
    logging.getLogger("vllm.dispatchkit").addFilter(
        lambda record: kept.append(record.getMessage()) is None
    )
    engine = CpuEngine()
    said = [line for line in kept if "cudagraph mode NONE" in line]
    ok = say("a platform without graphs is said", len(said) == 1, vllm=vllm.__version__, said=said)
    ok &= first_runner(engine)
    ok &= learning_moves(engine)
    ok &= second_runner(engine)
    return traces(engine) and ok


def main() -> int:
    """Run the checks of each build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=list(BUILDS))
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--inside", action="store_true")
    given = parser.parse_args()
    if given.inside:
        return not inside()
    ok = True
    for python in given.python or map(environment, given.releases):
        done = subprocess.run(
            [python, __file__, "--inside"], env={**os.environ, **ZEROED}, check=False
        )
        ok &= done.returncode == 0
    return not ok


if __name__ == "__main__":
    sys.exit(main())
