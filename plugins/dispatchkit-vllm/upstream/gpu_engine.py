"""Measure a whole vLLM engine on a GPU, with policies in one of its model runners.

    python gpu_engine.py policies --runner 1 [--few-rounds 5] [--trace steps.csv.gz]
    python gpu_engine.py adaptive --runner 1 [--rounds 20]
    python gpu_engine.py sizes --runner 1 [--few-rounds 5] [--plan steps.csv.gz [--rounds 20]]
    python gpu_engine.py gap --runner 1 [--rounds 20]

Runs the engine in this process, with asynchronous scheduling and a Llama with random weights.
Prints JSON lines; the first line contains the card, the driver and the versions.

- ``policies``: in each round, every policy runs the same batch of requests, in turn; ``plain`` is
  vLLM's own class. For each policy, prints the numbers of decisions and of rows (with padding) of
  each mode, the time of a batch, whether the tokens equal those of plain, the mean time of the
  first 1,000 decisions, and its ratio to plain. Also prints the time that recording adds to a step.
- ``adaptive``: the policy ``adaptive`` takes turns with ``plain`` only.
- ``sizes``: the time of startup, the time and memory of captures, and the time of a batch. With
  ``--plan``, the engine uses the 24 sizes with the least padding for a recorded trace. Each batch
  then runs on this engine and on three others, in turn: with the default sizes, with 24 planned
  multiples of 8, and with the default sizes again.
- ``gap``: ``adaptive`` and ``plain`` take turns on a large model. The capture sizes have a wide
  gap: graphs compute many more rows than the batches have, and are slower than eager.
"""

# ruff: noqa: SLF001 - measures private parts of the engine

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dispatchkit.observe import read_trace

from dispatchkit_plan import plan_sizes
from dispatchkit_vllm.engine.steplog import StepLog

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

#: Number of decisions to average over, from the first decision on.
FIRST_STEPS = 1000
#: Policies that take turns, with their options.
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("vllm", {}),
    "threshold": ("threshold", {}),
    "threshold max_tokens=64": ("threshold", {"max_tokens": 64}),
    "threshold prefer_piecewise": ("threshold", {"prefer_piecewise": True}),
    "composite": ("composite", {"members": "vllm"}),
    "adaptive": ("adaptive", {}),
}
OWN_RULES = {1: "vllm@0.33", 2: "vllm@0.33-manager"}


def emit(**facts: Any) -> None:
    """Print and flush one JSON line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def model_folder(hidden: int, layers: int) -> str:
    """Write the configuration of a Llama, and return its folder."""
    folder = Path(tempfile.gettempdir()) / f"llama-{hidden}-{layers}"
    folder.mkdir(exist_ok=True)
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "head_dim": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


class Engine:
    """An engine with its controller, and the time and memory of its captures."""

    def __init__(self, runner: int, *, hidden: int = 1024, layers: int = 8, **options: Any) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(runner - 1)
        os.environ.setdefault("DISPATCHKIT_POLICY", "vllm")
        begun = time.perf_counter()
        from vllm import LLM

        imported = time.perf_counter()
        self.captures: list[dict[str, float]] = []
        self._watch_captures(runner)
        settings: dict[str, Any] = {
            "model": model_folder(hidden, layers),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "gpu_memory_utilization": 0.2,
            "seed": 0,
            "enable_prefix_caching": False,
            "async_scheduling": True,
        }
        self.llm = LLM(**{**settings, **options})
        self._stop_watching()
        self.start_s = time.perf_counter() - imported
        self.import_s = imported - begun
        core: Any = self.llm.llm_engine.engine_core
        core = getattr(core, "engine_core", core)
        self.runner = core.model_executor.driver_worker.worker.model_runner
        name = "cudagraph_dispatcher" if runner == 1 else "cudagraph_manager"
        self.decider = getattr(self.runner, name)
        self.controller = self.decider.controller
        #: Owner and name of the runner's function that decides a step.
        self.step_function: tuple[Any, str] = (
            (type(self.runner), "_determine_batch_execution_and_padding")
            if runner == 1
            else (sys.modules[type(self.runner).__module__], "dispatch_cg_and_sync_dp")
        )

    def _watch_captures(self, runner: int) -> None:
        module = (
            "vllm.v1.worker.gpu_model_runner" if runner == 1 else "vllm.v1.worker.gpu.model_runner"
        )
        __import__(module)
        owner = sys.modules[module].GPUModelRunner
        own = owner.capture_model

        def capture_model(this: Any, *args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            found = own(this, *args, **kwargs)
            took = time.perf_counter() - begun
            self.captures.append({"seconds": round(took, 2), "mib": round((found or 0) / 2**20, 1)})
            return found

        owner.capture_model = capture_model
        self._stop_watching: Callable[[], None] = lambda: setattr(owner, "capture_model", own)

    def generate(self, requests: list[tuple[list[int], int]]) -> tuple[float, str, int]:
        """Run requests; return seconds, a hash of the tokens, and the number of tokens."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": tokens} for tokens, _ in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        begun = time.perf_counter()
        out = self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - begun
        tokens = [list(one.outputs[0].token_ids) for one in out]
        digest = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
        return took, digest, sum(map(len, tokens))

    def facts(self) -> dict[str, Any]:
        """Return the card, the driver and the versions."""
        import pynvml
        import torch

        pynvml.nvmlInit()
        return {
            "card": torch.cuda.get_device_name(),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "torch": torch.__version__,
            "vllm": importlib.metadata.version("vllm"),
            "model_runner": type(self.runner).__module__,
            "async_scheduling": bool(
                self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
            ),
        }


