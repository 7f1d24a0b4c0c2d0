"""Run whole vLLM engines on the CPU, with policies in both model runners.

vLLM captures no graphs on a CPU, so the first runner gets a new dispatcher with a forced mode.
Every step still runs eager, so the decisions must not change the tokens. The second runner needs
Triton to generate, so its graph manager is called directly, step by step. Each build of vLLM has an
environment under ``.vllm/``. Prints one JSON line per check; the exit code is 1 if a check fails.

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

#: Makes glibc zero new memory. The CPU kernels of vLLM 0.13 read uninitialized memory, so their
#: logits differ in the last bits from run to run, and are sometimes NaN.
ZEROED = {"MALLOC_PERTURB_": "255"}
SIZES = [1, 2, 4, 8, 16, 32]
FIVE = {
    "vllm": {},
    "threshold": {"max_tokens": 4},
    "vllm@0.33": {},
    "composite": {"members": "vllm"},
    "adaptive": {},
}


def report(check: str, ok: bool, **facts: object) -> bool:
    """Print and flush one JSON line; return ``ok``."""
    sys.stdout.write(json.dumps({"check": check, "ok": ok, **facts}) + "\n")
    sys.stdout.flush()
    return ok


class CpuEngine:
    """An engine that runs a tiny Llama, with a dispatcher in a forced mode."""

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
        self.controller = self.decider.controller

    def force(self) -> Any:
        """Replace the runner's dispatcher with a new dispatcher that has keys to choose from."""
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
        """Run requests; return seconds, a hash of the tokens, and the number of tokens."""
        from gpu_engine import Engine

        return Engine.generate(self, requests)  # type: ignore[arg-type]


def short_requests(rng: random.Random, count: int = 10) -> list[tuple[list[int], int]]:
    """Return random requests with short prompts and short outputs."""
    return [
        ([rng.randrange(3, 32000) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 10))
        for _ in range(count)
    ]


def first_runner(engine: CpuEngine) -> bool:
    """Check that five policies generate equal tokens and decide as expected."""
    import gpu_engine

    gpu_engine.POLICIES = {name: (name, dict(options)) for name, options in FIVE.items()}
    names = ["plain", *FIVE, "plain again"]
    _, same, decisions, _, cores = gpu_engine.take_turns(engine, names, 2, short_requests)
    # If vLLM does not reproduce its own tokens, comparing the tokens of policies is meaningless.
    ok = report(
        "vLLM repeats its own tokens", same["plain again"], tokens=decisions.hashes["plain again"]
    )
    for name in names[:-1]:
        asked = sum(decisions.modes[name][mode] for mode in ("FULL", "PIECEWISE", "NONE"))
        ok &= report(
            f"first runner, {name}",
            same[name] and asked == len(decisions.times[name]) > 0,
            modes=dict(decisions.modes[name]),
            tokens_equal=same[name],
            tokens=decisions.hashes[name],
        )
    differs = decisions.modes["threshold"] != decisions.modes["plain"]
    ok &= report("options of threshold take effect", differs)
    ok &= report(
        "the policy vllm decides like vLLM", decisions.modes["vllm"] == decisions.modes["plain"]
    )
    outcomes = engine.controller._timers[cores["adaptive"]].num_outcomes  # noqa: SLF001
    return report("adaptive received outcomes", outcomes > 0, outcomes=outcomes) and ok


class WorkClock(HostClock):
    """A clock of this thread's CPU time, independent of other processes; ``delay`` advances it."""

    def __init__(self) -> None:
        self._added_ns = 0

    def delay(self, seconds: float) -> None:
        """Advance this clock."""
        self._added_ns += int(seconds * 1e9)

    def set_mark(self, mark: list[int]) -> None:
        """Store the current time of this clock in a mark."""
        mark[0] = time.thread_time_ns() + self._added_ns


def activate_learner(controller: Any) -> WorkClock:
    """Activate a policy that learns fast enough to change its decisions in about 50 steps."""
    controller.activate(controller.make("adaptive", promise=0.2, explore=0.05))
    clock = controller.timer._clock = WorkClock()  # noqa: SLF001
    return clock


