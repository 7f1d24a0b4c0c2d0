"""Every installed policy and lane policy meets the contract, nightly on ten seeds."""

from __future__ import annotations

import contextlib
import unittest

import pytest

from dispatchkit import load_plugins
from dispatchkit.dispatch import Policy
from dispatchkit.testing import PolicyTests, run_lane_policy_conformance

PLUGINS = load_plugins()
#: Needs no seed, starts two processes, and each plugin's own tests run it.
LEFT_OUT = "test_trait_stateless_in_another_process"


def test_there_are_several() -> None:
    """The parametrised test below would pass without policies."""
    assert {"vllm", "composite", "threshold", "adaptive"} <= set(PLUGINS.policies)
    assert {"round-robin", "least-loaded", "by-key", "priority"} <= set(PLUGINS.lane_policies)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PLUGINS.policies) - {"grid"}))  # supports one axis only
def test_installed_policy_keeps_the_contract_whatever_the_seed(name: str, is_nightly: bool) -> None:
    class Tests(PolicyTests):
        max_examples = 5

        def make_policy(self) -> Policy:
            # A composite would load plugins again each time.
            options = {"plugins": PLUGINS} if name == "composite" else {}
            return PLUGINS.create_policy(name, **options)

    properties = [each for each in vars(PolicyTests) if each.startswith("test_")]
    assert LEFT_OUT in properties
    for seed in range(1, 11 if is_nightly else 2):  # the plugin's own tests use seed 0
        tests = Tests()
        tests.seed = seed
        for each in properties:
            if each != LEFT_OUT:
                with contextlib.suppress(unittest.SkipTest):
                    getattr(tests, each)()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PLUGINS.lane_policies))
def test_installed_lane_policy_keeps_the_contract_whatever_the_seed(
    name: str, is_nightly: bool
) -> None:
    for seed in range(1, 11 if is_nightly else 2):
        policy = PLUGINS.create_lane_policy(name)
        run_lane_policy_conformance(policy, seed=seed, max_examples=3).raise_if_failed()
