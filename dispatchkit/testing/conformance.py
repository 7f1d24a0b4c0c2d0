"""Run the test kit for a policy or lane policy in one call, without pytest.

Every policy must have the core set of properties. A policy that claims a *trait* by listing it in
``traits`` must also have the properties that the trait requires.
"""

from __future__ import annotations

import copy
import inspect
import unittest
from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import strategies as st

from dispatchkit.dispatch import (
    LANE_TRAITS,
    TRAITS,
    LanePolicy,
    Policy,
    policy_name,
    policy_traits,
)
from dispatchkit.keys import DispatchConfig
from dispatchkit.testing.lane_policy_tests import LanePolicyTests
from dispatchkit.testing.policy_tests import PolicyTests

_HOLDS, _FAILS, _SKIPPED = "holds", "FAILS", "not tested"


@attrs.frozen
class Finding:
    """The result of testing one property.

    Attributes:
        name: Name of the property.
        holds: Whether the property holds; None if it was not tested.
        trait: The trait that requires the property; "" if every policy must have the property.
        message: The violation, or the reason why the property was not tested; "" if it holds.
        why: The property and the harm of violating it, from the docstring of its test.
    """

    name: str
    holds: bool | None
    trait: str = ""
    message: str = ""
    why: str = ""


@attrs.frozen
class Verdict:
    """The printable results of the test kit for a policy.

    Attributes:
        policy: Name of the policy.
        findings: One finding per property, in test order.
        claimed: Known traits that the policy claims.
        unknown: Claimed traits that do not exist.
        seed: Seed of the random cases.
        kind: "policy" or "lane policy".
    """

    policy: str
    findings: tuple[Finding, ...]
    claimed: tuple[str, ...]
    unknown: tuple[str, ...]
    seed: int
    kind: str = "policy"

    @property
    def passed(self) -> bool:
        """Whether all tested properties hold and all claimed traits exist."""
        return not self.failures and not self.unknown

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The properties that do not hold."""
        return tuple(each for each in self.findings if each.holds is False)

    @property
    def not_claimed(self) -> tuple[str, ...]:
        """Known traits that the policy does not claim."""
        return tuple(sorted(self._traits - set(self.claimed)))

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the printed results unless the policy passed."""
        if not self.passed:
            raise AssertionError(str(self))

    @property
    def _traits(self) -> frozenset[str]:
        return LANE_TRAITS if self.kind == "lane policy" else TRAITS

    def __str__(self) -> str:
        outcome = "satisfies the contract" if self.passed else "violates the contract"
        lines = [f"{self.kind.capitalize()} {self.policy!r} {outcome} (seed {self.seed})."]
        first_with: dict[str, str] = {}  # message -> name of the first property that failed with it
        for each in self.findings:
            if each.trait and each.holds is None and each.trait not in self.claimed:
                continue  # reported below
            state = {True: _HOLDS, False: _FAILS, None: _SKIPPED}[each.holds]
            note = f": {each.message}" if each.holds is None else ""
            lines.append(f"  {state:<10}  {each.name}{note}")
            if each.holds is not False:
                continue
            first = first_with.setdefault(each.message, each.name)
            if first != each.name:
                lines.append(f"              the same failure as for {first!r}")
                continue
            lines += [f"              {line}" for line in each.message.splitlines()]
            lines.append(f"              why: {each.why}")
        lines.append(f"  claimed: {', '.join(self.claimed) or 'no traits'}")
        if self.not_claimed:
            lines.append(f"  not claimed, not tested: {', '.join(self.not_claimed)}")
        if self.unknown:
            known = ", ".join(sorted(self._traits))
            lines.append(
                f"  unknown traits claimed: {', '.join(self.unknown)} (known traits: {known})"
            )
        return "\n".join(lines)


