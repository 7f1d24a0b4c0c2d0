"""Simulate a trace with and without prediction, and count the steps that miss a graph.

A step misses a graph if the graph that the policy chose for it is not captured.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import attrs

from dispatchkit import Dispatcher, GraphKey, load_plugins
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.keys import check_count
from dispatchkit.observe import StepTrace, trace_config

from dispatchkit_predictive.capture_planner import CapturePlanner
from dispatchkit_predictive.predictor import KeyPredictor, check_keys


@attrs.frozen
class PredictionSimulation:
    """Results of a simulation that captures graphs only in idle time.

    Attributes:
        num_steps: Number of steps that a graph could serve.
        max_graphs: Maximum number of live graphs, the same for ``most_wanted``, ``latest`` and
            ``predicted``.
        most_wanted: Number of steps that miss a graph if each idle moment captures the key that was
            missed most often, as ``runner.controls.capture_next()`` does.
        latest: Number of steps that miss a graph if each idle moment captures the key that was
            missed last.
        predicted: Number of steps that miss a graph if a ``CapturePlanner`` chooses the captures.
        captures: Number of captures that the ``CapturePlanner`` chose.
        hit_rate: Share of predictions of the next key that were correct.
        used: Share of the prefetched graphs (captured before a step missed them) that steps used.
    """

    num_steps: int
    max_graphs: int
    most_wanted: int
    latest: int
    predicted: int
    captures: int
    hit_rate: float
    used: float


def _check_steps(keys: Any) -> None:
    if not isinstance(keys, Sequence):
        hint = "Pass the first of the two lists that keys_of_trace(trace) returns."
        raise ConfigError("keys", keys, "a list with a key or None for each step", hint)


def keys_of_trace(
    trace: StepTrace, policy: str = "vllm"
) -> tuple[list[GraphKey | None], list[GraphKey]]:
    """Return the key of each step (None if it runs eager), and all declared keys.

    Steps without tokens are skipped.

    Raises:
        TraceError: No step of the trace has tokens.
        UnknownNameError: No policy of this name is installed.
    """
    config = trace_config(trace)
    dispatcher = Dispatcher(load_plugins().create_policy(policy), config, lazy=True)
    names = trace.columns

    def column(name: str) -> Sequence[int]:
        return trace.column(name) if name in names else [0] * len(trace)

    keys: list[GraphKey | None] = []
    rows = zip(
        column("num_tokens"),
        column("num_reqs"),
        column("uniform_decode"),
        column("max_query_len"),
        column("num_active_loras"),
        strict=True,
    )
    for tokens, reqs, uniform, longest, loras in rows:
        if tokens:
            is_known = uniform and longest in config.query_lens
            kind = config.query_lens.index(longest) + 1 if is_known else 0
            reqs, loras = min(reqs, config.max_num_seqs), min(loras, config.max_loras)
            keys.append(dispatcher.dispatch(tokens, reqs, kind, loras).key)
    if not keys:
        raise TraceError(
            trace.source, None, "the trace has no step with tokens. Use another trace."
        )
    return keys, list(dispatcher.registry)


def simulate_prediction(
    keys: Sequence[GraphKey | None],
    declared: Sequence[GraphKey],
    *,
    max_graphs: int,
    idle_every: int = 1,
) -> PredictionSimulation:
    """Simulate the steps of a trace with prediction and with two simpler rules.

    Args:
        keys: Key of each step; None for a step that always runs eager.
        declared: All declared keys.
        max_graphs: Maximum number of live graphs.
        idle_every: Number of steps from one idle moment to the next. Each idle moment suffices for
            one capture.

    Raises:
        ConfigError: A setting is invalid.
    """
    check_count(idle_every, "idle_every")
    _check_steps(keys)
    declared = check_keys(declared, "declared")
    if not declared:
        hint = "Pass the second of the two lists that keys_of_trace(trace) returns."
        raise ConfigError("declared", declared, "a list of at least one key", hint)
    planner = CapturePlanner(KeyPredictor(declared), max_graphs=max_graphs)
    predicted = captures = 0
    live: set[GraphKey] = set()
    for step, key in enumerate(keys):
        if key is not None:
            predicted += key not in live
            planner.record_use(key, has_graph=key in live)
        if step % idle_every == 0 and (found := planner.next_capture(live)) is not None:
            wanted, victim = found
            if victim is not None:
                live.discard(victim)
                planner.record_eviction(victim)
            live.add(wanted)
            planner.record_capture(wanted, ok=True)
            captures += 1
    return PredictionSimulation(
        num_steps=sum(key is not None for key in keys),
        max_graphs=max_graphs,
        most_wanted=_without(keys, max_graphs, idle_every, latest=False),
        latest=_without(keys, max_graphs, idle_every, latest=True),
        predicted=predicted,
        captures=captures,
        hit_rate=planner.predictor.hit_rate,
        used=planner.num_used / planner.num_ahead if planner.num_ahead else 0.0,
    )


def _without(
    keys: Sequence[GraphKey | None], max_graphs: int, idle_every: int, *, latest: bool
) -> int:
    """Return the number of steps that miss a graph if only missed keys are captured."""
    missed: Counter[GraphKey] = Counter()
    last: dict[GraphKey, None] = {}
    live: dict[GraphKey, None] = {}  # least recently used first
    eager = 0
    for step, key in enumerate(keys):
        if key is not None:
            if key in live:
                del live[key]
                live[key] = None
            else:
                eager += 1
                missed[key] += 1
                last.pop(key, None)
                last[key] = None
        if step % idle_every:
            continue
        order = reversed(last) if latest else (one for one, _ in missed.most_common())
        wanted = next((one for one in order if one not in live), None)
        if wanted is not None:
            if len(live) >= max_graphs:
                del live[next(iter(live))]
            live[wanted] = None
            last.pop(wanted, None)
    return eager


def fewest_eager_steps(
    keys: Sequence[GraphKey | None], *, max_graphs: int, idle_every: int = 1, ahead: bool = True
) -> int:
    """Return the number of steps that miss a graph if the future is known.

    The simulation captures the key that is needed soonest and evicts the key whose next use is the
    furthest away (Belady's rule). With ``ahead`` and ``idle_every=1``, no rule has fewer misses.

    Args:
        keys: Key of each step; None for a step that always runs eager.
        max_graphs: Maximum number of live graphs.
        idle_every: Number of steps from one idle moment to the next. Each idle moment suffices for
            one capture.
        ahead: Whether keys may be captured before a step has missed them. If not, an evicted key
            is captured again only after another miss.

    Raises:
        ConfigError: A setting is invalid.
    """
    check_count(max_graphs, "max_graphs")
    check_count(idle_every, "idle_every")
    _check_steps(keys)
    uses: defaultdict[GraphKey, deque[int]] = defaultdict(deque)
    for step, key in enumerate(keys):
        if key is not None:
            uses[key].append(step)

    def next_use(key: GraphKey) -> int:
        return uses[key][0] if uses[key] else len(keys)

    live: set[GraphKey] = set()
    wanted: set[GraphKey] = set(uses) if ahead else set()
    eager = 0
    for step, key in enumerate(keys):
        if key is not None:
            uses[key].popleft()
            if key not in live:
                eager += 1
                wanted.add(key)
        if step % idle_every or not wanted:
            continue
        best = min(wanted, key=next_use)
        if next_use(best) == len(keys):
            continue
        if len(live) >= max_graphs:
            victim = max(live, key=next_use)
            if next_use(victim) < next_use(best):
                continue
            live.discard(victim)
            if ahead:
                wanted.add(victim)
        wanted.discard(best)
        live.add(best)
    return eager