class DecisionTimer:
    """Timer of a runner's decisions, which also counts their modes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.times: dict[str, list[int]] = {}
        self.modes: dict[str, Counter[str]] = {}
        self.hashes: dict[str, list[str]] = {}

    def activate(self, name: str, core: Any) -> None:
        """Make a policy decide; None selects vLLM's own class."""
        decider = self._engine.decider
        self._engine.controller.activate(core)
        if core is None:
            own: Callable[..., Any] = type(decider).__mro__[1].dispatch.__get__(decider)
        else:
            own = type(decider).dispatch.__get__(decider)
        times = self.times.setdefault(name, [])
        modes = self.modes.setdefault(name, Counter())
        clock, first = time.perf_counter_ns, self._engine.controller

        def note(took: int, mode: Any, padded: int) -> None:
            if not first.is_dummy:
                times.append(took)
                modes[mode.name] += 1
                modes[f"{mode.name} rows"] += padded

        # Call the clock once in advance: its first call after a step takes microseconds.
        def dispatch(*args: Any, **options: Any) -> Any:
            clock()
            begun = clock()
            found = own(*args, **options)
            note(clock() - begun, found[0], found[1].num_tokens)
            return found

        def dispatch_second(
            num_reqs: int, num_tokens: int, uniform: int | None, num_active_loras: int = 0
        ) -> Any:
            clock()
            begun = clock()
            found = own(num_reqs, num_tokens, uniform, num_active_loras)
            note(clock() - begun, found.cg_mode, found.num_tokens)
            return found

        is_first = hasattr(decider, "initialize_cudagraph_keys")
        decider.dispatch = dispatch if is_first else dispatch_second

    def mean_us(self, name: str) -> float:
        """Return the mean time of a policy's first decisions, in microseconds."""
        return statistics.fmean(self.times[name][:FIRST_STEPS]) / 1e3


def chat_requests(rng: random.Random, count: int) -> list[tuple[list[int], int]]:
    """Return random requests with prompts and outputs of various lengths."""
    return [
        (
            [rng.randrange(3, 32000) for _ in range(rng.choice((5, 17, 40, 130, 400, 900)))],
            rng.choice((4, 16, 60, 120)),
        )
        for _ in range(count)
    ]


