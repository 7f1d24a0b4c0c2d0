"""Random cases for the tests of a policy, and how a check of one becomes a test of many."""

from __future__ import annotations

import functools
import random
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import attrs
import hypothesis
from hypothesis import HealthCheck
from hypothesis import strategies as st

from dispatchkit.dispatch import Decision, GraphView, Policy, Reason, policy_traits
from dispatchkit.errors import ConfigError
from dispatchkit.keys import Batch, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.registry import GraphRegistry
from dispatchkit.testing import strategies
from dispatchkit.testing.samples import graph_view


@attrs.define
class Case:
    """One random case: a policy under a configuration, with its graphs in some state.

    Attributes:
        policy: A fresh policy.
        config: The configuration.
        keys: What the policy declares.
        registry: Its graphs.
        graphs: The view of them that a policy gets.
        make_policy: Makes another fresh policy.
        rng: Chooses batches, changes and outcomes; seeded by hypothesis.
    """

    policy: Policy
    config: DispatchConfig
    keys: list[GraphKey]
    registry: GraphRegistry
    graphs: GraphView
    make_policy: Callable[[], Policy]
    rng: random.Random

    def batches(self, count: int = 20, *, known_reqs: bool = True) -> Iterator[Batch]:
        """Yield batches at and around the edges of buckets."""
        for _ in range(count):
            yield strategies.sample_batch(self.config, self.rng, known_reqs=known_reqs)

    def change(self, keys: list[GraphKey], kinds: Sequence[str]) -> strategies.Change | None:
        """Let something happen to one of some graphs; return what, None if it could not."""
        change = strategies.Change(self.rng.choice(kinds), self.rng.choice(keys))
        return change if strategies.apply_change(self.registry, change) else None

    def decide(self, batch: Batch, policy: Policy | None = None) -> Decision:
        """Ask the policy; "not mine" and a choice of eager both come as an eager decision."""
        asked = self.policy if policy is None else policy
        try:
            answer = asked.decide(batch, self.graphs)
        except Exception as error:  # noqa: BLE001 - whatever a policy raises is a finding
            self.fail(f"decide raised {type(error).__name__}: {error}", batch, cause=error)
        if answer is None:
            return Decision.eager(Reason.NOT_MINE)
        if not isinstance(answer, Decision):
            self.fail(f"decide answered {answer!r}; a Decision or None is allowed", batch)
        return answer

    def declare(self, policy: Policy) -> list[GraphKey]:
        """Ask a policy for its keys."""
        return list(policy.declare(self.config))

    def fail(
        self, problem: str, batch: Batch | None = None, *, cause: Exception | None = None
    ) -> NoReturn:
        """Raise AssertionError with the problem and what is needed to try it again."""
        lines = [problem]
        if batch is not None:
            lines.append(f"  batch:  {_short(batch)}")
        lines.append(f"  config: {_short(self.config)}")
        odd = [
            f"{key} ({self.graphs.why_not(key)})" for key in self.keys if self.graphs.why_not(key)
        ]
        if odd:
            more = f", and {len(odd) - 6} more" if len(odd) > 6 else ""
            lines.append(f"  graphs that cannot run: {'; '.join(odd[:6])}{more}")
        raise AssertionError("\n".join(lines)) from cause

    def admissible(self, batch: Batch) -> Iterator[GraphKey]:
        """Yield the graphs that can run now, cover the batch and are of an allowed mode."""
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if batch.allows(mode):
                yield from filter(self.graphs.is_ready, self.graphs.covering(batch, mode))


def _short(facts: Any) -> str:
    """The attributes of an object that differ from their default."""
    parts = [
        f"{field.name}={value!s}"
        for field in attrs.fields(type(facts))
        if (value := getattr(facts, field.name)) != field.default
    ]
    return ", ".join(parts)


_Check = Callable[[Any, Case], None]


def for_all_cases(
    *,
    trait: str | None = None,
    learning: bool = False,
    all_captured: bool = False,
    share: float = 1.0,
) -> Callable[[_Check], Callable[[Any], None]]:
    """Turn a check of one case into a test of many.

    Args:
        trait: Skip it where the policy does not claim this trait.
        learning: Skip it where the policy has no ``observe``.
        all_captured: Only with every graph captured and every mode possible.
        share: Part of the usual number of examples, for checks that do much in each.
    """

    def wrap(check: _Check) -> Callable[[Any], None]:
        # No functools.wraps: pytest would follow __wrapped__ and take ``case`` for a fixture.
        def test(self: CaseRunner) -> None:
            self.skip_unless(trait, learning=learning)
            self.for_all(functools.partial(check, self), all_captured=all_captured, share=share)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__qualname__, test.__module__ = check.__qualname__, check.__module__
        return test

    return wrap


class CaseRunner:
    """Makes cases of a policy and runs checks on them; the base of ``PolicyTests``.

    Attributes:
        seed: Of the random cases; the same seed gives the same cases.
        max_examples: Cases per property under a hypothesis profile of 100; scaled with it.
    """

    seed: int = 0
    max_examples: int = 30

    def make_policy(self) -> Policy:
        """Return a fresh policy, without any history."""
        raise NotImplementedError(f"{type(self).__name__} must define make_policy().")

    def configs(self) -> st.SearchStrategy[DispatchConfig]:
        """Return the configurations to try.

        A policy may refuse some by raising ConfigError in ``declare``; one that serves few
        of them narrows this down.
        """
        return strategies.configs()

    # -- inside ---------------------------------------------------------------------------

    def skip_unless(self, trait: str | None, *, learning: bool) -> None:
        """Skip a test of what the policy does not claim, or does not do."""
        policy = self.make_policy()
        if trait is not None and trait not in policy_traits(policy):
            raise unittest.SkipTest(f"trait {trait} is not claimed")
        if learning and not callable(getattr(policy, "observe", None)):
            raise unittest.SkipTest("the policy does not learn")

    def for_all(self, check: Callable[[Case], None], *, all_captured: bool, share: float) -> None:
        """Run a check on random cases, the same ones for the same seed."""
        wanted = hypothesis.settings.default
        usual = 100 if wanted is None else wanted.max_examples
        examples = max(5, round(usual * self.max_examples * share / 100))

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=False,
            report_multiple_bugs=False,
            # Cases are small as they come; shrinking one costs ten times what finding it did.
            phases=[hypothesis.Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @hypothesis.given(st.data())
        def run(data: st.DataObject) -> None:
            check(self._case(data.draw, all_captured=all_captured))

        run()

    def _case(self, draw: Callable[..., Any], *, all_captured: bool) -> Case:
        config: DispatchConfig = draw(self.configs())
        policy = self.make_policy()
        try:
            keys: list[Any] = list(policy.declare(config))
        except ConfigError:
            hypothesis.reject()  # its right; a policy that refuses nearly all fails for that
        except Exception as error:
            problem = f"declare raised {type(error).__name__}: {error}"
            raise AssertionError(f"{problem}\n  config: {_short(config)}") from error
        odd = [key for key in keys if not isinstance(key, GraphKey)]
        if odd:
            raise AssertionError(f"declare returned {odd[0]!r}, which is no GraphKey")
        registry = draw(strategies.registries(keys, all_captured=all_captured))
        modes = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})
        if not all_captured and draw(st.integers(0, 5)) == 0:
            modes -= {RuntimeMode.PIECEWISE}
        lazy = not all_captured and draw(st.integers(0, 5)) == 0
        rng = random.Random(draw(st.integers(0, 2**16)))
        graphs = graph_view(registry, config, modes=modes, lazy=lazy)
        return Case(policy, config, keys, registry, graphs, self.make_policy, rng)
