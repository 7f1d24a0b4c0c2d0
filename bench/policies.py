"""Simulate dispatch policies on recorded traffic with step times from a cost model.

Every step goes through the real dispatcher; only time is simulated. The times that policies receive
have 10% noise, and one in a hundred is ten times too long. The results use the true times.
``over_oracle_pct`` is the additional time of a policy, in percent, relative to the best choice at
every step. ``worst_prefix_vs_base_pct`` is the largest additional time relative to the base policy
(``vllm``), over all prefixes of at least 200 steps. Regular steps are those that are not probes.

    python bench/policies.py                          # all traces, the MLP's costs
    python bench/policies.py --cost-model lm
    python bench/policies.py --sample-every 16 --delay 32
    python bench/policies.py --trace uniform --slow-eager 1.5 --json
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dispatchkit import DispatchConfig, GraphKey, load_plugins
from dispatchkit.observe.trace import read_trace

from dispatchkit_plan.costs import CostModel, load_cost_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "dispatchkit-adaptive" / "tests"))
from rehearsal import rehearse  # noqa: E402

TRACES = ROOT / "tests" / "data" / "traces"
#: Name -> (cost model, capture sizes, minimum and maximum number of tokens of a step).
MODELS: dict[str, tuple[str, str, int, int]] = {
    "mlp": ("mlp-h100", "512,768,1024,2048", 385, 2048),
    "lm": ("lm-decode-h100", "", 1, 512),
}
UNIFORM_STEPS = 5000


def main() -> None:
    """Simulate every policy, trace and seed, and print the results."""
    options = parse()
    model_name, sizes, low, high = MODELS.get(options.cost_model, (options.cost_model, "", 1, 512))
    model = load_cost_model(model_name)
    wanted = options.sizes or sizes
    given: dict[str, Any] = {"sizes": wanted} if wanted else {}
    config = DispatchConfig(mode="FULL", max_num_tokens=high, **given)
    plugins = load_plugins()
    rows = []
    for trace, steps in traces(options.trace, low, high):
        cost = costs(model, len(steps) // 2, options.slow_eager)
        for name in options.policies.split(","):
            for seed in range(options.seeds):
                extra = {"seed": seed, "plugins": plugins} if name == "adaptive" else {}
                result = rehearse(
                    plugins.create_policy(name, **extra),
                    config,
                    steps,
                    cost,
                    plugins.create_policy("vllm"),
                    seed=seed,
                    sample_every=options.sample_every,
                    delay=options.delay,
                )
                row = {
                    "bench": "policies",
                    "cost_model": model.name,
                    "trace": trace,
                    "policy": name,
                    "seed": seed,
                    "steps": result.steps,
                    "total": result.total_us,
                    "oracle": result.oracle_us,
                    "base": result.base_us,
                    "over_oracle_pct": result.over_oracle_pct,
                    "worst_prefix_vs_base_pct": result.worst_prefix_pct,
                    "measured": result.measured,
                    "changes": result.changes,
                    "sample_every": options.sample_every,
                    "delay": options.delay,
                    "slow_eager": options.slow_eager,
                }
                rows.append(row)
                if options.json:
                    print(json.dumps(row), flush=True)
            if not options.json:
                print(summary(rows[-options.seeds :]), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--trace",
        default="all",
        help="trace file, `uniform`, or `all` (uniform and tests/data/traces)",
    )
    add("--cost-model", default="mlp", help="mlp, lm, or the name or file of a cost model")
    add(
        "--sizes",
        default="",
        help="capture sizes, comma-separated (default: those of the cost model)",
    )
    add("--policies", default="vllm,adaptive")
    add("--seeds", type=int, default=10)
    add("--sample-every", type=int, default=1, help="measure one in N regular steps")
    add("--delay", type=int, default=0, help="number of steps until an outcome is reported")
    add(
        "--slow-eager",
        type=float,
        default=1.0,
        help="factor on the times of eager steps in the second half",
    )
    add("--json", action="store_true", help="print one JSON object per line")
    return parser.parse_args()


def traces(name: str, low: int, high: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the step sizes of each trace, without steps outside the range."""
    if name in ("all", "uniform"):
        chance = random.Random(1)
        yield "uniform", [chance.randint(low, high) for _ in range(UNIFORM_STEPS)]
    if name == "uniform":
        return
    for path in sorted(TRACES.glob("step_*")) if name == "all" else [Path(name)]:
        trace = read_trace(path)
        steps = [step.num_tokens for step in trace if low <= step.num_tokens <= high]
        if steps:
            yield path.name.removeprefix("step_").split(".")[0], steps


def costs(
    model: CostModel, half: int, slow_eager: float
) -> Callable[[int, int, GraphKey | None], float]:
    """Return the cost function; in the second half, eager takes ``slow_eager`` times as long."""
    eager = functools.cache(model.eager_us.__call__)
    graph = functools.cache(model.graph_us.__call__)

    def cost(step: int, num_tokens: int, key: GraphKey | None) -> float:
        if key is not None:
            return graph(key.num_tokens)
        return eager(num_tokens) * (slow_eager if step >= half else 1.0)

    return cost


def summary(rows: list[dict[str, Any]]) -> str:
    over = [row["over_oracle_pct"] for row in rows]
    first = rows[0]
    behind = [row["worst_prefix_vs_base_pct"] for row in rows]
    prefix = "  (short)" if None in behind else f"{max(behind):+8.3f}%"
    return (
        f"{first['trace']:<18} {first['policy']:<10} over oracle {statistics.mean(over):6.3f}% "
        f"(worst {max(over):6.3f}%), worst prefix vs base {prefix}, "
        f"{first['steps']} steps, {first['measured']} measured, {first['changes']} changed"
    )


if __name__ == "__main__":
    main()