def recording_us(engine: Engine, rounds: int) -> dict[str, float]:
    """Return the time that recording adds to a step, in microseconds, and related figures.

    Half of the steps, chosen at random, are recorded. The measured function is the runner's
    function that decides a step, with vLLM's own class. The slowest 5% of each half are excluded
    from the means.
    """
    controller, rng = engine.controller, random.Random(0)
    kept, clock = controller.log, time.perf_counter_ns
    log = StepLog(Path(tempfile.mkdtemp()) / "steps.csv.gz")
    times: dict[bool, list[int]] = {True: [], False: []}
    owner, name = engine.step_function
    own = getattr(owner, name)

    def step(*args: Any, **options: Any) -> Any:
        records = rng.random() < 0.5
        controller.log = log if records else None
        clock()
        begun = clock()
        found = own(*args, **options)
        took = clock() - begun
        if not controller.is_dummy:
            times[records].append(took)
        return found

    controller.activate(None)
    setattr(owner, name, step)
    for index in range(rounds):
        engine.generate(chat_requests(random.Random(index), 100))
    setattr(owner, name, own)
    controller.log = kept
    log.close()
    steps = len(times[True])
    kept_of = {records: sorted(found)[: len(found) * 19 // 20] for records, found in times.items()}
    means = {records: statistics.fmean(found) / 1e3 for records, found in kept_of.items()}
    medians = {records: statistics.median(found) / 1e3 for records, found in times.items()}
    return {
        "steps": steps,
        "us_per_step": round(means[True] - means[False], 3),
        "by_medians": round(medians[True] - medians[False], 3),
        "step_us": round(means[False], 3),
        "bytes_per_step": round(log.path.stat().st_size / steps, 2),
    }


def time_learning(timer: Any) -> None:
    """Make a step timer add up its own host time in ``host_ns``."""
    timer.host_ns = 0
    begin, end, now = timer.begin, timer.end, time.perf_counter_ns

    def timed_begin(answer: Any) -> None:
        begun = now()
        begin(answer)
        timer.host_ns += now() - begun

    def timed_end() -> None:
        begun = now()
        end()
        timer.host_ns += now() - begun

    timer.begin, timer.end = timed_begin, timed_end


def take_turns(
    engine: Engine, names: list[str], rounds: int, make: Callable[[random.Random], Any]
) -> Any:
    """Run the same batches with several policies, in turn.

    Returns:
        A tuple: the seconds of each batch, by policy; whether all tokens equal those of ``plain``,
        by policy; the decision timer; the number of tokens of the last batch; the policies (as
        ``PolicyCore`` objects), by name.
    """
    cores: dict[str, Any] = {"plain": None, "plain again": None}
    for name in names:
        if name not in cores:
            policy, options = POLICIES[name]
            cores[name] = engine.controller.make(policy, **options)
            engine.controller.activate(cores[name])
            if engine.controller.timer is not None:
                time_learning(engine.controller.timer)
    timer = DecisionTimer(engine)
    results: dict[str, list[float]] = {name: [] for name in names}
    same: dict[str, bool] = dict.fromkeys(names, True)
    tokens = 0
    for index in range(rounds):
        order = names[index % len(names) :] + names[: index % len(names)]
        hashes = {}
        for name in order:
            timer.activate(name, cores[name])
            took, hashes[name], tokens = engine.generate(make(random.Random(index)))
            results[name].append(took)
            timer.hashes.setdefault(name, []).append(hashes[name])
        for name in names:
            same[name] &= hashes[name] == hashes["plain"]
    engine.controller.activate(None)
    return results, same, timer, tokens, cores


def measure_policies(given: argparse.Namespace) -> None:
    """Measure policies in turn, and then the overhead of recording."""
    if given.trace:
        os.environ["DISPATCHKIT_TRACE"] = given.trace
    POLICIES[OWN_RULES[given.runner]] = (OWN_RULES[given.runner], {})
    engine = Engine(given.runner)
    facts = engine.facts()
    emit(what="start", start_s=round(engine.start_s, 1), captures=engine.captures, **facts)
    emit(what="summary", text=engine.controller.summary or engine.controller.inactive_reason)
    engine.generate(chat_requests(random.Random(99), 40))
    names = ["plain", *POLICIES]
    results, same, timer, tokens, cores = take_turns(
        engine, names, given.few_rounds, lambda rng: chat_requests(rng, 150)
    )
    plain_us = timer.mean_us("plain")
    for name in names:
        core = cores[name]
        emit(
            what="policy",
            runner=given.runner,
            policy=name,
            tokens_equal=same[name],
            batch_s=round(statistics.median(results[name]), 4),
            decisions=len(timer.times[name]),
            decision_us=round(timer.mean_us(name), 2),
            of_plain=round(timer.mean_us(name) / plain_us, 3),
            modes=dict(sorted(timer.modes[name].items())),
            fallbacks=dict(core.fallbacks) if core else {},
            tokens=tokens,
        )
    emit(what="recording", runner=given.runner, **recording_us(engine, 10))


def measure_adaptive(given: argparse.Namespace) -> None:
    """Measure the policy ``adaptive`` and vLLM's own class in turn."""
    engine = Engine(given.runner)
    emit(
        what="start",
        start_s=round(engine.start_s, 1),
        captures=engine.captures,
        **engine.facts(),
    )
    engine.generate(chat_requests(random.Random(99), 40))
    results, same, _, _, cores = take_turns(
        engine, ["plain", "adaptive"], given.rounds, lambda rng: chat_requests(rng, 150)
    )
    emit_adaptive("adaptive on chat", engine, results, same, cores, given.runner)


def emit_adaptive(
    what: str, engine: Engine, results: Any, same: Any, cores: Any, runner: int
) -> None:
    """Print the results of adaptive compared with plain."""
    plain, adaptive = results["plain"], results["adaptive"]
    timer, policy = engine.controller._timers[cores["adaptive"]], cores["adaptive"].policy
    steps = max(1, timer._step)
    emit(
        what=what,
        runner=runner,
        batches=len(plain),
        plain_s=round(statistics.median(plain), 4),
        adaptive_s=round(statistics.median(adaptive), 4),
        of_plain=round(statistics.median(adaptive) / statistics.median(plain), 4),
        last_half=round(
            statistics.median(adaptive[len(plain) // 2 :])
            / statistics.median(plain[len(plain) // 2 :]),
            4,
        ),
        steps=steps,
        outcomes=timer.num_outcomes,
        pace=policy.pace,
        learning_us=round(timer.host_ns / 1e3 / steps, 2),
        device_us=round(policy.ledger.base_us / max(1.0, policy.ledger.steps), 1),
        lead_pct=round(100 * policy.ledger.lead_us / max(1.0, policy.ledger.base_us), 3),
        tokens_equal=same["adaptive"],
    )


def planned_sizes(trace: str, align: int = 1) -> dict[str, Any]:
    """Return engine options that set the 24 sizes with the least padding for a trace."""
    sizes = list(plan_sizes(read_trace(trace), graphs=24, max_size=512, align=align).sizes)
    return {"compilation_config": {"cudagraph_capture_sizes": sizes}}


def measure_sizes(given: argparse.Namespace) -> None:
    """Measure startup, captures and throughput with default or planned sizes."""
    options = planned_sizes(given.plan) if given.plan else {}
    engine = Engine(given.runner, **options)
    used = engine.runner.compilation_config.cudagraph_capture_sizes
    engine.generate(chat_requests(random.Random(99), 40))
    times = [
        engine.generate(chat_requests(random.Random(index), 150))
        for index in range(given.few_rounds)
    ]
    emit(
        what="sizes",
        runner=given.runner,
        planned=bool(given.plan),
        num_sizes=len(used),
        sizes=list(used),
        start_s=round(engine.start_s, 1),
        captures=engine.captures,
        batch_s=round(statistics.median(took for took, _, _ in times), 4),
        tokens=times[0][1],
        **engine.facts(),
    )
    if given.plan:
        others = {
            "default": Engine(given.runner),
            "aligned": Engine(given.runner, **planned_sizes(given.plan, align=8)),
            # A control: it differs from "default" only in being created later.
            "default again": Engine(given.runner),
        }
        compare_sizes({"planned": engine, **others}, given.rounds)


def compare_sizes(engines: dict[str, Engine], rounds: int) -> None:
    """Measure the same batches on several engines in turn, in one process.

    Engines in separate processes would differ in more than their sizes.
    """
    for engine in engines.values():
        engine.generate(chat_requests(random.Random(99), 40))
    found: dict[str, list[tuple[float, str, int]]] = {name: [] for name in engines}
    for index in range(rounds):
        for name in sorted(engines, reverse=bool(index % 2)):
            found[name].append(engines[name].generate(chat_requests(random.Random(index), 150)))
    times = {name: [took for took, _, _ in batches] for name, batches in found.items()}
    tokens = {name: [each for _, each, _ in batches] for name, batches in found.items()}
    for name, engine in engines.items():
        ratios = [mine / other for mine, other in zip(times[name], times["default"], strict=True)]
        emit(
            what="sizes in turns",
            name=name,
            sizes=list(engine.runner.compilation_config.cudagraph_capture_sizes),
            rounds=rounds,
            batch_s=round(statistics.median(times[name]), 4),
            of_default=round(statistics.median(ratios), 4),
            tokens_equal=tokens[name] == tokens["default"],
        )


def measure_gap(given: argparse.Namespace) -> None:
    """Measure prompts for which eager is faster, because the next capture size is far larger."""
    sizes = [1, 2, 4, 8, 16, 32, 2048]
    engine = Engine(
        given.runner,
        hidden=4096,
        layers=4,
        compilation_config={"cudagraph_capture_sizes": sizes},
    )
    emit(
        what="start of gap",
        start_s=round(engine.start_s, 1),
        captures=engine.captures,
        sizes=sizes,
        **engine.facts(),
    )

    def prompts(rng: random.Random) -> list[tuple[list[int], int]]:
        return [
            ([rng.randrange(3, 32000) for _ in range(rng.randrange(40, 300))], rng.choice((20, 60)))
            for _ in range(60)
        ]

    engine.generate(prompts(random.Random(99)))
    results, same, _, _, cores = take_turns(engine, ["plain", "adaptive"], given.rounds, prompts)
    emit_adaptive("adaptive on a gap", engine, results, same, cores, given.runner)


def main() -> None:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measures = {
        "policies": measure_policies,
        "adaptive": measure_adaptive,
        "sizes": measure_sizes,
        "gap": measure_gap,
    }
    parser.add_argument("what", choices=tuple(measures))
    parser.add_argument("--runner", type=int, choices=(1, 2), required=True)
    parser.add_argument(
        "--rounds", type=int, default=20, help="rounds for adaptive, gap, and sizes with --plan"
    )
    parser.add_argument("--few-rounds", type=int, default=5, help="rounds for policies and sizes")
    parser.add_argument("--trace", help="for policies: file to record steps to")
    parser.add_argument("--plan", help="for sizes: trace to plan capture sizes from")
    given = parser.parse_args()
    measures[given.what](given)


if __name__ == "__main__":
    main()