def run_policy_conformance(
    policy: Policy | Callable[[], Policy],
    *,
    seed: int = 0,
    max_examples: int = PolicyTests.max_examples,
    configs: st.SearchStrategy[DispatchConfig] | None = None,
) -> Verdict:
    """Test a policy for the core set of properties and for the traits that it claims.

    Args:
        policy: A fresh policy, or a factory of policies, such as a class. If you pass a policy, the
            tests use deep copies of it.
        seed: Seed of the random cases; the same seed gives the same verdict.
        max_examples: Number of cases per property (fewer for slow properties), if the hypothesis
            profile has its default ``max_examples`` of 100. With 200, the number of cases doubles.
        configs: Hypothesis strategy for the configurations to test; None for all kinds of
            configurations.

    Returns:
        The verdict. ``Verdict.raise_if_failed`` raises AssertionError if the policy failed.

    Raises:
        TypeError: ``policy`` is neither a policy nor a factory of policies.
    """
    make = _factory(policy, "decide")

    class Tests(PolicyTests):
        def make_policy(self) -> Policy:
            return make()  # type: ignore[no-any-return]

    class NarrowedTests(Tests):
        def configs(self) -> st.SearchStrategy[DispatchConfig]:
            return super().configs() if configs is None else configs

    tests = Tests() if configs is None else NarrowedTests()
    tests.seed, tests.max_examples = seed, max_examples
    first = make()
    return _verdict(tests, PolicyTests, policy_name(first), policy_traits(first), "policy")


def run_lane_policy_conformance(
    policy: LanePolicy | Callable[[], LanePolicy],
    *,
    seed: int = 0,
    max_examples: int = LanePolicyTests.max_examples,
) -> Verdict:
    """Test a lane policy for the core set of properties and for the traits that it claims.

    Args:
        policy: A fresh lane policy, or a factory of lane policies, such as a class. If you pass a
            lane policy, the tests use deep copies of it.
        seed: Seed of the random schedules of steps; the same seed gives the same verdict.
        max_examples: Number of random schedules per property.

    Returns:
        The verdict. ``Verdict.raise_if_failed`` raises AssertionError if the policy failed.

    Raises:
        TypeError: ``policy`` is neither a lane policy nor a factory of lane policies.
    """
    make = _factory(policy, "choose")

    class Tests(LanePolicyTests):
        def make_lane_policy(self) -> LanePolicy:
            return make()  # type: ignore[no-any-return]

    tests = Tests()
    tests.seed, tests.max_examples = seed, max_examples
    first = make()
    claimed = policy_traits(first)
    return _verdict(tests, LanePolicyTests, policy_name(first), claimed, "lane policy")


#: Required method, name and test function of each kind of policy.
_KINDS = (
    ("decide", "a policy", "run_policy_conformance"),
    ("choose", "a lane policy", "run_lane_policy_conformance"),
)


def _factory(policy: Any, asked: str) -> Callable[[], Any]:
    """Return a function that creates policies, after checking that a policy has the method.

    Raises:
        TypeError: The policy lacks the method.
    """
    if not inspect.isclass(policy) and any(hasattr(policy, method) for method, *_ in _KINDS):
        first, make = policy, lambda: copy.deepcopy(policy)
    elif callable(policy):
        first, make = policy(), policy
    else:
        first, make = policy, None
    if make is not None and hasattr(first, asked):
        return make
    wanted = next(kind for method, kind, _ in _KINDS if method == asked)
    hints = [f" For {kind}, use {test}." for method, kind, test in _KINDS if hasattr(first, method)]
    got = "got" if first is policy else "the factory returned"
    raise TypeError(
        f"{wanted.capitalize()} is an object with the method {asked}(), or a factory that returns "
        f"one; {got} {first!r}, which has no {asked}().{''.join(hints)}"
    )


def _verdict(
    tests: PolicyTests | LanePolicyTests, kit: type, name: str, claimed: frozenset[str], kind: str
) -> Verdict:
    known = LANE_TRAITS if kind == "lane policy" else TRAITS
    return Verdict(
        policy=name,
        findings=tuple(_find(tests, each) for each in vars(kit) if each.startswith("test_")),
        claimed=tuple(sorted(claimed & known)),
        unknown=tuple(sorted(claimed - known)),
        seed=tests.seed,
        kind=kind,
    )


def _find(tests: PolicyTests | LanePolicyTests, name: str) -> Finding:
    test = getattr(tests, name)
    trait = ""
    words = name.removeprefix("test_")
    if words.startswith("trait_"):
        words = words.removeprefix("trait_")
        trait = next(each for each in TRAITS | LANE_TRAITS if words.startswith(each))
        words = f"trait {trait}{words.removeprefix(trait).replace('_', ' ')}"
    else:
        words = words.replace("_", " ")
    why = " ".join((inspect.getdoc(test) or "").split())
    holds: bool | None = True
    message = ""
    try:
        test()
    except unittest.SkipTest as skip:
        holds, message = None, str(skip)
    except AssertionError as error:
        holds, message = False, str(error)
    except Exception as error:  # noqa: BLE001 - any exception of a policy is a finding
        holds, message = False, f"{type(error).__name__}: {error}"
    return Finding(words, holds, trait, message, why)