def learning_moves(engine: CpuEngine) -> bool:
    """Check that a learning policy stops using an artificially slow mode."""
    controller, decider = engine.controller, engine.decider
    clock = activate_learner(controller)
    seen: list[str] = []
    own_dispatch = type(decider).dispatch

    def dispatch(*args: Any, **options: Any) -> Any:
        found = own_dispatch(decider, *args, **options)
        seen.append(found[0].name)
        return found

    # Add the delay inside the method that `_timed` wraps, so that it is measured.
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
        controller.activate(None)
    late = Counter(seen[-60:])
    return report(
        "a learning policy stops using a slow mode",
        late["FULL"] < 15,
        first=Counter(seen[:60]),
        last=late,
    )


def second_runner(engine: CpuEngine) -> bool:
    """Check policies, options and learning in the second runner's manager."""
    try:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu import model_runner as module
    except ImportError as error:
        return report("second runner", True, left_out=f"cannot be imported: {error}")
    from dispatchkit_vllm.engine import second, worker

    unknown = second.unsupported_reason(module)
    if unknown:
        runner = SimpleNamespace(cudagraph_manager=object())
        return report(
            "an unsupported second runner is rejected",
            bool(worker.inactive_reason(runner)),
            why=unknown,
        )
    config = engine.runner.vllm_config
    # A CPU has no graph pool. Any object can take its place, because nothing is captured.
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
    made.controller.activate(None)
    plain = [step(made, *batch) for batch in batches]
    ok = True
    for name in ("vllm", "vllm@0.33-manager", "threshold", "composite"):
        core = made.controller.make(name, **({"members": "vllm"} if name == "composite" else {}))
        made.controller.activate(core)
        ok &= report(f"second runner, {name}", [step(made, *batch) for batch in batches] == plain)
    made.controller.activate(made.controller.make("threshold", max_tokens=4))
    limited = [step(made, *batch) for batch in batches]
    right = all(
        (found.cg_mode == CUDAGraphMode.NONE) == (batch[0] > 4 or was.cg_mode == CUDAGraphMode.NONE)
        for found, was, batch in zip(limited, plain, batches, strict=True)
    )
    ok &= report("options of threshold take effect in the second runner", right)
    clock = activate_learner(made.controller)
    timer, modes = made.controller.timer, []
    for _ in range(600):
        found = step(made, 8, 8, 1)
        modes.append(found.cg_mode.name)
        timer.begin(made.controller.take_answer())
        clock.delay(0.004 if found.cg_mode == CUDAGraphMode.FULL else 0.001)
        timer.end()
    late = Counter(modes[-60:])
    return ok & report(
        "learning changes decisions in the second runner", late["FULL"] < 15, last=late
    )


def traces(engine: CpuEngine) -> bool:
    """Check that steps were recorded, and that sizes can be planned from them."""
    from dispatchkit.observe import read_trace

    from dispatchkit_plan import plan_sizes

    log = engine.controller.log
    log.flush()
    trace = read_trace(log.path)
    sizes = plan_sizes(trace, graphs=4, max_size=32).sizes
    return report(
        "sizes are planned from the trace",
        len(trace) > 100 and len(sizes) == 4,
        steps=len(trace),
        sizes=sizes,
    )


def inside() -> bool:
    """Run all checks in one engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # By default, vLLM binds a thread to each core, and the threads spin while they wait for each
    # other. On a busy machine, they would spin most of the time.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["DISPATCHKIT_POLICY"] = "vllm"
    os.environ["DISPATCHKIT_TRACE"] = str(Path(tempfile.mkdtemp()) / "steps.csv.gz")
    import vllm

    log_lines: list[str] = []
    # Use a filter: vLLM removes handlers when it configures logging again.
    logging.getLogger("vllm.dispatchkit").addFilter(
        lambda record: log_lines.append(record.getMessage()) is None
    )
    engine = CpuEngine()
    messages = [line for line in log_lines if "cudagraph mode NONE" in line]
    ok = report(
        "a platform without graphs is reported once",
        len(messages) == 1,
        vllm=vllm.__version__,
        messages=messages,
    )
    ok &= first_runner(engine)
    ok &= learning_moves(engine)
    ok &= second_runner(engine)
    return traces(engine) and ok


def main() -> int:
    """Run the checks with each build."""
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
