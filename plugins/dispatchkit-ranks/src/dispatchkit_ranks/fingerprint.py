"""Values that ranks compare at start-up: configuration, policy, dialect, sizes, versions."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import platform
from collections.abc import Mapping, Sequence

import attrs

from dispatchkit.dispatch import (
    Dispatcher,
    GraphView,
    PlainView,
    Policy,
    declares_axes,
    policy_name,
)
from dispatchkit.keys import AxisBuckets, Batch, RuntimeMode
from dispatchkit.registry import GraphRegistry

# Maximum number of sizes at which decisions are compared. Comparing all sizes would take seconds.
_MAX_PROBED_SIZES = 64


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions that must be equal on all ranks."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("dispatchkit", "dispatchkit-ranks", "torch"):
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[f"version of {name}"] = "not installed"
    return found


def fingerprint(
    dispatcher: Dispatcher,
    extra: Mapping[str, object] | None = None,
    *,
    policy: Policy | None = None,
) -> dict[str, str]:
    """Return everything that determines a dispatcher's decisions, by name.

    Args:
        dispatcher: The dispatcher to describe.
        extra: Further values that must be equal, such as the revision of the model or the
            all-reduce implementation. They are compared as text.
        policy: The policy whose decisions are included; by default, the dispatcher's policy. The
            decisions show whether policies with the same name have different options.
    """
    config = dispatcher.config
    fields = attrs.fields(type(config))
    names = [field.name for field in fields if not field.name.startswith("_")]
    facts = {f"config.{name}": str(getattr(config, name)) for name in names}
    # If these differ, one rank raises an error for a batch that another rank runs eager.
    facts["token limit is set"] = str(config.has_token_limit)
    facts["request limit is set"] = str(config.has_request_limit)
    facts["policy"] = dispatcher.policy_name
    facts["policy's distribution"] = dispatcher.policy_origin or "none"
    dialect = getattr(policy or dispatcher.policy, "dialect", None)
    facts["dialect"] = str(getattr(dialect, "name", dialect))
    facts["digest of the keys"] = _digest(sorted(map(str, dispatcher.registry)))
    facts["digest of the policy's decisions"] = _digest(
        _answers(dispatcher, policy or dispatcher.policy)
    )
    facts.update(versions())
    facts.update({name: str(value) for name, value in (extra or {}).items()})
    return facts


def differences(facts: Sequence[Mapping[str, str]], numbers: Sequence[int]) -> dict[str, str]:
    """Describe each value that differs, by name, such as "rank 2 has Y; ranks 0, 1 have X".

    Args:
        facts: The fingerprint of each rank.
        numbers: The number to report for each rank.
    """
    found = {}
    for name in dict.fromkeys(name for each in facts for name in each):
        by_value: dict[str, list[int]] = {}
        for number, each in zip(numbers, facts, strict=True):
            by_value.setdefault(each.get(name, "nothing"), []).append(number)
        if len(by_value) > 1:
            found[name] = "; ".join(
                f"{_ranks(who)} {'has' if len(who) == 1 else 'have'} {_short(value)}"
                for value, who in sorted(by_value.items(), key=lambda item: len(item[1]))
            )
    return found


def deviating_ranks(facts: Sequence[Mapping[str, str]], numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose fingerprints differ from the most common fingerprint.

    In a tie, the fingerprint of the lowest rank counts as the most common.
    """
    texts = [tuple(sorted(each.items())) for each in facts]
    usual = max(texts, key=texts.count)
    return tuple(number for number, text in zip(numbers, texts, strict=True) if text != usual)


def _answers(dispatcher: Dispatcher, policy: Policy) -> list[str]:
    """Return a policy's decisions at each capture size, and at one token more.

    If there are more than ``_MAX_PROBED_SIZES`` sizes, some are skipped. The policy decides as if
    all graphs were captured.
    """
    config = dispatcher.config
    registry = GraphRegistry()
    registry.declare(sorted(dispatcher.registry, key=str))
    every = GraphView(
        registry, config, modes=frozenset(RuntimeMode), dispatchable=lambda entry: True
    )
    # Pairs of axis values and the graphs visible to the policy.
    views: list[tuple[AxisBuckets, GraphView]] = [((), every)]
    if config.axes:
        combinations = config.variants.combinations()
        views = [(axes, every) for axes in (combinations[0], combinations[-1])]
        if not declares_axes(policy.declare(config)):
            views = [((), PlainView(every, combinations[0]))]
    sizes = sorted({key.num_tokens for key in registry} | {1, config.max_num_tokens})
    step = -(-len(sizes) // _MAX_PROBED_SIZES)
    probed = {*sizes[::step], config.max_num_tokens}
    tokens = {
        size + off for size in probed for off in (0, 1) if size + off <= config.max_num_tokens
    }
    found = []
    for num_tokens in sorted(tokens):
        for uniform in range(config.num_query_classes):
            is_uniform, query_len, max_query_len = config.query_class(uniform)
            for loras in sorted({0, min(1, config.max_loras), config.max_loras}):
                for ceiling, (axes, view) in itertools.product((1, 2), views):
                    batch = Batch(
                        num_tokens=num_tokens,
                        uniform=is_uniform,
                        query_len=query_len,
                        max_query_len=max_query_len,
                        num_active_loras=loras,
                        allowed=ceiling,
                        axes=axes,
                    )
                    found.append(f"{batch}: {_answer(policy, batch, view)}")
    return found


def _answer(policy: Policy, batch: Batch, view: GraphView) -> str:
    """Return a policy's decision, or the type of the error that it raises, as text."""
    try:
        answer = policy.decide(batch, view)
    except Exception as error:  # noqa: BLE001 - the dispatcher handles errors; compare them here
        return f"{policy_name(policy)} raised {type(error).__name__}"
    return "None" if answer is None else f"{answer} {answer.timed}"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _ranks(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank {named}" if len(numbers) == 1 else f"ranks {named}"


def _short(value: str) -> str:
    return value if len(value) <= 120 else f"{value[:117]}…"
