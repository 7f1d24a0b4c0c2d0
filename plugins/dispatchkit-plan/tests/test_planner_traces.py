"""Figures of the nine shipped traces."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from dispatchkit.observe.trace import read_trace  # noqa: E402 - after the check for numpy

from dispatchkit_plan.costs import BUILTIN_COST_MODELS  # noqa: E402
from dispatchkit_plan.objective import TimeObjective  # noqa: E402
from dispatchkit_plan.planner import plan_sizes  # noqa: E402
from dispatchkit_plan.rivals import (  # noqa: E402
    power_sizes,
    vllm_default_sizes,
    vllm_interactivity_sizes,
)
from dispatchkit_plan.workload import as_workload  # noqa: E402

TRACES = Path(__file__).parents[3] / "tests" / "data" / "traces"

# Per trace: vLLM's waste; waste of 8, 12, 16, 24, 35 and 51 optimal sizes; how many match
# vLLM's 51 and its 76 in hindsight; how many match the 51 planned on the first half at most;
# planned by kind of step in hindsight (graphs, uniform and mixed of them).
KNOWN = {
    "azure_conv_low": (12.8, (10.4, 6.0, 3.9, 1.7, 0.6, 0.2), 7, 38, 9, 9, (5, 4)),
    "azure_conv_high": (4.0, (8.2, 5.4, 4.0, 2.5, 1.4, 0.8), 17, 17, 21, 19, (12, 7)),
    "azure_conv_peak": (2.4, (6.7, 4.3, 3.1, 2.0, 1.2, 0.7), 21, 21, 37, 25, (18, 7)),
    "azure_code_low": (12.0, (33.4, 15.6, 9.0, 3.7, 1.6, 0.6), 14, 40, 19, 17, (11, 6)),
    "azure_code_high": (16.7, (34.1, 17.5, 10.7, 4.7, 2.0, 0.7), 13, 37, 16, 16, (13, 3)),
    "mooncake_low": (22.5, (8.8, 2.7, 0.2, 0.0, 0.0, 0.0), 6, 17, 14, 7, (6, 1)),
    "mooncake_high": (15.0, (13.8, 7.4, 4.8, 2.5, 1.0, 0.3), 8, 22, 11, 10, (8, 2)),
    "azure_conv_spec3": (1.4, (9.0, 5.6, 3.9, 2.2, 1.2, 0.5), 33, 33, 44, 39, (32, 7)),
    "azure_conv_lora": (5.1, (10.7, 6.8, 4.9, 2.9, 1.8, 1.0), 16, 16, 29, 17, (12, 5)),
}
NAMES = list(KNOWN)


@cache
def trace(name):
    return read_trace(TRACES / f"step_{name}.csv.gz")


@pytest.mark.slow_except("azure_conv_low", "mooncake_high", "azure_conv_spec3")
@pytest.mark.parametrize("name", NAMES)
def test_hindsight_plans_have_the_known_waste(name):
    """The exact optimum, and the number of sizes that match vLLM's 51 and 76."""
    vllm, wastes, match_51, match_76, *_ = KNOWN[name]
    plan = plan_sizes(trace(name), graphs=51, hedge="none", curve_to=80)
    curve = dict(plan.curve)
    assert [round(curve[k], 1) for k in (8, 12, 16, 24, 35, 51)] == list(wastes)
    assert plan.rivals["vllm-default"].num_graphs == 51
    assert plan.rivals["vllm-interactivity"].num_graphs == 76
    assert plan.rivals["vllm-default"].waste_pct == pytest.approx(vllm, abs=0.06)
    assert plan.rivals["vllm-default"].matched_by == match_51
    assert plan.rivals["vllm-interactivity"].matched_by == match_76
    assert plan.waste_pct == pytest.approx(curve[51])
    assert plan.sizes[-1] == 512


@cache
def out_of_sample(name):
    """Return one plan for both tests below, because validating a hedge takes seconds."""
    return plan_sizes(trace(name), graphs=76, fit_on="first-half", curve_to=80)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_plans_from_the_first_half_hold_in_the_second(name):
    """Hedges are validated within the first half; nothing uses the second half."""
    at_most = KNOWN[name][4]
    plan = out_of_sample(name)
    vllm = plan.rivals["vllm-default"]
    assert plan.hedge.validated
    assert plan.judged_on == "the second half"
    assert vllm.matched_by is not None
    assert vllm.matched_by <= at_most
    assert dict(plan.curve)[51] <= vllm.waste_pct


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_76_sizes_beat_the_list_of_76_but_on_one_trace(name):
    """The exception is named with its reason.

    azure_code_low has few requests; its steps above 32 tokens are single prompts, mostly of
    different sizes. On the held-out blocks of its first half the plan beats the list; on the second
    half an even grid happens to fit better, by 0.14 points. The first half gives no indication of
    this.
    """
    plan = out_of_sample(name)
    rival = plan.rivals["vllm-interactivity"]
    assert rival.num_graphs == 76
    slack = 0.2 if name == "azure_code_low" else 0.0
    assert plan.waste_pct <= rival.waste_pct + slack


