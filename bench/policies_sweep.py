"""Run ``bench/policies.py`` with one constant of ``adaptive`` changed at a time.

Each constant that is not derived from another takes the values in ``CONSTANTS``. A result is the
additional time relative to the best choice at every step, in percent, averaged over traces and
seeds. The three columns are: every step measured; the same, with eager steps taking 1.5 times as
long in the second half; and one step in 16 measured, and reported 32 steps late.

    python bench/policies_sweep.py
    python bench/policies_sweep.py --only LIMIT,DOUBT --seeds 10
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from policies import MODELS, costs, rehearse, traces

from dispatchkit import DispatchConfig, load_plugins

from dispatchkit_adaptive import estimates, ledger, policy
from dispatchkit_plan.costs import load_cost_model

#: Module, name and alternative values of each constant.
CONSTANTS: tuple[tuple[Any, str, tuple[float, ...]], ...] = (
    (estimates, "CLIP", (2.5, 4.0)),
    (estimates, "LIMIT", (4.0, 5.5)),
    (estimates, "FIRST_NOISE", (0.05, 0.2)),
    (estimates, "FIRST_SLOPE", (0.25, 1.0)),
    (estimates, "FIRST_SLOPE_ERROR", (0.25, 1.0)),
    (ledger, "DOUBT", (0.75, 3.0)),
    (ledger, "PLANNED", (0.5, 1.0)),
    (ledger, "AVERAGING", (0.1, 0.4)),
    (policy, "PROBE_US", (0.0, 50.0)),
    (policy, "_COST_AT_ONCE", (0.125, 0.5)),
    (policy, "_VERIFYING_COST", (0.003, 0.03)),
    (policy, "_PROOF_FROM", (0.6, 1.0)),
    (policy, "_CALM", (12, 48)),
    (policy, "_AFFORDED", (1.5, 6.0)),
    (policy, "_UNKNOWN_COST", (1.5, 6.0)),
)
CASES = {"measured": (1.0, 1, 0), "slow eager": (1.5, 1, 0), "late": (1.0, 16, 32)}


def main() -> None:
    """Print the results of the unchanged constants, then of each changed value."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default="azure_conv_high,azure_conv_lora")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="names of constants, comma-separated")
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    print_row("no change", None, options)
    for module, name, values in CONSTANTS:
        if only and name not in only:
            continue
        usual = getattr(module, name)
        for value in values:
            setattr(module, name, value)
            print_row(name, value, options)
        setattr(module, name, usual)


def print_row(name: str, value: float | None, options: argparse.Namespace) -> None:
    found = {case: over(case, options) for case in CASES}
    shown = " | ".join(f"{one:.3f}" for one in found.values())
    print(f"| {name.lstrip('_')} | {'' if value is None else value} | {shown} |", flush=True)


def over(case: str, options: argparse.Namespace) -> float:
    """Return the mean additional time relative to the best choices, in percent."""
    slow, sample_every, delay = CASES[case]
    name, sizes, low, high = MODELS["mlp"]
    model, plugins = load_cost_model(name), load_plugins()
    config = DispatchConfig(mode="FULL", max_num_tokens=high, sizes=sizes)
    found = []
    for trace, steps in traces("all", low, high):
        if trace not in options.traces.split(","):
            continue
        cost = costs(model, len(steps) // 2, slow)
        for seed in range(options.seeds):
            result = rehearse(
                plugins.create_policy("adaptive", seed=seed, plugins=plugins),
                config,
                steps,
                cost,
                plugins.create_policy("vllm"),
                seed=seed,
                sample_every=sample_every,
                delay=delay,
            )
            found.append(result.over_oracle_pct)
    return statistics.mean(found)


if __name__ == "__main__":
    main()
