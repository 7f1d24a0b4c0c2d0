"""A simulation of ranks equals the agreement of real ranks, batch by batch."""

from __future__ import annotations

import random
import warnings

import pytest

pytest.importorskip("numpy")
pytest.importorskip("dispatchkit_plan")

from dispatchkit import Dispatcher
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.keys import CaptureSizeWarning, DispatchConfig, RuntimeMode
from dispatchkit.observe.trace import StepTrace, TraceStep
from dispatchkit.plugins import load_plugins

from dispatchkit_plan import CostModel, Exchange, Scenario, simulate, simulate_ranks
from dispatchkit_ranks.facts import Facts

MODEL = CostModel(
    name="test", eager_us=[(1, 100.0), (64, 200.0)], graph_us=[(1, 20.0), (64, 150.0)]
)
with warnings.catch_warnings():  # larger batches run eager
    warnings.simplefilter("ignore", CaptureSizeWarning)
    CONFIG = DispatchConfig(sizes=(1, 2, 4, 8, 16, 32), max_num_tokens=64, max_num_seqs=64)


def trace_of(number: int, seed: int = 0) -> StepTrace:
    chance = random.Random(seed)
    steps = []
    for step in range(number):
        tokens = chance.choice((1, 3, 8, 20, 40, 64))
        decode = chance.random() < 0.7
        steps.append(
            TraceStep(
                step=step,
                num_tokens=tokens,
                num_reqs=tokens if decode else 1 + tokens // 4,
                uniform_decode=decode,
            )
        )
    return StepTrace.from_steps(steps)


def scenario_of(**settings) -> Scenario:
    return Scenario(**{"policy": "vllm", "config": CONFIG, "cost_model": MODEL, **settings})


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_run_what_they_would_agree_on(ranks):
    trace = trace_of(302)
    exchange = Exchange(hop_us=5, own_us=1)
    found = simulate_ranks(trace, ranks, scenario_of(), exchange=exchange)
    dispatcher = Dispatcher(load_plugins().create_policy("vllm"), CONFIG)
    for key in dispatcher.registry:
        dispatcher.registry.captured(key, "graph")
    facts = Facts(CONFIG)
    rows = list(
        zip(
            trace.column("num_tokens"),
            trace.column("num_reqs"),
            map(int, trace.column("uniform_decode")),
            strict=True,
        )
    )
    modes = dict.fromkeys((mode.name for mode in RuntimeMode), 0)
    total_us = real = padded = changed = 0.0
    rounds = len(rows) // ranks
    for first in range(0, rounds * ranks, ranks):
        batches = rows[first : first + ranks]
        own = [dispatcher.dispatch(*batch).mode for batch in batches]
        table = [
            facts.row(*batch, 0, 2, int(mode)) for batch, mode in zip(batches, own, strict=True)
        ]
        merged = [max(column) for column in zip(*table, strict=True)]
        agreed = dispatcher.dispatch(*facts.merge(merged)[:5])
        size = None if agreed.key is None else agreed.key.num_tokens
        is_pieces = agreed.mode is RuntimeMode.PIECEWISE
        total_us += MODEL.step_us(agreed.num_tokens, size, piecewise=is_pieces)
        modes[agreed.mode.name] += ranks
        changed += sum(mode != agreed.mode for mode in own)
        real += sum(tokens for tokens, _, _ in batches)
        padded += ranks * (agreed.num_tokens + agreed.padding)
    assert found.modes == modes
    assert found.changed_modes == changed > 0
    assert found.real_tokens == real
    assert found.rank_padding + found.graph_padding == padded - real
    assert found.time_s - found.exchange_s == pytest.approx(total_us / 1e6)
    assert found.exchange_s == pytest.approx(rounds * exchange.time_us(ranks) / 1e6)
    assert min(found.own_s, found.slowest_s) > 0


def test_one_rank_loses_nothing_to_others():
    trace = trace_of(100)
    found, alone = simulate_ranks(trace, 1, scenario_of()), simulate(trace, scenario_of())
    assert found.time_s == pytest.approx(alone.time_s)
    assert found.modes == alone.modes
    assert (found.slowest_s, found.padding_s, found.exchange_s) == (0, 0, 0)
    assert (found.rank_padding, found.graph_padding) == (0, alone.padding_tokens)


@pytest.mark.parametrize(
    ("shape", "hops"), [("tree", (0, 2, 4, 6, 8, 24)), ("ring", (0, 2, 6, 14, 30, 8190))]
)
def test_messages_that_wait_for_each_other(shape, hops):
    exchange = Exchange(shape=shape, hop_us=2, own_us=10)
    ranks = (1, 2, 4, 8, 16, 4096)
    assert tuple(map(exchange.num_hops, ranks)) == hops
    assert exchange.time_us(1) == 0
    assert exchange.time_us(4096) == 10 + 2 * hops[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_graphs": 2},
        {"capture_after": 2},
        {"lanes": 2},
        {"rows_independent": True},
        {"policy": "adaptive"},
    ],
)
def test_what_ranks_cannot_have_is_refused_by_name(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        simulate_ranks(trace_of(10), 2, scenario_of(**settings))


@pytest.mark.parametrize(
    "wrong", [{"trace": "a.csv"}, {"ranks": "x"}, {"scenario": 3}, {"exchange": 3}]
)
def test_arguments_of_the_wrong_type_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} must be"):
        simulate_ranks(**{"trace": trace_of(10), "ranks": 2, **wrong})


def test_fewer_steps_than_ranks():
    with pytest.raises(TraceError, match=r"3 steps with tokens, .* 4\. .*, or at most 3 ranks\.$"):
        simulate_ranks(trace_of(3), 4, scenario_of())


@pytest.mark.parametrize("settings", [{"shape": "star"}, {"hop_us": -1}, {"own_us": float("nan")}])
def test_an_exchange_of_nonsense_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Exchange(**settings)
