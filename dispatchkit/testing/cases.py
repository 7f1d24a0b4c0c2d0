"""Random cases for policy tests, and a decorator that runs a check on many cases."""

from __future__ import annotations

import functools
import random
import unittest
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import attrs
import hypothesis
from hypothesis import HealthCheck
from hypothesis import strategies as st

from dispatchkit.dispatch import Decision, GraphView, Policy, Reason, policy_traits
from dispatchkit.errors import ConfigError, describe_exception
from dispatchkit.keys import Batch, DispatchConfig, GraphKey, RuntimeMode
from dispatchkit.registry import GraphRegistry
from dispatchkit.testing import strategies
from dispatchkit.testing.samples import graph_view


@attrs.define
class Case:
    """A policy with a random configuration and graphs in random states.

    Attributes:
        policy: The policy under test, newly created.
        config: The configuration under which the policy decides.
        keys: The keys that the policy declares.
        registry: The registry of the keys and their graphs.
        graphs: The policy's view of the graphs.
        make_policy: Function that returns a fresh policy.
        rng: Random number generator for batches, changes and outcomes.
    """

    policy: Policy
    config: DispatchConfig
    keys: list[GraphKey]
    registry: GraphRegistry
    graphs: GraphView
    make_policy: Callable[[], Policy]
    rng: random.Random

    def batches(self, count: int = 20, *, known_reqs: bool = True) -> Iterator[Batch]:
        """Yield batches, most of them within one token of a capture size."""
        for _ in range(count):
            yield strategies.sample_batch(self.config, self.rng, known_reqs=known_reqs)

    def change(self, keys: list[GraphKey], kinds: Sequence[str]) -> strategies.Change | None:
        """Change the state of a random graph; return the change, or None if it is impossible."""
        change = strategies.Change(self.rng.choice(kinds), self.rng.choice(keys))
        return change if strategies.apply_change(self.registry, change) else None

    def decide(self, batch: Batch, policy: Policy | None = None) -> Decision:
        """Return the policy's decision; None counts as a decision to run eager."""
        asked = self.policy if policy is None else policy
        try:
            answer = asked.decide(batch, self.graphs)
        except Exception as error:  # noqa: BLE001 - any exception is a finding
            self.fail(f"decide {describe_exception(error)}", batch, cause=error)
        if answer is None:
            return Decision.eager(Reason.NO_ANSWER)
        if not isinstance(answer, Decision):
            self.fail(f"decide returned {answer!r}, but must return a Decision or None", batch)
        return answer

    def declare(self, policy: Policy) -> list[GraphKey]:
        """Return the keys that a policy declares."""
        return list(policy.declare(self.config))

    def fail(
        self, problem: str, batch: Batch | None = None, *, cause: Exception | None = None
    ) -> NoReturn:
        """Raise AssertionError with the problem and the state that reproduces it."""
        lines = [problem]
        if batch is not None:
            lines.append(f"  batch:  {_short(batch)}")
        lines.append(f"  config: {self.config!r}")
        odd = [
            f"{key} ({self.graphs.why_not(key)})" for key in self.keys if self.graphs.why_not(key)
        ]
        if odd:
            more = f", and {len(odd) - 6} more" if len(odd) > 6 else ""
            lines.append(f"  graphs that cannot run: {'; '.join(odd[:6])}{more}")
        raise AssertionError("\n".join(lines)) from cause

    def admissible(self, batch: Batch) -> Iterator[GraphKey]:
        """Yield the keys of ready graphs that may serve the batch."""
        for mode in (RuntimeMode.FULL, RuntimeMode.PIECEWISE):
            if batch.allows(mode):
                yield from filter(self.graphs.is_ready, self.graphs.covering(batch, mode))


def _short(batch: Batch) -> str:
    """Describe a batch by the attributes that differ from their defaults."""
    parts = [
        f"{field.name}={value!s}"
        for field in attrs.fields(Batch)
        if (value := getattr(batch, field.name)) != field.default
    ]
    return ", ".join(parts)


def show_different(one: Decision, other: Decision) -> tuple[str, str]:
    """Return two different decisions as text, with all fields if their short texts are equal."""
    short = str(one), str(other)
    return short if short[0] != short[1] else (repr(one), repr(other))


_Check = Callable[[Any, Case], None]


def for_all_cases(
    *,
    trait: str | None = None,
    learning: bool = False,
    all_captured: bool = False,
    share: float = 1.0,
) -> Callable[[_Check], Callable[[Any], None]]:
    """Return a decorator that turns a check of one case into a test of many cases.

    Args:
        trait: Skip the test if the policy does not claim this trait.
        learning: Skip the test if the policy has no ``observe``.
        all_captured: Use only cases with all graphs captured and all modes supported.
        share: Fraction of the cases to run; less than 1 for slow checks.
    """

    def wrap(check: _Check) -> Callable[[Any], None]:
        # Not functools.wraps, because pytest would follow __wrapped__ and treat ``case`` as a
        # fixture.
        def test(self: CaseRunner) -> None:
            self.skip_unless(trait, learning=learning)
            self.for_all(functools.partial(check, self), all_captured=all_captured, share=share)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__qualname__, test.__module__ = check.__qualname__, check.__module__
        return test

    return wrap


