"""Simulate a trace with and without prediction, and count the steps that lack a graph."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import attrs

from dispatchkit import Dispatcher, GraphKey, load_plugins
from dispatchkit.errors import ConfigError, TraceError
from dispatchkit.keys import check_count
from dispatchkit.observe import StepTrace, trace_config

from dispatchkit_predictive.foresight import Foresight
from dispatchkit_predictive.predictor import KeyPredictor


@attrs.frozen
class Rehearsal:
    """Results of a simulated trace, with graphs captured only in idle moments.

    Attributes:
        num_steps: Number of steps that a graph could serve.
        max_graphs: Most live graphs, for all three rules.
        most_wanted: Steps that ran eager for lack of a graph if each idle moment captures the key
            missed by the most steps, as ``runner.controls.capture_next()`` does.
        latest: The same if it captures the key missed last.
        predicted: The same with prediction.
        captures: Number of captures with prediction.
        hit_rate: Share of the predicted key changes for which the prediction was right.
        used: Share of the captures ahead that were used.
    """

    num_steps: int
    max_graphs: int
    most_wanted: int
    latest: int
    predicted: int
    captures: int
    hit_rate: float
    used: float


def keys_of_trace(
    trace: StepTrace, policy: str = "vllm"
) -> tuple[list[GraphKey | None], list[GraphKey]]:
    """Return the key that each step of a trace asks for (None: eager), and all declared keys.

    Raises:
        TraceError: No step has tokens.
        UnknownNameError: The policy is not installed.
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
        raise TraceError(trace.source, None, "has no step with tokens in it.")
    return keys, list(dispatcher.registry)


def rehearse(
    keys: Sequence[GraphKey | None],
    declared: Sequence[GraphKey],
    *,
    max_graphs: int,
    idle_every: int = 1,
) -> Rehearsal:
    """Simulate the steps of a trace with prediction, and with two rules without it.

    Args:
        keys: The key that each step asks for; None always runs eager.
        declared: All keys.
        max_graphs: Most live graphs.
        idle_every: Steps between two idle moments, each long enough for one capture.

    Raises:
        ConfigError: A setting is invalid.
    """
    check_count(idle_every, "idle_every")
    if not declared:
        raise ConfigError("declared", declared, "at least one key")
    foresight = Foresight(KeyPredictor(declared), max_graphs=max_graphs)
    predicted = captures = 0
    live: set[GraphKey] = set()
    for step, key in enumerate(keys):
        if key is not None:
            predicted += key not in live
            foresight.see(key, has_graph=key in live)
        if step % idle_every == 0 and (found := foresight.next_capture(live)) is not None:
            wanted, victim = found
            if victim is not None:
                live.discard(victim)
                foresight.evicted(victim)
            live.add(wanted)
            foresight.captured(wanted, ok=True)
            captures += 1
    return Rehearsal(
        num_steps=sum(key is not None for key in keys),
        max_graphs=max_graphs,
        most_wanted=_without(keys, max_graphs, idle_every, latest=False),
        latest=_without(keys, max_graphs, idle_every, latest=True),
        predicted=predicted,
        captures=captures,
        hit_rate=foresight.predictor.hit_rate,
        used=foresight.num_used / foresight.num_ahead if foresight.num_ahead else 0.0,
    )


def _without(
    keys: Sequence[GraphKey | None], max_graphs: int, idle_every: int, *, latest: bool
) -> int:
    """Return the number of eager steps if only keys that a step missed are captured."""
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


def at_best(
    keys: Sequence[GraphKey | None], *, max_graphs: int, idle_every: int = 1, ahead: bool = True
) -> int:
    """Return the number of steps that lack a graph if the future is known.

    It captures the key needed soonest and evicts the one needed latest (Belady's rule). If there is
    time for a capture after each step, no rule does better.

    Args:
        keys: The key that each step asks for; None always runs eager.
        max_graphs: Most live graphs.
        idle_every: Steps between two idle moments, each long enough for one capture.
        ahead: Capture any key; if false, only keys that a step missed.

    Raises:
        ConfigError: A setting is invalid.
    """
    check_count(max_graphs, "max_graphs")
    check_count(idle_every, "idle_every")
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
