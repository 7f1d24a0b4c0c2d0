"""Why a batch is decided as it is, in words."""

from __future__ import annotations

import attrs

from dispatchkit.dispatch.decision import Decision
from dispatchkit.dispatch.dispatcher import Dispatcher
from dispatchkit.keys.batch import Batch, GraphKey
from dispatchkit.keys.modes import RuntimeMode


@attrs.frozen
class Candidate:
    """A graph that could compute the batch.

    Attributes:
        key: Its name.
        chosen: It is what was decided.
        why_not: Why it cannot run now, or why it is not allowed; None if it could run.
        padding: Tokens it would compute for nothing.
    """

    key: GraphKey
    chosen: bool
    why_not: str | None
    padding: int


@attrs.frozen
class Explanation:
    """A decision, the policy behind it and the graphs that were near.

    Attributes:
        batch: The batch asked about.
        decision: What would happen now.
        policy: Name of the policy, with where it comes from.
        candidates: Per runtime mode, the smallest graphs that cover the batch.
    """

    batch: Batch
    decision: Decision
    policy: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        facts = [f"{self.batch.num_tokens} tokens"]
        if self.batch.num_reqs is not None:
            facts.append(f"{self.batch.num_reqs} requests")
        if self.batch.uniform:
            facts.append(f"uniform decode of {self.batch.query_len} per request")
        if self.batch.num_active_loras:
            facts.append(f"{self.batch.num_active_loras} adapters")
        names = ", ".join(mode.name for mode in sorted(self.batch.allowed_modes))
        lines = [
            f"{', '.join(facts)}; allowed: {names}",
            f"-> {self.decision}",
            f"   decided by policy {self.policy}; padding {self.decision.padding} tokens",
        ]
        for each in self.candidates:
            verdict = "chosen" if each.chosen else each.why_not or "ready, not preferred"
            lines.append(f"   {each.key}: {verdict} (padding {each.padding})")
        if not self.candidates:
            lines.append("   no declared graph is large enough for it")
        return "\n".join(lines)


def explain(
    dispatcher: Dispatcher,
    num_tokens: int,
    num_reqs: int = 0,
    uniform: int = 0,
    loras: int = 0,
    ceiling: int = 2,
    *,
    per_mode: int = 2,
) -> Explanation:
    """Say what would happen to a batch and why, without touching table or counters.

    Raises:
        DescriptorError: The batch is impossible.
    """
    batch = dispatcher.batch(num_tokens, num_reqs, uniform, loras, ceiling)
    answer = dispatcher.decide(batch)
    decision = attrs.evolve(answer, num_tokens=batch.num_tokens, policy=dispatcher.policy_name)
    candidates = []
    for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
        for index, key in enumerate(dispatcher.graphs.covering(batch, mode)):
            chosen = key == decision.key
            if index >= per_mode and not chosen:
                continue
            why = None if batch.allows(mode) else "mode not allowed for this batch"
            candidates.append(
                Candidate(
                    key,
                    chosen,
                    why or dispatcher.graphs.why_not(key),
                    key.num_tokens - batch.num_tokens,
                )
            )
            if index > per_mode and decision.key is None:
                break
    origin = f" ({dispatcher.policy_origin})" if dispatcher.policy_origin else ""
    return Explanation(batch, decision, dispatcher.policy_name + origin, tuple(candidates))