@pytest.mark.slow_except("azure_conv_low", "azure_conv_lora", "azure_conv_spec3")
@pytest.mark.parametrize("name", NAMES)
def test_plans_by_kind_of_step_have_the_known_split(name):
    """One budget covers uniform decode and mixed steps."""
    *_, graphs, (uniform, mixed) = KNOWN[name]
    limit = {"azure_conv_peak": 512, "azure_conv_spec3": 512}.get(name, 256)
    plan = plan_sizes(trace(name), graphs=graphs, keyed=True, hedge="none", max_uniform_size=limit)
    counts = {family.uniform: len(family.sizes) for family in plan.families}
    assert plan.rivals["vllm-default"].matched_by == graphs
    assert counts == {True: uniform, False: mixed}
    assert plan.num_graphs == graphs
    assert plan.waste_pct <= plan.rivals["vllm-default"].waste_pct
    assert plan.rivals["vllm-default"].num_graphs == (102 if limit == 512 else 86)


# Seconds of the whole trace under the decoder's cost model: all eager; vLLM's 51; powers of
# two replayed always, or only where faster; optimal 8, 16, 24 and 51 sizes; exact sizes.
SECONDS = {
    "azure_conv_low": (27.1, 10.99, 11.33, 11.30, (10.93, 10.86, 10.83, 10.82), 10.81),
    "azure_conv_high": (48.4, 32.40, 34.03, 33.93, (32.56, 32.40, 32.33, 32.26), 32.22),
    "azure_conv_peak": (68.7, 59.14, 61.06, 60.97, (59.31, 59.17, 59.12, 59.06), 59.02),
    "azure_code_low": (42.3, 28.07, 28.15, 28.12, (28.13, 28.06, 28.04, 28.03), 28.03),
    "azure_code_high": (91.8, 78.49, 78.55, 78.54, (78.55, 78.47, 78.45, 78.43), 78.43),
    "mooncake_low": (28.4, 13.26, 13.27, 13.26, (13.22, 13.20, 13.20, 13.20), 13.20),
    "mooncake_high": (48.7, 32.82, 33.06, 33.04, (32.78, 32.68, 32.66, 32.63), 32.63),
    "azure_conv_spec3": (60.9, 50.48, 53.70, 53.04, (51.02, 50.66, 50.53, 50.40), 50.35),
    "azure_conv_lora": (42.2, 25.01, 26.09, 26.02, (25.17, 24.99, 24.93, 24.86), 24.83),
}


@pytest.mark.slow_except("mooncake_high")
@pytest.mark.parametrize("name", NAMES)
def test_times_under_the_decoder_model_are_the_known_ones(name):
    """Replays above and below, and sizes planned for time instead of padding."""
    model = BUILTIN_COST_MODELS["lm-decode-h100"]
    work = as_workload(trace(name))
    demand = work.demand(512)
    over = sum(model.eager_us(int(n)) for n in work.num_tokens[work.num_tokens > 512])
    always, best = TimeObjective(model), TimeObjective(model, "best")

    def seconds(cost):
        return round((float(cost[1:] @ demand[1:]) + over) / 1e6, 2)

    eager, vllm, powers, powers_best, planned, exact = SECONDS[name]
    assert round(sum(map(model.eager_us, work.num_tokens.tolist())) / 1e6, 1) == eager
    assert seconds(always.at_sizes(vllm_default_sizes(), 512)) == vllm
    assert seconds(always.at_sizes(power_sizes(), 512)) == powers
    assert seconds(best.at_sizes(power_sizes(), 512)) == powers_best
    assert seconds(best.exact(512)) == exact
    for graphs, known in zip((8, 16, 24, 51), planned, strict=True):
        plan = plan_sizes(
            trace(name), graphs=graphs, cost_model=model, dispatch="best", hedge="none"
        )
        assert seconds(best.at_sizes(plan.sizes, 512)) == pytest.approx(known, abs=0.006)
        # 16 sizes are within 2.0% of a graph at every size on steps up to 512 (2.5% with
        # drafts), 24 within 1.5%.
        if graphs in (16, 24):
            limit = {16: 2.0, 24: 1.5}[graphs] + (0.5 if "spec3" in name else 0.0)
            assert plan.excess_pct <= limit


def test_the_known_lists_have_the_known_lengths():
    assert len(vllm_default_sizes()) == 51
    assert len(vllm_interactivity_sizes()) == 76
    assert len(power_sizes()) == 10
    for make in (vllm_default_sizes, vllm_interactivity_sizes, power_sizes):
        assert make(300)[-1] == 300
        assert make(1) == (1,)