class CaseRunner:
    """A base class that runs checks on random cases, for ``PolicyTests``.

    Attributes:
        seed: Seed of the random cases; the same seed gives the same cases.
        max_examples: Number of cases per property (fewer for slow properties), if the hypothesis
            profile has its default ``max_examples`` of 100. With 200, the number of cases doubles.
    """

    seed: int = 0
    max_examples: int = 60

    def make_policy(self) -> Policy:
        """Return a fresh policy."""
        raise NotImplementedError(f"{type(self).__name__} must define make_policy().")

    def configs(self) -> st.SearchStrategy[DispatchConfig]:
        """Return a hypothesis strategy for the configurations to test.

        ``declare`` may reject a configuration by raising ConfigError. Override this method if a
        policy supports only a few configurations.
        """
        return strategies.configs()

    # -- internals ------------------------------------------------------------------------

    def skip_unless(self, trait: str | None, *, learning: bool) -> None:
        """Skip the test if the policy lacks the trait or, if ``learning`` is True, ``observe``."""
        policy = self.make_policy()
        if trait is not None and trait not in policy_traits(policy):
            raise unittest.SkipTest(f"trait {trait} is not claimed")
        if learning and not callable(getattr(policy, "observe", None)):
            raise unittest.SkipTest("the policy does not learn")

    def for_all(self, check: Callable[[Case], None], *, all_captured: bool, share: float) -> None:
        """Run a check on the random cases that ``seed`` determines.

        The configurations are drawn once for all properties. Each configuration has a seed for the
        other parts of its case (graph states, batches, changes).
        """
        wanted = hypothesis.settings.default
        usual = 100 if wanted is None else wanted.max_examples
        drawn = _draw(self, max(5, round(usual * self.max_examples / 100)))
        tried = drawn[: max(5, round(len(drawn) * share))]
        accepted = 0
        for config, seed in tried:
            case = self._case(config, random.Random(seed), all_captured=all_captured)
            if case is not None:
                accepted += 1
                check(case)
        if accepted == 0:
            raise AssertionError(
                f"declare rejected every configuration ({len(tried)} tried), so nothing was "
                "tested. Override configs(), or pass configs to run_policy_conformance, to draw "
                "configurations that the policy supports."
            )

    def _case(
        self, config: DispatchConfig, rng: random.Random, *, all_captured: bool
    ) -> Case | None:
        policy = self.make_policy()
        keys = declared_keys(policy, config)
        if keys is None:
            return None
        registry = GraphRegistry()
        registry.declare(keys)
        modes = frozenset({RuntimeMode.PIECEWISE, RuntimeMode.FULL})
        lazy = False
        if all_captured or rng.random() < 0.75:
            for key in registry:
                registry.captured(key, object())
        graphs = graph_view(registry, config)
        case = Case(policy, config, keys, registry, graphs, self.make_policy, rng)
        if not all_captured:
            lazy = rng.random() < 0.2
            if rng.random() < 0.2:
                modes -= {RuntimeMode.PIECEWISE}
            case.graphs = graph_view(registry, config, modes=modes, lazy=lazy)
            for _ in range(rng.randrange(6) if keys else 0):
                case.change(keys, strategies.CHANGE_KINDS)
        return case


# Pairs of a drawn configuration and the seed of its case. The outer key is the test class, or
# CaseRunner if the class does not override ``configs``. The inner key is the seed of the class and
# the number of configurations.
_drawn: weakref.WeakKeyDictionary[
    type[CaseRunner], dict[tuple[int, int], list[tuple[DispatchConfig, int]]]
] = weakref.WeakKeyDictionary()


def _draw(runner: CaseRunner, count: int) -> list[tuple[DispatchConfig, int]]:
    """Draw configurations, each with a seed for the other parts of a case."""
    is_usual = type(runner).configs is CaseRunner.configs
    known = _drawn.setdefault(CaseRunner if is_usual else type(runner), {})
    if (runner.seed, count) not in known:
        drawn: list[tuple[DispatchConfig, int]] = []

        # hypothesis only generates cases here, without shrinking or storing them.
        @hypothesis.seed(runner.seed)
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(runner.configs(), st.integers(0, 2**32 - 1))
        def draw(config: DispatchConfig, seed: int) -> None:
            drawn.append((config, seed))

        draw()
        known[runner.seed, count] = drawn
    return known[runner.seed, count]


def declared_keys(policy: Policy, config: DispatchConfig) -> list[GraphKey] | None:
    """Return the keys that a policy declares, or None if it rejects the configuration.

    Raises:
        AssertionError: ``declare`` raised an exception other than ConfigError, or returned
            something other than GraphKeys.
    """
    try:
        answer: Any = policy.declare(config)
        is_iterable = isinstance(answer, Iterable)
        keys: list[Any] = list(answer) if is_iterable else []
    except ConfigError:
        return None  # a policy may reject configurations
    except Exception as error:
        problem = f"declare {describe_exception(error)}"
        raise AssertionError(f"{problem}\n  config: {config!r}") from error
    odd = [key for key in keys if not isinstance(key, GraphKey)]
    if odd or not is_iterable:
        given = f"the key {odd[0]!r}" if odd else repr(answer)
        raise AssertionError(f"declare returned {given}, but must return only GraphKeys")
    return keys
